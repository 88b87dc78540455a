"""The run folder: what a run puts into it, and what it refuses to touch."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlora.types import UserError

ADAPTERS, METRICS, PICTURE, TRACE = "adapters", "metrics.jsonl", "timeline.svg", "timeline.trace.json"
_OURS = (ADAPTERS, METRICS, PICTURE, TRACE)


def check_output(folder: Path, overwrite: bool) -> None:
    """Raises UserError where ``folder`` holds an earlier run (unless it is to be replaced) or anything else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"output_dir: {folder} is a file; give a folder")
    found = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in found if name not in _OURS]
    if foreign:
        raise UserError(f"output_dir: {folder} holds {foreign[0]!r}, which is not from a run; give a folder of its own")
    if found and not overwrite:
        raise UserError(f"output_dir: {folder} holds an earlier run; give another folder, or --overwrite to replace it")


def make_output(folder: Path) -> None:
    """Make the folder, without what an earlier run left there. Raises UserError where it cannot be written."""
    try:
        for name in _OURS:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (folder / ADAPTERS).mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written: {error.strerror}") from None
