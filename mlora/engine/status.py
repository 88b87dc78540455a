"""``status.json``: what a run says of itself while it goes, and how ``mlora status`` reads it, live or dead."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlora.checkpoint.versions import newest_manifest
from mlora.engine.adapter_run import OVER, AdapterRun
from mlora.engine.evaluation import best_of
from mlora.engine.output import CHECKPOINTS, INBOX, STATUS, is_live
from mlora.files import write_whole
from mlora.types import UserError

_EVERY_S = 1.0
_NEXT = "give a run's folder, the output_dir of its configuration"
_KEYS = {"state", "reason", "step", "total_steps", "first_loss", "last_loss", "exported"}  # of each adapter


def launcher() -> str:
    """What is the same for all restarts by one torchrun, and for nothing else: its folder of logs. Else empty."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/0/error.json
    return f"{socket.gethostname()}:{Path(error_file).parents[2]}" if error_file else ""


class Status:
    """Writes the file, from any thread. A disk that does not take it costs the file, not the run."""

    def __init__(self, output_dir: Path, adapters: Sequence[AdapterRun], parked: Mapping[str, str]) -> None:
        self._path, self._adapters, self._parked = output_dir / STATUS, adapters, parked
        self.exported: dict[int, Path] = {}  # folders by adapter
        self._lock = threading.Lock()
        self._last = -_EVERY_S

    def write(self, at_once: bool = False) -> None:
        """Write it, unless it was written within the last second and this is not to be seen at once."""
        with self._lock:
            if not at_once and time.monotonic() - self._last < _EVERY_S:
                return
            self._last = time.monotonic()
            with suppress(OSError):  # a disk that does not take it must not cost the training
                write_whole(self._path, json.dumps(self._tree(), indent=1).encode())

    def _tree(self) -> dict[str, Any]:
        adapters = {adapter.config.name: self._adapter(adapter) for adapter in list(self._adapters)}
        nothing = dict.fromkeys(("step", "total_steps", "first_loss", "last_loss", "exported"))
        adapters |= {name: {"state": "failed", "reason": why, **nothing} for name, why in self._parked.items()}
        return {"launcher": launcher(), "process": os.getpid(), "updated": time.time(), "adapters": adapters}

    def _adapter(self, adapter: AdapterRun) -> dict[str, Any]:
        reports, folder = adapter.reports, self.exported.get(adapter.index)
        return {
            "state": adapter.state,
            "step": len(reports),
            "total_steps": adapter.total_steps,
            "first_loss": str(reports[0].loss) if reports else None,
            "last_loss": str(reports[-1].loss) if reports else None,
            "reason": adapter.reason,
            "exported": str(folder) if folder else None,
            **_evaluation(adapter),
        }


def _evaluation(adapter: AdapterRun) -> dict[str, Any]:
    """The last one and the best; nothing before the first."""
    evaluations = list(adapter.evaluations)
    if not evaluations:
        return {}
    last, best = evaluations[-1], best_of(evaluations)
    found: dict[str, Any] = {"eval_step": last.step, "eval_loss": str(last.loss), "eval_accuracy": last.accuracy}
    found["eval_perplexity"] = str(last.perplexity)
    return found | ({"best_step": best.step, "best_eval_loss": str(best.loss)} if best else {})


def read_status(output_dir: Path) -> dict[str, Any]:
    """The run's state with each adapter's last checkpoint. A run that is not live any more has "interrupted" adapters.

    Raises UserError where the folder holds no run.
    """
    try:
        tree = json.loads((output_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{output_dir}: holds no run: {STATUS} cannot be read: {reason}; {_NEXT}") from None
    if not _is_status(tree):
        raise UserError(f"{output_dir}: holds no run: {STATUS} is not one that a run has written; {_NEXT}")
    live = is_live(output_dir)
    for name, adapter in tree["adapters"].items():
        if not live and adapter["state"] not in OVER:
            adapter["state"] = "interrupted"
        adapter["checkpoint"] = _checkpoint(output_dir / CHECKPOINTS / name)
    refused = {
        path.stem.removeprefix("add-"): path.read_text("utf-8") for path in (output_dir / INBOX).glob("add-*.refused")
    }
    return {"live": live, **tree, "refused": refused}


def _is_status(tree: Any) -> bool:
    """Whether it has the form that ``Status`` writes: other programs call files so, too."""
    adapters = tree.get("adapters") if isinstance(tree, dict) else None
    return (
        isinstance(adapters, dict)
        and isinstance(tree.get("updated"), float)
        and all(isinstance(adapter, dict) and adapter.keys() >= _KEYS for adapter in adapters.values())
    )


def status_table(tree: dict[str, Any]) -> str:
    """The same as a table to read."""
    width = max(len("adapter"), *(len(name) for name in tree["adapters"]))
    evaluated = any("eval_loss" in adapter for adapter in tree["adapters"].values())
    lines = [
        f"{'live' if tree['live'] else 'not running'}; written {_age(tree['updated'])} ago",
        f"{'adapter':<{width}}  {'state':<11}  {'step':>13}  {'first loss':>10}  {'last loss':>9}  "
        + (f"{'eval loss':>9}  {'best':>16}  " if evaluated else "")
        + "checkpoint",
    ]
    for name, adapter in tree["adapters"].items():
        step = "-" if adapter["step"] is None else f"{adapter['step']}/{adapter['total_steps']}"
        first, last = (_loss(adapter[key]) for key in ("first_loss", "last_loss"))
        text = f"{name:<{width}}  {adapter['state']:<11}  {step:>13}  {first:>10}  {last:>9}  "
        text += (f"{_loss(adapter.get('eval_loss')):>9}  {_best(adapter):>16}  " if evaluated else "") + _saved(adapter)
        lines.append(text + (f"  {adapter['reason']}" if adapter["reason"] else ""))
    lines += [f"{name}: not added: {reason}" for name, reason in tree["refused"].items()]
    return "\n".join(lines)


def _checkpoint(folder: Path) -> dict[str, Any] | None:
    newest = newest_manifest(folder)
    return {"step": newest[1].step, "saved": newest[1].saved, "folder": str(newest[0])} if newest else None


def _saved(adapter: dict[str, Any]) -> str:
    checkpoint = adapter["checkpoint"]
    return f"step {checkpoint['step']}, {_age(checkpoint['saved'])} old" if checkpoint else "none"


def _best(adapter: dict[str, Any]) -> str:
    return f"{_loss(adapter['best_eval_loss'])} step {adapter['best_step']}" if "best_step" in adapter else "-"


def _loss(text: str | None) -> str:
    return "-" if text is None else f"{float(text):.4f}"


def _age(since: float) -> str:
    seconds = max(0, round(time.time() - since))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
