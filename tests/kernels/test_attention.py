"""Attention kernels against a softmax written out in float64, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from mlora.ops.kernels.attention import Tile, Tiles, attention_backward, attention_forward, choose_tiles

# The interpreter computes with NumPy, which warns of the infinities in rows that are never stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small: samples of a few dozen rows have full blocks, both kinds of edges and tails.
SMALL = Tiles(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), 0)
TURNED = Tiles(Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), 0)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative to the largest element


def attention_reference(
    qkv_TC: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ / √E)·v [T, H·E] and the scores' base-2 log-sum-exp [H, T], sample by sample; 0 at padding rows."""
    out_THE = qkv_TC.new_zeros(len(qkv_TC), heads, head_dim)
    lse_HT = qkv_TC.new_zeros(heads, len(qkv_TC))
    for start, length in zip(starts, lengths, strict=True):
        columns_CNE = qkv_TC[start : start + length].unflatten(1, (-1, head_dim)).transpose(0, 1)
        q_HNE, k_KNE, v_KNE = columns_CNE.split([heads, kv_heads, kv_heads])
        k_HNE, v_HNE = (x.repeat_interleave(heads // kv_heads, 0) for x in (k_KNE, v_KNE))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = (q_HNE @ k_HNE.mT / math.sqrt(head_dim)).masked_fill(hidden.to(qkv_TC.device), -math.inf)
        out_THE[start : start + length] = (scores.softmax(-1) @ v_HNE).transpose(0, 1)
        lse_HT[:, start : start + length] = scores.logsumexp(-1) / math.log(2)
    return out_THE.flatten(1), lse_HT


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """Triton's interpreter multiplies bfloat16 by their bit patterns as integers; give it the numbers."""
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def create_dot_of_numbers(self, a, b, *rest):
        if a.dtype == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return create_dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot_of_numbers)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that what a kernel leaves unwritten or reads too early shows."""
    for name in ("empty_like", "new_empty"):
        owner = torch if name == "empty_like" else torch.Tensor
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make):
    def poisoned(*args, **kwargs):
        fresh = make(*args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    return poisoned


class Case:
    """Random rows of several samples; NaN in the padding, also in dout's."""

    def __init__(self, lengths, gaps=(0,), heads=(2, 1), head_dim=16, window=None, dtype=torch.float32, seed=0):
        self.lengths, self.window, self.shape = lengths, window, (*heads, head_dim)
        gaps = [gaps[s % len(gaps)] for s in range(len(lengths) + 1)]
        self.starts = [sum(lengths[:s]) + sum(gaps[: s + 1]) for s in range(len(lengths))]
        self.rows = sum(lengths) + sum(gaps)
        columns = {"qkv": (heads[0] + 2 * heads[1]) * head_dim, "dout": heads[0] * head_dim}
        self.qkv, self.dout = (self._fill(width, dtype, seed) for width in columns.values())

    def _fill(self, width, dtype, seed):
        x = torch.full((self.rows, width), math.nan, dtype=dtype, device=DEVICE)
        for start, length in zip(self.starts, self.lengths, strict=True):
            generator = torch.Generator().manual_seed(1000 * seed + length)
            x[start : start + length] = torch.randn(length, width, generator=generator).to(x)
        return x

    def owned(self):
        owned = torch.zeros(self.rows, dtype=torch.bool, device=DEVICE)
        for start, length in zip(self.starts, self.lengths, strict=True):
            owned[start : start + length] = True
        return owned

    def run(self, tiles=None, longest=None, capacity=0):
        """``capacity``: entries of length 0 behind the samples; what they call their start must not matter."""
        starts, lengths = (
            torch.tensor([*x, *[fill] * capacity], dtype=torch.int32, device=DEVICE)
            for x, fill in ((self.starts, 3), (self.lengths, 0))
        )
        geometry = (starts, lengths, longest or max(self.lengths), *self.shape, self.window, tiles)
        out, lse = attention_forward(self.qkv, *geometry)
        return out, lse, attention_backward(self.dout, out, lse, self.qkv, *geometry)

    def check(self, tiles=None, tolerance=None):
        out, lse, dqkv = self.run(tiles)
        owned, tolerance = self.owned(), tolerance or TOLERANCE[self.qkv.dtype]
        qkv = self.qkv.double().masked_fill(~owned[:, None], 0).requires_grad_()
        expected, expected_lse = attention_reference(qkv, self.starts, self.lengths, *self.shape, self.window)
        expected.backward(self.dout.double().masked_fill(~owned[:, None], 0))
        heads, kv_heads, head_dim = self.shape
        parts = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        pairs = {"out": (out, expected.detach()), "lse": (lse[:, owned], expected_lse.detach()[:, owned])}
        pairs |= dict(
            zip(("dq", "dk", "dv"), zip(dqkv.split(parts, 1), qkv.grad.split(parts, 1), strict=True), strict=True)
        )
        for name, (ours, theirs) in pairs.items():
            error = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1)
            assert error <= tolerance, f"{name}: {error:.1e}"  # NaN fails too
        assert not out[~owned].any() and not dqkv[~owned].any()
        assert out.dtype == dqkv.dtype == self.qkv.dtype and lse.dtype == torch.float32


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_values_and_gradients_of_odd_samples(heads, window):
    Case([17, 1, 40, 2], gaps=(3, 0, 5), heads=heads, window=window).check(SMALL)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("length", "tiles"), [(127, SMALL), (130, SMALL), (127, TURNED)])
def test_values_and_gradients_over_many_blocks(length, tiles, window):
    Case([length], gaps=(1,), window=window).check(tiles)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 256])
def test_head_dims(head_dim):
    Case([37, 5], gaps=(2,), head_dim=head_dim).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, 100)])
def test_the_tables_tiles(dtype, head_dim, window):
    Case([140, 1, 127], gaps=(0, 1), head_dim=head_dim, window=window, dtype=dtype).check()


def test_scores_far_from_zero():
    """A softmax without the running maximum would overflow; scores grow along the sample.

    A score of 300 is rounded to 3e-5, and its power of two is off by that much, relatively.
    """
    case = Case([70], window=20)
    case.qkv *= 8 * torch.linspace(0.1, 1, case.rows, device=DEVICE)[:, None]
    q, k = case.qkv[:, :16], case.qkv[:, 32:48]
    assert 150 < (q @ k.T / 4).max() < 400
    case.check(SMALL, tolerance=3e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 17, 130])
def test_a_samples_bits_do_not_depend_on_company_place_grid_or_capacity(length, window):
    alone = Case([length], window=window).run(SMALL)
    calls = [
        (Case([length], window=window), {"longest": 3 * length + 100}),
        (Case([length], window=window), {"capacity": 70}),
        (Case([7, length, 90], gaps=(4, 0, 1), window=window), {"longest": 131}),
    ]
    for case, arguments in calls:
        start = case.starts[case.lengths.index(length)]
        rows = slice(start, start + length)
        for one, other in zip(alone, case.run(SMALL, **arguments), strict=True):
            other = other[:, rows] if one.shape == (2, length) else other[rows]
            assert torch.equal(one, other) and bool(one.isfinite().all())


def test_company_with_nan_does_not_matter():
    quiet, loud = Case([40, 50, 33]), Case([40, 50, 33])
    loud.qkv[:40], loud.qkv[90:] = math.nan, math.inf
    for one, other in zip(quiet.run(SMALL), loud.run(SMALL), strict=True):
        middle = slice(40, 90)
        assert torch.equal(*(x[:, middle] if len(x) == 2 else x[middle] for x in (one, other)))


def test_a_microbatch_of_nothing_is_all_zero():
    case = Case([0], gaps=(33, 4))
    out, _, dqkv = case.run(longest=1)
    assert out.shape == (37, 32) and not out.any() and not dqkv.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_dim_has_tiles_for_large_and_small_gpus(dtype):
    for head_dim in (8, 64, 80, 128, 256):
        small, large = choose_tiles(dtype, head_dim, 99 * 1024), choose_tiles(dtype, head_dim, 227 * 1024)
        assert small.shared_bytes <= 99 * 1024 and large.shared_bytes >= small.shared_bytes


@pytest.mark.parametrize(
    "wrong", [(torch.float64, 64, 227), (torch.int16, 64, 227), (torch.bfloat16, 257, 227), (torch.bfloat16, 64, 64)]
)
def test_what_has_no_tiles_is_named(wrong):
    dtype, head_dim, kibibytes = wrong
    with pytest.raises(ValueError, match=f"no attention kernel for {dtype}, head dim {head_dim}"):
        choose_tiles(dtype, head_dim, kibibytes * 1024)
