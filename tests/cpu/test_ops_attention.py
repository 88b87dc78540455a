"""Attention of packed samples, and its explicit backward, against autograd of a softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from mlora.ops.attention import attention, attention_backward
from mlora.ops.elementwise import Heads
from mlora.ops.routing import Routing
from tests.cpu.packing import routed

H, E = 6, 8


def _qkv(rows: int, heads: Heads, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    columns = (heads.query + 2 * heads.key_value) * heads.size
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _heads(key_value: int = 2) -> Heads:
    return Heads(query=H, key_value=key_value, size=E)


@torch.no_grad()
def _both(
    qkv: torch.Tensor, dout: torch.Tensor, heads: Heads, routing: Routing, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What forward and backward give."""
    out, kept = attention(qkv, heads, routing, window)
    return out, attention_backward(dout, out, kept, qkv, heads, routing, window)


def _naive(qkv, heads, lengths, window):
    """One head, one row at a time."""
    q, k, v = heads.split(qkv)
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    start = 0
    for length in lengths:
        for row in range(length):
            first = 0 if window is None else max(0, row - window + 1)
            seen = slice(start + first, start + row + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[start + row, head] / math.sqrt(q.shape[2])
                out[start + row, head] = scores.softmax(0) @ v[seen, head // group]
        start += length
    return out.flatten(1)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_values_and_gradients_equal_a_naive_softmax(kv_heads, window):
    lengths, rows, heads = [9, 1, 5, 2], 32, _heads(kv_heads)
    qkv = _qkv(rows, heads)
    dout = torch.randn(rows, H * E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, dqkv = _both(qkv, dout, heads, routed({0: lengths[:2], 3: lengths[2:]}), window)
    leaf = qkv.clone().requires_grad_()
    expected = _naive(leaf, heads, lengths, window)
    expected.backward(dout)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dqkv, leaf.grad, rtol=1e-11, atol=1e-13)
    assert all(bool(part.any()) for part in heads.split(dqkv))


def test_padding_gives_zero_and_takes_no_gradient():
    heads = _heads()
    out, dqkv = _both(_qkv(16, heads), torch.ones(16, H * E, dtype=torch.float64), heads, routed({0: [7, 4]}))
    assert out.shape == (16, H * E) and not out[11:].any() and bool(out[:11].any())
    assert dqkv.shape == (16, 80) and not dqkv[11:].any() and bool(dqkv[:11].any())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 7, 16, 33, 130])
def test_a_sample_alone_has_the_same_bits_as_among_others(length, window):
    """The others, and the padding, hold NaN."""
    heads = _heads()
    own = _qkv(length, heads, torch.float32)
    own_dout = torch.randn(length, H * E, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for routing, start in ((routed({0: [length]}), 0), (routed({1: [3], 0: [length], 2: [40]}), 3)):
        rows = slice(start, start + length)
        qkv, dout = (torch.full((routing.rows, x.shape[1]), math.nan) for x in (own, own_dout))
        qkv[rows], dout[rows] = own, own_dout
        outcomes.append([x[rows] for x in _both(qkv, dout, heads, routing, window)])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())
