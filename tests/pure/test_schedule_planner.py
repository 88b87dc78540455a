"""Order and cuts: every sample once, in its adapter's order, under the cap, and no step before the one before it."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora.pipeline.schedule import Planner, StepRef, in_flight
from mlora.types import padded
from tests.pure.schedule_helpers import adapters, flights, lengths, plans, stream


def picture(positions):
    """``adapter.step×samples`` of each position, an E after it if forward only, and what it carries behind ``/``."""
    texts = []
    for position in positions:
        segments = position.microbatch.segments if position.microbatch else ()
        text = "+".join(f"{x.adapter}.{x.step}×{len(x.samples)}" for x in segments) or "-"
        text += "E" if position.forward_only else ""
        texts.append("/".join([text, *(f"{ref.adapter}.{ref.step}" for ref in position.steps)]))
    return " ".join(texts)


def next_fit(cap, steps):
    """The packing rule for one stage, as plainly as it can be written: sample counts by (adapter, step)."""
    todo = {a: [(k, n) for k, step in enumerate(s) for n in sorted(step, reverse=True)] for a, s in enumerate(steps)}
    since = dict.fromkeys(todo, 0)
    packed = []
    while any(todo.values()):
        row, counts, started = 0, Counter(), dict(since)
        for a in sorted(todo, key=lambda a: (started[a], a)):
            step = todo[a][0][0] if todo[a] else None
            while todo[a] and todo[a][0][0] == step and (row == 0 or row + todo[a][0][1] <= cap):
                row += todo[a].pop(0)[1]
                counts[a, step] += 1
            if todo[a] and todo[a][0][0] != step:
                since[a] = len(packed) + 1
        packed.append(dict(counts))
    return packed


@settings(max_examples=150, deadline=None)
@given(adapters, st.integers(1, 300))
def test_one_stage_packs_by_next_fit(steps, cap):
    positions = stream(Planner(cap), [plans(a, s) for a, s in enumerate(steps)])
    found = [{(x.adapter, x.step): len(x.samples) for x in p.microbatch.segments} for p in positions]
    assert found == next_fit(cap, steps)
    assert not any(position.steps for position in positions)


@settings(max_examples=150, deadline=None)
@given(adapters, flights, st.integers(1, 300), st.integers(0, 3))
def test_every_rule_holds_for_any_stream(steps, flight, cap, evaluate_after):
    planned = [plans(a, s, evaluate_after=[evaluate_after]) for a, s in enumerate(steps)]
    positions = stream(Planner(cap, flight), planned)
    assert [position.index for position in positions] == list(range(len(positions)))
    seen, last, ended, carried = {}, {}, {}, {}
    for position in positions:
        for ref in position.steps:
            carried[ref.adapter, ref.step] = position.index
        if position.microbatch is None:
            continue
        check_rows(position.microbatch, position.index, cap)
        for segment in position.microbatch.segments:
            adapter, step = segment.adapter, segment.step
            version = step if position.forward_only else step - 1
            assert position.index >= ended.get((adapter, version), -flight[0]) + flight[0]
            assert (step, position.forward_only) >= last.get(adapter, (0, False))  # k, evaluation of k, k + 1
            last[adapter] = step, position.forward_only
            if not position.forward_only:
                seen.setdefault((adapter, step), []).extend(segment.samples)
                if segment.ends_step:
                    ended[adapter, step] = position.index
    expected = {(a, k): sorted(step, reverse=True) for a, s in enumerate(steps) for k, step in enumerate(s)}
    assert {key: [sample.length for sample in samples] for key, samples in seen.items()} == expected
    assert all([sample.ordinal for sample in samples] == list(range(len(samples))) for samples in seen.values())
    assert ended.keys() == expected.keys()
    assert carried == ({} if len(flight) == 1 else {key: index + flight[0] for key, index in ended.items()})


def check_rows(microbatch, index, cap):
    assert microbatch.index == index
    starts = [segment.start for segment in microbatch.segments]
    assert starts == [0, *(segment.stop for segment in microbatch.segments[:-1])]
    assert microbatch.rows == padded(microbatch.tokens)
    assert microbatch.tokens <= cap or len(microbatch.sample_lengths()) == 1


@settings(max_examples=50, deadline=None)
@given(adapters, flights, st.integers(1, 9))
def test_windows_leave_no_seam(steps, flight, window):
    whole, cut = (
        stream(Planner(150, flight), [plans(a, s, evaluate_after=[1]) for a, s in enumerate(steps)], n)
        for n in (1_000_000, window)
    )
    assert whole == cut


@given(st.lists(lengths, min_size=1, max_size=3), flights)
@settings(max_examples=50, deadline=None)
def test_cuts_do_not_depend_on_anything_but_the_plan(steps, flight):
    runs = [stream(Planner(150, flight), [plans(0, steps), plans(1, steps)]) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_lone_adapter_of_one_sample_waits_for_its_step_and_never_deadlocks():
    positions = stream(Planner(64, in_flight(3)), [plans(0, [[8], [8]])])
    assert picture(positions) == "0.0×1 - - 0.1×1/0.0 - - -/0.1"


def test_adapters_fill_each_others_wait():
    positions = stream(Planner(64, in_flight(3)), [plans(a, [[64], [64]]) for a in range(3)])
    assert picture(positions) == "0.0×1 1.0×1 2.0×1 0.1×1/0.0 1.1×1/1.0 2.1×1/2.0 -/0.1 -/1.1 -/2.1"


def test_the_step_is_carried_at_the_gap_whoever_stands_there():
    positions = stream(Planner(64, in_flight(2)), [plans(0, [[64]]), plans(1, [[64], [64], [64]])])
    assert picture(positions) == "0.0×1 1.0×1 -/0.0 1.1×1/1.0 - 1.2×1/1.1 - -/1.2"
    positions = stream(Planner(64, in_flight(2)), [plans(0, [[64]]), plans(1, [[64, 64, 64]])])
    assert picture(positions) == "0.0×1 1.0×1 1.0×1/0.0 1.0×1 - -/1.0"


def test_first_started_goes_first_and_others_fill_the_tail():
    positions = stream(Planner(100), [plans(0, [[60, 60], [60]]), plans(1, [[40, 40, 40]])])
    assert picture(positions) == "0.0×1+1.0×1 0.0×1+1.0×1 1.0×1+0.1×1"


def test_a_sample_over_the_cap_travels_alone():
    positions = stream(Planner(100), [plans(0, [[150, 20]]), plans(1, [[30]])])
    assert picture(positions) == "0.0×1 0.0×1+1.0×1"


def widths(planner, adapters, samples):
    """How many microbatches each step spans, but for the last, when adapters become fewer."""
    positions = stream(planner, [plans(a, [[100] * samples] * 3) for a in range(adapters)])
    spans = Counter()
    for position in positions:
        spans.update((x.adapter, x.step) for x in (position.microbatch.segments if position.microbatch else ()))
    return [span for (_, step), span in spans.items() if step < 2]


@pytest.mark.parametrize("adapters", [2, 3, 5, 9])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_steps_are_cut_until_the_others_fill_the_wait(adapters, stages):
    spans = widths(Planner(100_000, in_flight(stages)), adapters, samples=32)
    assert (adapters - 1) * min(spans) >= stages - 1
    positions = stream(Planner(100_000, in_flight(stages)), [plans(a, [[100] * 32] * 3) for a in range(adapters)])
    assert [position.microbatch for position in positions].index(None) >= len(positions) - stages


def test_steps_are_not_cut_without_need():
    assert set(widths(Planner(100_000, in_flight(4)), 1, samples=12)) == {12}  # alone: 4 · (w(0) - 1)
    assert set(widths(Planner(100_000, in_flight(4), floor=400), 1, samples=12)) == {3}
    assert set(widths(Planner(1_200, in_flight(4)), 4, samples=12)) == {1}  # one whole step per position
    assert set(widths(Planner(100_000, in_flight(2)), 1, samples=12)) == {4}
    assert set(widths(Planner(100_000, (1,)), 1, samples=12)) == {1}


def test_equal_steps_share_the_positions_evenly():
    """7 in one and 1 in the next would leave a stage idle for most of every second position."""
    positions = stream(Planner(100_000, in_flight(2)), [plans(a, [[64]] * 9) for a in range(8)])
    assert [len(p.microbatch.segments) for p in positions[:16] if p.microbatch] == [4] * 16


def test_a_cut_never_goes_over_the_cap():
    assert set(widths(Planner(150, in_flight(2), floor=1024), 2, samples=4)) == {4}


def test_evaluation_stands_between_two_steps_at_the_gap():
    positions = stream(Planner(64, in_flight(2)), [plans(0, [[64], [64]], evaluate_after=[0, 1])])
    assert picture(positions) == "0.0×1 - 0.0×1E/0.0 0.0×1E 0.1×1 - 0.1×1E/0.1 0.1×1E -"  # the scores come up


def test_training_and_evaluation_never_share_a_position():
    steps = [plans(0, [[20], [20]], evaluate_after=[0]), plans(1, [[20], [20], [20]])]
    assert picture(stream(Planner(200), steps)) == "0.0×1+1.0×1 0.0×2E 1.1×1+0.1×1 1.2×1"


def test_leave_forgets_the_rest_but_not_what_is_under_way():
    planner = Planner(64, in_flight(2))
    planner.join(0, plans(0, [[64], [64]]))
    planner.join(1, plans(1, [[64], [64], [64]]))
    assert picture(planner.window(2)) == "0.0×1 1.0×1"
    planner.leave(1)
    planner.leave(1)
    assert picture(planner.window(9)) == "0.1×1/0.0 -/1.0 -/0.1"
    assert planner.done


def test_a_slot_is_free_when_no_stage_works_for_it():
    planner = Planner(64, in_flight(2))
    planner.join(0, plans(0, [[64]]))
    assert not planner.free(0)
    assert planner.free(1)
    assert picture(planner.window(2)) == "0.0×1 -"
    assert not planner.free(0)
    with pytest.raises(AssertionError, match="slot 0 is in use up to position 2"):
        planner.join(0, plans(1, [[64]]))
    assert planner.window(9)[0].steps == (StepRef(adapter=0, slot=0, step=0),)
    assert planner.free(0)
    planner.join(0, plans(1, [[64]]))
    assert picture(planner.window(9)) == "1.0×1 - -/1.0"


def test_one_stage_frees_a_slot_at_once():
    planner = Planner(64)
    planner.join(0, plans(0, [[64], [64]]))
    planner.window(1)
    planner.leave(0)
    planner.join(0, plans(1, [[64]]))
    assert [position.index for position in planner.window(9)] == [1]


def test_an_adapter_without_steps_never_joins():
    planner = Planner(64)
    planner.join(0, plans(0, []))
    assert planner.done
    assert planner.window(5) == ()


@pytest.mark.timed
def test_planning_is_quick():
    """128 microbatches for 8 stages and 32 adapters in under 50 ms."""
    planner = Planner(8192, in_flight(8, 2))
    for slot in range(32):
        planner.join(slot, plans(slot, [[100 + 37 * i % 900 for i in range(16)]] * 60))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert len(planner.window(128)) == 128
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
