"""What must come after what: valid rows pass, and every single edge is missed when it is gone."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora.pipeline.schedule import (
    Planner,
    Position,
    ScheduleError,
    StepRef,
    Stream,
    check,
    deps,
    edges,
    in_flight,
    parse,
    rows,
)
from mlora.types import Microbatch, SampleRef, Segment
from tests.pure.schedule_helpers import adapters, flights, plans, stream

GRID = """\
the schedule cannot go on:
  0RECV_B1 waits for 1SEND_B1
  1RECV_F4 waits for 0SEND_F4
  2RECV_F4 waits for 1SEND_F4
        stage 0    stage 1    stage 2
     4  0F2        1F1        2RECV_F1
     5  0SEND_F2   1SEND_F1   2F1
     6  0RECV_B0   1RECV_B0   2B1
     7  0B0        1B0        2SEND_B1
     8 [0RECV_B1]  1SEND_B0   2RECV_F2
     9  0B1        1RECV_F2   2F2
    10  0STEP0.0   1F2        2B2
    11  0E4        1SEND_F2   2SEND_B2
    12  0SEND_F4   1RECV_B1  [2RECV_F4]
    13  0RECV_B2   1B1        2STEP0.0
    14  0B2       [1RECV_F4]  2E4
    15  0STEP1.0   1SEND_B1   2SEND_B4
    16  0E5        1RECV_B2   2RECV_F5
    17  0SEND_F5   1B2        2STEP1.0
    18  0F6        1SEND_B2   2E5"""

EDGES = [
    "F after RECV_F",
    "F after STEP",
    "E after RECV_F",
    "E after STEP",
    "B after F",
    "B after RECV_B",
    "B after B",
    "STEP after B(0)",
    "STEP after RECV_F",
    "STEP after RECV_B",
    "SEND_F after F",
    "SEND_F after E",
    "SEND_F after RECV_F",
    "SEND_F after STEP",
    "RECV_F after SEND_F",
    "SEND_B after B",
    "SEND_B after E",
    "SEND_B after RECV_B",
    "RECV_B after SEND_B",
]


def small():
    """Three stages, two adapters, steps of several microbatches, an evaluation, an empty carrier."""
    steps = [plans(0, [[60, 60], [60]], evaluate_after=[0]), plans(1, [[60], [60], [60]])]
    positions = stream(Planner(64, in_flight(3)), steps)
    return rows(positions, in_flight(3)), Stream(positions, 3)


def without(name):
    return lambda action, positions: [other for edge, other in edges(action, positions) if edge != name]


@settings(max_examples=60, deadline=None)
@given(adapters, flights, st.integers(0, 2), st.randoms(use_true_random=False))
def test_a_stage_that_waits_for_messages_only_keeps_every_edge(steps, flight, evaluate_after, rand):
    """Also in the worst interleaving: nothing but a receive can make a stage wait, so the rows must see to the rest."""
    planned = [plans(a, s, evaluate_after=[evaluate_after]) for a, s in enumerate(steps)]
    positions = stream(Planner(150, flight), planned)
    part = Stream(positions, len(flight))
    left = [list(row)[::-1] for row in rows(positions, flight)]
    check([row[::-1] for row in left], part)
    done = set()
    while any(left):
        open_ = [r for r in left if r and (r[-1].kind[:4] != "RECV" or done.issuperset(deps(r[-1], part)))]
        row = rand.choice(open_)
        while row and (row[-1].kind[:4] != "RECV" or done.issuperset(deps(row[-1], part))):  # as far as it can get
            assert done.issuperset(deps(row[-1], part)), row[-1]
            done.add(row.pop())


def test_edges_are_those_of_the_specification():
    all_rows, part = small()
    assert {name for row in all_rows for action in row for name, _ in edges(action, part)} == set(EDGES)


@pytest.mark.parametrize(
    ("action", "before"),
    [
        ("0F0", ""),
        ("1F0", "1RECV_F0"),
        ("1F6", "1RECV_F6 1STEP1.0"),
        ("2B0", "2F0"),
        ("1B1", "1F1 1RECV_B1 1B0"),
        ("0STEP0.0", "0B0 0B1"),
        ("1STEP0.0", "0B0 0B1 1RECV_F4"),
        ("0STEP0.1", "0B7 0RECV_B4 0RECV_B5"),
        ("1STEP0.1", "0B7 1RECV_F10"),
        ("2E4", "2RECV_F4 2STEP0.0"),
        ("0SEND_F4", "0E4 0STEP0.0"),
        ("1SEND_F10", "1RECV_F10"),
        ("1RECV_F10", "0SEND_F10"),
        ("1SEND_B0", "1B0"),
        ("0RECV_B0", "1SEND_B0"),
        ("2SEND_B4", "2E4"),
        ("1SEND_B4", "1RECV_B4"),
    ],
)
def test_deps_of(action, before):
    _, part = small()
    assert sorted(map(str, deps(parse(action), part))) == sorted(before.split())


@pytest.mark.parametrize("name", EDGES)
def test_every_edge_is_needed(name):
    """Some rows break this edge alone: refused by all edges, let through by all but this one."""
    all_rows, part = small()
    actions = [action for row in all_rows for action in row]
    broken = [(action, other) for action in actions for edge, other in edges(action, part) if edge == name]
    for action, other in broken:
        mutant = early_and_late(actions, {a: without(name)(a, part) for a in actions}, early=action, late=other)
        check(mutant, part, deps=without(name))
        try:
            check(mutant, part)
        except ScheduleError:
            return
    raise AssertionError(f"no rows need {name}")


def early_and_late(actions, before, early, late):
    """Rows that keep ``before``, with one action as early and another as late as that allows."""
    wanted = [early]
    for action in wanted:
        wanted += [other for other in before[action] if other not in wanted]
    order, left = [], sorted(actions, key=lambda action: (action == late, action not in wanted))
    while left:
        order.append(next(action for action in left if set(before[action]).issubset(order)))
        left.remove(order[-1])
    return [[action for action in order if action.stage == stage] for stage in range(3)]


@pytest.mark.parametrize("gap", [2, 3])
def test_the_next_step_needs_a_gap_of_w0(gap):
    positions = [hand_made(index, index // gap if index % gap == 0 else None) for index in range(2 * gap)]
    positions[gap] = replace(positions[gap], steps=(StepRef(adapter=0, slot=0, step=0),))
    positions.append(Position(index=2 * gap, steps=(StepRef(adapter=0, slot=0, step=1),)))
    all_rows, part = rows(positions, in_flight(3)), Stream(positions, 3)
    if gap == 3:
        check(all_rows, part)
    else:
        with pytest.raises(ScheduleError, match=r"0F2 waits for 0STEP0.0 \(later in the same row\)"):
            check(all_rows, part)


def hand_made(index, step):
    """A position with a step of one sample, or an empty one."""
    if step is None:
        return Position(index=index)
    segment = Segment(0, 0, step, 0, (SampleRef(0, 0, 16),), 16, ends_step=True)
    return Position(index=index, microbatch=Microbatch(index, (segment,), 16))


def test_a_deadlock_is_shown_with_the_grid():
    all_rows, part = small()
    receive = parse("1RECV_F4")
    all_rows[1].remove(receive)
    all_rows[1].insert(all_rows[1].index(parse("1SEND_B1")), receive)
    with pytest.raises(ScheduleError) as caught:
        check(all_rows, part)
    assert str(caught.value) == GRID


def test_steps_from_before_the_stream_count_as_done():
    positions = stream(Planner(64), [plans(0, [[60], [60]], evaluate_after=[0])])
    whole, rest = Stream(positions, 1), Stream(positions[1:], 1)
    for name in ("0E1", "0F3"):
        assert [str(other) for other in deps(parse(name), whole)] == ["0STEP0.0"]
        assert deps(parse(name), rest) == []
    assert [str(other) for other in deps(parse("0STEP0.1"), whole)] == ["0B3", "0E1", "0E2"]
    positions = stream(Planner(64, in_flight(2)), [plans(0, [[60], [60]])])
    check(rows(positions[1:], in_flight(2)), Stream(positions[1:], 2))


def test_an_action_that_stands_twice_is_found():
    all_rows, part = small()
    all_rows[0].append(all_rows[0][0])
    with pytest.raises(ScheduleError, match="0F0 stands in the schedule twice"):
        check(all_rows, part)


def test_shuffled_rows_are_refused():
    refused = 0
    for seed in range(50):
        all_rows, part = small()
        row = random.Random(seed).choice(all_rows)
        i = random.Random(seed + 1).randrange(len(row) - 6)
        row[i], row[i + 5] = row[i + 5], row[i]
        try:
            check(all_rows, part)
        except ScheduleError:
            refused += 1
    assert refused > 40
