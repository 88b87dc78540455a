import pytest
from hypothesis import given, settings

from mlora.pipeline.schedule import Planner, Position, StageRow, drain, in_flight, rows
from tests.pure.schedule_helpers import adapters, flights, plans, stream


def text(row):
    return " ".join(map(str, row))


def test_rows_of_two_stages_with_an_evaluation_and_an_empty_carrier():
    positions = stream(Planner(64, in_flight(2)), [plans(0, [[64]], evaluate_after=[0]), plans(1, [[64], [64]])])
    first, last = rows(positions, in_flight(2))
    assert text(first) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0STEP0.0 "  # w(0) = 2: B0 behind F1
        "0E2 0SEND_F2 0RECV_B1 0B1 0STEP1.0 "  # an evaluation at version 0 carries STEP 0
        "0E3 0SEND_F3 0RECV_B2 "  # the evaluation is 80 rows: two microbatches, whose scores come up
        "0F4 0SEND_F4 0RECV_B3 0RECV_B4 0B4 0STEP1.1 "
        "0SEND_F6"  # nothing follows: an empty carrier
    )
    assert text(last) == (
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1STEP0.0 1E2 1SEND_B2 "
        "1RECV_F3 1STEP1.0 1E3 1SEND_B3 1RECV_F4 1F4 1B4 1SEND_B4 1RECV_F6 1STEP1.1"
    )


def test_one_stage_neither_sends_nor_receives():
    positions = stream(Planner(64), [plans(0, [[64, 64], [64]])])
    assert [text(row) for row in rows(positions, (1,))] == ["0F0 0B0 0F1 0B1 0STEP0.0 0F2 0B2 0STEP0.1"]


@settings(max_examples=60, deadline=None)
@given(adapters, flights)
def test_in_flight_is_kept_and_all_is_drained(steps, flight):
    positions = stream(Planner(150, flight), [plans(a, s) for a, s in enumerate(steps)])
    for stage, row in enumerate(rows(positions, flight)):
        inside = most = 0
        for action in row:
            inside += (action.kind == "F") - (action.kind == "B")
            most = max(most, inside)
        assert inside == 0
        assert most <= flight[stage]


def test_in_flight_is_reached_when_there_is_enough_to_do():
    positions = stream(Planner(10, in_flight(3, 2)), [plans(a, [[10]]) for a in range(8)])
    for stage, row in enumerate(rows(positions, in_flight(3, 2))):
        kinds = "".join(action.kind for action in row if action.kind in "FB")
        assert kinds.startswith("F" * (6 - 2 * stage) + "B")


def test_ticks_do_not_depend_on_windows():
    positions = stream(Planner(100, in_flight(3)), [plans(a, [[50, 70], [90]]) for a in range(3)])
    row = StageRow(1, in_flight(3))
    drained = [*positions, *drain(len(positions), in_flight(3))]
    ticked = [action for position in drained for action in row.tick(position)]
    assert ticked == rows(positions, in_flight(3))[1]


def test_rows_end_with_the_last_backward_even_if_a_step_is_cut_short():
    planner = Planner(10, in_flight(3))
    planner.join(0, plans(0, [[10, 10]]))
    first = rows(planner.window(1), in_flight(3))[0]
    assert text(first) == "0F0 0SEND_F0 0RECV_B0 0B0"


def test_a_hole_in_the_stream_and_a_growing_in_flight_are_faults():
    row = StageRow(0, (2, 1))
    row.tick(Position(index=4))
    with pytest.raises(AssertionError, match="6 is out of turn"):
        row.tick(Position(index=6))
    with pytest.raises(AssertionError, match="grows"):
        StageRow(0, (1, 2))
