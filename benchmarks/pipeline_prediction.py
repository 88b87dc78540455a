"""How well the plan predicts a run: SmolLM2-135M on two processes, with costs fitted on the run's first microbatches.

    python benchmarks/pipeline_prediction.py     # fitted on 50 microbatches, the next 100 are predicted
    python benchmarks/pipeline_prediction.py --fit 20 --next 20

The cost of F and of B on each stage is a + b · rows. The simulator runs the whole stream with these costs. Time and
bubble are compared from stage 0's last B of the fitted microbatches to its last B of the predicted ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlora import RunConfig, parse_config
from mlora.engine.cadence import Cadence
from mlora.engine.coordinator import Coordinator
from mlora.engine.loggers import Loggers
from mlora.engine.output import TRACE
from mlora.engine.prepare import prepare
from mlora.engine.recorder import Recorder
from mlora.engine.requests import Requests
from mlora.pipeline.schedule import (
    Action,
    CostModel,
    Position,
    Stream,
    Timed,
    bubble,
    parse,
    rows,
    simulate,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from prepare_model import default_cache  # type: ignore[import-not-found]
from prepare_model import prepare as prepare_model

STAGES, ADAPTERS, BATCH, CAP = 2, 4, 8, 128
WORDS = range(10, 100)  # of a row; each is about a token
LINES = 64


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds that a microbatch takes: ``fixed`` + ``per_row`` · rows."""

    fixed: float
    per_row: float

    def __call__(self, row_count: int) -> float:
        return self.fixed + self.per_row * row_count


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds and bubble of the predicted microbatches. ``costs`` are by kind, then by stage."""

    costs: dict[str, list[Line]]
    measured_s: float
    predicted_s: float
    measured_bubble: float
    predicted_bubble: float


def compare(model: Path, folder: Path, fit: int, following: int) -> Compared:
    """Train in ``folder``, fit costs on the first ``fit`` microbatches, predict the ``following`` ones."""
    config = write_config(model, folder, fit + following)
    train(folder / "run.yaml")
    positions, in_flight = planned(config)
    measured = read_trace(config.output_dir / TRACE)
    stage_rows = rows(positions, in_flight)
    for stage, row in enumerate(stage_rows):
        assert row == [timed.action for timed in measured if timed.action.stage == stage], (
            f"stage {stage} left the plan"
        )
    trained = [position.index for position in positions if position.trains]
    costs = fitted(measured, positions, trained[fit - 1])
    model_of_costs = CostModel(
        forward=lambda stage, row_count: costs["F"][stage](row_count),
        backward=lambda stage, row_count: costs["B"][stage](row_count),
    )
    predicted = simulate(stage_rows, Stream(positions, STAGES), model_of_costs)
    parts = [between(timeline, trained[fit - 1], trained[fit + following - 1]) for timeline in (measured, predicted)]
    (measured_s, measured_bubble), (predicted_s, predicted_bubble) = parts
    return Compared(
        costs=costs,
        measured_s=measured_s,
        predicted_s=predicted_s,
        measured_bubble=measured_bubble,
        predicted_bubble=predicted_bubble,
    )


def write_config(model: Path, folder: Path, microbatches: int) -> RunConfig:
    """Adapters with rows of random lengths, and steps enough for so many microbatches of at most CAP rows."""
    draw = random.Random(0)
    for name in range(ADAPTERS):
        texts = [
            " ".join(draw.choices(["river", "stone", "seven", "green"], k=draw.choice(WORDS))) for _ in range(LINES)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    adapters = [{"name": str(name), "dataset": str(folder / f"{name}.jsonl")} for name in range(ADAPTERS)]
    steps = math.ceil(microbatches * CAP / (ADAPTERS * BATCH * statistics.mean(WORDS))) + 1
    tree = {
        "base_model": str(model),
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "microbatch_tokens": CAP,
        "pipeline": {"stages": STAGES},
        "defaults": {"max_steps": steps, "per_device_train_batch_size": BATCH, "max_length": CAP},
        "adapters": adapters,
    }
    (folder / "run.yaml").write_text(json.dumps(tree))
    return parse_config(tree)


def train(config: Path) -> None:
    """A process per stage, each with its share of the cores. What it prints is of no interest here."""
    threads = max(1, (os.cpu_count() or 1) // STAGES)
    command = [sys.executable, "-m", "mlora", "train", str(config), "--nproc", str(STAGES)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def planned(config: RunConfig) -> tuple[list[Position], tuple[int, ...]]:
    """The stream of the run, planned once more, and the microbatches in flight on each stage."""
    prepared = prepare(config, STAGES)
    recorder = Recorder(Path(os.devnull), lambda: None, Loggers((), Path(os.devnull)))
    coordinator = Coordinator(
        config, prepared.adapters, prepared.in_flight, recorder, None, Requests(), Cadence(config)
    )
    return [position for window in coordinator.windows() for position in window.positions], prepared.in_flight


def read_trace(path: Path) -> list[Timed]:
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    return [Timed(parse(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]


def fitted(measured: Sequence[Timed], positions: Sequence[Position], last: int) -> dict[str, list[Line]]:
    """Least squares over the microbatches up to position ``last``, for F and B on every stage."""
    row_counts = {p.index: p.microbatch.rows for p in positions if p.microbatch and p.index <= last}

    def line(kind: str, stage: int) -> Line:
        own = [timed for timed in measured if (timed.action.kind, timed.action.stage) == (kind, stage)]
        seconds = {timed.action.position: timed.stop - timed.start for timed in own}
        slope, intercept = statistics.linear_regression(list(row_counts.values()), [seconds[i] for i in row_counts])
        return Line(fixed=intercept, per_row=slope)

    return {kind: [line(kind, stage) for stage in range(STAGES)] for kind in ("F", "B")}


def between(timeline: Sequence[Timed], first: int, last: int) -> tuple[float, float]:
    """Seconds and bubble between the ends of two positions' B on stage 0."""
    stops = {timed.action: timed.stop for timed in timeline}
    start, stop = (stops[Action(stage=0, kind="B", position=position)] for position in (first, last))
    inside = [
        Timed(t.action, max(t.start, start), min(t.stop, stop)) for t in timeline if t.start < stop and t.stop > start
    ]
    return stop - start, bubble(inside)


def show(found: Compared, fit: int, following: int) -> None:
    for kind, lines in found.costs.items():
        for stage, line in enumerate(lines):
            print(f"{kind} on stage {stage}: {line.fixed * 1e3:6.1f} ms + {line.per_row * 1e3:.2f} ms per row")
    ratio = found.predicted_s / found.measured_s
    print(f"fitted on {fit} microbatches; the next {following} and their bubble:")
    print(f"measured   {found.measured_s:6.1f} s  {found.measured_bubble:5.1%}")
    print(f"predicted  {found.predicted_s:6.1f} s  {found.predicted_bubble:5.1%}  {ratio:.2f} x measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a local model folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--fit", type=int, default=50, help="microbatches on which costs are fitted")
    parser.add_argument("--next", type=int, default=100, help="microbatches behind them that are predicted")
    options = parser.parse_args()
    model = Path(options.model) if options.model else prepare_model(default_cache())
    print(f"{STAGES} processes on {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(model, Path(folder), options.fit, options.next)
    show(found, options.fit, options.next)
    print(f"load after {os.getloadavg()[0]:.1f}; other work on the cores would make the next unlike the first")


if __name__ == "__main__":
    main()
