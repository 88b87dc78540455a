"""Grouped kernels of BatchLoRA: every adapter's products in one launch, sums in each sample's own order, no atomics.

Letters: T packed rows, N rows of one tile, K columns of one tile, R ranks of one tile, P modules of a merged linear.

Parameters are found through a table of addresses, int64 [slots, modules, FIELDS]; rows through the tables of
mlora.ops.routing. Tile sizes decide the order of sums, so they are constants and depend on nothing that other adapters bring: an
adapter's ranks are always taken 16 at a time.

A gradient is a sum over pieces, at most PIECE rows of one sample: each piece's own sum begins at zero and is then added to
the accumulator, in the order of the rows. Where many adapters keep the device busy one program walks all pieces of one;
where few do, every piece has a program, and another kernel adds their sums up. The bits are the same.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from mlora.ops.batch_lora import LinearBank, LoraTerm
from mlora.ops.kernels import UNFUSED
from mlora.ops.random import ROUNDS
from mlora.ops.routing import NARROW_TILE, PIECE, ROW_TILE, Routing

FIELDS = tl.constexpr(12)  # A, B, grad A, grad B as addresses, then these
A, B, GRAD_A, GRAD_B = (tl.constexpr(i) for i in range(4))
KEY, RANK, THRESHOLD, SCALING, KEEP_SCALE, COLUMN, WIDTH, IN_WIDTH = (tl.constexpr(i) for i in range(4, 12))
RANKS = tl.constexpr(16)
_ROUNDS = tl.constexpr(ROUNDS)
_SHRINK = {"column_tile": 256, "num_warps": 4, "num_stages": 3} | UNFUSED
_BACKWARD_B = {"row_tile": 64, "column_tile": 256, "num_warps": 8, "num_stages": 3} | UNFUSED
_SUM_PARTS = {"num_warps": 1} | UNFUSED
_OUTER = {"row_tile": 64, "column_tile": 128, "num_warps": 4, "num_stages": 4} | UNFUSED
_ADD_SUMS = {"column_tile": 256, "num_warps": 4} | UNFUSED
_EXPAND = {"column_tile": 64, "num_warps": 4} | UNFUSED
ENOUGH_PROGRAMS = 256  # they keep a large device busy


def shrink(x: torch.Tensor, bank: LinearBank, routing: Routing) -> torch.Tensor:
    """S = scaling · drop(x)·Aᵀ, [T, P · rank_cap], 0 beyond an adapter's own ranks. Rows of nobody stay undefined."""
    cap, table = bank.rank_cap, bank.table(x.device)
    out = _products(x, bank)
    if bank.groups:
        _shrink_kernel[(len(routing.row_tiles), cap // 16)](
            x,
            out,
            table,
            routing.row_tiles,
            x.stride(0),
            cap,
            dropout=routing.dropout,
            modules=bank.modules,
            aligned=bank.aligned,
            row_tile=ROW_TILE,
            **_staged(_SHRINK, x, ROW_TILE + 16 * triton.next_power_of_2(bank.modules)),
        )
    return out


def backward_b(dy: torch.Tensor, s: torch.Tensor, bank: LinearBank, routing: Routing) -> torch.Tensor:
    """dB += Sᵀ·dy, continuing the accumulators, and dS = scaling · dy·Bᵀ as ``shrink`` lays it out, with one read of dy.

    Each tile of columns gives a part of dS, [tiles, T, P · 16] in float32; 16 ranks at a time bound its memory.
    """
    out = _products(dy, bank)
    if bank.groups:
        cap, modules, table = s.shape[1] // bank.modules, bank.modules, bank.table(dy.device)
        tiles = triton.cdiv(bank.widest, _BACKWARD_B["column_tile"])
        parts = torch.empty(tiles, dy.shape[0], modules * 16, dtype=torch.float32, device=dy.device)
        sums = _sums(routing, tiles * modules, modules * 16, bank.widest, dy.device)
        for first_rank in range(0, bank.rank_cap, 16):
            _backward_b_kernel[(tiles, _walkers(routing, sums), modules)](
                s,
                dy,
                parts,
                sums,
                table,
                routing.spans,
                routing.pieces,
                dy.stride(0),
                dy.shape[0],
                cap,
                first_rank,
                bank.widest,
                split=sums is not None,
                modules=modules,
                aligned=bank.aligned,
                piece=PIECE,
                **_staged(_BACKWARD_B, dy, ROW_TILE + 16),
            )
            if sums is not None:
                _add_sums(sums, bank, routing, GRAD_B, WIDTH, first_rank)
            _sum_parts_kernel[(len(routing.narrow_tiles), modules)](
                parts,
                out,
                table,
                routing.narrow_tiles,
                dy.shape[0],
                bank.rank_cap,
                first_rank,
                modules=modules,
                row_tile=NARROW_TILE,
                column_tile=_BACKWARD_B["column_tile"],
                **_SUM_PARTS,
            )
    return out


def accumulate_a(ds: torch.Tensor, x: torch.Tensor, bank: LinearBank, routing: Routing) -> None:
    """dA += dSᵀ·drop(x), continuing the accumulators."""
    if not bank.groups:
        return
    cap, width = ds.shape[1] // bank.modules, x.shape[1]
    tiles, blocks = triton.cdiv(width, _OUTER["column_tile"]), cap // 16
    sums = _sums(routing, tiles * blocks, bank.modules * cap, width, x.device)
    _outer_kernel[(tiles, _walkers(routing, sums), blocks)](
        ds,
        x,
        sums,
        bank.table(x.device),
        routing.spans,
        routing.pieces,
        x.stride(0),
        cap,
        split=sums is not None,
        dropout=bank.has_dropout,
        modules=bank.modules,
        aligned=bank.aligned,
        piece=PIECE,
        **_staged(_OUTER, x, 2 * ROW_TILE),
    )
    if sums is not None:
        _add_sums(sums, bank, routing, GRAD_A, IN_WIDTH, 0)


def _sums(routing: Routing, programs: int, ranks: int, columns: int, device: torch.device) -> torch.Tensor | None:
    """Memory for the pieces' own sums, [pieces, ranks, columns], where programs that walk all of an adapter's are too few."""
    if programs * len(routing.segments) >= ENOUGH_PROGRAMS:
        return None
    return torch.empty(len(routing.pieces), ranks, columns, dtype=torch.float32, device=device)


def _walkers(routing: Routing, sums: torch.Tensor | None) -> int:
    return len(routing.spans if sums is None else routing.pieces)


def _add_sums(
    sums: torch.Tensor, bank: LinearBank, routing: Routing, grad: tl.constexpr, width: tl.constexpr, first_rank: int
) -> None:
    """Adds the sums of all pieces to the gradients, from ``first_rank`` on, an adapter's in their order."""
    blocks = sums.shape[1] // (16 * bank.modules)
    tiles = triton.cdiv(sums.shape[2], _ADD_SUMS["column_tile"])
    _add_sums_kernel[(tiles, len(routing.spans), bank.modules * blocks)](
        sums,
        bank.table(sums.device),
        routing.spans,
        sums.shape[1],
        sums.shape[2],
        first_rank,
        blocks,
        grad=grad.value,
        width=width.value,
        modules=bank.modules,
        **_ADD_SUMS,
    )


def _products(rows: torch.Tensor, bank: LinearBank) -> torch.Tensor:
    """Memory for S or dS of these rows."""
    allocate = torch.empty if bank.groups else torch.zeros
    return allocate(rows.shape[0], bank.modules * bank.rank_cap, dtype=rows.dtype, device=rows.device)


def expand(out: torch.Tensor, term: LoraTerm) -> None:
    """out += S·B, or out += drop(dS·A), in a pass of its own."""
    bank, routing = term.bank, term.routing
    if not bank.groups:
        return
    _expand_kernel[(triton.cdiv(out.shape[1], _EXPAND["column_tile"]), len(routing.row_tiles))](
        out,
        *arguments(term),
        routing.row_tiles,
        out.stride(0),
        out.shape[1],
        cap=cap_of(term),
        dropout=routing.dropout and bank.has_dropout,
        side=0 if term.through == "A" else 1,
        modules=bank.modules,
        aligned=bank.aligned,
        row_tile=ROW_TILE,
        **_EXPAND,
    )


def arguments(term: LoraTerm) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels take of a term: S and the table."""
    assert isinstance(term.products, torch.Tensor)
    return term.products, term.bank.table(term.products.device)


def cap_of(term: LoraTerm) -> int:
    """The columns of S for one module. Not the bank's: another adapter may have joined since S was made."""
    assert isinstance(term.products, torch.Tensor)
    return term.products.shape[1] // term.bank.modules


def _staged(tile: dict[str, int], x: torch.Tensor, rows: int) -> dict[str, int]:
    """The tile with as many loads of ``rows`` rows of it in flight as fit a block's shared memory; that changes no sum."""
    if not x.is_cuda:
        return tile
    fit = (_shared_memory(x.device.index) - 16 * 1024) // (rows * tile["column_tile"] * x.element_size())
    return tile | {"num_stages": max(1, min(tile["num_stages"], fit))}


@cache
def _shared_memory(device: int) -> int:
    """Bytes for one block."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


@triton.jit
def multiple(value, aligned: tl.constexpr):
    """Tells the compiler what it cannot know of a number that comes from a table.

    An address has to be told about where it is formed (``tl.multiple_of``): a hint on an argument is lost.
    """
    value = value.to(tl.int32)
    return tl.multiple_of(value, 16) if aligned else value


@triton.jit
def tile_of(tiles, index):
    """A tile: slot, first row, rows that are left of the sample, offset in it, ordinal, step."""
    tile = tiles + 8 * index
    return (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
        tl.load(tile + 4),
        tl.load(tile + 5),
    )


@triton.jit
def is_masked(entry, modules: tl.constexpr):
    """Whether the adapter has dropout; the table's empty entries have none."""
    threshold = tl.load(entry + THRESHOLD)
    for module in tl.static_range(1, modules):
        threshold = tl.maximum(threshold, tl.load(entry + module * FIELDS + THRESHOLD))
    return threshold > 0


@triton.jit
def as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def drop(x_NK, entry, ordinal, step, position_N, column, column_tile: tl.constexpr):
    """x with the mask of mlora.ops.random.keep_mask, scaled; columns ``column`` .. + column_tile, a multiple of 8."""
    block_K = column // 8 + tl.arange(0, column_tile // 8)
    zero = tl.zeros([position_N.shape[0], column_tile // 8], dtype=tl.int32)
    r0, r1, r2, r3 = tl.philox(
        tl.load(entry + KEY), zero + block_K[None, :], zero + position_N[:, None], zero + ordinal, zero + step, _ROUNDS
    )
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    halves = tl.reshape(halves, [position_N.shape[0], column_tile])
    keep = halves >= tl.load(entry + THRESHOLD).to(tl.uint32)
    return tl.where(keep, x_NK.to(tl.float32) * as_float(tl.load(entry + KEEP_SCALE)), 0.0).to(x_NK.dtype)


@triton.jit
def matrix_of(table, slot, module, side: tl.constexpr, modules: tl.constexpr, dtype: tl.constexpr):
    """A (side 0) or B (side 1) of one module and its rank, which is 0 where nobody has one."""
    entry = table + (tl.maximum(slot, 0) * modules + module) * FIELDS
    rank = tl.where(slot >= 0, tl.load(entry + RANK), 0).to(tl.int32)
    return tl.load(entry + side).to(tl.pointer_type(dtype)), rank


@triton.jit
def products_tile(s, row_N, owned_N, column, modules: tl.constexpr, cap: tl.constexpr):
    """S or dS, columns of one module from ``column`` on: all, or 64."""
    chunk: tl.constexpr = cap if cap < 64 else 64
    place_NR = row_N[:, None].to(tl.int64) * (cap * modules) + (column + tl.arange(0, chunk))[None, :]
    return tl.load(s + place_NR, mask=owned_N[:, None], other=0.0)


@triton.jit
def add_term(
    acc_NK, s, s_NR, matrix, rank, module, row_N, owned_N, column_K, width,
    modules: tl.constexpr, cap: tl.constexpr, aligned: tl.constexpr,
):
    """acc + S·B or dS·A of one module; ``s_NR``: its first columns of S, which a caller may need for many tiles.

    Ranks beyond the adapter's own, up to ``cap``, count as zeros, which changes no bit.
    """
    chunk: tl.constexpr = s_NR.shape[1]
    for first in tl.static_range(0, cap, chunk):
        if first > 0:
            s_NR = products_tile(s, row_N, owned_N, module * cap + first, modules, cap)
        r = first + tl.arange(0, chunk)
        pointer_RK = matrix + r[:, None] * width + column_K[None, :]
        if aligned:
            pointer_RK = tl.multiple_of(pointer_RK, [16, 16])
        inside_K = (column_K >= 0) & (column_K < width)
        m_RK = tl.load(pointer_RK, mask=(r < rank)[:, None] & inside_K[None, :], other=0.0)
        acc_NK = tl.dot(s_NR, m_RK, acc_NK, input_precision="ieee")
    return acc_NK


@triton.jit
def product_tile(
    s, s_NR, matrix, rank, module, row_N, owned_N, column_K, width,
    modules: tl.constexpr, cap: tl.constexpr, aligned: tl.constexpr,
):
    """S·B or dS·A of one module, in the dtype of S."""
    acc_NK = tl.zeros([row_N.shape[0], column_K.shape[0]], dtype=tl.float32)
    acc_NK = add_term(acc_NK, s, s_NR, matrix, rank, module, row_N, owned_N, column_K, width, modules, cap, aligned)
    return _apart(acc_NK, owned_N).to(s.dtype.element_ty)


@triton.jit
def _apart(sum_NK, owned_N):
    """The sum as it is. Without the choice the compiler would begin it, in float32 and with few ranks only, with the
    number that it is to be added to, and round otherwise than in company."""
    return tl.where(owned_N[:, None], sum_NK, 0.0)


@triton.jit
def term_tile(
    s, table, slot, module, row_N, valid_N, column_K, width,
    side: tl.constexpr, modules: tl.constexpr, cap: tl.constexpr, aligned: tl.constexpr,
):
    """The same for a single tile: S·B (side 1) or dS·A (side 0)."""
    matrix, rank = matrix_of(table, slot, module, side, modules, s.dtype.element_ty)
    owned_N = valid_N & (row_N * 0 + slot >= 0)
    s_NR = products_tile(s, row_N, owned_N, module * cap, modules, cap)
    return product_tile(s, s_NR, matrix, rank, module, row_N, owned_N, column_K, width, modules, cap, aligned)


@triton.jit
def dx_tile(
    s, table, slot, row_N, valid_N, column, width, position_N, ordinal, step,
    dropout: tl.constexpr, modules: tl.constexpr, cap: tl.constexpr, aligned: tl.constexpr, column_tile: tl.constexpr,
):
    """Σ over the modules of drop(dS·A), in the dtype of S, for ``column_tile`` columns from ``column`` on."""
    column_K = column + tl.arange(0, column_tile)
    entry = table + tl.maximum(slot, 0) * modules * FIELDS
    if dropout and is_masked(entry, modules):
        sum_NK = tl.zeros([row_N.shape[0], column_tile], dtype=tl.float32)
        for module in range(modules):
            tile_NK = term_tile(s, table, slot, module, row_N, valid_N, column_K, width, 0, modules, cap, aligned)
            sum_NK += drop(tile_NK, entry + module * FIELDS, ordinal, step, position_N, column, column_tile).to(tl.float32)
    else:
        sum_NK = _sum_of_terms(s, table, slot, row_N, valid_N, column_K, width, modules, cap, aligned)
    return sum_NK.to(s.dtype.element_ty)


@triton.jit
def _sum_of_terms(
    s, table, slot, row_N, valid_N, column_K, width,
    modules: tl.constexpr, cap: tl.constexpr, aligned: tl.constexpr,
):
    """Σ dS·A, one module after another; where each has 16 ranks, side by side in one product, which is the same sum."""
    acc_NK = tl.zeros([row_N.shape[0], column_K.shape[0]], dtype=tl.float32)
    owned_N = valid_N & (row_N * 0 + slot >= 0)
    if cap == 16 and modules > 1:
        together: tl.constexpr = triton.next_power_of_2(modules) * 16
        c = tl.arange(0, together)
        entry_C = table + (tl.maximum(slot, 0) * modules + tl.minimum(c // 16, modules - 1)) * FIELDS
        valid_C = (c % 16 < tl.load(entry_C + RANK)) & (c < modules * 16) & (c * 0 + slot >= 0)
        matrix_C = tl.load(entry_C + A).to(tl.pointer_type(s.dtype.element_ty))
        place_NC = row_N[:, None].to(tl.int64) * (16 * modules) + c[None, :]
        s_NC = tl.load(s + place_NC, mask=owned_N[:, None] & (c < modules * 16)[None, :], other=0.0)
        pointer_CK = matrix_C[:, None] + (c % 16)[:, None] * width + column_K[None, :]
        if aligned:
            pointer_CK = tl.multiple_of(pointer_CK, [16, 16])
        m_CK = tl.load(pointer_CK, mask=valid_C[:, None] & (column_K < width)[None, :], other=0.0)
        acc_NK = tl.dot(s_NC, m_CK, acc_NK, input_precision="ieee")
    else:
        for module in tl.static_range(modules):
            matrix, rank = matrix_of(table, slot, module, 0, modules, s.dtype.element_ty)
            s_NR = products_tile(s, row_N, owned_N, module * cap, modules, cap)
            acc_NK = add_term(acc_NK, s, s_NR, matrix, rank, module, row_N, owned_N, column_K, width, modules, cap, aligned)
    return _apart(acc_NK, owned_N)


@triton.jit
def _shrink_kernel(
    x, out, table, tiles, stride, cap,
    dropout: tl.constexpr, modules: tl.constexpr, aligned: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """With one read of x for all modules, unless each has a mask of its own."""
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(0))
    if (slot < 0) | (left <= 0):
        return
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    position_N = offset + tl.arange(0, row_tile)
    first_rank = tl.program_id(1) * RANKS
    x += row_N[:, None].to(tl.int64) * stride
    out += row_N[:, None].to(tl.int64) * (cap * modules)
    entry = table + slot * modules * FIELDS
    if dropout and is_masked(entry, modules):
        for each in range(modules):
            _shrink_one(x, out + each * cap, entry + each * FIELDS, first_rank, valid_N, position_N, ordinal, step,
                        aligned, row_tile, column_tile)
    else:
        _shrink_all(x, out, entry, cap, first_rank, valid_N, modules, aligned, row_tile, column_tile)


@triton.jit
def _shrink_one(
    x, out, entry, first_rank, valid_N, position_N, ordinal, step,
    aligned: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """16 ranks of one module, with its mask."""
    rank = tl.load(entry + RANK).to(tl.int32)
    width = multiple(tl.load(entry + IN_WIDTH), aligned)
    matrix = tl.load(entry + A).to(tl.pointer_type(x.dtype.element_ty))
    r = first_rank + tl.arange(0, RANKS)
    pointer_RK = matrix + r[:, None] * width + tl.arange(0, column_tile)[None, :]
    acc_NR = tl.zeros([row_tile, RANKS], dtype=tl.float32)
    if first_rank < rank:
        for k in range(0, width, column_tile):
            k_K = k + tl.arange(0, column_tile)
            inside_K = (k_K < width)[None, :]
            x_NK = tl.load(x + k_K[None, :], mask=valid_N[:, None] & inside_K, other=0.0)
            m_pointer_RK = pointer_RK + k
            if aligned:
                m_pointer_RK = tl.multiple_of(m_pointer_RK, [16, 16])
            m_RK = tl.load(m_pointer_RK, mask=(r < rank)[:, None] & inside_K, other=0.0)
            x_NK = drop(x_NK, entry, ordinal, step, position_N, k, column_tile)
            acc_NR = tl.dot(x_NK, tl.trans(m_RK), acc_NR, input_precision="ieee")
    acc_NR *= as_float(tl.load(entry + SCALING))
    tl.store(out + r[None, :], acc_NR.to(x.dtype.element_ty), mask=valid_N[:, None])


@triton.jit
def _shrink_all(
    x, out, entry, cap, first_rank, valid_N,
    modules: tl.constexpr, aligned: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """16 ranks of every module through A, with one read of x."""
    together: tl.constexpr = triton.next_power_of_2(modules) * RANKS
    c = tl.arange(0, together)
    module_C = tl.minimum(c // RANKS, modules - 1)
    r_C = first_rank + c % RANKS
    entry_C = entry + module_C * FIELDS
    valid_C = (r_C < tl.load(entry_C + RANK)) & (c < modules * RANKS)
    width = tl.load(entry + IN_WIDTH)
    for module in tl.static_range(1, modules):
        width = tl.maximum(width, tl.load(entry + module * FIELDS + IN_WIDTH))
    width = multiple(width, aligned)
    matrix_C = tl.load(entry_C + A).to(tl.pointer_type(x.dtype.element_ty))
    pointer_CK = matrix_C[:, None] + r_C[:, None] * width + tl.arange(0, column_tile)[None, :]
    acc_NC = tl.zeros([row_tile, together], dtype=tl.float32)
    for k in range(0, width, column_tile):
        k_K = k + tl.arange(0, column_tile)
        inside_K = (k_K < width)[None, :]
        x_NK = tl.load(x + k_K[None, :], mask=valid_N[:, None] & inside_K, other=0.0)
        m_pointer_CK = pointer_CK + k
        if aligned:
            m_pointer_CK = tl.multiple_of(m_pointer_CK, [16, 16])
        m_CK = tl.load(m_pointer_CK, mask=valid_C[:, None] & inside_K, other=0.0)
        acc_NC = tl.dot(x_NK, tl.trans(m_CK), acc_NC, input_precision="ieee")
    acc_NC *= as_float(tl.load(entry_C + SCALING))[None, :]
    tl.store(
        out + (module_C * cap + r_C)[None, :],
        acc_NC.to(x.dtype.element_ty),
        mask=valid_N[:, None] & (c < modules * RANKS)[None, :],
    )


@triton.jit
def _walk(spans, pieces, index, split: tl.constexpr):
    """Slot, first piece and the one behind the last of a program: of a whole span, or a single piece."""
    if split:
        left = tl.load(pieces + 8 * index + 2)
        slot = tl.where(left > 0, tl.load(pieces + 8 * index), -1)
        return slot, index, index + 1
    else:
        begin = tl.load(spans + 3 * index + 1)
        return tl.load(spans + 3 * index), begin, begin + tl.load(spans + 3 * index + 2)


@triton.jit
def _backward_b_kernel(
    s, dy, parts, sums, table, spans, pieces, stride, rows, cap, first_rank, columns,
    split: tl.constexpr, modules: tl.constexpr, aligned: tl.constexpr, piece: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """One program walks its pieces for 16 ranks and a tile of one module's columns."""
    slot, begin, end = _walk(spans, pieces, tl.program_id(1), split)
    if slot < 0:
        return
    module = tl.program_id(2)
    entry = table + (slot * modules + module) * FIELDS
    width = multiple(tl.load(entry + WIDTH), aligned)
    k = tl.program_id(0) * column_tile
    rank = tl.load(entry + RANK).to(tl.int32)
    if (k >= width) | (first_rank >= rank):
        return
    r = tl.arange(0, RANKS)
    k_K = k + tl.arange(0, column_tile)
    valid_RK = (first_rank + r < rank)[:, None] & (k_K < width)[None, :]
    place_RK = (first_rank + r)[:, None] * width + k_K[None, :]
    grad_RK = tl.load(entry + GRAD_B).to(tl.pointer_type(tl.float32)) + place_RK
    b_pointer_RK = tl.load(entry + B).to(tl.pointer_type(s.dtype.element_ty)) + place_RK
    if aligned:
        grad_RK = tl.multiple_of(grad_RK, [16, 16])
        b_pointer_RK = tl.multiple_of(b_pointer_RK, [16, 16])
    b_KR = tl.trans(tl.load(b_pointer_RK, mask=valid_RK, other=0.0))
    dy_K = dy + multiple(tl.load(entry + COLUMN), aligned) + k_K[None, :]
    s_R = s + (module * cap + first_rank + r)[None, :]
    part_R = parts + tl.program_id(0).to(tl.int64) * rows * (modules * RANKS) + (module * RANKS + r)[None, :]
    if split:
        total_RK = tl.zeros([RANKS, column_tile], dtype=tl.float32)
    else:
        total_RK = tl.load(grad_RK, mask=valid_RK, other=0.0)
    for index in range(begin, end):
        _, first, left, _, _, _ = tile_of(pieces, index)
        length = tl.minimum(left, piece)
        acc_RK = tl.zeros([RANKS, column_tile], dtype=tl.float32)
        for n in range(0, length, row_tile):
            n_N = n + tl.arange(0, row_tile)
            row_N = (first + n_N).to(tl.int64)[:, None]
            inside_N = (n_N < length)[:, None]
            s_NR = tl.load(s_R + row_N * (cap * modules), mask=inside_N, other=0.0)
            dy_NK = tl.load(dy_K + row_N * stride, mask=inside_N & (k_K < width)[None, :], other=0.0)
            acc_RK = tl.dot(tl.trans(s_NR), dy_NK, acc_RK, input_precision="ieee")
            part_NR = tl.dot(dy_NK, b_KR, input_precision="ieee")
            tl.store(part_R + row_N * (modules * RANKS), part_NR, mask=inside_N)
        total_RK += acc_RK
    if split:
        sum_R = sums + ((begin * modules + module) * RANKS + r).to(tl.int64)[:, None] * columns
        tl.store(sum_R + k_K[None, :], total_RK, mask=valid_RK)
    else:
        tl.store(grad_RK, total_RK, mask=valid_RK)


@triton.jit
def _add_sums_kernel(
    sums, table, spans, ranks, columns, first_rank, blocks,
    grad: tl.constexpr, width: tl.constexpr, modules: tl.constexpr, column_tile: tl.constexpr,
):
    """16 ranks of a tile of one module's gradient, all pieces of one adapter."""
    slot, begin, end = _walk(spans, spans, tl.program_id(1), False)
    if slot < 0:
        return
    row = tl.program_id(2) * RANKS
    entry = table + (slot * modules + tl.program_id(2) // blocks) * FIELDS
    r_R = first_rank + tl.program_id(2) % blocks * RANKS + tl.arange(0, RANKS)
    k_K = tl.program_id(0) * column_tile + tl.arange(0, column_tile)
    own_columns = tl.load(entry + width).to(tl.int32)
    valid_RK = (r_R < tl.load(entry + RANK))[:, None] & (k_K < own_columns)[None, :]
    grad_RK = tl.load(entry + grad).to(tl.pointer_type(tl.float32)) + r_R[:, None] * own_columns + k_K[None, :]
    total_RK = tl.load(grad_RK, mask=valid_RK, other=0.0)
    for index in range(begin, end):
        sum_R = sums + (index * ranks + row + tl.arange(0, RANKS)).to(tl.int64)[:, None] * columns
        total_RK += tl.load(sum_R + k_K[None, :], mask=valid_RK, other=0.0)
    tl.store(grad_RK, total_RK, mask=valid_RK)


@triton.jit
def _sum_parts_kernel(
    parts, out, table, tiles, rows, cap, first_rank,
    modules: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """dS of one module, its parts summed in the order of the columns."""
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(0))
    if (slot < 0) | (left <= 0):
        return
    module = tl.program_id(1)
    entry = table + (slot * modules + module) * FIELDS
    row_N = (first + tl.arange(0, row_tile)).to(tl.int64)[:, None]
    valid_NR = (tl.arange(0, row_tile) < left)[:, None]
    r = tl.arange(0, RANKS)[None, :]
    parts += row_N * (modules * RANKS) + module * RANKS + r
    sum_NR = tl.zeros([row_tile, RANKS], dtype=tl.float32)
    if first_rank < tl.load(entry + RANK):
        for _ in tl.range(0, tl.load(entry + WIDTH).to(tl.int32), column_tile, num_stages=4):
            sum_NR += tl.load(parts, mask=valid_NR, other=0.0)
            parts += rows.to(tl.int64) * (modules * RANKS)
    sum_NR *= as_float(tl.load(entry + SCALING))
    place_NR = out + row_N * (cap * modules) + module * cap + first_rank + r
    tl.store(place_NR, sum_NR.to(out.dtype.element_ty), mask=valid_NR)


@triton.jit
def _outer_kernel(
    ds, x, sums, table, spans, pieces, stride, cap,
    split: tl.constexpr, dropout: tl.constexpr, modules: tl.constexpr, aligned: tl.constexpr, piece: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """One program walks its pieces for 16 ranks and a tile of columns.

    It takes all modules, which share x, unless each has a mask of its own.
    """
    slot, begin, end = _walk(spans, pieces, tl.program_id(1), split)
    if slot < 0:
        return
    column = tl.program_id(0) * column_tile
    entry = table + slot * modules * FIELDS
    first_rank = tl.program_id(2) * RANKS
    if dropout and is_masked(entry, modules):
        for each in range(modules):
            _outer(ds, x, sums, entry, pieces, stride, cap, begin, end, first_rank, column, each, split,
                   True, modules, 1, aligned, piece, row_tile, column_tile)
    else:
        _outer(ds, x, sums, entry, pieces, stride, cap, begin, end, first_rank, column, 0, split,
               False, modules, modules, aligned, piece, row_tile, column_tile)


@triton.jit
def _outer(
    ds, x, sums, entry, pieces, stride, cap, begin, end, first_rank, k, module, split: tl.constexpr,
    dropout: tl.constexpr, modules: tl.constexpr, count: tl.constexpr, aligned: tl.constexpr, piece: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """``count`` modules from ``module`` on: grad[C, K] += dsᵀ·x."""
    together: tl.constexpr = triton.next_power_of_2(count) * RANKS
    c = tl.arange(0, together)
    module_C = module + tl.minimum(c // RANKS, count - 1)
    r_C = first_rank + c % RANKS
    entry_C = entry + module_C * FIELDS
    valid_C = (r_C < tl.load(entry_C + RANK)) & (c < count * RANKS)
    width = multiple(tl.max(tl.load(entry_C + IN_WIDTH), 0), aligned)
    if (tl.max(valid_C.to(tl.int32), 0) > 0) & (k < width):
        k_K = k + tl.arange(0, column_tile)
        valid_CK = valid_C[:, None] & (k_K < width)[None, :]
        grad_C = tl.load(entry_C + GRAD_A).to(tl.pointer_type(tl.float32))
        grad_CK = grad_C[:, None] + r_C[:, None] * width + k_K[None, :]
        if aligned:
            grad_CK = tl.multiple_of(grad_CK, [16, 16])
        if split:
            total_CK = tl.zeros([together, column_tile], dtype=tl.float32)
        else:
            total_CK = tl.load(grad_CK, mask=valid_CK, other=0.0)
        ds_C = ds + (module_C * cap + r_C)[None, :]
        for index in range(begin, end):
            _, first, left, offset, ordinal, step = tile_of(pieces, index)
            length = tl.minimum(left, piece)
            acc_CK = tl.zeros([together, column_tile], dtype=tl.float32)
            for n in range(0, length, row_tile):
                n_N = n + tl.arange(0, row_tile)
                row_N = (first + n_N).to(tl.int64)[:, None]
                inside_N = (n_N < length)[:, None]
                ds_NC = tl.load(ds_C + row_N * (cap * modules), mask=inside_N, other=0.0)
                x_NK = tl.load(x + row_N * stride + k_K[None, :], mask=inside_N & (k_K < width)[None, :], other=0.0)
                if dropout:
                    x_NK = drop(x_NK, entry + module * FIELDS, ordinal, step, offset + n_N, k, column_tile)
                acc_CK = tl.dot(tl.trans(ds_NC), x_NK, acc_CK, input_precision="ieee")
            total_CK += acc_CK
        if split:
            sum_C = sums + (begin * modules * cap + module_C * cap + r_C).to(tl.int64)[:, None] * width
            tl.store(sum_C + k_K[None, :], total_CK, mask=valid_CK)
        else:
            tl.store(grad_CK, total_CK, mask=valid_CK)


@triton.jit
def _expand_kernel(
    out, s, table, tiles, stride, columns,
    cap: tl.constexpr, dropout: tl.constexpr, side: tl.constexpr, modules: tl.constexpr, aligned: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(1))
    if (slot < 0) | (left <= 0):
        return
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    position_N = offset + tl.arange(0, row_tile)
    column = tl.program_id(0) * column_tile
    column_K = column + tl.arange(0, column_tile)
    pointer_NK = out + row_N[:, None].to(tl.int64) * stride + column_K[None, :]
    valid_NK = valid_N[:, None] & (column_K < columns)[None, :]
    out_NK = tl.load(pointer_NK, mask=valid_NK, other=0.0).to(tl.float32)
    if side == 0:
        out_NK += dx_tile(s, table, slot, row_N, valid_N, column, columns, position_N, ordinal, step,
                          dropout, modules, cap, aligned, column_tile).to(tl.float32)
    else:
        for module in tl.static_range(modules):
            entry = table + (slot * modules + module) * FIELDS
            begin = multiple(tl.load(entry + COLUMN), aligned)
            width = multiple(tl.load(entry + WIDTH), aligned)
            if (column < begin + width) & (column + column_tile > begin):
                out_NK += term_tile(s, table, slot, module, row_N, valid_N, column_K - begin, width,
                                    1, modules, cap, aligned).to(tl.float32)
    tl.debug_barrier()
    tl.store(pointer_NK, out_NK.to(out.dtype.element_ty), mask=valid_NK)
