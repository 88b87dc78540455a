"""Causal attention inside each sample of a packed microbatch.

Letters: T packed rows, N rows of one sample, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    lengths: list[int],
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q·kᵀ / √E)·v for each sample by itself, [T, H, E]; rows beyond ``sum(lengths)`` are padding and give 0.

    ``window``: a row sees itself and the ``window - 1`` rows before it (sliding window); None: all rows before it.
    """
    rows = q_THE.shape[0]
    sizes = [*lengths, rows - sum(lengths)]
    samples = zip(q_THE.split(sizes), k_TKE.split(sizes), v_TKE.split(sizes), strict=True)
    outputs = [_one_sample(q, k, v, window) for q, k, v in list(samples)[:-1]]
    return torch.cat([*outputs, torch.zeros_like(q_THE[rows - sizes[-1] :])])


def _one_sample(q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, window: int | None) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHE, k_NKE, v_NKE))
    rows = q_NHE.shape[0]
    mask = _window_mask(rows, window, q.device) if window is not None and rows > window else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def _window_mask(rows: int, window: int, device: torch.device) -> torch.Tensor:
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(rows, device=device)
    return (distance >= 0) & (distance < window)
