"""Attention of packed samples against a softmax written out, sample by sample."""

from __future__ import annotations

import math

import pytest
import torch

from mlora.ops.attention import causal_attention

H, E = 6, 8


def _qkv(rows: int, kv_heads: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, H, E), (rows, kv_heads, E), (rows, kv_heads, E))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def _naive(q, k, v, lengths, window):
    """One head, one row at a time."""
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
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_values_and_gradients_equal_a_naive_softmax(kv_heads, window):
    lengths, rows = [9, 1, 5, 2], 24
    ours, theirs = _qkv(rows, kv_heads), _qkv(rows, kv_heads)
    dy = torch.randn(rows, H, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, expected = causal_attention(*ours, lengths, window), _naive(*theirs, lengths, window)
    out.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-13)


def test_padding_gives_zero_and_takes_no_gradient():
    q, k, v = _qkv(16, 2)
    out = causal_attention(q, k, v, [7, 4])
    out.sum().backward()
    assert not out[11:].any() and bool(out[:11].any())
    assert not any(bool(x.grad[11:].any()) for x in (q, k, v))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 7, 16, 33, 130])
def test_a_sample_alone_has_the_same_bits_as_among_others(length, window):
    """The others, and the padding, hold NaN."""
    own = [x.detach() for x in _qkv(length, 2, torch.float32)]
    dy = torch.randn(length, H, E, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for lengths, start, rows in (([length], 0, length), ([3, length, 40], 3, length + 60)):
        inputs = []
        for x in own:
            full = torch.full((rows, *x.shape[1:]), math.nan)
            full[start : start + length] = x
            inputs.append(full.requires_grad_())
        full_dy = torch.full((rows, H, E), math.nan)
        full_dy[start : start + length] = dy
        out = causal_attention(*inputs, lengths, window)
        out.backward(full_dy)
        outcomes.append([x[start : start + length] for x in (out.detach(), *(x.grad for x in inputs))])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())
