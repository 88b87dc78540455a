"""Whether 1F1B's microbatches in flight or twice as many: by what the simulator makes of costs seen on a GPU."""

import argparse
import sys

import pytest
import torch

from benchmarks.pipeline import Row, adapter_runs, run_config, shape_of, token_count
from mlora.engine.device import full_rows
from mlora.engine.layout import layer_counts
from mlora.engine.memory import rows_of
from mlora.engine.prepare import in_flight_factor
from mlora.pipeline.schedule import CostModel, Planner, Stream, in_flight, makespan, rows, simulate
from mlora.types import padded

LAYER, LAYER_ROW, HEAD_ROW = 0.12e-3, 0.72e-6, 3.3e-6  # s; Llama-8B's shape on one H200, F or B (benchmarks/RESULTS.md)
SHAPE = argparse.Namespace(shape="llama-8b", layers=None)


def bucket(row_count):
    return max(1024, padded(row_count, 256))


def tokens_per_s(spec, row, stages, factor):
    config = run_config(row, 48, torch.device("cpu"), argparse.Namespace(microbatch_tokens=8192, in_flight=factor))
    flight, layers = in_flight(stages, factor), layer_counts(spec, stages)
    planner = Planner(rows_of(config), flight, bucket(1), bucket)
    for adapter in adapter_runs(row, config, spec):
        adapter.state = "training"
        planner.join(adapter.index, adapter.next_step)
    positions = planner.window(sys.maxsize)

    def backward(stage, row_count):
        return layers[stage] * (LAYER + LAYER_ROW * row_count)

    def forward(stage, row_count):
        return backward(stage, row_count) + (HEAD_ROW * row_count if stage == stages - 1 else 0)

    cost = CostModel(forward=forward, backward=backward)
    timeline = simulate(rows(positions, flight), Stream(positions, stages), cost)
    return sum(token_count(p.microbatch) for p in positions if p.microbatch) / makespan(timeline)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    "row", [f"mlora/{row}" for row in ("8x1x512", "8x2x512", "8x16x512", "16x1x512", "4x4x512", "8x4x128-2048")]
)
def test_the_choice_is_within_3_percent_of_the_better(row, stages):
    row, (_, spec) = Row.parse(row), shape_of(SHAPE)
    config = run_config(row, 48, torch.device("cpu"), argparse.Namespace(microbatch_tokens=8192, in_flight=None))
    step_rows = [row.samples * (row.shortest + row.longest) / 2] * row.jobs
    chosen = in_flight_factor(config, stages, step_rows, full_rows(torch.device("cuda")))
    speed = {factor: tokens_per_s(spec, row, stages, factor) for factor in (1, 2)}
    assert speed[chosen] > 0.97 * max(speed.values()), speed
