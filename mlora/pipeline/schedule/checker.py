"""Runs rows against ``deps``, without times. A schedule that cannot be finished is shown as a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from mlora.pipeline.schedule.actions import Action
from mlora.pipeline.schedule.deps import Deps, deps
from mlora.pipeline.schedule.stream import Stream

_AROUND = 4  # lines of the grid shown before the first and after the last blocked cell


class ScheduleError(AssertionError):
    """Rows that deadlock or break an order: a fault of ours, never of the user's."""


def check(rows: Sequence[Sequence[Action]], stream: Stream, deps: Deps = deps) -> None:
    """Raises ScheduleError, with the grid and what each blocked action waits for, unless the rows can be finished."""
    for _ in execution_order(rows, stream, deps):
        pass


def execution_order(rows: Sequence[Sequence[Action]], stream: Stream, deps: Deps = deps) -> Iterator[Action]:
    """All actions in an order that keeps ``deps`` and each stage's row. Raises ScheduleError where there is none."""
    done: set[Action] = set()
    reached = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while reached[stage] < len(row) and done.issuperset(deps(row[reached[stage]], stream)):
                action = row[reached[stage]]
                if action in done:
                    raise ScheduleError(f"{action} stands in the schedule twice")
                done.add(action)
                reached[stage] += 1
                moved = True
                yield action
    if any(at < len(row) for at, row in zip(reached, rows, strict=True)):
        raise ScheduleError(_explain(rows, reached, done, stream, deps))


def _explain(
    rows: Sequence[Sequence[Action]], reached: Sequence[int], done: set[Action], stream: Stream, deps: Deps
) -> str:
    lines = ["the schedule cannot go on:"]
    for row, at in zip(rows, reached, strict=True):
        for action in row[at : at + 1]:
            waits = [_place(other, action, rows) for other in deps(action, stream) if other not in done]
            lines.append(f"  {action} waits for {', '.join(waits)}")
    return "\n".join([*lines, *_grid(rows, reached)])


def _place(other: Action, action: Action, rows: Sequence[Sequence[Action]]) -> str:
    if other not in rows[other.stage]:
        return f"{other} (in no row)"
    return f"{other} (later in the same row)" if other.stage == action.stage else str(other)


def _grid(rows: Sequence[Sequence[Action]], reached: Sequence[int]) -> list[str]:
    """A column per stage, a line per place in the rows, blocked cells in brackets."""
    blocked = [at for at, row in zip(reached, rows, strict=True) if at < len(row)]
    first, last = max(0, min(blocked) - _AROUND), max(blocked) + _AROUND + 1
    columns = []
    for stage, row in enumerate(rows):
        cells = [f"[{x}]" if i == reached[stage] else f" {x} " for i, x in enumerate(row[:last])][first:]
        columns.append([f" stage {stage} ", *cells])
    widths = [max(map(len, column)) for column in columns]
    titles = ["", *map(str, range(first, last))]
    return [
        f"{title:>6} " + " ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for title, line in zip(titles, zip_longest(*columns, fillvalue=""), strict=False)
    ]
