"""Causal attention inside each sample of a packed microbatch, forward and backward, as Triton kernels.

For query row i and key row j of one sample, with scale = 1 / √E:

    s_ij = scale · q_i·k_j        where j ≤ i and, with a window, j > i - window
    lse_i = log2 Σ_j 2^(s_ij · log2 e),   p_ij = 2^(s_ij · log2 e - lse_i),   out_i = Σ_j p_ij · v_j
    delta_i = dout_i·out_i,   ds_ij = p_ij · (dout_i·v_j - delta_i)
    dv_j = Σ_i p_ij · dout_i,   dk_j = scale · Σ_i ds_ij · q_i,   dq_i = scale · Σ_j ds_ij · k_j

(Dao, FlashAttention-2, 2023; the online softmax is Milakov & Gimelshein's, 2018.) A sample's bits depend on nothing but
the sample: tiles begin at its first row, their sizes come from a table, every sum has one fixed order inside one
program and nothing is added atomically. dk and dv of a key/value head run over the query blocks, and inside a block
over the head's query heads.

Letters: T packed rows, S samples, C columns (q heads, then k heads, then v heads, each E wide; out: q heads), H query
heads, K key/value heads, E head dim, P the four floats of a row's statistics. Tensors live on the current device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mlora.ops.kernels import FUSED

_PADDING_TILE = {"BLOCK_T": 32, "BLOCK_S": 64, "BLOCK_C": 256}
_STATS_ROWS = 32
_FUSE = {"enable_fp_fusion": True}  # product and sum in one rounding: Triton's default differs between versions
_LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class Tile:
    """Query and key rows of a kernel's tile, warps of a program, loads in flight of its loop."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The three kernels' tiles, for devices that let a program take ``shared_bytes`` of shared memory or more."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    shared_bytes: int


def attention_forward(
    qkv_TC: torch.Tensor,
    starts_S: torch.Tensor,
    lengths_S: torch.Tensor,
    longest: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [T, H·E] in qkv's dtype and the scores' base-2 log-sum-exp [H, T] in float32.

    ``qkv_TC`` [T, (H + 2K)·E] is contiguous, q and k rotated. Sample s owns the rows from ``starts_S[s]`` on,
    ``lengths_S[s]`` of them (int32; 0: no sample); ``longest`` is an upper bound of the lengths and decides the grid
    alone. ``window``: a row sees itself and ``window - 1`` rows before it. Rows of no sample are padding: out is 0
    there, lse undefined. ``tiles`` replaces the table's, for tuning.
    """
    shape = _shape(qkv_TC, heads, kv_heads, head_dim, window)
    tiles = tiles or _tiles_of(qkv_TC, head_dim)
    out_TC = qkv_TC.new_empty(qkv_TC.shape[0], heads * head_dim)
    lse_HT = qkv_TC.new_empty(heads, qkv_TC.shape[0], dtype=torch.float32)
    _zero_padding(out_TC, starts_S, lengths_S)
    grid = (len(starts_S) * heads, triton.cdiv(longest, tiles.forward.queries))
    _attention_forward_kernel[grid](qkv_TC, out_TC, lse_HT, starts_S, lengths_S, len(qkv_TC), **shape, **_options(tiles.forward))
    return out_TC, lse_HT


def attention_backward(
    dout_TC: torch.Tensor,
    out_TC: torch.Tensor,
    lse_HT: torch.Tensor,
    qkv_TC: torch.Tensor,
    starts_S: torch.Tensor,
    lengths_S: torch.Tensor,
    longest: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """The gradient of ``qkv_TC`` [T, (H + 2K)·E] for ``dout_TC`` [T, H·E]; 0 at padding rows.

    ``out_TC`` and ``lse_HT`` are what :func:`attention_forward` gave; the other arguments are the same as there.
    """
    shape = _shape(qkv_TC, heads, kv_heads, head_dim, window)
    tiles = tiles or _tiles_of(qkv_TC, head_dim)
    rows, samples = len(qkv_TC), len(starts_S)
    dqkv_TC, dout_TC = torch.empty_like(qkv_TC), dout_TC.contiguous()
    _assert_aligned(dout_TC)
    _zero_padding(dqkv_TC, starts_S, lengths_S)
    stats_HTP = lse_HT.new_empty(heads, rows, 4)
    stats_grid = (triton.cdiv(rows, _STATS_ROWS), heads)
    _attention_stats_kernel[stats_grid](
        dout_TC, out_TC, lse_HT, stats_HTP, rows, heads, head_dim, shape["BLOCK_E"], BLOCK_T=_STATS_ROWS, **_FUSE
    )
    arguments = (dout_TC, stats_HTP, qkv_TC, dqkv_TC, starts_S, lengths_S, rows)
    dkdv_grid = (samples * kv_heads, triton.cdiv(longest, tiles.dkdv.keys))
    _attention_dkdv_kernel[dkdv_grid](*arguments, **shape, **_options(tiles.dkdv))
    dq_grid = (samples * heads, triton.cdiv(longest, tiles.dq.queries))
    _attention_dq_kernel[dq_grid](*arguments, **shape, **_options(tiles.dq))
    return dqkv_TC


_KIB_99 = 99 * 1024  # consumer cards since Ampere
_KIB_163 = 163 * 1024  # A100; Hopper and data-center Blackwell have 227

# Bytes of an element, head dim up to, tiles; the first row that serves is taken. Tiles set the order of sums: a change
# of this table changes bits.
_TABLE = (
    (2, 64, Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), _KIB_99)),
    (2, 128, Tiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3), _KIB_163)),
    (2, 128, Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(128, 32, 8, 2), _KIB_99)),
    (2, 256, Tiles(Tile(128, 32, 8, 3), Tile(32, 64, 8, 3), Tile(64, 32, 8, 3), _KIB_163)),
    (2, 256, Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(64, 16, 8, 2), _KIB_99)),
    (4, 64, Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), _KIB_99)),
    (4, 128, Tiles(Tile(32, 16, 8, 2), Tile(16, 32, 8, 2), Tile(32, 16, 8, 2), _KIB_99)),
    (4, 256, Tiles(Tile(32, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 4, 2), _KIB_99)),
)


def choose_tiles(dtype: torch.dtype, head_dim: int, shared_bytes: int) -> Tiles:
    """The table's tiles for a device that lets a program take ``shared_bytes`` of shared memory.

    Raises ValueError where there are none: another dtype than float32, bfloat16 and float16, a head dim over 256, too
    little shared memory.
    """
    for itemsize, largest, tiles in _TABLE:
        fits = head_dim <= largest and tiles.shared_bytes <= shared_bytes
        if fits and dtype.is_floating_point and dtype.itemsize == itemsize:
            return tiles
    raise ValueError(
        f"no attention kernel for {dtype}, head dim {head_dim} and {shared_bytes} bytes of shared memory: it takes "
        "float32, bfloat16 or float16, a head dim up to 256 and a GPU with 99 KiB or more"
    )


def _tiles_of(x: torch.Tensor, head_dim: int) -> Tiles:
    """On a CPU, in Triton's interpreter, those of the large GPUs."""
    return choose_tiles(x.dtype, head_dim, _shared_bytes(x.device.index) if x.is_cuda else _KIB_163)


@functools.cache
def _shared_bytes(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def _block_e(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _shape(qkv_TC: torch.Tensor, heads: int, kv_heads: int, head_dim: int, window: int | None) -> dict[str, float]:
    """The constants of a kernel."""
    assert qkv_TC.is_contiguous() and qkv_TC.shape[1] == (heads + 2 * kv_heads) * head_dim
    assert heads % kv_heads == 0 and (window is None or window > 0)
    _assert_aligned(qkv_TC)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": window or 0,
        "SCALE": 1 / math.sqrt(head_dim),
        "BLOCK_E": _block_e(head_dim),
    }


def _assert_aligned(x: torch.Tensor) -> None:
    """For a tensor that is not, Triton compiles a second kernel, whose bits might differ."""
    assert x.data_ptr() % 16 == 0


def _options(tile: Tile) -> dict[str, int]:
    blocks = {"BLOCK_Q": tile.queries, "BLOCK_K": tile.keys}
    return {**blocks, "num_warps": tile.warps, "num_stages": tile.stages, **_FUSE}


def _zero_padding(x_TC: torch.Tensor, starts_S: torch.Tensor, lengths_S: torch.Tensor) -> None:
    rows, columns = x_TC.shape
    grid = (triton.cdiv(rows, _PADDING_TILE["BLOCK_T"]),)
    _attention_padding_kernel[grid](x_TC, starts_S, lengths_S, rows, len(starts_S), COLUMNS=columns, **_PADDING_TILE, **_FUSE)


# What changes from call to call is not specialized on: one kernel serves all calls, compiled once.


@triton.jit(do_not_specialize=["starts", "lengths", "rows", "samples"])
def _attention_padding_kernel(
    x: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    samples: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Zeros to the rows of x [rows, COLUMNS] that no sample owns. A program: BLOCK_T rows."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    owners = tl.zeros([BLOCK_T], tl.int32)
    for first in range(0, samples, BLOCK_S):
        sample = first + tl.arange(0, BLOCK_S)
        start = tl.load(starts + sample, mask=sample < samples, other=0)
        end = start + tl.load(lengths + sample, mask=sample < samples, other=0)
        owners += tl.sum(((row[:, None] >= start) & (row[:, None] < end)).to(tl.int32), 1)
    empty = (owners == 0) & (row < rows)
    if tl.max(empty.to(tl.int32), 0) == 1:
        pointers = x + row.to(tl.int64)[:, None] * COLUMNS
        for first in range(0, COLUMNS, BLOCK_C):
            column = first + tl.arange(0, BLOCK_C)
            zeros = tl.zeros([BLOCK_T, BLOCK_C], x.dtype.element_ty)
            tl.store(pointers + column, zeros, mask=empty[:, None] & (column < COLUMNS))


@triton.jit(do_not_specialize=["starts", "lengths", "rows"])
def _attention_forward_kernel(
    qkv: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out and lse of one sample, head and tile of queries; the last tiles, which see most keys, go first."""
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    OUT_COLUMNS: tl.constexpr = HEADS * HEAD_DIM
    start, length = _sample(starts, lengths, tl.program_id(0) // HEADS)
    head = tl.program_id(0) % HEADS
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    if first >= length:
        return
    sample = qkv + start * COLUMNS
    k = sample + (HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM
    q_QE = _load(sample + head * HEAD_DIM, first, length, COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E, True)
    out_QE = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    top_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    sum_Q = tl.zeros([BLOCK_Q], tl.float32)
    low, full_low, full_high, high = _key_blocks(first, length, WINDOW, BLOCK_Q, BLOCK_K)
    for block in range(full_low, full_high):
        out_QE, top_Q, sum_Q = _attend(
            out_QE, top_Q, sum_Q, q_QE, k, first, block * BLOCK_K, length,
            KV_HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    for edge in range(0, full_low - low + high - full_high):
        block = _edge_block(edge, low, full_low, full_high)
        out_QE, top_Q, sum_Q = _attend(
            out_QE, top_Q, sum_Q, q_QE, k, first, block * BLOCK_K, length,
            KV_HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    target = out + start * OUT_COLUMNS + head * HEAD_DIM
    _store(target, out_QE / sum_Q[:, None], first, length, OUT_COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E)
    row = first + tl.arange(0, BLOCK_Q)
    tl.store(lse + head.to(tl.int64) * rows + start + row, top_Q + tl.log2(sum_Q), mask=row < length)


@triton.jit
def _attend(
    out_QE: tl.tensor,
    top_Q: tl.tensor,
    sum_Q: tl.tensor,
    q_QE: tl.tensor,
    k: tl.tensor,
    first: tl.tensor,
    key_first: tl.tensor,
    length: tl.tensor,
    KV_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE: tl.constexpr,
) -> Any:
    """One key block of the online softmax. In an edge block a row may have seen no key yet: its top is still -inf."""
    k_KE = _load(k, key_first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, EDGE)
    s_QK = tl.dot(q_QE, k_KE.T, input_precision="ieee")
    if EDGE:
        query, key = first + tl.arange(0, BLOCK_Q), key_first + tl.arange(0, BLOCK_K)
        s_QK = tl.where(_sees(query[:, None], key[None, :], WINDOW), s_QK, float("-inf"))
    new_top_Q = tl.maximum(top_Q, tl.max(s_QK, 1) * (SCALE * _LOG2_E))
    shift_Q = tl.where(new_top_Q == float("-inf"), 0.0, new_top_Q) if EDGE else new_top_Q
    p_QK = tl.exp2(s_QK * (SCALE * _LOG2_E) - shift_Q[:, None])
    fade_Q = tl.exp2(top_Q - shift_Q)
    v_KE = _load(k + KV_HEADS * HEAD_DIM, key_first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, EDGE)
    out_QE = tl.dot(p_QK.to(v_KE.dtype), v_KE, out_QE * fade_Q[:, None], input_precision="ieee")
    return out_QE, new_top_Q, sum_Q * fade_Q + tl.sum(p_QK, 1)


@triton.jit(do_not_specialize=["rows"])
def _attention_stats_kernel(
    dout: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """lse and delta, two of four floats, of BLOCK_T rows and one head; sixteen bytes are one load for the backward.

    A row's sum does not depend on the row's place, so the tiles need not begin with a sample.
    """
    first, head = tl.program_id(0) * BLOCK_T, tl.program_id(1)
    out_TE = _load(out + head * HEAD_DIM, first, rows, HEADS * HEAD_DIM, HEAD_DIM, BLOCK_T, BLOCK_E, True)
    dout_TE = _load(dout + head * HEAD_DIM, first, rows, HEADS * HEAD_DIM, HEAD_DIM, BLOCK_T, BLOCK_E, True)
    delta_T = tl.sum(out_TE.to(tl.float32) * dout_TE.to(tl.float32), 1)
    row = first + tl.arange(0, BLOCK_T)
    place = head.to(tl.int64) * rows + row
    lse_T = tl.load(lse + place, mask=row < rows, other=0.0)
    pair = tl.arange(0, 2)[None, :]
    tl.store(stats + place[:, None] * 4 + pair, tl.join(lse_T, delta_T), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["starts", "lengths", "rows"])
def _attention_dkdv_kernel(
    dout: tl.tensor,
    stats: tl.tensor,
    qkv: tl.tensor,
    dqkv: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """dk and dv of one sample, key/value head and tile of keys; the first tiles, seen by most queries, go first."""
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    GROUP: tl.constexpr = HEADS // KV_HEADS
    start, length = _sample(starts, lengths, tl.program_id(0) // KV_HEADS)
    kv_head = tl.program_id(0) % KV_HEADS
    first = tl.program_id(1) * BLOCK_K
    if first >= length:
        return
    k_column = (HEADS + kv_head) * HEAD_DIM
    k = qkv + start * COLUMNS + k_column
    k_KE = _load(k, first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, True)
    v_KE = _load(k + KV_HEADS * HEAD_DIM, first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, True)
    dk_KE = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    dv_KE = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    low, full_low, full_high, high = _query_blocks(first, length, WINDOW, BLOCK_Q, BLOCK_K)
    for turn in range(full_low * GROUP, full_high * GROUP):
        dk_KE, dv_KE = _add_queries(
            dk_KE, dv_KE, k_KE, v_KE, dout, stats, qkv, kv_head * GROUP + turn % GROUP,
            first, turn // GROUP * BLOCK_Q, start, length, rows,
            HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    for turn in range(0, (full_low - low + high - full_high) * GROUP):
        block = _edge_block(turn // GROUP, low, full_low, full_high)
        dk_KE, dv_KE = _add_queries(
            dk_KE, dv_KE, k_KE, v_KE, dout, stats, qkv, kv_head * GROUP + turn % GROUP,
            first, block * BLOCK_Q, start, length, rows,
            HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    dk = dqkv + start * COLUMNS + k_column
    _store(dk, dk_KE * SCALE, first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E)
    _store(dk + KV_HEADS * HEAD_DIM, dv_KE, first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E)


@triton.jit
def _add_queries(
    dk_KE: tl.tensor,
    dv_KE: tl.tensor,
    k_KE: tl.tensor,
    v_KE: tl.tensor,
    dout: tl.tensor,
    stats: tl.tensor,
    qkv: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    query_first: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE: tl.constexpr,
) -> Any:
    """One query block of one head into dk / scale and dv. Queries beyond the sample are loaded as 0 and add 0."""
    OUT_COLUMNS: tl.constexpr = HEADS * HEAD_DIM
    q = qkv + start * COLUMNS + head * HEAD_DIM
    q_QE = _load(q, query_first, length, COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E, EDGE)
    lse_Q, delta_Q = _load_stats(stats, head, query_first, start, length, rows, BLOCK_Q, EDGE)
    s_KQ = tl.dot(k_KE, q_QE.T, input_precision="ieee")
    p_KQ = tl.exp2(s_KQ * (SCALE * _LOG2_E) - lse_Q[None, :])
    if EDGE:
        query, key = query_first + tl.arange(0, BLOCK_Q)[None, :], first + tl.arange(0, BLOCK_K)[:, None]
        p_KQ = tl.where(_sees(query, key, WINDOW), p_KQ, 0.0)
    dout = dout + start * OUT_COLUMNS + head * HEAD_DIM
    dout_QE = _load(dout, query_first, length, OUT_COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E, EDGE)
    dv_KE = tl.dot(p_KQ.to(dout_QE.dtype), dout_QE, dv_KE, input_precision="ieee")
    dp_KQ = tl.dot(v_KE, dout_QE.T, input_precision="ieee")
    ds_KQ = p_KQ * (dp_KQ - delta_Q[None, :])
    return tl.dot(ds_KQ.to(q_QE.dtype), q_QE, dk_KE, input_precision="ieee"), dv_KE


@triton.jit(do_not_specialize=["starts", "lengths", "rows"])
def _attention_dq_kernel(
    dout: tl.tensor,
    stats: tl.tensor,
    qkv: tl.tensor,
    dqkv: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """dq of one sample, head and tile of queries; the last tiles, which see most keys, go first."""
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    OUT_COLUMNS: tl.constexpr = HEADS * HEAD_DIM
    start, length = _sample(starts, lengths, tl.program_id(0) // HEADS)
    head = tl.program_id(0) % HEADS
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    if first >= length:
        return
    sample = qkv + start * COLUMNS
    k = sample + (HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM
    q_QE = _load(sample + head * HEAD_DIM, first, length, COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E, True)
    dout = dout + start * OUT_COLUMNS + head * HEAD_DIM
    dout_QE = _load(dout, first, length, OUT_COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E, True)
    lse_Q, delta_Q = _load_stats(stats, head, first, start, length, rows, BLOCK_Q, True)
    dq_QE = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    low, full_low, full_high, high = _key_blocks(first, length, WINDOW, BLOCK_Q, BLOCK_K)
    for block in range(full_low, full_high):
        dq_QE = _add_keys(
            dq_QE, q_QE, dout_QE, lse_Q, delta_Q, k, first, block * BLOCK_K, length,
            KV_HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    for edge in range(0, full_low - low + high - full_high):
        block = _edge_block(edge, low, full_low, full_high)
        dq_QE = _add_keys(
            dq_QE, q_QE, dout_QE, lse_Q, delta_Q, k, first, block * BLOCK_K, length,
            KV_HEADS, COLUMNS, HEAD_DIM, WINDOW, SCALE, BLOCK_E, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    target = dqkv + start * COLUMNS + head * HEAD_DIM
    _store(target, dq_QE * SCALE, first, length, COLUMNS, HEAD_DIM, BLOCK_Q, BLOCK_E)


@triton.jit
def _add_keys(
    dq_QE: tl.tensor,
    q_QE: tl.tensor,
    dout_QE: tl.tensor,
    lse_Q: tl.tensor,
    delta_Q: tl.tensor,
    k: tl.tensor,
    first: tl.tensor,
    key_first: tl.tensor,
    length: tl.tensor,
    KV_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE: tl.constexpr,
) -> Any:
    """One key block into dq / scale."""
    k_KE = _load(k, key_first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, EDGE)
    v_KE = _load(k + KV_HEADS * HEAD_DIM, key_first, length, COLUMNS, HEAD_DIM, BLOCK_K, BLOCK_E, EDGE)
    s_QK = tl.dot(q_QE, k_KE.T, input_precision="ieee")
    p_QK = tl.exp2(s_QK * (SCALE * _LOG2_E) - lse_Q[:, None])
    if EDGE:
        query, key = first + tl.arange(0, BLOCK_Q), key_first + tl.arange(0, BLOCK_K)
        p_QK = tl.where(_sees(query[:, None], key[None, :], WINDOW), p_QK, 0.0)
    dp_QK = tl.dot(dout_QE, v_KE.T, input_precision="ieee")
    ds_QK = p_QK * (dp_QK - delta_Q[:, None])
    return tl.dot(ds_QK.to(k_KE.dtype), k_KE, dq_QE, input_precision="ieee")


@triton.jit
def _sample(starts: tl.tensor, lengths: tl.tensor, sample: tl.tensor) -> Any:
    return tl.load(starts + sample).to(tl.int64), tl.load(lengths + sample)


@triton.jit
def _sees(query: tl.tensor, key: tl.tensor, WINDOW: tl.constexpr) -> Any:
    seen = key <= query
    if WINDOW > 0:
        seen = seen & (key > query - WINDOW)
    return seen


@triton.jit
def _key_blocks(
    first: tl.tensor, length: tl.tensor, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    """Blocks [low, high) hold a key that a query of the tile sees; every query sees all of [full_low, full_high)."""
    end = tl.minimum(first + BLOCK_Q, length)
    full_high, high = (first + 1) // BLOCK_K, tl.cdiv(end, BLOCK_K)
    low, full_low = 0, 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_K
        full_low = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_K), full_high)
    return low, full_low, full_high, high


@triton.jit
def _query_blocks(
    first: tl.tensor, length: tl.tensor, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    """Blocks [low, high) hold a query that sees a key of the tile; in [full_low, full_high) every query sees all."""
    last = tl.minimum(first + BLOCK_K, length) - 1
    end, full_end = length, length
    if WINDOW > 0:
        end, full_end = tl.minimum(last + WINDOW, length), tl.minimum(first + WINDOW, length)
    full_low = tl.cdiv(last, BLOCK_Q)
    return first // BLOCK_Q, full_low, tl.maximum(full_end // BLOCK_Q, full_low), tl.cdiv(end, BLOCK_Q)


@triton.jit
def _edge_block(edge: tl.tensor, low: tl.tensor, full_low: tl.tensor, full_high: tl.tensor) -> Any:
    """The edge-th of the blocks before full_low and from full_high on."""
    return tl.where(edge < full_low - low, low + edge, full_high + edge - (full_low - low))


@triton.jit
def _load(
    x: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHECK: tl.constexpr,
) -> Any:
    """[BLOCK_R, BLOCK_E] of x from row ``first``; 0 from column HEAD_DIM on and, with CHECK, from row ``end`` on."""
    row, column = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_E)[None, :]
    pointers = x + tl.cast(first, tl.int64) * COLUMNS + row * COLUMNS + column
    if CHECK:
        value = tl.load(pointers, mask=_exists(first + row, column, end, HEAD_DIM, BLOCK_E), other=0.0)
    elif BLOCK_E != HEAD_DIM:
        value = tl.load(pointers, mask=column < HEAD_DIM, other=0.0)
    else:
        value = tl.load(pointers)
    return value


@triton.jit
def _load_stats(
    stats: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    rows: tl.tensor,
    BLOCK_R: tl.constexpr,
    CHECK: tl.constexpr,
) -> Any:
    """lse and delta [BLOCK_R] of the sample's rows from ``first``; with CHECK 0 at rows from ``end`` on.

    Loaded one by one, Triton 3.6 makes every thread fetch every value that it needs, and wgmma is serialized.
    """
    row = first + tl.arange(0, BLOCK_R)[:, None]
    pointers = stats + (tl.cast(head, tl.int64) * rows + start + row) * 4 + tl.arange(0, 4)[None, :]
    stats_RP = tl.load(pointers, mask=row < end, other=0.0) if CHECK else tl.load(pointers)
    even, odd = tl.split(tl.reshape(stats_RP, [BLOCK_R, 2, 2]))
    lse_R, _ = tl.split(even)
    delta_R, _ = tl.split(odd)
    return lse_R, delta_R


@triton.jit
def _store(
    x: tl.tensor,
    value_RE: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    row, column = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_E)[None, :]
    pointers = x + tl.cast(first, tl.int64) * COLUMNS + row * COLUMNS + column
    mask = _exists(first + row, column, end, HEAD_DIM, BLOCK_E)
    tl.store(pointers, value_RE.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _exists(row: tl.tensor, column: tl.tensor, end: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr) -> Any:
    exists = row < end
    if BLOCK_E != HEAD_DIM:
        exists = exists & (column < HEAD_DIM)
    return exists
