"""From an adapter's record to a version on disk and back, and what must be the same for a run to go on exactly."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora.checkpoint.versions import Manifest, Version, newest_sound, write_version
from mlora.config import AdapterConfig
from mlora.engine.adapter_run import AdapterRun, Record
from mlora.engine.base import Base
from mlora.engine.evaluation import EvaluationReport
from mlora.models.spec import ModelSpec, Quantization, linear_shapes
from mlora.types import UserError

_HISTORY = "history"  # float64 [steps, 5]: loss, grad_norm, learning_rate, num_tokens, skipped
_EVALUATIONS = "evaluations"  # float64 [evaluations, 4]: step, loss, correct tokens, target tokens
_BEST = "best."  # before the names of the matrices of the best step, where that is not the last
_FREE = ("logging_steps", "dataset", "eval_dataset")  # change no bit; of the data the tokens count, not the path
# These give the tensors their shapes.
_FIXED = ("r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "optim")
_SIZES = ("hidden_size", "layers", "vocab_size")


def base_facts(base: Base) -> dict[str, Any]:
    """What identifies the frozen model and how it is computed."""
    spec = base.spec
    return {
        **{"hidden_size": spec.hidden_size, "layers": spec.num_layers, "vocab_size": spec.vocab_size},
        "model": base.digest,
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": base.device.type,
        "quantization": _quantization_fact(base.quantization),
    }


def _quantization_fact(quantization: Quantization | None) -> str:
    if quantization is None:
        return "none"
    return ", without ".join([str(quantization), *sorted(quantization.dense)])


def write_checkpoint(
    folder: Path,
    adapter: AdapterRun,
    record: Record,
    tensors: Mapping[str, Tensor],
    base: Base,
    keep: int,
) -> Path:
    """Write ``adapter`` as it was at ``record`` into its own folder under ``folder``. Raises WriteError."""
    manifest = Manifest(
        adapter=adapter.config.name,
        step=record.step,
        total_steps=record.total_steps,
        state=record.state,
        reason=record.reason,
        nonfinite_in_a_row=record.nonfinite_in_a_row,
        config=adapter.config.plain(),
        base=base_facts(base),
        data=_data_digest(adapter),
        saved=time.time(),
    )
    rows = [(r.loss, r.grad_norm, r.learning_rate, r.num_tokens, r.skipped) for r in record.reports]
    evaluations = [(e.step, e.loss, e.correct_tokens, e.target_tokens) for e in record.evaluations]
    whole = {
        **tensors,
        **{_BEST + name: matrix for name, matrix in best_matrices(adapter, record).items()},
        _HISTORY: torch.tensor(rows, dtype=torch.float64).view(-1, 5),
        _EVALUATIONS: torch.tensor(evaluations, dtype=torch.float64).view(-1, 4),
    }
    return write_version(folder / manifest.adapter, manifest, whole, keep)


def best_matrices(adapter: AdapterRun, record: Record) -> Mapping[str, Tensor]:
    """The matrices of the best step where they are to be exported and are not the last; else none."""
    if not adapter.config.load_best_model_at_end or record.best_step in (None, record.step):
        return {}
    assert adapter.kept is not None and adapter.kept[0] == record.best_step, "the best step was not kept"
    return adapter.kept[1]


def _data_digest(adapter: AdapterRun) -> str:
    """Of the tokens, and behind a + of those that are held out."""
    return "+".join(data.digest for data in (adapter.data, adapter.held_out) if data is not None)


@dataclass(frozen=True)
class Resume:
    """Where a run goes on from. ``folder`` holds the adapters' checkpoints, each in a folder of its name."""

    folder: Path
    allow_changed: bool

    def apply(self, adapters: Sequence[AdapterRun], parked: Collection[str], base: Base) -> None:
        """Put every adapter where its newest sound checkpoint was; those without one begin at their first step.

        Raises UserError that names all keys whose change would give other bits, unless they may change; and always
        where the tensors are not those of the adapter.
        """
        changes: list[str] = []
        facts = base_facts(base)
        for adapter in adapters:
            version = newest_sound(self.folder / adapter.config.name, _tell)
            if version is None:
                _tell(f"{adapter.config.name}: no checkpoint; it begins at its first step")
                continue
            _check_base(version, facts)
            _check_shapes(version, adapter, base.spec)
            changes += _changes(version, adapter, facts)
            _resume(adapter, version)
            how = "goes on" if adapter.state == "waiting" else f"stays {adapter.state}"
            _tell(f"{adapter.config.name}: {how} behind step {version.manifest.step} of {adapter.total_steps}")
        if changes and not self.allow_changed:
            raise UserError(
                f"{'; '.join(changes)}: the result would be another than without the interruption; write it back, or "
                "--allow-changed (allow_changed=True) to go on like this"
            )
        names = {adapter.config.name for adapter in adapters} | set(parked)
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name not in names:
                _tell(f"{path.name}: is not in the configuration any more; its checkpoints stay in {path}")


def _resume(adapter: AdapterRun, version: Version) -> None:
    record = _record(version, adapter)
    best = {k.removeprefix(_BEST): x for k, x in version.tensors.items() if k.startswith(_BEST)}
    if best and record.best_step is not None:
        adapter.kept = record.best_step, best
    elif adapter.config.load_best_model_at_end and record.best_step not in (None, record.step):
        raise UserError(
            f"adapters[{adapter.config.name}].load_best_model_at_end: the weights of step {record.best_step}, the best "
            f"so far, were not kept in {version.folder}; write it back, or train under another name"
        )
    others = (_HISTORY, _EVALUATIONS)
    own = {k: x for k, x in version.tensors.items() if k not in others and not k.startswith(_BEST)}
    adapter.resume(record, own)


def _tell(text: str) -> None:
    print(text, flush=True)


def _record(version: Version, adapter: AdapterRun) -> Record:
    manifest = version.manifest
    steps = version.tensors[_HISTORY].tolist()
    evaluations: list[EvaluationReport] = []
    for done, loss, correct, targets in version.tensors.get(_EVALUATIONS, torch.zeros(0, 4)).tolist():
        evaluations.append(adapter.evaluation_report(int(done), loss, int(correct), int(targets), evaluations))
    return Record(
        step=manifest.step,
        total_steps=manifest.total_steps,
        state=manifest.state,  # type: ignore[arg-type]  # sealed: written by us from a State
        reason=manifest.reason,
        nonfinite_in_a_row=manifest.nonfinite_in_a_row,
        reports=tuple(
            adapter.step_report(step, loss, grad_norm, rate, int(tokens), bool(skipped))
            for step, (loss, grad_norm, rate, tokens, skipped) in enumerate(steps)
        ),
        evaluations=tuple(evaluations),
    )


def _check_base(version: Version, base: Mapping[str, Any]) -> None:
    was = version.manifest.base
    wrong = [f"{key} {was[key]}, not {base[key]}" for key in _SIZES if was[key] != base[key]]
    if wrong:
        raise UserError(f"{version.folder}: was made for another base model: {', '.join(wrong)}; give that base_model")


def _check_shapes(version: Version, adapter: AdapterRun, spec: ModelSpec) -> None:
    """The checkpoint has just the tensors of the adapter, so that every stage will find its own."""
    shapes = linear_shapes(spec)
    wanted: dict[str, tuple[int, ...]] = {}
    for name in adapter.targets:
        out_features, in_features = shapes[name.split(".")[-1]]
        r = adapter.config.rank(name)
        wanted |= {f"{name}.A": (r, in_features), f"{name}.B": (r, out_features)}
    found = {name: tuple(x.shape) for name, x in version.tensors.items() if _is_matrix(name)}
    changed = _changed_keys(version.manifest.config, adapter.config, _FIXED)
    if found != wanted or "optim" in changed:
        what = ", ".join(changed) or "its modules"
        raise UserError(
            f"adapters[{adapter.config.name}]: {what} cannot change in mid-training, and {version.folder} has other "
            "values; write them back, or train under another name"
        )


def _is_matrix(name: str) -> bool:
    return name.endswith((".A", ".B")) and not name.startswith(_BEST)


def _changes(version: Version, adapter: AdapterRun, base: Mapping[str, Any]) -> list[str]:
    """What differs from when the checkpoint was written and decides about bits."""
    was, now = version.manifest, adapter.config.plain()
    keys = _changed_keys(was.config, adapter.config, [key for key in now if key not in _FREE + _FIXED])
    place = f"adapters[{adapter.config.name}]"
    found = [f"{place}.{key} is {now[key]!r} and was {was.config.get(key)!r}" for key in keys]
    was_data, _, was_held_out = was.data.partition("+")
    data, _, held_out = _data_digest(adapter).partition("+")
    if was_data != data:
        places = ", ".join(str(source.path or source.hub) for source in adapter.config.sources)
        one = "gives other tokens than it did"
        what = one if len(adapter.config.sources) == 1 else "give other tokens, or other shares of them, than they did"
        found.append(f"{place}.dataset: {places} {what}")
    if was_held_out != held_out:
        found.append(f"{place}: the rows that it is evaluated on are others than they were")
    found += [
        f"{key} is {base[key]} and was {before}"
        for key in ("dtype", "device", "quantization")
        if (before := was.base.get(key, "none")) != base[key]
    ]
    if was.base["model"] != base["model"]:
        found.append("base_model: its files are others than they were")
    return found


def _changed_keys(was: Mapping[str, Any], now: AdapterConfig, keys: Sequence[str]) -> list[str]:
    """A key that did not exist when the checkpoint was written had its default."""
    plain, default = now.plain(), AdapterConfig(name=now.name, dataset=now.dataset).plain()
    return [key for key in keys if was.get(key, default[key]) != plain[key]]
