"""Random numbers by coordinates: each coordinate counts, and the stream never changes silently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlora.ops.random import (
    INIT_A,
    INIT_B,
    _philox_4x32,
    dropout_key,
    dropout_threshold,
    keep_mask,
    key_for,
    normal,
    philox,
    uniform,
)

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
    assert torch.equal(keep_mask(**(PLACE | {"columns": 401}))[:, :65], mask[:20])


def test_columns_of_one_draw_are_independent():
    """Eight columns share a counter: no two of them agree, nor does one with its neighbour in the next eight."""
    mask = keep_mask(**(PLACE | {"rows": 4000, "columns": 9}))
    pairs = [(i, j) for i in range(9) for j in range(i)]
    assert all(0.45 < (mask[:, i] == mask[:, j]).double().mean().item() < 0.55 for i, j in pairs)


def _words(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox 4x32 with 7 rounds, one counter in Python's whole numbers."""
    x0, x1, x2, x3 = counter
    for turn in range(7):
        k0 = ((key & 0xFFFFFFFF) + turn * 0x9E3779B9) % 2**32
        k1 = ((key >> 32) + turn * 0xBB67AE85) % 2**32
        one, two = divmod(x0 * 0xD2511F53, 2**32), divmod(x2 * 0xCD9E8D57, 2**32)
        x0, x1, x2, x3 = two[0] ^ x1 ^ k0, two[1], one[0] ^ x3 ^ k1, one[1]
    return [x0, x1, x2, x3]


def test_an_element_of_a_mask_is_the_documented_draw():
    """Key and counter as mlora.ops.random states them; words 0, 2, 1, 3 serve two columns each, the low half first."""
    mask = keep_mask(KEY, step=7, ordinal=70000, rows=131, columns=21, dropout=0.3)
    for position in (0, 1, 63, 64, 130):
        for column in range(21):
            words = _words(dropout_key(KEY), (column // 8, position, 70000, 7))
            bits = words[(0, 2, 1, 3)[column % 8 // 2]] >> 16 * (column % 2) & 0xFFFF
            assert mask[position, column].item() == (bits >= dropout_threshold(0.3)), (position, column)


# Random123's own vectors for 7 rounds: key, counter, words
VECTORS = (
    (0, (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (2**64 - 1, (2**32 - 1,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)


@pytest.mark.parametrize(("key", "counter", "words"), VECTORS)
def test_the_generator_gives_the_published_answers(key, counter, words):
    blocks, positions = (np.array([x], dtype=np.uint64) for x in counter[:2])
    assert tuple(int(x[0]) for x in _philox_4x32(key, blocks, positions, *counter[2:])) == words
    assert tuple(_words(key, counter)) == words


def test_purposes_do_not_share_a_stream():
    words = [philox(KEY, purpose).random_raw() for purpose in (INIT_A, INIT_B, 3)]
    assert len(set(words)) == 3


def test_streams_are_pinned():
    """Known answers: another value here means that no earlier run could be repeated."""
    assert KEY == (42, 5201650349048704911)
    assert dropout_key(KEY) == 0x8D19156DF1D51BE2
    assert philox(KEY, 3, step=3, ordinal=1).random_raw(2).tolist() == [
        5834572660193634181,
        12587292529543028439,
    ]
    assert keep_mask(**PLACE).flatten()[:16].int().tolist() == [1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1]
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
