"""When each action ran, simulated or measured, and what that says about the stages. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlora.pipeline.schedule.actions import Action

COMPUTE = ("F", "B", "E", "STEP")  # the rest is communication; a receive lasts until its message is there


class Timed(NamedTuple):
    """An action with the time at which its stage began and ended it."""

    action: Action
    start: float
    stop: float


def makespan(timeline: Sequence[Timed]) -> float:
    """From the first action's start to the last one's stop."""
    return max(timed.stop for timed in timeline) - min(timed.start for timed in timeline)


def busy_shares(timeline: Sequence[Timed]) -> list[float]:
    """The share of the makespan that each stage computes."""
    return _shares(timeline, min(timed.start for timed in timeline), max(timed.stop for timed in timeline))


def bubble(timeline: Sequence[Timed]) -> float:
    """The share of all stages' time, over the makespan, in which they do not compute."""
    shares = busy_shares(timeline)
    return 1 - sum(shares) / len(shares)


def bubble_between_ramps(timeline: Sequence[Timed]) -> float:
    """The bubble from the first F's start on the last stage to the last F's stop on stage 0."""
    last = max(timed.action.stage for timed in timeline)
    start = min(timed.start for timed in timeline if timed.action.kind == "F" and timed.action.stage == last)
    stop = max(timed.stop for timed in timeline if timed.action.kind == "F" and timed.action.stage == 0)
    shares = _shares(timeline, start, stop)
    return 1 - sum(shares) / len(shares)


def _shares(timeline: Sequence[Timed], start: float, stop: float) -> list[float]:
    busy = [0.0] * (1 + max(timed.action.stage for timed in timeline))
    for timed in timeline:
        if timed.action.kind in COMPUTE:
            busy[timed.action.stage] += max(0.0, min(timed.stop, stop) - max(timed.start, start))
    return [time / (stop - start) for time in busy]
