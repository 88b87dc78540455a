"""Packs samples of several adapters into the positions of the stream. Decides order and cuts, never arithmetic.

The adapter whose step started first goes first; the others only fill the tail of the microbatch. Each adapter's samples
keep their canonical order (next-fit), so its gradient is the same sum however its step is cut. The cost of a sample is
its rows; a sample longer than the cap travels alone.

A step's coefficient is known on stage 0 after the last B there, w(0) - 1 ticks behind its F. So the adapter's next
step stands at least w(0) positions after its last microbatch, and the position at exactly that gap carries the STEP
down, whatever else it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlora.pipeline.schedule.stream import Position, StepRef
from mlora.types import ROW_MULTIPLE, Microbatch, SampleRef, Segment, StepPlan, padded

NextStep = Callable[[], StepPlan | None]
_ALONE = 4  # with this many times w(0) - 1 microbatches in its step, a lone adapter idles a fifth of the time


@dataclass(frozen=True)
class EvaluationPlan(StepPlan):
    """Samples to run forward only, at the version after ``step`` (-1: before any); comes between two StepPlans.

    Its segments' ``ends_step`` marks the evaluation's last microbatch; no STEP follows. The next step may stand right
    behind it: what it came to is known on stage 0 before that step's STEP.
    """


class _Line:
    """An adapter's plan that is being packed, and the position from which it may stand in the stream."""

    def __init__(self, slot: int, next_step: NextStep, plan: StepPlan, ready: int, alone: bool) -> None:
        assert plan.samples, f"adapter {plan.adapter} has no samples in step {plan.step}"
        self.slot, self.next_step, self.plan, self.ready, self.alone = slot, next_step, plan, ready, alone
        self.left = list(plan.samples)
        self.rows = sum(sample.length for sample in plan.samples)
        self.forward_only = isinstance(plan, EvaluationPlan)

    def take(self, row: int, cap: int) -> list[SampleRef]:
        """The next samples that fit behind ``row``."""
        taken: list[SampleRef] = []
        while self.left and (row + self.left[0].length <= cap or row == 0):
            taken.append(self.left.pop(0))
            row += taken[-1].length
        return taken

    def segment(self, row: int, samples: list[SampleRef]) -> Segment:
        return Segment(
            adapter=self.plan.adapter,
            slot=self.slot,
            step=self.plan.step,
            start=row,
            samples=tuple(samples),
            target_tokens=self.plan.target_tokens,
            ends_step=not self.left,
        )


class Planner:
    """The positions of the stream for the adapters that are active; windows of it follow each other without a seam.

    Args:
        cap: the most rows of one microbatch.
        in_flight: w(s) for each stage, see ``schedule.in_flight``.
        floor: rows under which a smaller microbatch is no cheaper; steps are not cut into smaller ones than that.
        bucket: rows of a microbatch with its padding.
    """

    def __init__(
        self,
        cap: int,
        in_flight: Sequence[int] = (1,),
        floor: int = ROW_MULTIPLE,
        bucket: Callable[[int], int] = padded,
    ) -> None:
        self._cap, self._floor, self._bucket = cap, floor, bucket
        self._gap, self._stages = in_flight[0], len(in_flight)
        self._index = 0
        self._lines: dict[int, _Line] = {}
        self._carried: dict[int, list[StepRef]] = {}
        self._busy: dict[int, int] = {}  # slot -> the last tick at which a stage works for it

    @property
    def position(self) -> int:
        """The position that is planned next."""
        return self._index

    def join(self, slot: int, next_step: NextStep, alone: bool = False) -> None:
        """Add an adapter to a free slot, from the next position on; with ``alone`` its first plan shares no microbatch.

        ``next_step`` gives its plans one after another, None when there are no more. It is asked as soon as the one
        before is packed.
        """
        assert self.free(slot), f"slot {slot} is in use up to position {self._busy[slot]}"
        self._start(slot, next_step, self._index, alone)

    def leave(self, slot: int) -> None:
        """Plan no more for the adapter; nothing happens if it is gone already. What was planned stays."""
        self._lines.pop(slot, None)

    def free(self, slot: int) -> bool:
        """Whether all that was planned for the slot is done, on every stage, before the next position."""
        return slot not in self._lines and self._busy.get(slot, -1) < self._index

    @property
    def done(self) -> bool:
        """Whether all plans are packed and all that follows from them stands in the positions given out."""
        return not self._lines and all(tick < self._index for tick in self._busy.values())

    def window(self, n: int) -> tuple[Position, ...]:
        """The next ``n`` positions, fewer when ``done`` comes first. How n is chosen changes nothing in the stream."""
        positions: list[Position] = []
        while len(positions) < n and not self.done:
            positions.append(self._next())
        return tuple(positions)

    def _next(self) -> Position:
        lines = self._eligible()
        segments = self._pack(lines)
        position = Position(
            index=self._index,
            microbatch=Microbatch(self._index, tuple(segments), self._bucket(segments[-1].stop)) if segments else None,
            forward_only=bool(lines) and lines[0].forward_only,
            steps=tuple(self._carried.pop(self._index, ())),
        )
        for segment in segments:
            self._note(self._lines[segment.slot], segment)
        self._index += 1
        return position

    def _eligible(self) -> list[_Line]:
        """Who may stand here, first started first; a position holds either training or evaluation."""
        ready = [line for line in self._lines.values() if line.ready <= self._index]
        ready.sort(key=lambda line: (line.ready, line.slot))
        if ready and ready[0].alone:
            return ready[:1]
        return [line for line in ready if line.forward_only == ready[0].forward_only and not line.alone]

    def _pack(self, lines: list[_Line]) -> list[Segment]:
        cap = self._effective_cap()
        segments: list[Segment] = []
        row = 0
        for line in lines:
            samples = line.take(row, cap)
            if samples:
                segments.append(line.segment(row, samples))
                row = segments[-1].stop
        return segments

    def _effective_cap(self) -> int:
        """The cap, lowered until the steps of all others fill the w(0) - 1 positions in which the largest waits.

        Where no step is larger than the w(0)-th part of all, each position gets such a part: an even share fills them
        best.
        """
        waiting = self._gap - 1
        if not waiting or not self._lines:
            return self._cap
        rows = [line.rows for line in self._lines.values()]
        share = -(-sum(rows) // self._gap)
        if max(rows) > share:
            share = max(sum(rows) - max(rows), sum(rows) // _ALONE) // waiting
        return min(self._cap, max(self._floor, share))

    def _note(self, line: _Line, segment: Segment) -> None:
        """What follows from a segment at this position: its slot is in use, a later position carries its STEP."""
        index, gap = self._index, 1 if line.forward_only else self._gap
        self._busy[line.slot] = index + self._gap - 1
        if not segment.ends_step:
            return
        if not line.forward_only and self._stages > 1:
            ref = StepRef(adapter=segment.adapter, slot=segment.slot, step=segment.step)
            self._carried.setdefault(index + gap, []).append(ref)
            self._busy[line.slot] = index + gap
        self._start(line.slot, line.next_step, index + gap)

    def _start(self, slot: int, next_step: NextStep, ready: int, alone: bool = False) -> None:
        plan = next_step()
        if plan is None:
            self._lines.pop(slot, None)
        else:
            self._lines[slot] = _Line(slot, next_step, plan, ready, alone)
