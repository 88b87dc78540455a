"""There is no flush: measured on a process per stage over gloo, with joins, leaves, evaluations, STEPs and seams."""

import pickle

import pytest
from harness import check_all_passed, run
from stub_stages import STAGES, Run, assert_no_flush


def test_processes_take_the_planned_time_and_are_never_empty(tmp_path):
    check_all_passed(run("stub_stages:process", STAGES, str(tmp_path / "run"), deadline_s=90))
    assert_no_flush(Run(*pickle.loads((tmp_path / "run").read_bytes())))


@pytest.mark.slow
def test_costs_of_the_first_microbatches_predict_the_time_of_the_next(tmp_path):
    from benchmarks.pipeline_prediction import compare, default_cache, prepare_model

    found = compare(prepare_model(default_cache()), tmp_path, fit=30, following=40)
    assert abs(found.predicted_s / found.measured_s - 1) < 0.25
