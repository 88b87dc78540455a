"""The kernel that quantises rows against the plain form."""

from __future__ import annotations

import pytest
import torch

from mlora.ops import fp8
from mlora.ops.kernels import fp8 as kernels
from tests.kernels.lora_cases import DEVICE, DTYPES

SCALES = torch.tensor([0.0, 1e-38, 1e-3, 1.0, 1e4, 1e30])


def _rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(len(SCALES), width, generator=torch.Generator().manual_seed(0)) * SCALES[:, None]
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def _carried(values: torch.Tensor) -> torch.Tensor:
    """Rounded up to a power of two, where Triton's interpreter forgets the carry."""
    return (values.frexp().mantissa.abs() == 0.5) & (values != 0)


@pytest.mark.parametrize("width", [64, 300, 1000])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_quantised_as_in_the_plain_form(width: int, scaled: bool, dtype: torch.dtype) -> None:
    x = _rows(width, dtype)
    factor = torch.rand(1, width, generator=torch.Generator().manual_seed(1)) + 0.5 if scaled else None
    q, scale = kernels.quantise_rows(x.to(DEVICE), None if factor is None else factor.to(DEVICE))
    expected, expected_scale = fp8.quantise_rows(x, factor)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-6, atol=0)
    ours, theirs = q.cpu().float(), expected.float()
    near = (ours - theirs).abs() <= theirs.abs() / 8 + 2.0**-9  # one step of e4m3: halves may fall to either side
    if DEVICE == "cpu":
        near |= _carried(theirs)
    assert bool(near.all())
    assert (ours != theirs)[near & ~_carried(theirs)].float().mean() < 0.01


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's conversion turns NaN into a number")
def test_what_is_not_finite_stays_so() -> None:
    x = torch.randn(3, 64, device=DEVICE)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    q, scale = kernels.quantise_rows(x, None)
    finite = (q.float() * scale).isfinite()
    assert not finite[0, 5] and not finite[1, 6] and finite[2].all()
    y = torch._scaled_mm(
        q.repeat(16, 1), q.repeat(16, 1).T, scale.repeat(16, 1), scale.repeat(16, 1).T, out_dtype=torch.bfloat16
    )
    assert not y[0].isfinite().any() and not y[1].isfinite().any() and y[2, 2].isfinite()
