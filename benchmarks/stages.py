"""What a pipeline would do, from one GPU: every stage is timed alone, the simulator puts them together.

    python benchmarks/stages.py                                  # 8B on 1, 2, 4 and 8 GPUs
    python benchmarks/stages.py --shape llama-70b --quantization nf4 --stages 4 8 --microbatch-tokens 2048
    OMP_NUM_THREADS=1 python benchmarks/stages.py --shape tiny --device cpu --stages 1 2 --microbatch-tokens 256 \\
        --rows mlora/8x2x32

Rows and the cut are those of benchmarks/pipeline.py, which measures what is predicted here: the engine's planner packs
the stream, each stage runs its F, B and STEPs one after another, and the stream is simulated with a + b · rows fitted
to them. Messages take no time there. Of the stages inside the model those of as many layers are timed once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.pipeline import (
    SHAPES,
    Measured,
    Row,
    TimedStage,
    adapter_runs,
    bubble_between,
    flights,
    median_ms,
    predict,
    rate_between,
    run_config,
    shape_of,
    token_count,
)
from benchmarks.throughput import RATE, RandomCheckpoint, device_name, table
from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.config import RunConfig
from mlora.engine.device import choose_device, choose_dtype, full_rows, prepare, row_bucket
from mlora.engine.layout import first_layers, layer_counts
from mlora.engine.memory import rows_of
from mlora.models.decoder import Decoder
from mlora.models.spec import ModelSpec, Quantization, linear_shapes
from mlora.pipeline.schedule import Planner, Position, Timed, makespan
from mlora.pipeline.stage import Batch
from mlora.types import IGNORE, Microbatch, StepDecision

ROWS = ("mlora/8x16x512", "mlora/8x4x512", "mlora/8x1x512", "mlora/8x4x128-2048")
HEAD = ("row", "stages", "w(0)", "layers", "F ms", "B ms", "tokens/s with ramps", "between ramps", "bubble there")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A row's stream over so many stages."""

    row: Row
    config: RunConfig
    flight: tuple[int, ...]
    positions: tuple[Position, ...]

    @property
    def microbatches(self) -> list[Microbatch]:
        return [position.microbatch for position in self.positions if position.microbatch]


def plan(row: Row, spec: ModelSpec, stages: int, device: torch.device, options: argparse.Namespace) -> Plan:
    """As the coordinator plans a run whose adapters all begin at once."""
    config = run_config(row, options.stream, device, options)
    bucket = row_bucket(device, choose_dtype("auto", device))
    flight = flights(row, config, stages, full_rows(device))
    planner = Planner(rows_of(config), flight, bucket(1), bucket)
    for adapter in adapter_runs(row, config, spec):
        adapter.state = "training"
        planner.join(adapter.index, adapter.next_step)
    return Plan(row=row, config=config, flight=flight, positions=planner.window(sys.maxsize))


class Alone:
    """A stage of the model by itself; adapters join once and are trained on."""

    def __init__(self, spec: ModelSpec, layers: range, device: torch.device, options: argparse.Namespace) -> None:
        self._spec, self._layers, self._device = spec, layers, device
        self._dtype = choose_dtype("auto", device)
        quantization = Quantization(kind=options.quantization) if options.quantization else None
        checkpoint = RandomCheckpoint(spec, self._dtype, device)
        model = Decoder(spec, checkpoint, layers, self._dtype, device, quantization)  # type: ignore[arg-type]
        self._stage, self._joined = TimedStage(model, 0), 0

    def time(self, plan: Plan) -> list[Timed]:
        """When each F, B and STEP ran, after a third of them has compiled the kernels."""
        self._join(plan.config)
        for microbatch in plan.microbatches[: len(plan.microbatches) // 3 + 1]:
            self._run(microbatch)
        self._stage.start_stream()
        for microbatch in plan.microbatches:
            self._run(microbatch)
        return self._stage.timeline

    def _join(self, config: RunConfig) -> None:
        for slot in range(self._joined, len(config.adapters)):
            adapter, shapes = config.adapters[slot], linear_shapes(self._spec)
            targets = match_targets(adapter, self._spec.num_layers)
            self._stage.join(slot, AdapterState(adapter, targets, shapes, self._layers, self._dtype, self._device))
            self._joined += 1

    def _run(self, microbatch: Microbatch) -> None:
        model, size = self._stage.model, (microbatch.rows, self._spec.hidden_size)
        x_TD, dout_TD = (torch.randn(size, dtype=self._dtype, device=self._device) for _ in range(2))
        self._stage.forward(self._batch(microbatch), None if model.is_first else x_TD)
        self._stage.backward(microbatch.index, None if model.is_last else dout_TD)
        for segment in microbatch.segments:
            if segment.ends_step:
                self._stage.close_step(segment.slot)
                self._stage.step(segment.slot, StepDecision(RATE, 1.0, False))

    def _batch(self, microbatch: Microbatch) -> Batch:
        ids_T = torch.randint(self._spec.vocab_size, (microbatch.rows,))
        targets_T = torch.full_like(ids_T, IGNORE)
        for segment in microbatch.segments:
            for _, first, last in segment.sample_rows():
                targets_T[first : last - 1] = ids_T[first + 1 : last]
        return Batch(microbatch, ids_T.to(self._device), targets_T)


def measured(
    spec: ModelSpec, plans: Sequence[Plan], layers: Sequence[int], options: argparse.Namespace
) -> list[Measured]:
    """Each plan's stream, with the times of every stage alone."""
    device, stages = choose_device(options.device), len(layers) - 1
    seen: dict[tuple[int, bool, bool], list[list[Timed]]] = {}
    timelines: list[list[Timed]] = [[] for _ in plans]
    for stage in range(stages):
        own = range(*layers[stage : stage + 2])
        kind = (len(own), stage == 0, stage == stages - 1)
        if kind not in seen:
            alone = Alone(spec, own, device, options)
            seen[kind] = [alone.time(plan) for plan in plans]
        for timeline, times in zip(timelines, seen[kind], strict=True):
            timeline += [timed._replace(action=replace(timed.action, stage=stage)) for timed in times]
    return [
        Measured(positions=list(plan.positions), flight=plan.flight, timeline=timeline, sent=[])
        for plan, timeline in zip(plans, timelines, strict=True)
    ]


def line(row: Row, layers: Sequence[int], stream: Measured) -> list[str]:
    timeline = predict(stream)
    tokens = sum(token_count(position.microbatch) for position in stream.positions if position.microbatch)
    between = rate_between(replace(stream, timeline=timeline))

    def medians(kind: str) -> str:
        return " / ".join(f"{median_ms([stream], kind, stage):.1f}" for stage in range(len(stream.flight)))

    return [
        row.name,
        str(len(stream.flight)),
        str(stream.flight[0]),
        " / ".join(str(stop - start) for start, stop in pairwise(layers)),
        medians("F"),
        medians("B"),
        f"{tokens / makespan(timeline):,.0f}",
        f"{between:,.0f}",
        f"{bubble_between(stream, timeline):.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Row.parse, default=[Row.parse(name) for name in ROWS])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape's")
    parser.add_argument("--quantization", choices=("nf4", "int8"), help="of the frozen linears")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--stream", type=int, default=24, help="full microbatches of a stream, about")
    parser.add_argument("--in-flight", type=int, choices=(1, 2), help="as pipeline.in_flight; default: the engine's")
    options = parser.parse_args()
    device = choose_device(options.device)
    prepare(device)
    torch.manual_seed(0)
    _, spec = shape_of(options)
    kept = f", {options.quantization}" if options.quantization else ""
    print(
        f"{device_name(device)}, torch {torch.__version__}, shape {options.shape}{kept}: predicted from stages alone\n"
    )
    lines = []
    for stages in options.stages:
        start = time.perf_counter()
        layers = first_layers(layer_counts(spec, stages))
        plans = [plan(row, spec, stages, device, options) for row in options.rows]
        streams = measured(spec, plans, layers, options)
        lines += [line(row, layers, stream) for row, stream in zip(options.rows, streams, strict=True)]
        print(f"{stages} stages: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(table(HEAD, lines))


if __name__ == "__main__":
    main()
