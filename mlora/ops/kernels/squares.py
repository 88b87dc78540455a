"""Sums of squares of gradients by layer, in float64 and in an order that depends on the layer's own size alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlora.ops.kernels import FUSED


def block_sums(grad: torch.Tensor, block: int) -> torch.Tensor:
    """Σ grad² of each block, float64 [len(grad) / block]."""
    out = torch.empty(grad.numel() // block, dtype=torch.float64, device=grad.device)
    if out.numel():
        _block_kernel[(out.numel(),)](grad, out, block=block, num_warps=4, **FUSED)
    return out


def range_sums(values: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Σ values[starts[i]:starts[i + 1]], float64 [len(starts) - 1]."""
    out = torch.empty(len(starts) - 1, dtype=torch.float64, device=values.device)
    _range_kernel[(len(out),)](values, starts, out, tile=1024, num_warps=4, **FUSED)
    return out


@triton.jit
def _block_kernel(grad, out, block: tl.constexpr):
    x = tl.load(grad + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _range_kernel(values, starts, out, tile: tl.constexpr):
    begin = tl.load(starts + tl.program_id(0))
    end = tl.load(starts + tl.program_id(0) + 1)
    acc = tl.zeros([tile], dtype=tl.float64)
    for i in range(begin, end, tile):
        i_I = i + tl.arange(0, tile)
        acc += tl.load(values + i_I, mask=i_I < end, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))
