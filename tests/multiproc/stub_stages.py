"""A run whose stages sleep instead of computing; coordinator, planner, executor and transports are the real ones."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from mlora import parse_config
from mlora.config import RunConfig
from mlora.data import shares
from mlora.engine.adapter_run import AdapterRun, StepReport
from mlora.engine.cadence import Cadence
from mlora.engine.coordinator import Coordinator
from mlora.engine.requests import Requests
from mlora.pipeline.executor import Entry, Executor, Window
from mlora.pipeline.schedule import (
    CostModel,
    Position,
    StageRow,
    Stream,
    Timed,
    drain,
    in_flight,
    makespan,
    rows,
    simulate,
)
from mlora.pipeline.schedule.timeline import COMPUTE
from mlora.pipeline.stage import Batch, StepSums
from mlora.pipeline.transport.base import Transport, TransportError
from mlora.pipeline.transport.control import Control
from mlora.pipeline.transport.distributed import distributed_control, distributed_transport
from mlora.pipeline.transport.local import local_controls, local_transports
from mlora.types import Microbatch, StepDecision

STAGES = 4
FORWARD_S, BACKWARD_S = 0.03, 0.06  # so long that what the host does between them is little on a slow machine too
FACTOR = 2  # times S - s microbatches are in flight on stage s
STEPS = (11, 12, 40, 21, 15, 14, 11, 9, 4)  # of each adapter; chosen so that the last ones end together
ENDED_EARLY, AT_STEP = "a2", 5  # this adapter is ended by hand, with microbatches of its planned already
WIDTH, CAP, ACTIVE = 4, 128, 5


class Run(NamedTuple):
    """What a run did: the timeline of all stages, and the windows that were published."""

    timeline: list[Timed]
    windows: list[Window]
    in_flight: tuple[int, ...]

    @property
    def positions(self) -> list[Position]:
        return [position for window in self.windows for position in window.positions]

    def slowdown(self) -> float:
        """Measured wall time over what the simulator says of the same positions with the stages' own costs."""
        stage_rows = rows(self.positions, self.in_flight)
        planned = makespan(simulate(stage_rows, Stream(self.positions, len(self.in_flight)), COSTS))
        return makespan([timed for timed in self.timeline if timed.action.kind in COMPUTE]) / planned

    def empty_at(self) -> list[int]:
        """Positions with whose B no microbatch is left in flight on stage 0 (F done, B not), up to the last F there."""
        own = [timed.action for timed in self.timeline if timed.action.stage == 0 and timed.action.kind in ("F", "B")]
        last = max(i for i, action in enumerate(own) if action.kind == "F")
        counts = itertools.accumulate(1 if action.kind == "F" else -1 for action in own)
        return [action.position for action, count in zip(own[:last], counts, strict=False) if count == 0]


@cache
def _seconds(kind: str, stage: int, row_count: int) -> float:
    """± 30 %, another factor for each kind, stage and number of rows."""
    mean = BACKWARD_S if kind == "B" else FORWARD_S
    return mean * random.Random(f"{kind} {stage} {row_count}").uniform(0.7, 1.3)


COSTS = CostModel(
    forward=lambda stage, row_count: _seconds("F", stage, row_count),
    backward=lambda stage, row_count: _seconds("B", stage, row_count),
)


class SleepingStage:
    """Has the methods of mlora.pipeline.stage.Stage that the executor uses, and checks who sits in which slot."""

    def __init__(self, index: int, stages: int) -> None:
        self.model = SimpleNamespace(
            is_last=index == stages - 1, width=WIDTH, dtype=torch.float32, device=torch.device("cpu")
        )
        self._index = index
        self._slots: dict[int, int] = {}
        self._flights: dict[int, Microbatch] = {}

    def meet(self, entry: Entry) -> None:
        if entry.kind == "join":
            assert entry.slot not in self._slots, f"slot {entry.slot} is taken"
            self._slots[entry.slot] = entry.adapter
            return
        flying = [segment.slot for microbatch in self._flights.values() for segment in microbatch.segments]
        assert entry.slot not in flying, f"adapter {entry.adapter} leaves with a microbatch in flight"
        assert self._slots.pop(entry.slot) == entry.adapter

    def forward(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor | None:
        self._flights[batch.microbatch.index] = batch.microbatch
        out_TD = self._through(batch)
        return None if self.model.is_last else out_TD

    def score(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor:
        out_TD = self._through(batch)
        return torch.ones(len(batch.microbatch.sample_lengths()), 2).double() if self.model.is_last else out_TD

    def _through(self, batch: Batch) -> torch.Tensor:
        assert all(self._slots[segment.slot] == segment.adapter for segment in batch.microbatch.segments)
        time.sleep(COSTS.forward(self._index, batch.microbatch.rows))
        return torch.zeros(batch.microbatch.rows, WIDTH)

    def backward(self, index: int, dout_TD: torch.Tensor | None = None) -> torch.Tensor:
        microbatch = self._flights.pop(index)
        time.sleep(COSTS.backward(self._index, microbatch.rows))
        return torch.zeros(microbatch.rows, WIDTH)

    def close_step(self, slot: int) -> StepSums:
        return StepSums(1.0, (1.0,))

    def step(self, slot: int, decision: StepDecision) -> None:
        assert slot in self._slots


class StubData:
    """Rows of random lengths, all of whose tokens are trained."""

    def __init__(self, seed: int, rows: int = 40) -> None:
        self.lengths = np.random.default_rng(seed).integers(20, 61, rows)
        self.target_tokens = self.lengths - 1
        self.shares = shares([rows], None)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(self.lengths[index], int), np.ones(self.lengths[index], int)


@dataclass(kw_only=True)
class EvaluatedRun(AdapterRun):
    """An adapter that is evaluated on a few rows after every fourth step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._evaluation_planned = -1  # some are evaluated before their first step too

    def _evaluates(self, done: int) -> bool:
        return (done - 1) % 4 == self.index % 4


class QuietRecorder:
    def start(self, adapter: str, earlier: object, config: object) -> None: ...

    def step(self, report: StepReport, config: object) -> None: ...

    def evaluation(self, report: object) -> None: ...


def _config(steps: tuple[int, ...]) -> RunConfig:
    adapters = [
        {"name": f"a{i}", "dataset": "none", "max_steps": count, "per_device_train_batch_size": 4 + i % 3}
        for i, count in enumerate(steps)
    ]
    tree = {"base_model": "none", "adapters": adapters, "microbatch_tokens": CAP, "max_active": ACTIVE, "device": "cpu"}
    return parse_config(tree)


def _coordinator(config: RunConfig, flight: tuple[int, ...]) -> Coordinator:
    adapters = [
        EvaluatedRun(index=i, config=adapter, data=StubData(i), targets=(), held_out=StubData(i, rows=3))
        for i, adapter in enumerate(config.adapters)
    ]

    def on_step(report: StepReport) -> str | None:
        return "end" if (report.adapter, report.step) == (ENDED_EARLY, AT_STEP) else None

    return Coordinator(config, adapters, flight, QuietRecorder(), on_step, Requests(), Cadence(config))


class FlushingExecutor(Executor):
    """What must be noticed: it waits for an empty pipeline behind every few positions."""

    every = 8

    def _walk(self, positions: Sequence[Position]) -> None:
        for first in range(0, len(positions), self.every):
            part = positions[first : first + self.every]
            super()._walk([*part, *drain(part[-1].index + 1, self._in_flight)])
            self._row = StageRow(self._index, self._in_flight)


class SeamFlushingExecutor(FlushingExecutor):
    """It waits for an empty pipeline at the end of every window."""

    every = 1_000_000


def run_stage(
    transport: Transport, control: Control, steps: tuple[int, ...] = STEPS, kind: type[Executor] = Executor
) -> Run | None:
    """Run one stage to the end; on stage 0, lead the others and return what all have done."""
    flight = in_flight(transport.stages, FACTOR)
    first_layers = range(transport.stages + 1)  # a layer on each stage
    stage = SleepingStage(transport.stage, transport.stages)
    if transport.stage:
        executor = kind(stage, transport, flight, first_layers, stage.meet)
        executor.run(iter(control.next, None))
        control.gather_objects(executor.timeline)
        return None
    coordinator = _coordinator(_config(steps), flight)
    windows = []

    def publish(window: Window | None) -> None:
        control.publish(window)
        windows.append(window)

    executor = kind(stage, transport, flight, first_layers, stage.meet, coordinator)
    executor.run(coordinator.windows(publish))
    parts = control.gather_objects(executor.timeline)
    return Run([timed for part in parts for timed in part], [window for window in windows if window], flight)


def run_threads(deadline_s: float, steps: tuple[int, ...] = STEPS, kind: type[Executor] = Executor) -> Run:
    """All stages as threads of this process."""
    transports, controls = local_transports(STAGES), local_controls(STAGES)
    with ThreadPoolExecutor(STAGES) as pool:
        pairs = zip(transports, controls, strict=True)
        stages = [pool.submit(run_stage, transport, control, steps, kind) for transport, control in pairs]
        if wait(stages, deadline_s, FIRST_EXCEPTION).not_done:
            transports[0].abort()
            controls[0].abort()
    return _first_result(stages)


def _first_result(stages: list[Future[Run | None]]) -> Run:
    """Stage 0's result; where a stage failed, its own error rather than the broken connections of the others."""
    errors = [error for stage in stages if (error := stage.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, TransportError)):
        raise error
    return stages[0].result()


def process(store, rank: int, world: int, file: str) -> None:
    """One stage as a process; the first writes what all have done to ``file``."""
    transport, control = distributed_transport(store, range(world), rank), distributed_control(store, rank, world)
    run = run_stage(transport, control)
    if run is not None:
        Path(file).write_bytes(pickle.dumps(tuple(run)))
    transport.close()
    control.close()


def assert_no_flush(run: Run) -> None:
    """The stream has all that could be a reason for a flush, and there was none."""
    entries = [entry for window in run.windows[1:] for entry in window.entries]
    assert sum(position.trains for position in run.positions) >= 300
    assert sum(position.forward_only for position in run.positions) >= 30
    assert sum(entry.kind == "join" for entry in entries) >= 4 and sum(entry.kind == "leave" for entry in entries) >= 9
    assert len(run.windows) >= 10
    assert run.empty_at() == [], f"nothing in flight on stage 0 after B of {run.empty_at()}"
    slowdown = run.slowdown()
    assert 0.85 < slowdown < 1.15, f"{slowdown:.3f} x the planned time"
