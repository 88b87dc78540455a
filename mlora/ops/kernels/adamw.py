"""AdamW over an adapter's flat buffers in one pass: clip, moments, masters, compute copy, gradients cleared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlora.ops.kernels import FUSED

_TILE = 1024


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    compute: torch.Tensor,
    coefficient: float,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    count: int,
    is_b: torch.Tensor | None = None,
    ratio: float = 1.0,
) -> None:
    """Step ``count`` (from 1) of torch.optim.AdamW (Loshchilov & Hutter, 2019) with ``coefficient`` · grad.

    Where ``is_b`` (int8, as long as master) is 1 the rate is ``ratio`` times as high.

        m = β1·m + (1 - β1)·g;   v = β2·v + (1 - β2)·g²
        p -= rate·decay·p + rate / (1 - β1ⁿ) · m / (√v / √(1 - β2ⁿ) + eps)

    What is near 1 or a difference from it is formed here in double precision; a kernel takes float32.
    """
    size = master.numel()
    if size == 0:
        return
    _adamw_kernel[(triton.cdiv(size, _TILE),)](
        master, grad, *moments, compute, is_b, size, coefficient, learning_rate * weight_decay,
        learning_rate / (1 - betas[0] ** count), (1 - betas[1] ** count) ** 0.5, 1 - betas[0], betas[1], 1 - betas[1], eps,
        ratio, tile=_TILE, num_warps=4, **FUSED,
    )  # fmt: skip


@triton.jit
def _adamw_kernel(
    master, grad, first, second, compute, is_b, size, coefficient, decay, rate, correction, new1, old2, new2, eps,
    ratio, tile: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    valid = i < size
    g = tl.load(grad + i, mask=valid, other=0.0) * coefficient
    m = tl.load(first + i, mask=valid, other=0.0)
    v = tl.load(second + i, mask=valid, other=0.0)
    p = tl.load(master + i, mask=valid, other=0.0)
    if is_b is not None:
        scale = tl.where(tl.load(is_b + i, mask=valid, other=0) == 1, ratio, 1.0)
        decay, rate = decay * scale, rate * scale
    p -= decay * p
    m += (g - m) * new1
    v = v * old2 + g * g * new2
    p -= rate * m / (tl.sqrt(v) / correction + eps)
    tl.store(master + i, p, mask=valid)
    tl.store(first + i, m, mask=valid)
    tl.store(second + i, v, mask=valid)
    tl.store(compute + i, p.to(compute.dtype.element_ty), mask=valid)
    tl.store(grad + i, tl.zeros([tile], dtype=tl.float32), mask=valid)
