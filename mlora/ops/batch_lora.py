"""BatchLoRA: one frozen product for all rows of a microbatch, every adapter's own matrices on its own rows.

    y = x·Wᵀ + bias;   for each sample of each segment, with its adapter's A, B, s = scaling, drop = its own mask:
    y[rows] += (s · drop(x[rows])·Aᵀ)·B

Letters: T packed rows, N rows of one sample, D in features, O out features, R the LoRA ranks of one adapter summed over
the modules of a merged linear (q, k and v share one x, so their A lie stacked in one ``a_RD``).

The sample is the unit of arithmetic. Gradients are products over one sample's rows, added to the adapter's accumulator
in the order in which the samples come, so they do not depend on how a step is cut into microbatches or on neighbours.
Gradients are added to ``grad_a_RD`` and ``grad_b_RO`` as a side effect of backward: parameters are read when they are
needed and never saved for autograd, which would refuse another adapter's step between this forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mlora.ops.random import Key, keep_mask
from mlora.types import SampleRef, Segment

_TILE = 16  # with fewer rows, or columns that are no multiple, a CPU's product may depend on the number of threads


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """One module of a merged linear: its rows of the stacked A, its output columns, its B (stored [R, O])."""

    ranks: slice
    columns: slice
    b_RO: torch.Tensor
    grad_b_RO: torch.Tensor
    key: Key


@dataclass(frozen=True, kw_only=True)
class LoraGroup:
    """One adapter's matrices in one merged linear. ``grad_*`` are the accumulators of its unfinished step."""

    a_RD: torch.Tensor
    grad_a_RD: torch.Tensor
    parts: tuple[LoraPart, ...]
    scaling: float
    dropout: float


LinearBank = Mapping[int, LoraGroup]  # slot -> matrices; a slot without targets in this linear is absent


def batch_lora(
    x_TD: torch.Tensor,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    bank: LinearBank,
    segments: tuple[Segment, ...],
) -> torch.Tensor:
    """The merged linear with all adapters' contributions, [T, O]. ``segments`` name slots, steps and rows."""
    return _BatchLora.apply(x_TD, weight_OD, bias_O, bank, segments)


def batch_lora_reference(
    x_TD: torch.Tensor,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    bank: LinearBank,
    segments: tuple[Segment, ...],
) -> torch.Tensor:
    """The formula and nothing else, differentiable by autograd in x, ``a_RD`` and ``b_RO``."""
    y_TO = F.linear(x_TD, weight_OD, bias_O)
    for group, segment, sample, rows in _samples(bank, segments):
        for part in group.parts:
            dropped_ND = _drop(x_TD[rows], group, part, segment, sample)
            update_NO = group.scaling * (dropped_ND @ group.a_RD[part.ranks].T) @ part.b_RO
            full_TO = torch.zeros_like(y_TO)
            full_TO[rows, part.columns] = update_NO
            y_TO = y_TO + full_TO
    return y_TO


class _BatchLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_OD: torch.Tensor,
        bias_O: torch.Tensor | None,
        bank: LinearBank,
        segments: tuple[Segment, ...],
    ) -> torch.Tensor:
        y_TO = F.linear(x_TD, weight_OD, bias_O)
        ctx.shrunk = []
        for group, segment, sample, rows in _samples(bank, segments):
            s_NR = _shrink(x_TD[rows], group, segment, sample)
            for part in group.parts:
                _add_product(y_TO[rows, part.columns], s_NR[:, part.ranks], part.b_RO)
            ctx.shrunk.append(s_NR)
        ctx.save_for_backward(x_TD, weight_OD)
        ctx.bank, ctx.segments = bank, segments
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_TD, weight_OD = ctx.saved_tensors
        dy_TO = grads[0].contiguous()
        dx_TD = dy_TO @ weight_OD if ctx.needs_input_grad[0] else None
        for (group, segment, sample, rows), s_NR in zip(_samples(ctx.bank, ctx.segments), ctx.shrunk, strict=True):
            ds_NR = _backward_b(dy_TO[rows], s_NR, group)
            _backward_a(x_TD[rows], ds_NR, group, segment, sample, None if dx_TD is None else dx_TD[rows])
        return dx_TD, None, None, None, None


def _samples(bank: LinearBank, segments: tuple[Segment, ...]) -> Iterator[tuple[LoraGroup, Segment, SampleRef, slice]]:
    for segment in segments:
        group = bank.get(segment.slot)
        if group is not None:
            for sample, first, last in segment.sample_rows():
                yield group, segment, sample, slice(first, last)


def _shrink(x_ND: torch.Tensor, group: LoraGroup, segment: Segment, sample: SampleRef) -> torch.Tensor:
    """s · drop(x)·Aᵀ for all parts, [N, R]."""
    if group.dropout == 0:
        return _product(x_ND, group.a_RD.T).mul_(group.scaling)
    columns = [_product(_drop(x_ND, group, part, segment, sample), group.a_RD[part.ranks].T) for part in group.parts]
    return torch.cat(columns, dim=1).mul_(group.scaling)


def _backward_b(dy_NO: torch.Tensor, s_NR: torch.Tensor, group: LoraGroup) -> torch.Tensor:
    """Adds to each ``grad_b_RO``; returns s · dy·Bᵀ, [N, R]."""
    ds_NR = torch.empty_like(s_NR)
    for part in group.parts:
        _accumulate(part.grad_b_RO, s_NR[:, part.ranks], dy_NO[:, part.columns])
        ds_NR[:, part.ranks] = _product(dy_NO[:, part.columns], part.b_RO.T)
    return ds_NR.mul_(group.scaling)


def _backward_a(
    x_ND: torch.Tensor,
    ds_NR: torch.Tensor,
    group: LoraGroup,
    segment: Segment,
    sample: SampleRef,
    dx_ND: torch.Tensor | None,
) -> None:
    """Adds to ``grad_a_RD`` and, where dX is wanted, to ``dx_ND``."""
    if group.dropout == 0:
        _accumulate(group.grad_a_RD, ds_NR, x_ND)
        if dx_ND is not None:
            _add_product(dx_ND, ds_NR, group.a_RD)
        return
    for part in group.parts:
        ds_part_NR = ds_NR[:, part.ranks]
        dropped_ND = _drop(x_ND, group, part, segment, sample)
        _accumulate(group.grad_a_RD[part.ranks], ds_part_NR, dropped_ND)
        if dx_ND is not None:
            dx_ND.add_(_drop(_product(ds_part_NR, group.a_RD[part.ranks]), group, part, segment, sample))


def _drop(x_ND: torch.Tensor, group: LoraGroup, part: LoraPart, segment: Segment, sample: SampleRef) -> torch.Tensor:
    """x with this sample's mask of this module, scaled by 1 / (1 - p); the same for forward, backward and recompute."""
    if group.dropout == 0:
        return x_ND
    keep_ND = keep_mask(part.key, segment.step, sample.ordinal, x_ND.shape[0], x_ND.shape[1], group.dropout)
    return torch.where(keep_ND.to(x_ND.device), x_ND / (1 - group.dropout), 0.0)


def _product(left_NK: torch.Tensor, right_KM: torch.Tensor) -> torch.Tensor:
    rows, columns = left_NK.shape[0], right_KM.shape[1]
    if rows < _TILE:
        left_NK = F.pad(left_NK, (0, 0, 0, _TILE - rows))
    if columns % _TILE:
        right_KM = F.pad(right_KM, (0, -columns % _TILE))
    return (left_NK @ right_KM)[:rows, :columns]


def _add_product(out_NM: torch.Tensor, left_NK: torch.Tensor, right_KM: torch.Tensor) -> None:
    if out_NM.shape[0] >= _TILE and out_NM.shape[1] % _TILE == 0:
        out_NM.addmm_(left_NK, right_KM)
    else:
        out_NM.add_(_product(left_NK, right_KM))


def _accumulate(grad_RM: torch.Tensor, left_NR: torch.Tensor, right_NM: torch.Tensor) -> None:
    """grad += leftᵀ·right over one sample's rows, in the accumulator's precision."""
    if left_NR.is_cuda and grad_RM.dtype != left_NR.dtype:
        grad_RM.add_(torch.mm(left_NR.T, right_NM, out_dtype=grad_RM.dtype))
        return
    left_NR, right_NM = left_NR.to(grad_RM.dtype), right_NM.to(grad_RM.dtype)
    ranks = grad_RM.shape[0]
    if ranks % _TILE:
        grad_RM.add_((F.pad(left_NR, (0, -ranks % _TILE)).T @ right_NM)[:ranks])
    else:
        grad_RM.addmm_(left_NR.T, right_NM)
