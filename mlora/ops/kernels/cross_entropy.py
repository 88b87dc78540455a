"""Softmax cross-entropy of a chunk of logits, in place: two reads and one write of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlora.ops.kernels import FUSED

_COLUMNS = 4096


def cross_entropy(logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, with_grad: bool) -> torch.Tensor:
    """-log softmax(logits)[label] of each row, float32. With ``with_grad`` the logits become (softmax - onehot)·weight."""
    rows, vocabulary = logits_CV.shape
    nll_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    _kernel[(rows,)](
        logits_CV, labels_C, weights_C, nll_C, vocabulary, with_grad=with_grad, column_tile=_COLUMNS, num_warps=8, **FUSED
    )
    return nll_C


@triton.jit
def _kernel(logits, labels, weights, nll, vocabulary, with_grad: tl.constexpr, column_tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    wanted = tl.load(logits + label).to(tl.float32)
    largest_V = tl.full([column_tile], float("-inf"), dtype=tl.float32)
    total_V = tl.zeros([column_tile], dtype=tl.float32)
    for v in range(0, vocabulary, column_tile):
        v_V = v + tl.arange(0, column_tile)
        x_V = tl.load(logits + v_V, mask=v_V < vocabulary, other=float("-inf")).to(tl.float32)
        larger_V = tl.maximum(largest_V, x_V)
        # exp(-inf - -inf) is NaN: a lane that has seen nothing yet counts nothing
        shift_V = tl.where(larger_V == float("-inf"), 0.0, larger_V)
        total_V = total_V * tl.exp(largest_V - shift_V) + tl.exp(x_V - shift_V)
        largest_V = larger_V
    largest = tl.max(largest_V, 0)
    total = tl.sum(total_V * tl.exp(largest_V - largest), 0)
    lse = largest + tl.log(total)
    tl.store(nll + row, lse - wanted)
    if with_grad:
        weight = tl.load(weights + row).to(tl.float32)
        tl.debug_barrier()
        for v in range(0, vocabulary, column_tile):
            v_V = v + tl.arange(0, column_tile)
            x_V = tl.load(logits + v_V, mask=v_V < vocabulary, other=float("-inf")).to(tl.float32)
            d_V = (tl.exp(x_V - lse) - (v_V == label).to(tl.float32)) * weight
            tl.debug_barrier()
            tl.store(logits + v_V, d_V.to(logits.dtype.element_ty), mask=v_V < vocabulary)
