import pytest

from mlora.data import Sampler


def test_last_short_step_counts_and_steps_stay_in_their_epoch():
    sampler = Sampler(rows=10, seed=1, rows_per_step=4)
    assert sampler.steps_per_epoch == 3
    assert [len(sampler.indices(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    for epoch in range(2):
        seen = [i for step in range(3) for i in sampler.indices(3 * epoch + step)]
        assert sorted(seen) == list(range(10))


def test_any_step_can_be_asked_for_in_any_order():
    steps = list(range(20))
    forward = Sampler(13, 7, 5)
    expected = {step: forward.indices(step) for step in steps}
    backward = Sampler(13, 7, 5)
    assert {step: backward.indices(step) for step in reversed(steps)} == expected
    assert Sampler(13, 7, 5).indices(17) == expected[17]


def test_order_depends_on_seed_and_epoch():
    orders = [tuple(Sampler(100, seed, 100).indices(epoch)) for seed in (0, 1, 2**63 - 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9


def test_order_is_the_same_on_every_machine():
    assert Sampler(8, 42, 8).indices(0) == [7, 1, 6, 4, 3, 5, 0, 2]
    assert all(type(i) is int for i in Sampler(8, 42, 8).indices(0))


def test_every_row_comes_first_about_equally_often():
    firsts = [Sampler(4, seed, 1).indices(0)[0] for seed in range(2000)]
    assert all(400 < firsts.count(row) < 600 for row in range(4))


def test_epoch_is_the_share_of_rows_seen_after_the_step():
    sampler = Sampler(rows=10, seed=0, rows_per_step=4)
    assert [sampler.epoch(step) for step in range(4)] == pytest.approx([0.4, 0.8, 1.0, 1.4])
    assert Sampler(rows=3, seed=0, rows_per_step=8).epoch(4) == 5.0


def test_a_step_larger_than_the_data_is_the_data():
    assert sorted(Sampler(3, 0, 8).indices(5)) == [0, 1, 2]
