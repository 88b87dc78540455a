"""The stream: the unending order of positions that every stage walks through, and an index of a part of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlora.types import Microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRef:
    """One step of one adapter. Where the adapter sits is no part of which step it is."""

    adapter: int
    slot: int = field(compare=False)
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """One place of the stream.

    ``microbatch.index`` equals ``index``. ``forward_only`` makes it an E, at version ``segment.step`` of each adapter
    (the weights after that step). ``steps`` are the STEPs whose coefficient this position's F message carries down to
    the stages behind the first. With neither microbatch nor steps the position is empty in every row.
    """

    index: int
    microbatch: Microbatch | None = None
    forward_only: bool = False
    steps: tuple[StepRef, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the position has an F and a B."""
        return self.microbatch is not None and not self.forward_only

    @property
    def has_message(self) -> bool:
        """Whether an F message goes down from stage to stage."""
        return self.microbatch is not None or bool(self.steps)


class Stream:
    """Consecutive positions for ``stages`` stages, indexed by (adapter, step).

    ``trained`` and ``evaluated`` give the positions of a step's F and B, and of the E at its version; ``carriers`` the
    position that carries its STEP; ``ended`` holds the steps whose last microbatch is here.
    """

    def __init__(self, positions: Iterable[Position], stages: int) -> None:
        self.stages = stages
        self.positions = {position.index: position for position in positions}
        self.trained: dict[tuple[int, int], list[int]] = {}
        self.evaluated: dict[tuple[int, int], list[int]] = {}
        self.carriers: dict[tuple[int, int], int] = {}
        self.ended: set[tuple[int, int]] = set()
        for position in self.positions.values():
            self._add(position)

    def _add(self, position: Position) -> None:
        for ref in position.steps:
            self.carriers[ref.adapter, ref.step] = position.index
        for segment in position.microbatch.segments if position.microbatch else ():
            key = segment.adapter, segment.step
            (self.trained if position.trains else self.evaluated).setdefault(key, []).append(position.index)
            if position.trains and segment.ends_step:
                self.ended.add(key)
