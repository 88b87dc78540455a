"""``mlora.train``: one call for one process, several stages in threads, or the processes that torchrun started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlora.config import RunConfig, apply_overrides, load_config, parse_config
from mlora.engine.coordinator import OnStep
from mlora.engine.leader import Leader
from mlora.engine.ranks import follow_training, run_stages
from mlora.engine.results import Results
from mlora.engine.start import Start
from mlora.types import Interrupted, UserError


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    resume: str | Path | None = None,
    allow_changed: bool = False,
    on_step: OnStep | None = None,
) -> Results:
    """Train all adapters of ``config`` together and write each as a PEFT adapter under ``output_dir``/adapters.

    Under torchrun every process calls this; rank 0 alone reads the configuration and the data and writes the run
    folder, and all processes get the same Results.

    Args:
        config: a RunConfig, its plain form as in the YAML file, or the file's path.
        overrides: ``a.b=c`` strings that change keys of the file.
        overwrite: replace an earlier run in ``output_dir``; without it that is an error.
        resume: "auto" goes on with the run in ``output_dir`` where there is one; a run folder goes on from that one's
            checkpoints. A restart by torchrun always goes on.
        allow_changed: go on even where hyper-parameters or data are others than before.
        on_step: called with the numbers of every optimizer step. "end" ends that adapter as if its last step were done,
            "cancel" ends it without an export; the others go on, and not a bit of theirs changes.

    Raises:
        UserError: a mistake in configuration, data or model, before anything is written.
        Interrupted: SIGINT or SIGTERM has stopped the run; the adapters are in its checkpoints.
    """

    def lead(world_size: int) -> Leader:
        return Leader(_as_config(config, overrides), start, on_step, world_size)

    if not isinstance(resume, str | Path | None):
        raise UserError(f"resume: expected 'auto' or a run's folder, found {resume!r}")
    start = Start(overwrite=overwrite, resume=resume, allow_changed=allow_changed)
    results: Results = run_stages(lead, follow_training, on_step)
    if results.signal is not None:
        raise Interrupted(results.signal)
    return results


def _as_config(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, RunConfig):
        if overrides:
            raise UserError("overrides: they change a file or plain data; use dataclasses.replace on a RunConfig")
        return config
    if isinstance(config, Mapping):
        return parse_config(apply_overrides(config, overrides))
    return load_config(config, overrides)
