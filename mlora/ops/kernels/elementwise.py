"""Norm, rotation and SwiGLU in one pass each, with what BatchLoRA left to be added; formulas in mlora.ops.elementwise.

Letters: T packed rows, N rows of one tile, D model dim, K columns of one tile, C columns of q, k and v, E half a head.

Sums over a row run in a fixed order over tiles of fixed size, so a row's bits depend on nothing else. Where a kernel reads
what it has written, or writes over what it has read, a barrier stands between, except in SwiGLU's loop, which a barrier would
keep from loading ahead: there an element is loaded once, and what is written over it comes from that load. Where nobody has
an adapter 0.0 is added instead of a term, so that a zero has the same sign as in company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlora.ops.batch_lora import LoraTerm
from mlora.ops.elementwise import Heads
from mlora.ops.kernels import FUSED, UNFUSED
from mlora.ops.kernels.lora import (
    FIELDS,
    arguments,
    cap_of,
    drop,
    expand,
    is_masked,
    matrix_of,
    product_tile,
    products_tile,
    term_tile,
    tile_of,
)
from mlora.ops.routing import NARROW_TILE, ROW_TILE

_ADD = {"column_tile": 64, "num_warps": 4} | UNFUSED
_ROTATE = {"num_warps": 4} | UNFUSED
_SWIGLU = {"column_tile": 128, "column_tiles": 8, "num_warps": 8} | UNFUSED


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    _norm_kernel[(rows,)](x, weight, normed, x.shape[-1], eps, **_row(x.shape[-1]))
    return normed


def add_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor, term: LoraTerm, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TD = add(x_TD, y_TD, term)
    return sum_TD, rms_norm(sum_TD, weight_D, eps)


def add(x_TD: torch.Tensor | None, y_TD: torch.Tensor, term: LoraTerm) -> torch.Tensor:
    if x_TD is None:
        expand(y_TD, term)
        return y_TD
    routing, width = term.routing, x_TD.shape[1]
    _add_kernel[(triton.cdiv(width, _ADD["column_tile"]), len(routing.row_tiles))](
        x_TD, y_TD, *arguments(term), routing.row_tiles, width,
        cap=cap_of(term), adapted=bool(term.bank.groups), aligned=term.bank.aligned, row_tile=ROW_TILE, **_ADD,
    )  # fmt: skip
    return y_TD


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dnormed: torch.Tensor,
    term: LoraTerm | None,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if term is not None:
        expand(dnormed, term)
    dx, normed = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    _norm_backward_kernel[(rows,)](
        x, weight, dnormed, residual, dx, normed, x.shape[-1], eps,
        has_residual=residual is not None, **_row(x.shape[-1]),
    )  # fmt: skip
    return dx, normed


def rotate(
    qkv_TC: torch.Tensor, term: LoraTerm, cos_TE: torch.Tensor, sin_TE: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor | None]:
    has_norm = heads.q_norm is not None
    out_TC, routing = torch.empty_like(qkv_TC) if has_norm else qkv_TC, term.routing
    turned = heads.query + heads.key_value
    # v needs a pass only where something is added to it or copied
    count = turned + heads.key_value if has_norm or term.bank.groups else turned
    _rotate_kernel[(count, len(routing.narrow_tiles))](
        qkv_TC, out_TC, cos_TE, sin_TE, heads.q_norm, heads.k_norm, *arguments(term), routing.narrow_tiles, heads.eps, heads.query, heads.key_value,
        has_norm=has_norm, cap=cap_of(term), adapted=bool(term.bank.groups), aligned=term.bank.aligned and heads.size % 32 == 0, size=heads.size,
        half=triton.next_power_of_2(heads.size // 2), row_tile=NARROW_TILE, **_ROTATE,
    )  # fmt: skip
    return out_TC, qkv_TC if has_norm else None


def rotate_backward(
    dqkv_TC: torch.Tensor, before_TC: torch.Tensor | None, cos_TE: torch.Tensor, sin_TE: torch.Tensor, heads: Heads
) -> torch.Tensor:
    rows = dqkv_TC.shape[0]
    _rotate_backward_kernel[(heads.query + heads.key_value, triton.cdiv(rows, ROW_TILE))](
        dqkv_TC, before_TC, cos_TE, sin_TE, heads.q_norm, heads.k_norm, rows, heads.eps, heads.query, heads.key_value,
        has_norm=before_TC is not None, size=heads.size, half=triton.next_power_of_2(heads.size // 2),
        row_tile=ROW_TILE, **_ROTATE,
    )  # fmt: skip
    return dqkv_TC


def swiglu(gate_up: torch.Tensor, term: LoraTerm) -> torch.Tensor:
    hidden = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[_swiglu_grid(hidden, term)](
        gate_up, hidden, *arguments(term), term.routing.narrow_tiles, hidden.shape[1],
        cap=cap_of(term), adapted=bool(term.bank.groups), aligned=term.bank.aligned, row_tile=NARROW_TILE,
        stages=_swiglu_stages(term), **_SWIGLU,
    )  # fmt: skip
    return hidden


def swiglu_backward(
    gate_up: torch.Tensor, term: LoraTerm, dhidden: torch.Tensor, dterm: LoraTerm
) -> tuple[torch.Tensor, torch.Tensor]:
    routing = dterm.routing
    _swiglu_backward_kernel[_swiglu_grid(dhidden, dterm)](
        gate_up, dhidden, *arguments(term), *arguments(dterm), routing.narrow_tiles, dhidden.shape[1],
        cap=cap_of(term), dcap=cap_of(dterm), adapted=bool(term.bank.groups), dadapted=bool(dterm.bank.groups), dropout=routing.dropout and dterm.bank.has_dropout,
        aligned=term.bank.aligned and dterm.bank.aligned, row_tile=NARROW_TILE, stages=_swiglu_stages(term, dterm), **_SWIGLU,
    )  # fmt: skip
    return gate_up, dhidden


def _swiglu_grid(hidden: torch.Tensor, term: LoraTerm) -> tuple[int, int]:
    return triton.cdiv(hidden.shape[1], _SWIGLU["column_tile"] * _SWIGLU["column_tiles"]), len(term.routing.narrow_tiles)


def _swiglu_stages(*terms: LoraTerm) -> int:
    """Tiles that are loaded ahead; with many ranks or in float32 they would not fit shared memory."""
    return 3 if max(map(cap_of, terms)) <= 32 and arguments(terms[0])[0].element_size() == 2 else 1


def _row(width: int) -> dict[str, int]:
    """A program holds a whole row; 16 elements a thread."""
    tile = triton.next_power_of_2(width)
    return {"tile": tile, "num_warps": min(16, max(1, tile // 512))} | FUSED


@triton.jit
def _norm_kernel(x, weight, normed, width, eps, tile: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    k_K = tl.arange(0, tile)
    x_K = tl.load(x + start + k_K, mask=k_K < width, other=0.0).to(tl.float32)
    weight_K = tl.load(weight + k_K, mask=k_K < width, other=0.0)
    wide_K = (x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) / width + eps)).to(normed.dtype.element_ty)
    tl.store(normed + start + k_K, (wide_K * weight_K).to(normed.dtype.element_ty), mask=k_K < width)


@triton.jit
def _norm_backward_kernel(
    x, weight, dnormed, residual, dx, normed, width, eps, has_residual: tl.constexpr, tile: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * width
    k_K = tl.arange(0, tile)
    x_K = tl.load(x + start + k_K, mask=k_K < width, other=0.0).to(tl.float32)
    d_K = tl.load(dnormed + start + k_K, mask=k_K < width, other=0.0).to(tl.float32)
    weight_K = tl.load(weight + k_K, mask=k_K < width, other=0.0)
    d_K *= weight_K.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_K * x_K, 0) / width + eps)
    mean = tl.sum(d_K * x_K, 0) / width * scale * scale * scale
    dx_K = d_K * scale - x_K * mean
    if has_residual:
        dx_K += tl.load(residual + start + k_K, mask=k_K < width, other=0.0).to(tl.float32)
    tl.store(dx + start + k_K, dx_K.to(dx.dtype.element_ty), mask=k_K < width)
    wide_K = (x_K * scale).to(normed.dtype.element_ty)
    tl.store(normed + start + k_K, (wide_K * weight_K).to(normed.dtype.element_ty), mask=k_K < width)


@triton.jit
def _add_kernel(
    x, y, s, table, tiles, width,
    cap: tl.constexpr, adapted: tl.constexpr, aligned: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr,
):
    """y = x + y + S·B."""
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(1))
    if left <= 0:
        return
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    k_K = tl.program_id(0) * column_tile + tl.arange(0, column_tile)
    place_NK = row_N[:, None].to(tl.int64) * width + k_K[None, :]
    valid_NK = valid_N[:, None] & (k_K < width)[None, :]
    sum_NK = tl.load(x + place_NK, mask=valid_NK, other=0.0).to(tl.float32)
    sum_NK += tl.load(y + place_NK, mask=valid_NK, other=0.0).to(tl.float32)
    if adapted:
        sum_NK += term_tile(s, table, slot, 0, row_N, valid_N, k_K, width, 1, 1, cap, aligned).to(tl.float32)
    else:
        sum_NK += 0.0
    tl.debug_barrier()
    tl.store(y + place_NK, sum_NK.to(y.dtype.element_ty), mask=valid_NK)


@triton.jit
def _rotate_kernel(
    qkv, out, cos, sin, q_norm, k_norm, s, table, tiles, eps, query_heads, kv_heads,
    has_norm: tl.constexpr, cap: tl.constexpr, adapted: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr, half: tl.constexpr,
    row_tile: tl.constexpr,
):
    """One head of one tile: + S·B, the head's norm, the rotation."""
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(1))
    if left <= 0:
        return
    head = tl.program_id(0)
    columns = (query_heads + 2 * kv_heads) * size
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    e_E = tl.arange(0, half)
    inside_E = e_E < size // 2
    valid_NE = valid_N[:, None] & inside_E[None, :]
    place = row_N[:, None].to(tl.int64) * columns + head * size + e_E[None, :]
    first_NE = tl.load(qkv + place, mask=valid_NE, other=0.0).to(tl.float32)
    second_NE = tl.load(qkv + place + size // 2, mask=valid_NE, other=0.0).to(tl.float32)
    module = tl.where(head < query_heads, 0, tl.where(head < query_heads + kv_heads, 1, 2))
    if adapted:
        begin = tl.where(module == 0, 0, query_heads + (module - 1) * kv_heads) * size
        width = tl.where(module == 0, query_heads, kv_heads) * size
        column_E = head * size - begin + e_E
        if half * 2 != size:
            column_E = tl.where(inside_E, column_E, width)  # outside: masked
        tile_NE = term_tile(s, table, slot, module, row_N, valid_N, column_E, width, 1, 3, cap, aligned)
        first_NE += tile_NE.to(tl.float32)
        column_E += size // 2
        tile_NE = term_tile(s, table, slot, module, row_N, valid_N, column_E, width, 1, 3, cap, aligned)
        second_NE += tile_NE.to(tl.float32)
    else:
        first_NE += 0.0
        second_NE += 0.0
    tl.debug_barrier()
    if has_norm:
        tl.store(qkv + place, first_NE.to(qkv.dtype.element_ty), mask=valid_NE)
        tl.store(qkv + place + size // 2, second_NE.to(qkv.dtype.element_ty), mask=valid_NE)
    if module < 2:
        if has_norm:
            weight = q_norm if module == 0 else k_norm
            first_NE = first_NE.to(qkv.dtype.element_ty).to(tl.float32)
            second_NE = second_NE.to(qkv.dtype.element_ty).to(tl.float32)
            mean_N = (tl.sum(first_NE * first_NE, 1) + tl.sum(second_NE * second_NE, 1)) / size
            scale_N = tl.rsqrt(mean_N + eps)
            weight_E = tl.load(weight + e_E, mask=inside_E, other=0.0).to(tl.float32)
            first_NE = first_NE * scale_N[:, None] * weight_E[None, :]
            weight_E = tl.load(weight + size // 2 + e_E, mask=inside_E, other=0.0).to(tl.float32)
            second_NE = second_NE * scale_N[:, None] * weight_E[None, :]
        angle = row_N[:, None] * size + e_E[None, :]
        cos_NE = tl.load(cos + angle, mask=valid_NE, other=0.0).to(tl.float32)
        sin_NE = tl.load(sin + angle, mask=valid_NE, other=0.0).to(tl.float32)
        turned_NE = first_NE * cos_NE - second_NE * sin_NE
        second_NE = second_NE * cos_NE + first_NE * sin_NE
        first_NE = turned_NE
    tl.store(out + place, first_NE.to(out.dtype.element_ty), mask=valid_NE)
    tl.store(out + place + size // 2, second_NE.to(out.dtype.element_ty), mask=valid_NE)


@triton.jit
def _rotate_backward_kernel(
    dqkv, before, cos, sin, q_norm, k_norm, rows, eps, query_heads, kv_heads,
    has_norm: tl.constexpr, size: tl.constexpr, half: tl.constexpr, row_tile: tl.constexpr,
):
    """One head of q or k of one tile: turned back, then through the head's norm."""
    head = tl.program_id(0)
    columns = (query_heads + 2 * kv_heads) * size
    row_N = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    valid_N = row_N < rows
    e_E = tl.arange(0, half)
    inside_E = e_E < size // 2
    valid_NE = valid_N[:, None] & inside_E[None, :]
    place = row_N[:, None].to(tl.int64) * columns + head * size + e_E[None, :]
    first_NE = tl.load(dqkv + place, mask=valid_NE, other=0.0).to(tl.float32)
    second_NE = tl.load(dqkv + place + size // 2, mask=valid_NE, other=0.0).to(tl.float32)
    angle = row_N[:, None] * size + e_E[None, :]
    cos_NE = tl.load(cos + angle, mask=valid_NE, other=0.0).to(tl.float32)
    sin_NE = tl.load(sin + angle, mask=valid_NE, other=0.0).to(tl.float32)
    turned_NE = first_NE * cos_NE + second_NE * sin_NE
    second_NE = second_NE * cos_NE - first_NE * sin_NE
    first_NE = turned_NE
    if has_norm:
        weight = q_norm if head < query_heads else k_norm
        x1_NE = tl.load(before + place, mask=valid_NE, other=0.0).to(tl.float32)
        x2_NE = tl.load(before + place + size // 2, mask=valid_NE, other=0.0).to(tl.float32)
        first_NE *= tl.load(weight + e_E, mask=inside_E, other=0.0).to(tl.float32)[None, :]
        second_NE *= tl.load(weight + size // 2 + e_E, mask=inside_E, other=0.0).to(tl.float32)[None, :]
        scale_N = tl.rsqrt((tl.sum(x1_NE * x1_NE, 1) + tl.sum(x2_NE * x2_NE, 1)) / size + eps)
        mean_N = (tl.sum(first_NE * x1_NE, 1) + tl.sum(second_NE * x2_NE, 1)) / size
        mean_N *= scale_N * scale_N * scale_N
        first_NE = first_NE * scale_N[:, None] - x1_NE * mean_N[:, None]
        second_NE = second_NE * scale_N[:, None] - x2_NE * mean_N[:, None]
    tl.debug_barrier()
    tl.store(dqkv + place, first_NE.to(dqkv.dtype.element_ty), mask=valid_NE)
    tl.store(dqkv + place + size // 2, second_NE.to(dqkv.dtype.element_ty), mask=valid_NE)


@triton.jit
def _swiglu_kernel(
    gate_up, hidden, s, table, tiles, width,
    cap: tl.constexpr, adapted: tl.constexpr, aligned: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr, column_tiles: tl.constexpr, stages: tl.constexpr,
):
    """A program looks its adapter up once, for several tiles of columns; the next ones are loaded meanwhile."""
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(1))
    if left <= 0:
        return
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    owned_N = valid_N & (row_N * 0 + slot >= 0)
    if adapted:
        gate, gate_rank = matrix_of(table, slot, 0, 1, 2, s.dtype.element_ty)
        up, up_rank = matrix_of(table, slot, 1, 1, 2, s.dtype.element_ty)
        s_gate_NR = products_tile(s, row_N, owned_N, 0, 2, cap)
        s_up_NR = products_tile(s, row_N, owned_N, cap, 2, cap)
    for i in tl.range(column_tiles, num_stages=stages):
        k_K = (tl.program_id(0) * column_tiles + i) * column_tile + tl.arange(0, column_tile)
        valid_NK = valid_N[:, None] & (k_K < width)[None, :]
        place_NK = gate_up + row_N[:, None].to(tl.int64) * (2 * width) + k_K[None, :]
        gate_NK = tl.load(place_NK, mask=valid_NK, other=0.0)
        up_NK = tl.load(place_NK + width, mask=valid_NK, other=0.0)
        if adapted:
            gate_NK += product_tile(s, s_gate_NR, gate, gate_rank, 0, row_N, owned_N, k_K, width, 2, cap, aligned)
            up_NK += product_tile(s, s_up_NR, up, up_rank, 1, row_N, owned_N, k_K, width, 2, cap, aligned)
        else:
            gate_NK += 0.0
            up_NK += 0.0
        gate_NK = gate_NK.to(tl.float32)
        hidden_NK = (gate_NK * tl.sigmoid(gate_NK)).to(hidden.dtype.element_ty).to(tl.float32) * up_NK.to(tl.float32)
        place_NK = hidden + row_N[:, None].to(tl.int64) * width + k_K[None, :]
        tl.store(place_NK, hidden_NK.to(hidden.dtype.element_ty), mask=valid_NK)


@triton.jit
def _swiglu_backward_kernel(
    gate_up, dhidden, s, table, ds, dtable, tiles, width,
    cap: tl.constexpr, dcap: tl.constexpr, adapted: tl.constexpr, dadapted: tl.constexpr, dropout: tl.constexpr, aligned: tl.constexpr,
    row_tile: tl.constexpr, column_tile: tl.constexpr, column_tiles: tl.constexpr, stages: tl.constexpr,
):
    """Writes the gradient over gate and up, and the product, made again, over its own gradient.

    What was added to gate and up is made again too: that costs less than to write them back in forward.
    """
    slot, first, left, offset, ordinal, step = tile_of(tiles, tl.program_id(1))
    if left <= 0:
        return
    row_N = first + tl.arange(0, row_tile)
    valid_N = tl.arange(0, row_tile) < left
    owned_N = valid_N & (row_N * 0 + slot >= 0)
    position_N = offset + tl.arange(0, row_tile)
    entry = dtable + tl.maximum(slot, 0) * FIELDS
    masked = False
    if adapted:
        gate, gate_rank = matrix_of(table, slot, 0, 1, 2, s.dtype.element_ty)
        up, up_rank = matrix_of(table, slot, 1, 1, 2, s.dtype.element_ty)
        s_gate_NR = products_tile(s, row_N, owned_N, 0, 2, cap)
        s_up_NR = products_tile(s, row_N, owned_N, cap, 2, cap)
    if dadapted:
        down, down_rank = matrix_of(dtable, slot, 0, 0, 1, s.dtype.element_ty)
        ds_NR = products_tile(ds, row_N, owned_N, 0, 1, dcap)
        if dropout:
            masked = is_masked(entry, 1)
    for i in tl.range(column_tiles, num_stages=stages):
        k = (tl.program_id(0) * column_tiles + i) * column_tile
        k_K = k + tl.arange(0, column_tile)
        valid_NK = valid_N[:, None] & (k_K < width)[None, :]
        place_NK = gate_up + row_N[:, None].to(tl.int64) * (2 * width) + k_K[None, :]
        hidden_NK = dhidden + row_N[:, None].to(tl.int64) * width + k_K[None, :]
        gate_NK = tl.load(place_NK, mask=valid_NK, other=0.0)
        up_NK = tl.load(place_NK + width, mask=valid_NK, other=0.0)
        d_NK = tl.load(hidden_NK, mask=valid_NK, other=0.0).to(tl.float32)
        if adapted:
            gate_NK += product_tile(s, s_gate_NR, gate, gate_rank, 0, row_N, owned_N, k_K, width, 2, cap, aligned)
            up_NK += product_tile(s, s_up_NR, up, up_rank, 1, row_N, owned_N, k_K, width, 2, cap, aligned)
        else:
            gate_NK += 0.0
            up_NK += 0.0
        if dadapted:
            term_NK = product_tile(ds, ds_NR, down, down_rank, 0, row_N, owned_N, k_K, width, 1, dcap, aligned)
            if dropout:
                if masked:
                    term_NK = drop(term_NK, entry, ordinal, step, position_N, k, column_tile)
            d_NK += term_NK.to(tl.float32)
        else:
            d_NK += 0.0
        gate_NK = gate_NK.to(tl.float32)
        up_NK = up_NK.to(tl.float32)
        sigmoid_NK = tl.sigmoid(gate_NK)
        silu_NK = gate_NK * sigmoid_NK
        dup_NK = d_NK * silu_NK
        dgate_NK = d_NK * up_NK * sigmoid_NK * (1 + gate_NK - silu_NK)
        product_NK = silu_NK.to(dhidden.dtype.element_ty).to(tl.float32) * up_NK
        tl.store(place_NK, dgate_NK.to(gate_up.dtype.element_ty), mask=valid_NK)
        tl.store(place_NK + width, dup_NK.to(gate_up.dtype.element_ty), mask=valid_NK)
        tl.store(hidden_NK, product_NK.to(dhidden.dtype.element_ty), mask=valid_NK)
