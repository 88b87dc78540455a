"""Norm, rotary embedding and SwiGLU against the plain formulas, and the same bits for a row wherever it lies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mlora.ops.elementwise import rms_norm, rotate, swiglu

EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _angles(rows: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(rows, dtype=dtype), 100.0 ** -torch.arange(width // 2, dtype=dtype))
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def _plain_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _plain_rotate(x, cos, sin):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _plain_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


COS, SIN = _angles(7, 6)
WEIGHT = 1 + 0.3 * _random(10, seed=1)
CASES = {
    "rms_norm": (lambda x: rms_norm(x, WEIGHT, EPS), lambda x: _plain_norm(x, WEIGHT), (7, 10)),
    "rms_norm of heads": (lambda x: rms_norm(x, WEIGHT, EPS), lambda x: _plain_norm(x, WEIGHT), (7, 3, 10)),
    "rotate": (lambda x: rotate(x, COS, SIN), lambda x: _plain_rotate(x, COS, SIN), (7, 3, 6)),
    "swiglu": (swiglu, _plain_swiglu, (7, 22)),
}


@pytest.mark.parametrize(("ours", "plain", "shape"), CASES.values(), ids=CASES)
def test_values_and_gradients_equal_the_plain_formula(ours, plain, shape):
    x = _random(*shape).requires_grad_()
    other = x.detach().clone().requires_grad_()
    dy = _random(*shape[:-1], ours(x).shape[-1], seed=2)
    y, expected = ours(x), plain(other)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(ours, x)


@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
def test_swiglu_stays_finite_at_extremes(value):
    x = torch.tensor([[value, 3.0]], requires_grad=True)
    y = swiglu(x)
    y.backward(torch.ones(1, 1))
    slope = 1.0 if value > 0 else 0.0
    assert y.item() == pytest.approx(3 * max(value, 0.0), abs=1e-30)
    assert x.grad.tolist() == [[pytest.approx(3 * slope, abs=1e-30), pytest.approx(max(value, 0.0), abs=1e-30)]]


def test_half_precision_is_computed_in_float32():
    x = _random(16, 512, dtype=torch.bfloat16)
    weight = torch.ones(512, dtype=torch.bfloat16)
    exact = _plain_norm(x.double(), weight.double())
    assert rms_norm(x, weight, EPS).dtype == torch.bfloat16
    assert ((rms_norm(x, weight, EPS) - exact).abs() <= exact.abs() * 2**-8).all()


def _float_cases():
    weight = 1 + 0.3 * _random(50, dtype=torch.float32, seed=1)
    cos, sin = _angles(1, 50, torch.float32)
    return {
        "rms_norm": (lambda x: rms_norm(x, weight, EPS), (50,)),
        "rotate": (lambda x: rotate(x, cos.expand(len(x), -1), sin.expand(len(x), -1)), (1, 50)),
        "swiglu": (swiglu, (114,)),
    }


def _with_gradient(function, x, dy):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("function", "shape"), _float_cases().values(), ids=_float_cases())
def test_bits_of_a_row_do_not_depend_on_its_place_or_on_threads(function, shape, threads):
    """Four threads share 1600 rows as three parts, each cut in the middle of a row."""
    x = _random(1600, *shape, dtype=torch.float32) * 4
    dy = _random(1600, *function(x).shape[1:], dtype=torch.float32, seed=2)
    alone = [_with_gradient(function, x[i : i + 16], dy[i : i + 16]) for i in range(0, 1600, 16)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = _with_gradient(function, x, dy)
        shifted = _with_gradient(function, x[3:], dy[3:])
    finally:
        torch.set_num_threads(before)
    for whole, moved, parts in zip(together, shifted, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
        assert torch.equal(whole[3:], moved)
