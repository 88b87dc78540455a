"""Causal attention inside each sample of a packed microbatch.

Letters: T packed rows, C columns of q, k and v together, N rows of one sample, H query heads, K key/value heads, E head dim.
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
        outputs.append(_one_sample(sample_NC, heads, window))
    padding = qkv_TC.new_zeros(routing.rows - sum(routing.sample_lengths), heads.query * heads.size)
    return torch.cat([*outputs, padding]), None


def attention_backward(
    dout: torch.Tensor, out: torch.Tensor, kept: Any, qkv_TC: torch.Tensor, heads: Heads, routing: Routing,
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
            again = _one_sample(leaf_NC, heads, window)
        (dqkv_TC[rows],) = torch.autograd.grad(again, leaf_NC, dout[rows])
        first += length
    return dqkv_TC


def _geometry(heads: Heads, routing: Routing) -> tuple[Any, ...]:
    return routing.starts, routing.lengths, routing.longest, heads.query, heads.key_value, heads.size


def _one_sample(qkv_NC: torch.Tensor, heads: Heads, window: int | None) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in heads.split(qkv_NC))
    rows = len(qkv_NC)
    mask = _window_mask(rows, window, qkv_NC.device) if window is not None and rows > window else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(rows, -1)


def _window_mask(rows: int, window: int, device: torch.device) -> torch.Tensor:
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(rows, device=device)
    return (distance >= 0) & (distance < window)
