from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mlora.pipeline.schedule import CostModel, EvaluationPlan, NextStep, Planner, Position
from mlora.types import SampleRef, StepPlan


def plans(adapter: int, steps: Sequence[Sequence[int]], evaluate_after: Sequence[int] = ()) -> NextStep:
    """Steps of the given sample lengths; after those named, an evaluation of two samples of 40 rows."""
    made: list[StepPlan] = []
    for step, lengths in enumerate(steps):
        made.append(StepPlan(adapter, step, _samples(lengths), sum(lengths)))
        if step in evaluate_after:
            made.append(EvaluationPlan(adapter, step, _samples((40, 40)), 80))
    return iter([*made, None]).__next__


def _samples(lengths: Sequence[int]) -> tuple[SampleRef, ...]:
    return tuple(SampleRef(i, i, length) for i, length in enumerate(sorted(lengths, reverse=True)))


def stream(planner: Planner, adapters: Sequence[NextStep], window: int = 1_000_000) -> list[Position]:
    """Every position for adapters that join at once, taken in windows."""
    for slot, next_step in enumerate(adapters):
        planner.join(slot, next_step)
    positions: list[Position] = []
    while part := planner.window(window):
        positions += part
    return positions


def rows_cost(send: float = 0.0) -> CostModel:
    """F takes a second per row, B two."""
    return CostModel(forward=lambda stage, rows: rows, backward=lambda stage, rows: 2 * rows, send=send)


lengths = st.lists(st.integers(1, 120), min_size=1, max_size=5)
adapters = st.lists(st.lists(lengths, min_size=1, max_size=4), min_size=1, max_size=5)
flights = st.integers(1, 5).flatmap(
    lambda stages: st.tuples(
        *(st.integers(1, 2 * stages) for _ in range(stages))  # any that does not grow
    ).map(lambda flight: tuple(sorted(flight, reverse=True)))
)
