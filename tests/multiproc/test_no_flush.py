"""There is no flush: measured on a process per stage over gloo, with joins, leaves, evaluations, STEPs and seams."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from harness import check_all_passed, run
from stub_stages import STAGES, Run, assert_no_flush

pytestmark = pytest.mark.timed


def test_processes_take_the_planned_time_and_are_never_empty(tmp_path):
    check_all_passed(run("stub_stages:process", STAGES, str(tmp_path / "run"), deadline_s=150))
    assert_no_flush(Run(*pickle.loads((tmp_path / "run").read_bytes())))


@pytest.mark.slow
def test_costs_of_the_first_microbatches_predict_the_time_of_the_next(tmp_path):
    from benchmarks.pipeline_prediction import compare, default_cache, prepare_model

    found = compare(prepare_model(default_cache()), tmp_path, fit=30, following=40)
    assert abs(found.predicted_s / found.measured_s - 1) < 0.25


@pytest.mark.slow
def test_the_benchmark_counts_what_the_stream_sends(tmp_path):
    """Per microbatch [T, D] of float32 each way; 5 numbers down and 1 + the last stage's layer up for each step."""
    script = Path(__file__).parents[2] / "benchmarks/pipeline.py"
    options = "--shape tiny --device cpu --microbatch-tokens 256 --stream 6 --repeats 1 --rows mlora/4x2x32"
    command = [sys.executable, str(script), *options.split(), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    found = json.loads((tmp_path / "out").read_text())
    steps, rows = 4 * 6, 6 * 256  # of all adapters; no microbatch has padding
    assert found["tokens"] == rows
    assert found["sent"] == [rows * 64 * 4 + steps * 5 * 8, rows * 64 * 4 + steps * 2 * 8]
    assert 0 < found["bubble"][0] < 1 and all(0 < share < 1 for share in found["busy"][0])
    assert found["between_ramps"][0] > 0
