"""Random numbers by coordinates: each coordinate counts, and the stream never changes silently."""

from __future__ import annotations

import pytest
import torch

from mlora.ops.random import DROPOUT, INIT_A, INIT_B, PERMUTATION, keep_mask, key_for, normal, philox, uniform

KEY = key_for(42, "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("dropout", [0.0, 0.05, 0.5, 0.99])
def test_rate_of_a_mask(dropout):
    mask = keep_mask(KEY, step=3, ordinal=1, rows=500, columns=401, dropout=dropout)
    assert mask.shape == (500, 401) and mask.dtype == torch.bool
    removed = 1 - mask.double().mean().item()
    assert abs(removed - dropout) <= 5 * (dropout * (1 - dropout) / mask.numel()) ** 0.5
    assert dropout > 0 or bool(mask.all())


CHANGES = {
    "seed": {"key": key_for(43, "model.layers.0.self_attn.q_proj")},
    "module": {"key": key_for(42, "model.layers.0.self_attn.k_proj")},
    "layer": {"key": key_for(42, "model.layers.1.self_attn.q_proj")},
    "step": {"step": 4},
    "ordinal": {"ordinal": 2},
}
PLACE = {"key": KEY, "step": 3, "ordinal": 1, "rows": 20, "columns": 65, "dropout": 0.5}


def test_same_coordinates_same_mask():
    assert torch.equal(keep_mask(**PLACE), keep_mask(**PLACE))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_coordinate_changes_the_mask(change):
    same = (keep_mask(**PLACE) == keep_mask(**(PLACE | change))).double().mean().item()
    assert 0.4 < same < 0.6


def test_positions_and_columns_are_independent_and_a_prefix_stays():
    mask = keep_mask(**(PLACE | {"rows": 400}))
    for first, second in ((mask[:-1], mask[1:]), (mask[:, :-1], mask[:, 1:])):
        assert 0.45 < (first == second).double().mean().item() < 0.55
    assert torch.equal(keep_mask(**PLACE), mask[:20])


def test_purposes_do_not_share_a_stream():
    words = [philox(KEY, purpose).random_raw() for purpose in (DROPOUT, INIT_A, INIT_B, PERMUTATION)]
    assert len(set(words)) == 4


def test_streams_are_pinned():
    """Known answers: another value here means that no earlier run could be repeated."""
    assert KEY == (42, 5201650349048704911)
    assert philox(KEY, DROPOUT, step=3, ordinal=1).random_raw(2).tolist() == [9227501929558349266, 545828689239345898]
    assert keep_mask(**PLACE).flatten()[:16].int().tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0]
    assert uniform(KEY, INIT_A, (1, 3), 1.0).tolist() == [
        [-0.4087904640639468, 0.31097391639601435, 0.5643791346452078]
    ]
    assert normal(KEY, INIT_B, (1, 3), 1.0).tolist() == [
        [-0.6760680933300802, 0.4573734923039927, -0.09781869829615726]
    ]


def test_uniform_and_normal_have_the_asked_spread():
    draws = uniform(KEY, INIT_A, (300, 200), 0.25)
    assert draws.dtype == torch.float64 and -0.25 <= draws.min() < -0.249 and 0.249 < draws.max() < 0.25
    assert abs(draws.std().item() - 0.25 / 3**0.5) < 1e-3
    assert abs(normal(KEY, INIT_A, (300, 200), 0.25).std().item() - 0.25) < 2e-3
