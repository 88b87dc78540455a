"""Rows quantised to FP8 in one pass; formula and plain form in mlora.ops.fp8.

Letters: N rows, D columns, K the columns that a program holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlora.ops.fp8 import E4M3, LARGEST, LEAST_SCALE
from mlora.ops.kernels import FUSED


def quantise_rows(x_ND: torch.Tensor, factor_1D: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x_ND.shape
    q_ND = torch.empty(rows, width, dtype=E4M3, device=x_ND.device)
    scale_N1 = torch.empty(rows, 1, device=x_ND.device)
    tile = triton.next_power_of_2(width)
    _quantise_kernel[(rows,)](
        x_ND, factor_1D, q_ND, scale_N1, width, LARGEST, LEAST_SCALE,
        has_factor=factor_1D is not None, tile=tile, num_warps=min(16, max(1, tile // 512)), **FUSED,
    )  # fmt: skip
    return q_ND, scale_N1


@triton.jit
def _quantise_kernel(x, factor, q, scales, width, largest, least, has_factor: tl.constexpr, tile: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    k_K = tl.arange(0, tile)
    x_K = tl.load(x + start + k_K, mask=k_K < width, other=0.0).to(tl.float32)
    if has_factor:
        x_K *= tl.load(factor + k_K, mask=k_K < width, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x_K), 0) / largest, least)
    tl.store(q + start + k_K, (x_K / scale).to(q.dtype.element_ty), mask=k_K < width)
    tl.store(scales + tl.program_id(0), scale)
