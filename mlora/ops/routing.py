"""Which rows of a microbatch belong to whom, for references as segments and for kernels as small tables.

It travels with the microbatch and is never kept on a module: with several in flight a "current" one would be another's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mlora.ops.devices import sent
from mlora.types import Microbatch, SampleRef, Segment, padded

ROW_TILE, NARROW_TILE = 64, 16  # rows of one program
PIECE = 512  # most rows of a sample that one sum runs over
SAMPLE_FIELDS = 5  # slot, first row, length, ordinal, step
NOBODY = -1  # the slot of padding rows
_TABLES = ("positions_T", "samples", "starts", "lengths", "spans", "pieces", "row_tiles", "narrow_tiles")
_CAPACITY = 16  # tables are padded to a multiple, so that shapes repeat


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The rows of one microbatch.

    Attributes:
        positions_T: int64 on the device, a row's place in its sample; 0 for padding.
        dropout: whether adapters' dropout applies (not in evaluation).
        samples: int32 [5, S]: slot, first row, length, ordinal, step; the padding rows as one of NOBODY; then empty.
        starts, lengths: int32 [S], rows 1 and 2 of ``samples`` with 0 for the padding.
        spans: int32 [G, 3]: slot, first piece and number of pieces of each segment; empty ones at the end.
        flat, shapes: all tables one after another in one tensor, and their shapes.
        pieces, row_tiles, narrow_tiles: int32 [N, 8]: slot, first row, rows that are left of the sample, offset in it,
            ordinal, step, two unused, of each tile of PIECE, ROW_TILE or NARROW_TILE rows.
    """

    segments: tuple[Segment, ...]
    rows: int
    sample_lengths: list[int]
    positions_T: torch.Tensor
    dropout: bool
    samples: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    spans: torch.Tensor
    pieces: torch.Tensor
    row_tiles: torch.Tensor
    narrow_tiles: torch.Tensor
    flat: torch.Tensor
    shapes: tuple[torch.Size, ...]

    @property
    def longest(self) -> int:
        """At least the longest sample's rows; a power of two, so that kernels are launched for few different ones."""
        return 1 << max(7, (max(self.sample_lengths, default=1) - 1).bit_length())

    @property
    def kind(self) -> tuple[object, ...]:
        """What kernels are launched for; microbatches of one kind differ in what the tables hold."""
        return self.shapes, self.longest, self.dropout

    def clone(self) -> Routing:
        """The same tables in other memory."""
        flat = self.flat.clone()
        return replace(self, flat=flat, **_tables(flat, self.shapes))

    def copy_(self, other: Routing) -> None:
        """Take over the tables of a microbatch of the same kind."""
        self.flat.copy_(other.flat)

    def sample_rows(self) -> list[tuple[Segment, SampleRef, slice]]:
        """Every sample with its segment and its rows, in row order."""
        return [
            (segment, sample, slice(first, last))
            for segment in self.segments
            for sample, first, last in segment.sample_rows()
        ]


def route(microbatch: Microbatch, device: torch.device, dropout: bool = True) -> Routing:
    """The tables of a microbatch, sent to the device in one copy."""
    samples, spans = _samples(microbatch), _spans(microbatch)
    starts = torch.where(samples[0] == NOBODY, 0, samples[1])
    lengths = torch.where(samples[0] == NOBODY, 0, samples[2])
    owner = torch.repeat_interleave(torch.arange(samples.shape[1]), samples[2].long())
    positions = torch.arange(microbatch.rows, dtype=torch.int32) - samples[1][owner]
    positions[microbatch.tokens :] = 0
    tiles = [_tiles(samples, rows) for rows in (PIECE, ROW_TILE, NARROW_TILE)]
    parts = [positions, samples, starts, lengths, spans, *tiles]
    flat = sent(torch.cat([part.reshape(-1) for part in parts]), device)
    shapes = tuple(part.shape for part in parts)
    return Routing(
        segments=microbatch.segments,
        rows=microbatch.rows,
        sample_lengths=microbatch.sample_lengths(),
        dropout=dropout,
        flat=flat,
        shapes=shapes,
        **_tables(flat, shapes),
    )


def _tables(flat: torch.Tensor, shapes: tuple[torch.Size, ...]) -> dict[str, Any]:
    """Views of the tables by name; each starts at a multiple of 16 bytes, as kernels like it."""
    parts = flat.split([shape.numel() for shape in shapes])
    views = dict(zip(_TABLES, (part.view(shape) for part, shape in zip(parts, shapes, strict=True)), strict=True))
    return views | {"positions_T": views["positions_T"].long()}


def _samples(microbatch: Microbatch) -> torch.Tensor:
    entries = [
        (segment.slot, first, last - first, sample.ordinal, segment.step)
        for segment in microbatch.segments
        for sample, first, last in segment.sample_rows()
    ]
    entries.append((NOBODY, microbatch.tokens, microbatch.rows - microbatch.tokens, 0, 0))
    entries += [(NOBODY, 0, 0, 0, 0)] * (padded(len(entries), _CAPACITY) - len(entries))
    return torch.tensor(entries, dtype=torch.int32).T.contiguous()


def _spans(microbatch: Microbatch) -> torch.Tensor:
    entries, first = [], 0
    for segment in microbatch.segments:
        count = sum(-(-(last - begin) // PIECE) for _, begin, last in segment.sample_rows())
        entries.append((segment.slot, first, count))
        first += count
    entries += [(NOBODY, 0, 0)] * (padded(len(entries), 4) - len(entries))
    return torch.tensor(entries, dtype=torch.int32).view(-1, 3)


def _tiles(samples: torch.Tensor, tile: int) -> torch.Tensor:
    """Tiles never reach over a sample's end; empty ones fill the table up."""
    slot, first, length, ordinal, step = samples
    counts = -(-length.long() // tile)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    offset = ((torch.arange(len(owner)) - (torch.cumsum(counts, 0) - counts)[owner]) * tile).int()
    fields = [slot[owner], first[owner] + offset, length[owner] - offset, offset, ordinal[owner], step[owner]]
    tiles = torch.stack([*fields, torch.zeros_like(offset), torch.zeros_like(offset)], dim=1)
    return torch.nn.functional.pad(tiles, (0, 0, 0, padded(len(tiles), 2 * _CAPACITY) - len(tiles)))
