"""Linear cross-entropy against torch's, by chunks that change no bit and never hold all logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mlora.ops.cross_entropy import CHUNK_ROWS, linear_cross_entropy, linear_cross_entropy_scores

D = 24
CHUNK = CHUNK_ROWS


def _inputs(rows: int, vocab: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, D, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    weights[::5] = 0
    return hidden, weight, labels, weights


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("rows", "vocab"), [(16, 320), (32, 50257), (528, 1001)])
def test_losses_and_gradient_equal_torchs(rows, vocab, dtype, limit):
    hidden, weight, labels, weights = _inputs(rows, vocab, dtype)
    nll, grad = linear_cross_entropy(hidden, weight, labels, weights)
    leaf = hidden.clone().requires_grad_()
    expected = F.cross_entropy(leaf @ weight.T, labels, reduction="none")
    (expected * weights.to(dtype)).sum().backward()
    torch.testing.assert_close(nll, expected.detach(), rtol=limit, atol=limit)
    torch.testing.assert_close(grad, leaf.grad, rtol=limit, atol=limit)
    assert not grad[::5].any(), "a row of weight 0 has a gradient"


def test_scores_have_the_losses_of_training_and_tell_the_likeliest():
    hidden, weight, labels, weights = _inputs(32, 100)
    nll, correct = linear_cross_entropy_scores(hidden, weight, labels)
    assert torch.equal(nll, linear_cross_entropy(hidden, weight, labels, weights)[0])
    likeliest = (hidden @ weight.T).argmax(-1)
    assert torch.equal(correct, labels == likeliest) and not bool(correct.all())
    assert bool(linear_cross_entropy_scores(hidden, weight, likeliest)[1].all())


@pytest.mark.parametrize("start", [0, 240, 256, 400, 512])
def test_bits_of_a_row_do_not_depend_on_its_chunk_or_on_company(start):
    """16 rows alone and inside 528; the others hold NaN."""
    hidden, weight, labels, weights = _inputs(528, 1001, torch.float32)
    rows = slice(start, start + 16)
    alone = linear_cross_entropy(hidden[rows], weight, labels[rows], weights[rows])
    company = torch.full_like(hidden, math.nan)
    company[rows] = hidden[rows]
    for one, other in zip(alone, linear_cross_entropy(company, weight, labels, weights), strict=True):
        assert torch.equal(one, other[rows]) and bool(one.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_reduced_in_float32(dtype):
    hidden, weight, labels, weights = _inputs(32, 1001, dtype)
    nll, grad = linear_cross_entropy(hidden, weight, labels, weights)
    assert nll.dtype == torch.float32 and grad.dtype == dtype
    expected = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    torch.testing.assert_close(nll, expected, rtol=1e-6, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_logits_of_all_rows_never_exist():
    inputs = _inputs(4 * CHUNK, 997, torch.float32)
    with LargestTensor() as seen:
        linear_cross_entropy(*inputs)
    assert CHUNK * D < seen.largest <= CHUNK * 997
