"""Products with a frozen weight in FP8 (e4m3, Micikevicius et al., 2022), both sides quantised row by row.

    rows of a matrix X:  s = max(max|row| / 448, 2⁻¹²⁶),  q(X) = e4m3(row / s)

    y  = s(x) · s(W) · (q(x)·q(W)ᵀ) + bias
    dx = s(dy·s(W)) · (q(dy·s(W))·q(W))

448 is e4m3's largest number. W's scales lie on its out features, over which dx sums, so they are multiplied into dy
before that is quantised; both products then read the same numbers of W. Each has them in the layout that the hardware
reads, so a weight is kept twice, 2 bytes an element in all.

A row is quantised by itself, so whatever stands in other rows leaves it alone.

Letters: T packed rows, N rows, D in features, O out features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlora.ops.devices import has_kernels, kernels

E4M3 = torch.float8_e4m3fn
LARGEST, LEAST_SCALE = 448.0, 2.0**-126
FAST_ACCUMULATION = True  # sums stay in the tensor cores, in 22 bits; else they go to float32 every 128 terms
MULTIPLE = 16  # of which a weight's sides must be: 16 bytes


@dataclass(frozen=True)
class Fp8Weight:
    """A frozen weight [O, D]: ``q_OD``, the same transposed, the rows' scales in float32, and ones in place of them for
    dx."""

    q_OD: torch.Tensor
    q_DO: torch.Tensor
    scale_1O: torch.Tensor
    ones_1D: torch.Tensor

    @classmethod
    def of(cls, q_OD: torch.Tensor, scale_O1: torch.Tensor, ones_1D: torch.Tensor) -> Fp8Weight:
        """From what ``quantise_rows`` has made of it. Both sides must be multiples of MULTIPLE."""
        q_DO = q_OD.view(torch.uint8).T.contiguous().view(E4M3)
        return cls(q_OD, q_DO, scale_O1.T, ones_1D)

    def matrix(self) -> Fp8Weight:
        """Itself: nothing is to be dequantised before a product."""
        return self

    def forward(self, x_TD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """y [T, O] in x's dtype; T must be a multiple of 16, on CUDA of 256."""
        y_TO = _product(*quantise_rows(x_TD), self.q_OD, self.scale_1O, x_TD.dtype)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def backward(self, dy_TO: torch.Tensor) -> torch.Tensor:
        """dx [T, D]."""
        return _product(*quantise_rows(dy_TO, self.scale_1O), self.q_DO, self.ones_1D, dy_TO.dtype)


def quantise_rows(x_ND: torch.Tensor, factor_1D: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """q(x·factor) [N, D] and s(x·factor), float32 [N, 1]. A row that is not finite gives a product that is not."""
    if has_kernels(x_ND):
        return kernels("fp8").quantise_rows(x_ND.contiguous(), factor_1D)
    wide_ND = x_ND.float() if factor_1D is None else x_ND.float() * factor_1D
    scale_N1 = (wide_ND.abs().amax(1, keepdim=True) / LARGEST).clamp_min(LEAST_SCALE)
    return (wide_ND / scale_N1).to(E4M3), scale_N1


def _product(
    q_TK: torch.Tensor, scale_T1: torch.Tensor, q_MK: torch.Tensor, scale_1M: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return torch._scaled_mm(q_TK, q_MK.T, scale_T1, scale_1M, out_dtype=dtype, use_fast_accum=FAST_ACCUMULATION)
