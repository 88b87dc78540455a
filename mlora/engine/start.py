"""How a run begins: anew, or from the checkpoints of a run folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mlora.checkpoint.versions import versions
from mlora.engine.output import CHECKPOINTS, STATUS
from mlora.engine.status import launcher
from mlora.types import UserError


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the user asked for. ``resume`` is None, "auto" or a run folder.

    A restart goes on with what this torchrun has begun, whatever was asked.
    """

    overwrite: bool = False
    resume: str | Path | None = None
    allow_changed: bool = False

    def source(self, output_dir: Path) -> Path | None:
        """The run folder to go on from; None to begin anew. Raises UserError where a named one has no checkpoints."""
        if _begun_here(output_dir):
            return output_dir
        if self.resume is None:
            return None
        if self.resume == "auto":
            return output_dir
        source = Path(self.resume)
        if not saved_adapters(source / CHECKPOINTS):
            raise UserError(f"resume {source}: there are no checkpoints in {source / CHECKPOINTS}; give a run's folder")
        return output_dir if source.resolve() == output_dir.resolve() else source


def saved_adapters(checkpoints: Path) -> list[str]:
    """The adapters of which a run has a checkpoint."""
    return [path.name for path in checkpoints.iterdir() if versions(path)] if checkpoints.is_dir() else []


def _begun_here(output_dir: Path) -> bool:
    """Whether the torchrun of this process has begun the run in the folder, by an earlier process.

    Its restart count does not tell: where another host's process has failed, it stays as it was.
    """
    try:
        status = json.loads((output_dir / STATUS).read_text(encoding="utf-8"))
        return bool(launcher()) and status["launcher"] == launcher() and status["process"] != os.getpid()
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False
