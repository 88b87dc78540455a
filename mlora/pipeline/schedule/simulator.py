"""Times for rows from a cost model: what the pipeline would do if nothing but compute and messages took time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlora.pipeline.schedule.actions import Action
from mlora.pipeline.schedule.checker import execution_order
from mlora.pipeline.schedule.deps import deps
from mlora.pipeline.schedule.stream import Stream
from mlora.pipeline.schedule.timeline import Timed

Cost = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of F (also E) and B by (stage, rows of the microbatch), and of a message on its way."""

    forward: Cost
    backward: Cost
    send: float = 0.0


def simulate(rows: Sequence[Sequence[Action]], stream: Stream, cost: CostModel) -> list[Timed]:
    """The timeline of ``rows``. A stage waits in its receives only; sends and STEPs take no time of the stage.

    Raises ScheduleError where the rows cannot be finished.
    """
    stops: dict[Action, float] = {}
    free = [0.0] * len(rows)
    timeline = []
    for action in execution_order(rows, stream):
        start = free[action.stage]
        stop = max(start, *(stops[other] + _latency(other, cost) for other in deps(action, stream)), 0.0)
        stop += _duration(action, cost)
        stops[action] = free[action.stage] = stop
        timeline.append(Timed(action, start, stop))
    return timeline


def _latency(before: Action, cost: CostModel) -> float:
    return cost.send if before.kind in ("SEND_F", "SEND_B") else 0.0


def _duration(action: Action, cost: CostModel) -> float:
    if action.kind not in ("F", "E", "B"):
        return 0.0
    assert action.microbatch is not None
    return (cost.backward if action.kind == "B" else cost.forward)(action.stage, action.microbatch.rows)
