"""Linear cross-entropy in chunks: the logits of a whole microbatch never exist.

Letters: N rows with a target (padded), C rows of one chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mlora.ops.devices import has_kernels, in_blocks, kernels

CHUNK_ROWS = 512  # fixed: 512 · 128k bf16 logits are 131 MB


def logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """[C, V]. C must be a multiple of 16, so that no row's product depends on the others."""
    return in_blocks(lambda rows_ND: F.linear(rows_ND, weight_VD), hidden_CD)


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row and the gradient of Σ weights·loss.

    Returns ``nll_N`` = -log softmax(hidden·Wᵀ)[label] in at least float32, unweighted, and ``dhidden_ND``. N must be a
    multiple of 16 so that no row's product depends on the others; rows of weight 0 give a zero gradient. The weight is
    the row's share of its adapter's step: 1 / target tokens of that step.
    """
    losses, grads = [], []
    for start in range(0, hidden_ND.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        logits_CV = logits(hidden_ND[rows], weight_VD)
        if has_kernels(logits_CV):
            losses.append(kernels("cross_entropy").cross_entropy(logits_CV, labels_N[rows], weights_N[rows], True))
            grads.append(logits_CV @ weight_VD)
            continue
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        label_C1 = labels_N[rows, None]
        losses.append(-torch.log_softmax(logits_CV, dim=-1).gather(1, label_C1)[:, 0])
        grads.append(_grad(logits_CV, label_C1, weights_N[rows, None].to(logits_CV.dtype), weight_VD))
    return torch.cat(losses), torch.cat(grads)


def linear_cross_entropy_scores(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``nll_N`` as ``linear_cross_entropy`` gives it, and bool ``correct_N``: whether the label has the largest logit.

    N must be a multiple of 16. Of several largest logits the first counts, as in torch's argmax.
    """
    losses, correct = [], []
    for start in range(0, hidden_ND.shape[0], CHUNK_ROWS):
        labels_C = labels_N[start : start + CHUNK_ROWS]
        logits_CV = logits(hidden_ND[start : start + CHUNK_ROWS], weight_VD)
        correct.append(logits_CV.argmax(-1) == labels_C)
        losses.append(_losses(logits_CV, labels_C))
    return torch.cat(losses), torch.cat(correct)


def _losses(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    if has_kernels(logits_CV):
        weights_C = torch.zeros(len(labels_C), dtype=torch.float64, device=labels_C.device)
        return kernels("cross_entropy").cross_entropy(logits_CV, labels_C, weights_C, False)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return -torch.log_softmax(logits_CV, dim=-1).gather(1, labels_C[:, None])[:, 0]


def _grad(
    logits_CV: torch.Tensor, label_C1: torch.Tensor, weight_C1: torch.Tensor, weight_VD: torch.Tensor
) -> torch.Tensor:
    """(softmax - onehot) · weight, times W. Softmax works row by row, so a row's bits do not depend on its chunk."""
    dlogits_CV = torch.softmax(logits_CV, dim=-1).mul_(weight_C1)
    dlogits_CV[torch.arange(len(label_C1), device=label_C1.device), label_C1[:, 0]] -= weight_C1[:, 0]
    return in_blocks(lambda rows_NV: rows_NV @ weight_VD, dlogits_CV.to(weight_VD.dtype))
