"""The run folder: what a run puts into it, what it refuses to touch, and that one run at a time has it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO

from mlora.checkpoint.versions import is_version
from mlora.config import RunConfig
from mlora.types import UserError

ADAPTERS, METRICS, PICTURE, TRACE = "adapters", "metrics.jsonl", "timeline.svg", "timeline.trace.json"
CHECKPOINTS, STATUS, INBOX, ADDED = "checkpoints", "status.json", "inbox", "added"
FACTS, REPORT, CURVES, TENSORBOARD, LOGGED = "run.json", "report.html", "curves.png", "tensorboard", "report_to.json"
_REPLACED = (ADAPTERS, CHECKPOINTS)  # kept beside the new run until that is complete
_LOCK = ".lock"
_FILES = (METRICS, PICTURE, TRACE, STATUS, FACTS, REPORT, CURVES, LOGGED)
_FOLDERS = (INBOX, ADDED, TENSORBOARD)
_OURS = (*_REPLACED, *_FILES, *_FOLDERS, _LOCK)
_GLANCE_S = 1.0


def check_output(config: RunConfig, overwrite: bool, resume: bool = False) -> None:
    """Raises UserError where the folder holds an earlier run that is neither to be replaced nor to go on, or anything
    else."""
    folder = config.output_dir
    if not resume:
        check_inputs(config)
    if not folder.exists():
        return
    ours = (*_OURS, *map(_previous, _REPLACED))
    here = sorted(folder.iterdir())
    foreign = [path for path in here if (path.name not in ours and path.suffix != ".partial") or path.is_symlink()]
    foreign += [path for name in (ADAPTERS, _previous(ADAPTERS)) for path in _not_exported(folder / name)]
    foreign += [path for name in (CHECKPOINTS, _previous(CHECKPOINTS)) for path in _not_saved(folder / name)]
    if foreign:
        raise UserError(f"output_dir: {foreign[0]} is not from a run; give a folder of its own")
    found = [path for path in folder.iterdir() if path.name != _LOCK]
    if found and not overwrite and not resume:
        raise UserError(
            f"output_dir: {folder} holds an earlier run; give another folder, or --overwrite (overwrite=True) to "
            "replace it, or --resume auto (resume='auto') to go on with it"
        )


def check_free(folder: Path) -> None:
    """Raises UserError where another run has the folder, or where it is none, cannot be made or written."""
    if is_live(folder):
        raise UserError(f"output_dir: {folder} is in use by another run; give another folder, or mlora add to join it")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"output_dir: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: {folder} cannot be written: {there} is read-only; give another folder")


def take_output(config: RunConfig, overwrite: bool, resume: bool = False) -> IO[str]:
    """Make the folder and lock it; unless it goes on, an earlier run's files are set aside until this one is complete.

    Raises UserError where it cannot be written or another run has it.
    """
    folder = config.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder / _LOCK)
        check_output(config, overwrite, resume)
        if not resume:
            _set_aside(folder)
        for name in (ADAPTERS, CHECKPOINTS, INBOX, ADDED):
            (folder / name).mkdir(exist_ok=True)
    except BlockingIOError:
        raise UserError(f"output_dir: {folder} is in use by another run; give another folder") from None
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from None
    return lock


def _locked(path: Path) -> IO[str]:
    """The file, locked, and still the one of that name: the run before deletes it. Raises BlockingIOError.

    ``is_live`` locks it too, for a moment; a run that has it does so for long.
    """
    end = time.monotonic() + _GLANCE_S
    while True:
        lock = path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        lock.close()
        time.sleep(_GLANCE_S / 20)


def leave_output(folder: Path, lock: IO[str], complete: bool) -> None:
    """Let go of the folder; after a complete run the adapters that it replaces are deleted."""
    for old in (folder / _previous(name) for name in _REPLACED):
        if complete:
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            print(f"what the run before made is kept in {old}", flush=True)
    (folder / _LOCK).unlink(missing_ok=True)
    lock.close()


def is_live(folder: Path) -> bool:
    """Whether a run has the folder now."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _previous(name: str) -> str:
    return f"{name}.previous"


def _set_aside(folder: Path) -> None:
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _REPLACED:
        if (folder / name).exists() and any((folder / name).iterdir()):
            shutil.rmtree(folder / _previous(name), ignore_errors=True)
            (folder / name).rename(folder / _previous(name))


def _not_saved(checkpoints: Path) -> list[Path]:
    """What lies in a folder of checkpoints and is none."""
    adapters = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    return [
        path
        for adapter in adapters
        for path in (sorted(adapter.iterdir()) if adapter.is_dir() else [adapter])
        if not is_version(path) and path.suffix != ".partial"
    ]


def _not_exported(adapters: Path) -> list[Path]:
    """What lies in a folder of adapters and is none."""
    if not adapters.is_dir():
        return []
    return [
        p for p in sorted(adapters.iterdir()) if p.suffix != ".partial" and not (p / "adapter_config.json").is_file()
    ]


def check_inputs(config: RunConfig) -> None:
    """Raises UserError where the run folder holds what the run reads: --overwrite would delete it."""
    folder = config.output_dir.resolve()
    inputs = {f"adapters[{a.name}].dataset": s.path for a in config.adapters for s in a.sources if s.path}
    held_out = [(a.name, a.eval_dataset) for a in config.adapters]
    inputs |= {f"adapters[{name}].eval_dataset": s.path for name, s in held_out if s is not None and s.path}
    inputs |= {f"adapters[{a.name}].init_from": a.init_from for a in config.adapters if a.init_from is not None}
    inputs["base_model"] = Path(config.base_model)
    for place, path in inputs.items():
        if path.resolve().is_relative_to(folder) and path.exists():
            raise UserError(f"output_dir: {place} ({path}) lies inside it; give a folder of its own")
