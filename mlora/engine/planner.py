"""Packs samples of several adapters into microbatches. Pure Python; decides order and cuts, never arithmetic.

The adapter whose step started first goes first; the others only fill the tail of the microbatch. Each adapter's samples
keep their canonical order (next-fit), so its gradient is the same sum however its step is cut. The cost of a sample is
its rows; a sample longer than the cap travels alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlora.types import Microbatch, SampleRef, Segment, StepPlan, padded

NextStep = Callable[[], StepPlan | None]


@dataclass
class _Line:
    """An adapter's unplanned rest of its current step, and since which microbatch that step has been under way."""

    slot: int
    next_step: NextStep
    plan: StepPlan
    since: int
    left: list[SampleRef] = field(default_factory=list)


class Planner:
    """The order of microbatches for the adapters that are active. ``cap`` is the most rows of one microbatch."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lines: dict[int, _Line] = {}
        self._count = 0

    def join(self, slot: int, next_step: NextStep) -> None:
        """Add an adapter. ``next_step`` gives its steps one after another, None when there are no more."""
        plan = next_step()
        if plan is not None:
            self._lines[slot] = _Line(slot, next_step, plan, self._count, list(plan.samples))

    def leave(self, slot: int) -> None:
        """Forget the adapter and what it had planned; nothing happens if it is gone already."""
        self._lines.pop(slot, None)

    def next(self) -> Microbatch | None:
        """The next microbatch, or None when no adapter has a step left.

        A segment with ``ends_step`` closes its adapter's step; the next step starts in a later microbatch.
        """
        segments: list[Segment] = []
        row = 0
        for line in sorted(self._lines.values(), key=lambda line: (line.since, line.slot)):
            samples = self._take(line, row)
            if samples:
                segment = self._segment(line, row, samples)
                segments.append(segment)
                row = segment.stop
        if not segments:
            return None
        microbatch = Microbatch(self._count, tuple(segments), padded(row))
        self._count += 1
        self._advance()
        return microbatch

    def _take(self, line: _Line, row: int) -> list[SampleRef]:
        """The line's next samples that fit behind ``row``."""
        taken: list[SampleRef] = []
        while line.left and (row + line.left[0].length <= self._cap or row == 0):
            taken.append(line.left.pop(0))
            row += taken[-1].length
        return taken

    def _segment(self, line: _Line, row: int, samples: list[SampleRef]) -> Segment:
        plan = line.plan
        return Segment(
            adapter=plan.adapter,
            slot=line.slot,
            step=plan.step,
            start=row,
            samples=tuple(samples),
            target_tokens=plan.target_tokens,
            ends_step=not line.left,
        )

    def _advance(self) -> None:
        for line in [line for line in self._lines.values() if not line.left]:
            plan = line.next_step()
            if plan is None:
                del self._lines[line.slot]
            else:
                line.plan, line.since, line.left = plan, self._count, list(plan.samples)
