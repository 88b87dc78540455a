"""Where a run's numbers go: ``metrics.jsonl`` and a line per adapter and logging step on the terminal."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import IO

from mlora.config import AdapterConfig
from mlora.engine.adapter_run import StepReport
from mlora.engine.results import AdapterResult, Results


class Recorder:
    """Averages losses over an adapter's logging steps, as transformers' Trainer does; the other values are the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._losses: dict[str, list[float]] = {}
        self._marks: dict[str, tuple[float, int]] = {}

    def open(self) -> None:
        """Open the file; until then nothing is written."""
        self._file = self._path.open("a", encoding="utf-8")

    def start(self, adapter: str) -> None:
        """The adapter's clock for tokens per second starts."""
        self._marks[adapter] = (time.monotonic(), 0)
        self._losses[adapter] = []

    def step(self, report: StepReport, config: AdapterConfig) -> None:
        """Take a step's numbers; write them when a logging step, the last step or a skipped step is due."""
        self._losses[report.adapter].append(report.loss)
        if report.step % config.logging_steps and report.step != report.total_steps and not report.skipped:
            return
        entry = self._entry(report)
        self._write(json.dumps(entry) + "\n")
        print(_line(report, entry), flush=True)

    def _write(self, line: str) -> None:
        """A full disk costs the file, not the run."""
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            print(f"{self._path} cannot be written: {error.strerror}; the run goes on without it", flush=True)
            self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _entry(self, report: StepReport) -> dict[str, object]:
        now, losses = time.monotonic(), self._losses[report.adapter]
        since, tokens = self._marks[report.adapter]
        self._marks[report.adapter] = (now, report.num_tokens)
        self._losses[report.adapter] = []
        entry: dict[str, object] = {
            "adapter": report.adapter,
            "step": report.step,
            "epoch": round(report.epoch, 4),
            "loss": _shown(sum(losses) / len(losses)),
            "grad_norm": _shown(report.grad_norm),
            "learning_rate": report.learning_rate,
            "num_tokens": report.num_tokens,
            "tokens_per_second": round((report.num_tokens - tokens) / max(now - since, 1e-9), 1),
        }
        return entry | ({"skipped": True} if report.skipped else {})


def print_table(results: Results) -> None:
    """The end-of-run table."""
    width = max(len("adapter"), *(len(name) for name in results.adapters))
    titles = f"{'state':<9}  {'steps':>6}  {'first loss':>10}  {'last loss':>9}  {'tokens':>9}  result"
    print(f"\n{'adapter':<{width}}  {titles}")
    for result in results.adapters.values():
        print(f"{result.name:<{width}}  {_row(result)}")


def _row(result: AdapterResult) -> str:
    reports = result.reports
    first, last = (f"{reports[i].loss:.4f}" if reports else "-" for i in (0, -1))
    tokens = reports[-1].num_tokens if reports else 0
    outcome = str(result.folder) if result.folder else result.reason
    return f"{result.state:<9}  {len(reports):>6}  {first:>10}  {last:>9}  {tokens:>9}  {outcome}"


def _line(report: StepReport, entry: dict[str, object]) -> str:
    total = str(report.total_steps)
    note = "  skipped: loss or gradient is not finite" if report.skipped else ""
    return (
        f"{report.adapter}  step {report.step:>{len(total)}}/{total}  epoch {report.epoch:.2f}  "
        f"loss {float(str(entry['loss'])):.4f}  grad_norm {report.grad_norm:.4f}  "
        f"learning_rate {report.learning_rate:.3e}  {entry['tokens_per_second']} tokens/s{note}"
    )


def _shown(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are written as text."""
    return value if math.isfinite(value) else str(value)
