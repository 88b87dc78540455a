"""Simulated times against closed forms, and how full the pipeline is."""

import random
from itertools import pairwise

import pytest

from mlora.pipeline.schedule import (
    Planner,
    Stream,
    Timed,
    bubble,
    bubble_between_ramps,
    busy_shares,
    in_flight,
    makespan,
    parse,
    rows,
    simulate,
)
from tests.pure.schedule_helpers import plans, rows_cost, stream

F, B = 16, 32  # of a microbatch of 16 rows, in rows_cost's seconds


def run(flight, planned, cap, cost=None):
    positions = stream(Planner(cap, flight), planned)
    part = Stream(positions, len(flight))
    return simulate(rows(positions, flight), part, cost or rows_cost())


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_lone_adapter_is_1f1b_with_its_drain(stages, n):
    timeline = run(in_flight(stages), [plans(0, [[16] * n] * 3)], cap=16)
    assert makespan(timeline) == 3 * (n + stages - 1) * (F + B)
    assert bubble(timeline) == pytest.approx((stages - 1) / (n + stages - 1))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_stream_of_as_many_adapters_as_stages_has_only_its_ramps(stages):
    timeline = run(in_flight(stages), [plans(a, [[16]] * 5) for a in range(stages)], cap=16)
    assert makespan(timeline) == (5 * stages + stages - 1) * (F + B)
    assert busy_shares(timeline) == pytest.approx([5 * stages * (F + B) / makespan(timeline)] * stages)


def test_messages_take_their_time():
    timeline = run(in_flight(4), [plans(0, [[16]])], cap=16, cost=rows_cost(send=5))
    compute = [timed for timed in timeline if timed.action.kind in ("F", "B")]
    assert makespan(compute) == 4 * (F + B) + 2 * 3 * 5
    last = timeline[-1]
    assert (str(last.action), last.stop) == ("3STEP0.0", makespan(compute) + 3 * 5)  # the coefficient travels too


def test_a_receive_lasts_from_when_the_stage_is_free_until_its_message_is_there():
    timeline = run(in_flight(2), [plans(0, [[16]])], cap=16, cost=rows_cost(send=3))
    times = {str(timed.action): (timed.start, timed.stop) for timed in timeline}
    assert times["1RECV_F0"] == (0, F + 3)
    assert times["1F0"] == (F + 3, 2 * F + 3)
    assert times["0RECV_B0"] == (F, 2 * F + B + 6)


def test_stages_never_do_two_things_at_once():
    timeline = run(in_flight(3, 2), [plans(a, [[30, 50], [90]]) for a in range(4)], cap=64)
    for stage in range(3):
        own = [timed for timed in timeline if timed.action.stage == stage]
        assert all(a.stop <= b.start and b.start <= b.stop for a, b in pairwise(own))


def test_an_evaluation_takes_a_forward():
    timeline = run((1,), [plans(0, [[16]], evaluate_after=[0])], cap=80)
    assert makespan(timeline) == F + B + 80


def test_bubble_between_ramps_leaves_the_ramps_out():
    times = [
        ("0F0", 0, 1),
        ("1F0", 2, 3),  # from here
        ("0F1", 2, 4),
        ("1B0", 3, 5),
        ("0B0", 5, 6),
        ("0F2", 6, 8),  # to the end of this: stage 0 works 5 of 6, stage 1 works 4 of 6
        ("1F2", 7, 9),
        ("0B1", 10, 12),
    ]
    timeline = [Timed(parse(name), start, stop) for name, start, stop in times]
    assert bubble_between_ramps(timeline) == pytest.approx(1 - (5 + 4) / 12)
    assert busy_shares(timeline) == pytest.approx([8 / 12, 5 / 12])
    assert bubble(timeline) == pytest.approx(1 - 13 / 24)


def between_ramps(stages, adapters, factor, spread, samples=1, cap=1300):
    rand = random.Random(7)
    planned = [
        plans(a, [[rand.randint(1000 - spread, 1000 + spread) for _ in range(samples)] for _ in range(800 // adapters)])
        for a in range(adapters)
    ]
    return bubble_between_ramps(run(in_flight(stages, factor), planned, cap))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_equal_costs_fill_the_pipeline(stages):
    assert between_ramps(stages, adapters=stages, factor=1, spread=0) <= 0.01


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_twice_in_flight_rides_out_uneven_costs(stages):
    assert between_ramps(stages, adapters=2 * stages, factor=2, spread=300) <= 0.02
    assert between_ramps(stages, adapters=2 * stages, factor=1, spread=300) > 0.05  # 1F1B does not


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_with_few_adapters_steps_of_several_samples_are_cut_to_fill_it(stages):
    assert between_ramps(stages, adapters=stages, factor=2, spread=300, samples=4, cap=8192) <= 0.02
