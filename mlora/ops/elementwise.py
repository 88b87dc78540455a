"""Norm, rotary embedding and SwiGLU with hand-written backward passes that keep little.

Letters: T packed rows, D model dim, H heads, E head dim, I intermediate size.

Only operations whose bits do not depend on an element's place in memory are used. On a CPU that rules out sigmoid and
silu (their vector code and the scalar code for the last few elements differ); exp, division and rsqrt are safe.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x · rsqrt(mean(x²) + eps) · weight over the last dim, in at least float32 (Zhang & Sennrich, 2019)."""
    return _RmsNorm.apply(x_TD, weight_D, eps)


def rotate(x_THE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split form of transformers' Llama (Su et al., 2021)."""
    return _Rotate.apply(x_THE, cos_TE, sin_TE)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up for ``gate_up`` [T, 2·I], gives [T, I] (Shazeer, 2020)."""
    return _SwiGlu.apply(gate_up)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        wide, dnormed = _wide(x), _wide(grads[0] * weight)
        mean = (dnormed * wide).mean(-1, keepdim=True)
        dx = dnormed.mul_(scale).sub_(wide * (mean * scale * scale * scale))
        return dx.to(x.dtype), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TE, sin_TE)
        return _turn(x_THE, cos_TE, sin_TE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos_TE, sin_TE = ctx.saved_tensors
        return _turn(grads[0], cos_TE, -sin_TE), None, None


def _turn(x_THE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Both halves of ``cos`` and of ``sin`` are equal, so turning back is turning with -sin."""
    first, second = x_THE.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (x_THE * cos_TE[:, None]).add_(swapped.mul_(sin_TE[:, None]))


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        wide = _wide(gate)
        return (wide * _sigmoid(wide)).to(gate.dtype) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        wide, dout = _wide(gate), _wide(grads[0])
        sigmoid = _sigmoid(wide)
        silu = wide * sigmoid
        dgate_up = torch.empty_like(gate_up)
        dgate, dup = dgate_up.chunk(2, dim=-1)
        dup.copy_(dout * silu)
        dgate.copy_(dout * up * sigmoid * (1 + wide - silu))
        return dgate_up


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))
