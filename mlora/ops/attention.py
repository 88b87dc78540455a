"""Causal attention inside each sample of a packed microbatch.

Letters: T packed rows, C columns of q, k and v together, N rows of one sample, L these and those kept before them,
H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mlora.ops.devices import has_kernels, kernels
from mlora.ops.elementwise import Heads
from mlora.ops.routing import Routing


def attention(
    qkv_TC: torch.Tensor, heads: Heads, routing: Routing, window: int | None = None
) -> tuple[torch.Tensor, Any]:
    """softmax(q·kᵀ / √E)·v for each sample by itself, [T, H·E], 0 in the padding; and what backward needs besides.

    ``window``: a row sees itself and the ``window - 1`` rows before it (sliding window); None: all rows before it.
    """
    if has_kernels(qkv_TC):
        return kernels("attention").attention_forward(qkv_TC, *_geometry(heads, routing), window)
    outputs = []
    for sample_NC in qkv_TC[: sum(routing.sample_lengths)].split(routing.sample_lengths):
        outputs.append(one_sequence(*heads.split(sample_NC), 0, window))
    padding = qkv_TC.new_zeros(routing.rows - sum(routing.sample_lengths), heads.query * heads.size)
    return torch.cat([*outputs, padding]), None


def attention_backward(
    dout: torch.Tensor,
    out: torch.Tensor,
    kept: Any,
    qkv_TC: torch.Tensor,
    heads: Heads,
    routing: Routing,
    window: int | None = None,
) -> torch.Tensor:
    """The gradient of q, k and v, [T, C]; 0 in the padding."""
    if has_kernels(qkv_TC):
        return kernels("attention").attention_backward(dout, out, kept, qkv_TC, *_geometry(heads, routing), window)
    dqkv_TC, first = torch.zeros_like(qkv_TC), 0
    for length in routing.sample_lengths:
        rows = slice(first, first + length)
        with torch.enable_grad():
            leaf_NC = qkv_TC[rows].detach().requires_grad_()
            again = one_sequence(*heads.split(leaf_NC), 0, window)
        (dqkv_TC[rows],) = torch.autograd.grad(again, leaf_NC, dout[rows])
        first += length
    return dqkv_TC


def _geometry(heads: Heads, routing: Routing) -> tuple[Any, ...]:
    return routing.starts, routing.lengths, routing.longest, heads.query, heads.key_value, heads.size


def one_sequence(
    q_NHE: torch.Tensor, k_LKE: torch.Tensor, v_LKE: torch.Tensor, before: int, window: int | None
) -> torch.Tensor:
    """The plain form for one sequence of L rows, [N, H·E]; ``before`` of them stand before the first of q."""
    new, total, mask = len(q_NHE), len(k_LKE), None
    if (before and new > 1) or (window is not None and total > window):
        distance = torch.arange(before, total, device=q_NHE.device)[:, None] - torch.arange(total, device=q_NHE.device)
        mask = (distance >= 0) & (distance < (total + 1 if window is None else window))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHE, k_LKE, v_LKE))
    causal = mask is None and before == 0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(new, -1)
