"""Where a run's numbers go: ``metrics.jsonl``, the loggers of ``report_to``, a line per adapter and logging step."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from mlora.config import AdapterConfig
from mlora.engine.adapter_run import StepReport
from mlora.engine.evaluation import EvaluationReport, for_json
from mlora.engine.loggers import Loggers
from mlora.engine.results import AdapterResult, Results
from mlora.files import write_whole


class Recorder:
    """Averages losses over an adapter's logging steps, as transformers' Trainer does; the other values are the last.

    Args:
        path: ``metrics.jsonl``.
        changed: called at every step and evaluation.
        loggers: those of ``report_to``.
        lines: whether steps are printed; a skipped one is in any case.
    """

    def __init__(self, path: Path, changed: Callable[[], object], loggers: Loggers, lines: bool = True) -> None:
        self._path, self._changed, self._loggers, self._lines = path, changed, loggers, lines
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._losses: dict[str, list[float]] = {}
        self._marks: dict[str, tuple[float, int]] = {}

    def open(self, source: Path | None, done: Mapping[str, tuple[int, int]]) -> None:
        """Open the file; until then nothing is written.

        A run that goes on takes from ``source``, which may be the same file, each adapter's lines up to the step and
        the evaluation that are ``done``: what lies behind will be written again.
        """
        if source is not None and source.exists():
            write_whole(self._path, "".join(_lines_up_to(source, done)).encode())
        self._file = self._path.open("a", encoding="utf-8")
        self._loggers.open()

    def start(self, adapter: str, earlier: Sequence[StepReport], config: AdapterConfig) -> None:
        """The adapter's clock for tokens per second starts, behind the steps ``earlier``."""
        self._marks[adapter] = (time.monotonic(), earlier[-1].num_tokens if earlier else 0)
        last = max((report.step for report in earlier if _due(report, config)), default=0)
        self._losses[adapter] = [report.loss for report in earlier[last:]]
        self._loggers.start(config, len(earlier))

    def step(self, report: StepReport, config: AdapterConfig) -> None:
        """Take a step's numbers; write them when a logging step, the last step or a skipped step is due."""
        self._losses[report.adapter].append(report.loss)
        self._changed()
        if not _due(report, config):
            return
        entry = self._entry(report)
        self._write(json.dumps(entry) + "\n")
        self._loggers.log(entry)
        if self._lines or report.skipped:
            print(_line(report, entry), flush=True)

    def evaluation(self, report: EvaluationReport) -> None:
        """Take an evaluation's numbers and write them."""
        self._changed()
        entry = {
            "adapter": report.adapter,
            "step": report.step,
            "eval_loss": for_json(report.loss),
            "eval_perplexity": for_json(report.perplexity),
            "eval_accuracy": report.accuracy,
            "eval_tokens": report.target_tokens,
            "best": report.best,
        }
        self._write(json.dumps(entry) + "\n")
        self._loggers.log(entry)
        print(_evaluation_line(report), flush=True)

    def failed(self, adapter: str, step: int, reason: str) -> None:
        """An adapter was parked behind ``step``."""
        self._write(json.dumps({"adapter": adapter, "step": step, "state": "failed", "reason": reason}) + "\n")

    def _write(self, line: str) -> None:
        """A full disk costs the file, not the run."""
        if self._file is None:
            return
        try:
            with self._lock:
                self._file.write(line)
                self._file.flush()
        except OSError as error:
            print(f"{self._path} cannot be written: {error.strerror}; the run goes on without it", flush=True)
            self._file = None

    def close(self, states: Mapping[str, str]) -> None:
        """Close the file and the loggers; ``states`` are the adapters' last ones."""
        if self._file is not None:
            self._file.close()
        self._loggers.close(states)

    def _entry(self, report: StepReport) -> dict[str, object]:
        now, losses = time.monotonic(), self._losses[report.adapter]
        since, tokens = self._marks[report.adapter]
        self._marks[report.adapter] = (now, report.num_tokens)
        self._losses[report.adapter] = []
        entry: dict[str, object] = {
            "adapter": report.adapter,
            "step": report.step,
            "epoch": round(report.epoch, 4),
            "loss": for_json(sum(losses) / len(losses)),
            "grad_norm": for_json(report.grad_norm),
            "learning_rate": report.learning_rate,
            "num_tokens": report.num_tokens,
            "tokens_per_second": round((report.num_tokens - tokens) / max(now - since, 1e-9), 1),
        }
        return entry | ({"skipped": True} if report.skipped else {})


def _due(report: StepReport, config: AdapterConfig) -> bool:
    return not report.step % config.logging_steps or report.step == report.total_steps or report.skipped


def _lines_up_to(path: Path, done: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """A file's lines of what is done; a line that a crash has cut is left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            step, evaluated = done.get(entry["adapter"], (math.inf, math.inf))
            if entry["step"] <= (evaluated if "eval_loss" in entry else step) and "state" not in entry:
                yield line + "\n"


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


def _evaluation_line(report: EvaluationReport) -> str:
    total, best = str(report.total_steps), "  best so far" if report.best else ""
    return (
        f"{report.adapter}  step {report.step:>{len(total)}}/{total}  eval_loss {report.loss:.4f}  "
        f"perplexity {report.perplexity:.4g}  token accuracy {report.accuracy:.1%}{best}"
    )
