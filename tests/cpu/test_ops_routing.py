"""The tables of a microbatch: every row belongs to one entry and one tile, and what only fills a table owns none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlora.ops.routing import NARROW_TILE, NOBODY, ROW_TILE, SAMPLE_FIELDS, route
from mlora.types import Microbatch
from tests.cpu.packing import packed, routed

CPU = torch.device("cpu")
MICROBATCHES = {
    "one row": {0: [1]},
    "no padding": {3: [16]},
    "tiles and one row more": {0: [64, 65, 16, 17]},
    "one-row samples": {5: [1] * 19},
    "several segments": {7: [33, 1], 0: [65, 64, 7], 21: [1], 4: [130]},
    "one entry short of full": {0: [3] * 14},
    "full without an empty entry": {0: [2] * 15},
    "one entry over": {0: [5] * 16},
    "five segments": {slot: [slot + 1] for slot in (9, 2, 6, 1, 3)},
    "tiles filled up with the padding's entry": {0: [64] * 14 + [70]},
    "nothing": {},
}
each_microbatch = pytest.mark.parametrize(
    "microbatch", [packed(lengths) for lengths in MICROBATCHES.values()], ids=MICROBATCHES
)


@each_microbatch
def test_samples_are_the_microbatches_own_then_the_padding_then_empty(microbatch):
    routing = route(microbatch, CPU)
    expected, first = [], 0
    for segment in microbatch.segments:
        for sample in segment.samples:
            expected.append([segment.slot, first, sample.length, sample.ordinal, segment.step])
            first += sample.length
    expected.append([NOBODY, first, microbatch.rows - first, 0, 0])
    entries = routing.samples.T.tolist()
    assert routing.samples.shape[0] == SAMPLE_FIELDS and len(entries) % 16 == 0
    assert entries[: len(expected)] == expected
    assert all(entry == [NOBODY, 0, 0, 0, 0] for entry in entries[len(expected) :])


@each_microbatch
def test_starts_and_lengths_leave_the_padding_out(microbatch):
    routing = route(microbatch, CPU)
    count = len(microbatch.sample_lengths())
    assert routing.starts[:count].tolist() == routing.samples[1, :count].tolist()
    assert routing.lengths[:count].tolist() == microbatch.sample_lengths() == routing.sample_lengths
    assert not routing.starts[count:].any() and not routing.lengths[count:].any()
    assert len(routing.starts) == len(routing.lengths) == routing.samples.shape[1]
    longest = max(microbatch.sample_lengths(), default=1)
    assert routing.longest >= longest and routing.longest in (128, 256, 512, 1024)
    assert routing.longest < 2 * max(longest, 65)


@each_microbatch
def test_positions_restart_with_every_sample(microbatch):
    positions = [position for length in microbatch.sample_lengths() for position in range(length)]
    routing = route(microbatch, CPU)
    assert routing.rows == microbatch.rows == len(routing.positions_T)
    assert routing.positions_T.tolist() == positions + [0] * (microbatch.rows - len(positions))
    assert routing.positions_T.dtype == torch.int64


@each_microbatch
def test_spans_give_each_segment_its_samples(microbatch):
    routing = route(microbatch, CPU)
    spans = routing.spans.tolist()
    assert len(spans) % 4 == 0
    for segment, (slot, first, count) in zip(microbatch.segments, spans, strict=False):
        assert slot == segment.slot
        assert routing.samples[3, first : first + count].tolist() == [sample.ordinal for sample in segment.samples]
        assert routing.samples[1, first] == segment.start
        assert routing.samples[0, first : first + count].tolist() == [slot] * count
    assert sum(count for *_, count in spans) == len(microbatch.sample_lengths())
    assert all(span == [NOBODY, 0, 0] for span in spans[len(microbatch.segments) :])


@each_microbatch
@pytest.mark.parametrize(("table", "tile"), [("row_tiles", ROW_TILE), ("narrow_tiles", NARROW_TILE)])
def test_tiles_cover_every_row_once_and_cross_no_sample(microbatch, table, tile):
    routing = route(microbatch, CPU)
    tiles = getattr(routing, table).tolist()
    samples = {
        first: (slot, length, ordinal, step)
        for slot, first, length, ordinal, step in routing.samples.T.tolist()
        if length
    }
    covered = []
    for slot, first, left, offset, ordinal, step, *_ in tiles:
        covered.append(range(first, first + min(tile, left)))
        if left:
            assert offset % tile == 0
            assert samples[first - offset] == (slot, left + offset, ordinal, step)
    assert sorted(row for rows in covered for row in rows) == list(range(microbatch.rows))
    sizes = [*microbatch.sample_lengths(), microbatch.rows - microbatch.tokens]
    count = sum(-(-size // tile) for size in sizes)
    assert len(tiles) % 32 == 0
    assert all(covered[:count]) and not any(covered[count:])


@each_microbatch
def test_sample_rows_are_the_segments_own(microbatch):
    routing = route(microbatch, CPU)
    found = [(segment.slot, sample.ordinal, rows.start, rows.stop) for segment, sample, rows in routing.sample_rows()]
    entries = routing.samples.T[: len(found)].tolist()
    assert found == [(slot, ordinal, first, first + length) for slot, first, length, ordinal, _ in entries]
    assert len(found) == len(microbatch.sample_lengths())


def test_steps_and_ordinals_are_carried():
    one, two = (
        packed({slot: [3, 2]}, step=step, first_ordinal=ordinal) for slot, step, ordinal in ((0, 8, 4), (1, 2, 0))
    )
    second = replace(two.segments[0], start=5)
    routing = route(Microbatch(0, (*one.segments, second), 16), CPU)
    assert routing.samples[3, :4].tolist() == [4, 5, 0, 1]
    assert routing.samples[4, :4].tolist() == [8, 8, 2, 2]


def test_shapes_repeat():
    """Kernels are launched for the tables' shapes; few of them may occur."""
    shapes = {
        tuple(
            getattr(routed({0: [9] * count}), table).shape
            for table in ("samples", "spans", "row_tiles", "narrow_tiles")
        )
        for count in range(1, 15)
    }
    assert shapes == {((SAMPLE_FIELDS, 16), (4, 3), (32, 8), (32, 8))}
