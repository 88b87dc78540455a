from collections import Counter

import pytest

from mlora.data import Sampler, shares
from mlora.types import UserError


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


def test_without_weights_every_row_is_in_an_epoch_once():
    assert shares([3, 5], None) == ((3, 3), (5, 5))
    alone, joined = Sampler(8, 42, 8), Sampler(8, 42, 8, shares([3, 5], None))
    assert [joined.indices(step) for step in range(4)] == [alone.indices(step) for step in range(4)]


@pytest.mark.parametrize(
    "rows, weights, drawn",
    [
        ([100, 100], [3, 1], [300, 100]),  # the second would run out last: the first is repeated
        ([100, 300], [1, 1], [300, 300]),
        ([300, 100], [3, 1], [300, 100]),  # as they are anyway
        ([10, 7, 3], [0.5, 0.3, 0.2], [12, 7, 5]),
        ([7, 7], [1e-6, 1e-6], [7, 7]),
    ],
)
def test_weights_are_shares_of_an_epoch_in_which_every_row_is(rows, weights, drawn):
    assert [share.drawn for share in shares(rows, weights)] == drawn


def test_weights_that_make_an_epoch_endless_are_refused():
    with pytest.raises(UserError, match=r"an epoch has 1,000,000,000,001,000 rows .* choose weights nearer"):
        shares([10, 1000], [1e6, 1e-6])


def test_a_mixtures_epoch_has_the_shares_and_each_row_equally_often():
    sampler = Sampler(7, 5, 4, shares([2, 5], [3, 2]))
    assert sampler.steps_per_epoch == 4
    epochs = [[i for step in range(4 * e, 4 * e + 4) for i in sampler.indices(step)] for e in range(40)]
    for epoch in epochs:
        counts = Counter(epoch)
        assert sum(counts[i] for i in (0, 1)) == 8 and [counts[i] for i in range(2, 7)] == [1] * 5
        assert counts[0] == counts[1] == 4
    assert len({tuple(epoch) for epoch in epochs}) == 40


def test_the_rest_of_a_repeated_source_is_drawn_anew_for_each_epoch():
    sampler = Sampler(13, 1, 15, shares([10, 3], [10, 5]))
    twice = [[i for i, n in Counter(sampler.indices(epoch)).items() if n == 2] for epoch in range(300)]
    assert all(len(rows) == 2 and max(rows) > 9 for rows in twice)
    counts = Counter(i for rows in twice for i in rows)
    assert counts.keys() == {10, 11, 12} and min(counts.values()) > 150


def test_a_mixtures_steps_can_be_asked_for_in_any_order():
    parts = shares([10, 3], [1, 2])
    forward = [Sampler(13, 7, 5, parts).indices(step) for step in range(20)]
    sampler = Sampler(13, 7, 5, parts)
    assert [sampler.indices(step) for step in reversed(range(20))] == forward[::-1]
    assert forward != [Sampler(13, 8, 5, parts).indices(step) for step in range(20)]
