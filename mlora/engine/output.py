"""The run folder: what a run puts into it, what it refuses to touch, and that one run at a time has it."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO

from mlora.config import RunConfig
from mlora.types import UserError

ADAPTERS, METRICS, PICTURE, TRACE = "adapters", "metrics.jsonl", "timeline.svg", "timeline.trace.json"
_PREVIOUS, _LOCK = "adapters.previous", ".lock"
_OURS = (ADAPTERS, METRICS, PICTURE, TRACE, _PREVIOUS, _LOCK)


def check_output(config: RunConfig, overwrite: bool) -> None:
    """Raises UserError where the folder holds an earlier run that is not to be replaced, or anything else."""
    folder = config.output_dir
    _check_inputs(config)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"output_dir: {folder} is a file; give a folder")
    foreign = [path for path in sorted(folder.iterdir()) if path.name not in _OURS]
    foreign += [path for name in (ADAPTERS, _PREVIOUS) for path in _not_exported(folder / name)]
    if foreign:
        raise UserError(f"output_dir: {foreign[0]} is not from a run; give a folder of its own")
    found = [path for path in folder.iterdir() if path.name != _LOCK]
    if found and not overwrite:
        raise UserError(f"output_dir: {folder} holds an earlier run; give another folder, or --overwrite to replace it")


def take_output(config: RunConfig, overwrite: bool) -> IO[str]:
    """Make the folder and lock it; adapters of an earlier run are set aside until this one is complete.

    Raises UserError where it cannot be written or another run has it.
    """
    folder = config.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_output(config, overwrite)
        for name in (METRICS, PICTURE, TRACE):
            (folder / name).unlink(missing_ok=True)
        if (folder / ADAPTERS).exists() and any((folder / ADAPTERS).iterdir()):
            shutil.rmtree(folder / _PREVIOUS, ignore_errors=True)
            (folder / ADAPTERS).rename(folder / _PREVIOUS)
        (folder / ADAPTERS).mkdir(exist_ok=True)
    except BlockingIOError:
        raise UserError(f"output_dir: {folder} is in use by another run; give another folder") from None
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from None
    return lock


def leave_output(folder: Path, lock: IO[str], complete: bool) -> None:
    """Let go of the folder; after a complete run the adapters that it replaces are deleted."""
    if complete:
        shutil.rmtree(folder / _PREVIOUS, ignore_errors=True)
    elif (folder / _PREVIOUS).exists():
        print(f"the adapters of the run before are kept in {folder / _PREVIOUS}", flush=True)
    (folder / _LOCK).unlink(missing_ok=True)
    lock.close()


def _not_exported(adapters: Path) -> list[Path]:
    """What lies in a folder of adapters and is none."""
    if not adapters.is_dir():
        return []
    return [
        p for p in sorted(adapters.iterdir()) if p.suffix != ".partial" and not (p / "adapter_config.json").is_file()
    ]


def _check_inputs(config: RunConfig) -> None:
    """The run folder may not hold what the run reads: --overwrite would delete it."""
    folder = config.output_dir.resolve()
    inputs = {f"adapters[{a.name}].dataset": a.dataset.path for a in config.adapters}
    inputs["base_model"] = Path(config.base_model)
    for place, path in inputs.items():
        if path.resolve().is_relative_to(folder) and path.exists():
            raise UserError(f"output_dir: {place} ({path}) lies inside it; give a folder of its own")
