"""BatchLoRA: one frozen product for all rows of a microbatch, every adapter's own matrices on its own rows.

    y = x·Wᵀ + bias;   for each sample of each segment, with its adapter's A, B, s = scaling, drop = its own mask:
    y[rows] += (s · drop(x[rows])·Aᵀ)·B

and backward, with S = s · drop(x)·Aᵀ kept from forward and dS = s · dy·Bᵀ:

    dB += Sᵀ·dy;   dA += dSᵀ·drop(x);   dx = dy·W;   dx[rows] += drop(dS·A)

Letters: T packed rows, N rows of one sample, D in features, O out features, R the LoRA ranks of one adapter summed over
the modules of a merged linear (q, k and v share one x, so their A lie stacked in one ``a_RD``).

The sample is the unit of arithmetic. Gradients are products over one sample's rows, added to the adapter's accumulator
in the order in which the samples come, so they do not depend on how a step is cut into microbatches or on neighbours
(in kernels: over pieces of a sample, see mlora.ops.kernels.lora).
Parameters are read when they are needed and never kept: another adapter may step between this forward and its backward.

What is added to y or dx costs a pass over it. On a GPU that pass is left to the kernel that reads y or dx next (a norm,
the rotation, SwiGLU), which takes the ``LoraTerm`` as an argument; on a CPU the term is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from mlora.ops.devices import has_kernels, in_blocks, kernels
from mlora.ops.fp8 import Fp8Weight
from mlora.ops.random import Key, dropout_key, dropout_threshold, keep_mask
from mlora.ops.routing import Routing
from mlora.types import SampleRef, Segment, padded

_TILE = 16  # with fewer rows, or columns that are no multiple, a CPU's product may depend on the number of threads
FLOAT32_ROWS = 1024  # of one float32 product on CUDA; a microbatch is padded to a multiple
_LEAST_SLOTS = 64  # of the table that kernels read; it grows when a slot lies beyond


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """One module of a merged linear: its place among them, its rows of the stacked A, its output columns, its B
    (stored [R, O]), how much B·A counts."""

    index: int
    ranks: slice
    columns: slice
    b_RO: torch.Tensor
    grad_b_RO: torch.Tensor
    key: Key
    scaling: float


@dataclass(frozen=True, kw_only=True)
class LoraGroup:
    """One adapter's matrices in one merged linear. ``grad_*`` are the accumulators of its unfinished step."""

    a_RD: torch.Tensor
    grad_a_RD: torch.Tensor
    parts: tuple[LoraPart, ...]
    dropout: float


class LinearBank:
    """All adapters' matrices in one merged linear of ``modules`` modules, by slot.

    Attributes:
        rank_cap: columns that one module's S takes in kernels.
        widest: the most columns of one module.
        has_dropout: whether any adapter has.
        aligned: whether every row of a matrix and every module's columns start at a multiple of 16, so that kernels may
            load 16 bytes at a time.
    """

    def __init__(self, modules: int) -> None:
        self.modules = modules
        self.groups: dict[int, LoraGroup] = {}
        self._table: torch.Tensor | None = None
        self._stale = True
        self._outgrown: list[torch.Tensor] = []
        self._changed()

    def put(self, slot: int, group: LoraGroup) -> None:
        self.groups[slot] = group
        self._changed()

    def remove(self, slot: int) -> None:
        """Empties the slot; one without an adapter in this linear is left as it is."""
        self.groups.pop(slot, None)
        self._changed()

    def table(self, device: torch.device) -> torch.Tensor:
        """int64 [slots, modules, FIELDS] for kernels; its fields stand in mlora.ops.kernels.lora."""
        if self._table is None:
            self._table = torch.zeros(_LEAST_SLOTS, self.modules, 12, dtype=torch.int64, device=device)
        if self._stale:
            slots = max([len(self._table), *(1 + slot for slot in self.groups)])
            table = torch.zeros(slots, self.modules, 12, dtype=torch.int64)
            for slot, group in self.groups.items():
                for part in group.parts:
                    table[slot, part.index] = torch.tensor(_entry(group, part))
            self._renew(table, device)
            self._stale = False
        return self._table

    def _renew(self, table: torch.Tensor, device: torch.device) -> None:
        """In place where it fits, since graphs go on reading it there; else graphs in flight still need the old one."""
        assert self._table is not None
        if len(table) == len(self._table):
            self._table.copy_(table)
        else:
            self._outgrown.append(self._table)
            self._table = table.to(device)

    def layout(self, device: torch.device) -> tuple[object, ...]:
        """What kernels are compiled and launched for."""
        return self.rank_cap, self.widest, self.aligned, self.has_dropout, self.table(device).data_ptr()

    def _changed(self) -> None:
        self._stale = True
        parts = [part for group in self.groups.values() for part in group.parts]
        self.rank_cap = _rank_cap(max((part.ranks.stop - part.ranks.start for part in parts), default=0))
        self.widest = max((part.columns.stop - part.columns.start for part in parts), default=0)
        places = [x for part in parts for x in (part.columns.start, part.columns.stop)]
        widths = [group.a_RD.shape[1] for group in self.groups.values()]
        self.has_dropout = any(group.dropout > 0 for group in self.groups.values())
        self.aligned = all(place % 16 == 0 for place in (*places, *widths))


@dataclass(frozen=True, kw_only=True)
class LoraTerm:
    """S or dS of a microbatch, and through which matrices it is added: S·B to y, dS·A to dx.

    ``pending``: it is not yet added; whoever reads y or dx next must do it. Then ``products`` is one tensor
    [T, modules · rank_cap], else a list by sample.
    """

    products: torch.Tensor | list[torch.Tensor]
    bank: LinearBank
    routing: Routing
    through: Literal["A", "B"]
    pending: bool


def forward(
    x_TD: torch.Tensor,
    weight_OD: torch.Tensor | Fp8Weight,
    bias_O: torch.Tensor | None,
    bank: LinearBank,
    routing: Routing,
) -> tuple[torch.Tensor, LoraTerm]:
    """The merged linear: y [T, O], and S, which is still to be added where it is pending."""
    y_TO = _frozen(x_TD, weight_OD, bias_O)
    if has_kernels(x_TD):
        products = kernels("lora").shrink(x_TD, bank, routing)
        return y_TO, LoraTerm(products=products, bank=bank, routing=routing, through="B", pending=True)
    shrunk = []
    for group, segment, sample, rows in _samples(bank, routing):
        s_NR = _shrink(x_TD[rows], group, segment, sample, routing.dropout)
        for part in group.parts:
            _add_product(y_TO[rows, part.columns], s_NR[:, part.ranks], part.b_RO)
        shrunk.append(s_NR)
    return y_TO, LoraTerm(products=shrunk, bank=bank, routing=routing, through="B", pending=False)


def backward(
    dy_TO: torch.Tensor, weight_OD: torch.Tensor | Fp8Weight, forward_term: LoraTerm
) -> tuple[torch.Tensor, LoraTerm]:
    """dX [T, D], and dS, which is still to be added where it is pending. Adds to the gradients of B.

    ``accumulate_a`` must follow, with the x of forward.
    """
    bank, routing, shrunk = forward_term.bank, forward_term.routing, forward_term.products
    if has_kernels(dy_TO):
        products = kernels("lora").backward_b(dy_TO, shrunk, bank, routing)
        dx_TD = _frozen_backward(dy_TO, weight_OD)
        return dx_TD, LoraTerm(products=products, bank=bank, routing=routing, through="A", pending=True)
    dx_TD = _frozen_backward(dy_TO, weight_OD)
    dshrunk = []
    for (group, segment, sample, rows), s_NR in zip(_samples(bank, routing), shrunk, strict=True):
        ds_NR = _backward_b(dy_TO[rows], s_NR, group)
        _add_a(dx_TD[rows], ds_NR, group, segment, sample)
        dshrunk.append(ds_NR)
    return dx_TD, LoraTerm(products=dshrunk, bank=bank, routing=routing, through="A", pending=False)


def accumulate_a(x_TD: torch.Tensor, backward_term: LoraTerm) -> None:
    """Adds to the gradients of A; x is what forward got, or was made again to the bit."""
    bank, routing, dshrunk = backward_term.bank, backward_term.routing, backward_term.products
    if has_kernels(x_TD):
        kernels("lora").accumulate_a(dshrunk, x_TD, bank, routing)
        return
    for (group, segment, sample, rows), ds_NR in zip(_samples(bank, routing), dshrunk, strict=True):
        if group.dropout == 0:
            _accumulate(group.grad_a_RD, ds_NR, x_TD[rows])
            continue
        for part in group.parts:
            dropped_ND = _drop(x_TD[rows], group, part, segment, sample)
            _accumulate(group.grad_a_RD[part.ranks], ds_NR[:, part.ranks], dropped_ND)


def add_pending(y_TO: torch.Tensor, term: LoraTerm | None) -> torch.Tensor:
    """y or dx with the term, where that is still to be added: the reference of what kernels do on their way."""
    if term is None or not term.pending:
        return y_TO
    assert isinstance(term.products, torch.Tensor)
    out_TO = y_TO.clone()
    cap = term.products.shape[1] // term.bank.modules  # of when it was made: an adapter may have joined since
    for group, segment, sample, rows in _samples(term.bank, term.routing):
        for part in group.parts:
            r, first = part.ranks.stop - part.ranks.start, part.index * cap
            s_NR = term.products[rows, first : first + r]
            if term.through == "B":
                out_TO[rows, part.columns] += s_NR @ part.b_RO
            else:
                update_ND = s_NR @ group.a_RD[part.ranks]
                out_TO[rows] += _drop(update_ND, group, part, segment, sample) if term.routing.dropout else update_ND
    return out_TO


def _frozen(x_TD: torch.Tensor, weight_OD: torch.Tensor | Fp8Weight, bias_O: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight_OD, Fp8Weight):
        return weight_OD.forward(x_TD, bias_O)
    return _by_rows(lambda rows_ND: F.linear(rows_ND, weight_OD, bias_O), x_TD)


def _frozen_backward(dy_TO: torch.Tensor, weight_OD: torch.Tensor | Fp8Weight) -> torch.Tensor:
    if isinstance(weight_OD, Fp8Weight):
        return weight_OD.backward(dy_TO)
    return _by_rows(lambda rows_NO: rows_NO @ weight_OD, dy_TO)


def _by_rows(product: Callable[[torch.Tensor], torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
    """The product in equal blocks, where cuBLAS would choose another float32 kernel for another number of rows, or a
    CPU's library another order."""
    if x_TD.is_cuda and x_TD.dtype == torch.float32:
        return torch.cat([product(rows_ND) for rows_ND in x_TD.split(FLOAT32_ROWS)])
    return in_blocks(product, x_TD)


def _rank_cap(rank: int) -> int:
    """Few different ones, since kernels are compiled for each."""
    return next((cap for cap in (16, 32, 64) if rank <= cap), padded(rank, 64))


def _entry(group: LoraGroup, part: LoraPart) -> list[int]:
    scaling, keep_scale = np.array([part.scaling, 1 / (1 - group.dropout)], dtype=np.float32).view(np.int32).tolist()
    a_RD, grad_a_RD = group.a_RD[part.ranks], group.grad_a_RD[part.ranks]
    pointers = [x.data_ptr() for x in (a_RD, part.b_RO, grad_a_RD, part.grad_b_RO)]
    key = int(np.uint64(dropout_key(part.key)).astype(np.int64))
    columns = part.columns
    sizes = [columns.start, columns.stop - columns.start, a_RD.shape[1]]
    return [*pointers, key, a_RD.shape[0], dropout_threshold(group.dropout), scaling, keep_scale, *sizes]


def _samples(bank: LinearBank, routing: Routing) -> Iterator[tuple[LoraGroup, Segment, SampleRef, slice]]:
    for segment, sample, rows in routing.sample_rows():
        group = bank.groups.get(segment.slot)
        if group is not None:
            yield group, segment, sample, rows


def _shrink(x_ND: torch.Tensor, group: LoraGroup, segment: Segment, sample: SampleRef, dropout: bool) -> torch.Tensor:
    """s · drop(x)·Aᵀ for all parts, [N, R]."""
    if group.dropout == 0 or not dropout:
        return _scale(_product(x_ND, group.a_RD.T), group)
    columns = [_product(_drop(x_ND, group, part, segment, sample), group.a_RD[part.ranks].T) for part in group.parts]
    return _scale(torch.cat(columns, dim=1), group)


def _backward_b(dy_NO: torch.Tensor, s_NR: torch.Tensor, group: LoraGroup) -> torch.Tensor:
    """Adds to each ``grad_b_RO``; returns s · dy·Bᵀ, [N, R]."""
    ds_NR = torch.empty_like(s_NR)
    for part in group.parts:
        _accumulate(part.grad_b_RO, s_NR[:, part.ranks], dy_NO[:, part.columns])
        ds_NR[:, part.ranks] = _product(dy_NO[:, part.columns], part.b_RO.T)
    return _scale(ds_NR, group)


def _scale(s_NR: torch.Tensor, group: LoraGroup) -> torch.Tensor:
    for part in group.parts:
        s_NR[:, part.ranks].mul_(part.scaling)
    return s_NR


def _add_a(dx_ND: torch.Tensor, ds_NR: torch.Tensor, group: LoraGroup, segment: Segment, sample: SampleRef) -> None:
    """dx += drop(ds·A), each part with its own mask."""
    if group.dropout == 0:
        _add_product(dx_ND, ds_NR, group.a_RD)
        return
    for part in group.parts:
        dx_ND.add_(_drop(_product(ds_NR[:, part.ranks], group.a_RD[part.ranks]), group, part, segment, sample))


def _drop(x_ND: torch.Tensor, group: LoraGroup, part: LoraPart, segment: Segment, sample: SampleRef) -> torch.Tensor:
    """x with this sample's mask of this module, scaled by 1 / (1 - p); the same for forward, backward and recompute."""
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
    left_NR, right_NM = left_NR.to(grad_RM.dtype), right_NM.to(grad_RM.dtype)
    ranks = grad_RM.shape[0]
    if ranks % _TILE:
        grad_RM.add_((F.pad(left_NR, (0, -ranks % _TILE)).T @ right_NM)[:ranks])
    else:
        grad_RM.addmm_(left_NR.T, right_NM)
