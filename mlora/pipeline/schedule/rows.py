"""Each stage's row: the one definition of which action follows which, for executor, checker, simulator and pictures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mlora.pipeline.schedule.actions import Action, Kind
from mlora.pipeline.schedule.stream import Position, StepRef


def in_flight(stages: int, factor: int = 1) -> tuple[int, ...]:
    """How many microbatches each stage holds: w(s) = factor·(S - s); 1 is 1F1B, 2 rides out uneven costs."""
    return tuple(factor * (stages - stage) for stage in range(stages))


class StageRow:
    """The row of one stage, made tick by tick as positions come in.

    ``in_flight[s]`` is w(s), for all stages of the pipeline. It must not grow from a stage to the next: B on stage s
    waits for B on stage s + 1, which stands w(s + 1) - 1 ticks after its F.
    """

    def __init__(self, stage: int, in_flight: Sequence[int]) -> None:
        assert all(a >= b for a, b in pairwise(in_flight)), f"in_flight {in_flight} grows"
        assert in_flight[-1] >= 1, f"in_flight {in_flight} leaves the last stage without a microbatch"
        self.stage = stage
        self._is_first, self._is_last = stage == 0, stage == len(in_flight) - 1
        self._recent: deque[Position] = deque(maxlen=in_flight[stage])

    def tick(self, position: Position) -> list[Action]:
        """The stage's actions at ``position``; positions come one after another without a hole."""
        assert not self._recent or position.index == self._recent[-1].index + 1, f"{position.index} is out of turn"
        self._recent.append(position)
        actions = self._forward(position) if position.has_message else []
        oldest = self._recent[0]
        if len(self._recent) == self._recent.maxlen and oldest.microbatch is not None:
            actions += self._backward(oldest) if oldest.trains else self._scores(oldest)
        return actions

    def _forward(self, position: Position) -> list[Action]:
        actions = []
        if not self._is_first:
            actions = [self._at("RECV_F", position), *map(self._step, position.steps)]
        if position.microbatch is not None:
            actions.append(self._at("E" if position.forward_only else "F", position))
        if not self._is_last:
            actions.append(self._at("SEND_F", position))
        return actions

    def _backward(self, position: Position) -> list[Action]:
        actions = [] if self._is_last else [self._at("RECV_B", position)]
        actions.append(self._at("B", position))
        if not self._is_first:
            return [*actions, self._at("SEND_B", position)]
        assert position.microbatch is not None
        ended = [segment for segment in position.microbatch.segments if segment.ends_step]
        return actions + [self._step(StepRef(adapter=x.adapter, slot=x.slot, step=x.step)) for x in ended]

    def _scores(self, position: Position) -> list[Action]:
        """What an evaluation came to goes up as gradients do, so stage 0 has it before it decides the next STEP."""
        actions = [] if self._is_last else [self._at("RECV_B", position)]
        return actions if self._is_first else [*actions, self._at("SEND_B", position)]

    def _at(self, kind: Kind, position: Position) -> Action:
        return Action(stage=self.stage, kind=kind, position=position.index, microbatch=position.microbatch)

    def _step(self, ref: StepRef) -> Action:
        return Action(stage=self.stage, kind="STEP", step=ref)


def drain(index: int, in_flight: Sequence[int]) -> tuple[Position, ...]:
    """Empty positions from ``index`` on: with their ticks every B of the positions before them is done."""
    return tuple(Position(index=index + i) for i in range(in_flight[0] - 1))


def rows(positions: Iterable[Position], in_flight: Sequence[int]) -> list[list[Action]]:
    """The whole row of every stage for a stream that ends with ``positions``."""
    positions = list(positions)
    if positions:
        positions += drain(positions[-1].index + 1, in_flight)
    stage_rows = [StageRow(stage, in_flight) for stage in range(len(in_flight))]
    return [[action for position in positions for action in row.tick(position)] for row in stage_rows]
