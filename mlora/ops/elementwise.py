"""Norm, rotary embedding and SwiGLU, forward and backward written out, each taking in what BatchLoRA left to be added.

Letters: T packed rows, D model dim, C columns of q, k and v together, H heads, E head dim, I intermediate size.

On a CPU only operations are used whose bits do not depend on an element's place in memory. That rules out sigmoid and
silu (their vector code and the scalar code for the last few elements differ); exp, division and rsqrt are safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlora.ops.batch_lora import LoraTerm, add_pending
from mlora.ops.devices import has_kernels, kernels


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How the columns of q, k and v are divided; ``q_norm`` and ``k_norm`` [E] where heads are normalised (Qwen3)."""

    query: int
    key_value: int
    size: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0

    def split(self, qkv_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q, k and v, each [T, H, E]."""
        heads_TNE = qkv_TC.view(len(qkv_TC), -1, self.size)
        q_THE, k_TKE, v_TKE = heads_TNE.split([self.query, self.key_value, self.key_value], dim=1)
        return q_THE, k_TKE, v_TKE


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x · rsqrt(mean(x²) + eps) · weight over the last dim, in at least float32 (Zhang & Sennrich, 2019)."""
    if has_kernels(x):
        return kernels("elementwise").rms_norm(x, weight, eps)
    wide = _wide(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor, term: LoraTerm, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y + term, and its norm."""
    if has_kernels(x_TD):
        return kernels("elementwise").add_norm(x_TD, y_TD, term, weight_D, eps)
    sum_TD = add(x_TD, y_TD, term)
    return sum_TD, rms_norm(sum_TD, weight_D, eps)


def add(x_TD: torch.Tensor | None, y_TD: torch.Tensor, term: LoraTerm) -> torch.Tensor:
    """x + y + term; without x, y + term. May write over y."""
    if has_kernels(y_TD):
        return kernels("elementwise").add(x_TD, y_TD, term)
    y_TD = add_pending(y_TD, term)
    return y_TD if x_TD is None else x_TD + y_TD


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dnormed: torch.Tensor,
    term: LoraTerm | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient ``dnormed`` + term of the norm: residual + dx, and the norm itself, made again.

    With g = dnormed · weight and r = rsqrt(mean(x²) + eps): dx = r·g - x · r³ · mean(g·x). May write over ``dnormed``.
    """
    if has_kernels(x):
        return kernels("elementwise").rms_norm_backward(x, weight, eps, dnormed, term, residual)
    wide, dwide = _wide(x), _wide(add_pending(dnormed, term) * weight)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * (wide * scale).to(x.dtype)
    mean = (dwide * wide).mean(-1, keepdim=True)
    dx = dwide.mul_(scale).sub_(wide * (mean * scale * scale * scale)).to(x.dtype)
    return dx if residual is None else residual + dx, normed


def rotate(
    qkv_TC: torch.Tensor, term: LoraTerm, cos_TE: torch.Tensor, sin_TE: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q and k with the rotary embedding in the half-split form of transformers' Llama (Su et al., 2021), v as it is.

    May write over ``qkv_TC``. Returns, where heads are normalised before, also what they were then.
    """
    if has_kernels(qkv_TC):
        return kernels("elementwise").rotate(qkv_TC, term, cos_TE, sin_TE, heads)
    qkv_TC = add_pending(qkv_TC, term)
    q_THE, k_TKE, v_TKE = heads.split(qkv_TC)
    normed_q = q_THE if heads.q_norm is None else rms_norm(q_THE, heads.q_norm, heads.eps)
    normed_k = k_TKE if heads.k_norm is None else rms_norm(k_TKE, heads.k_norm, heads.eps)
    turned = [_turn(x, cos_TE, sin_TE) for x in (normed_q, normed_k)]
    return torch.cat([*turned, v_TKE], dim=1).view_as(qkv_TC), qkv_TC if heads.q_norm is not None else None


def rotate_backward(
    dqkv_TC: torch.Tensor, before_TC: torch.Tensor | None, cos_TE: torch.Tensor, sin_TE: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """The gradient before rotation and norm of heads. May write over ``dqkv_TC``."""
    if has_kernels(dqkv_TC):
        return kernels("elementwise").rotate_backward(dqkv_TC, before_TC, cos_TE, sin_TE, heads)
    dq_THE, dk_TKE, dv_TKE = heads.split(dqkv_TC)
    dq_THE, dk_TKE = (_turn(x, cos_TE, -sin_TE) for x in (dq_THE, dk_TKE))
    if before_TC is not None:
        assert heads.q_norm is not None and heads.k_norm is not None
        q_THE, k_TKE, _ = heads.split(before_TC)
        dq_THE, _ = rms_norm_backward(q_THE, heads.q_norm, heads.eps, dq_THE)
        dk_TKE, _ = rms_norm_backward(k_TKE, heads.k_norm, heads.eps, dk_TKE)
    return torch.cat([dq_THE, dk_TKE, dv_TKE], dim=1).view_as(dqkv_TC)


def swiglu(gate_up: torch.Tensor, term: LoraTerm) -> torch.Tensor:
    """silu(gate) · up [T, I] of ``gate_up`` + term [T, 2·I] (Shazeer, 2020)."""
    if has_kernels(gate_up):
        return kernels("elementwise").swiglu(gate_up, term)
    return _swiglu(add_pending(gate_up, term))


def swiglu_backward(
    gate_up: torch.Tensor, term: LoraTerm, dhidden: torch.Tensor, dterm: LoraTerm
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient ``dhidden`` + dterm: that of gate_up, and the product made again. May write over both."""
    if has_kernels(gate_up):
        return kernels("elementwise").swiglu_backward(gate_up, term, dhidden, dterm)
    gate_up, dhidden = add_pending(gate_up, term), add_pending(dhidden, dterm)
    gate, up = gate_up.chunk(2, dim=-1)
    wide, dout = _wide(gate), _wide(dhidden)
    sigmoid = _sigmoid(wide)
    silu = wide * sigmoid
    dgate_up = torch.empty_like(gate_up)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    dup.copy_(dout * silu)
    dgate.copy_(dout * up * sigmoid * (1 + wide - silu))
    return dgate_up, _swiglu(gate_up)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = _wide(gate)
    return (wide * _sigmoid(wide)).to(gate.dtype) * up


def _turn(x_THE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Both halves of ``cos`` and of ``sin`` are equal, so turning back is turning with -sin."""
    first, second = x_THE.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (x_THE * cos_TE[:, None]).add_(swapped.mul_(sin_TE[:, None]))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
