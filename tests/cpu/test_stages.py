"""Invariant 3: stages, microbatches in flight and replicas change no bit of any adapter."""

from __future__ import annotations

import math

import pytest

from mlora.adapters.state import AdapterState
from tests.cpu.runs import outcome, run, write_rows


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Different r, targets, dropout, clipping, accumulation over ragged rows and numbers of steps."""
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "max_steps": 6, "warmup_steps": 1}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 30, i, 25)) for i, name in enumerate("abcd")}
    return [
        common
        | {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5}
        | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        common | {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"], "max_steps": 3},
        common | {"name": "c", "dataset": rows["c"], "r": 16, "layers_to_transform": [3], "use_rslora": True},
        common | {"name": "d", "dataset": rows["d"], "r": 64, "per_device_train_batch_size": 1, "max_steps": 9},
    ]


@pytest.fixture(scope="module")
def one_stage(model, adapters, tmp_path_factory):
    results = run(tmp_path_factory.mktemp("one"), model, adapters)
    return {name: outcome(results, name) for name in results.adapters}


def _local(stages, in_flight=None):
    return {"stages": stages, "transport": "local"} | ({"in_flight": in_flight} if in_flight else {})


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_change_no_bit(tmp_path, model, adapters, one_stage, stages, in_flight):
    results = run(tmp_path / "run", model, adapters, microbatch_tokens=90, pipeline=_local(stages, in_flight))
    for name, alone in one_stage.items():
        assert not alone.differences(outcome(results, name)), name


def test_one_adapter_of_one_sample_never_deadlocks(tmp_path, model, adapters, one_stage):
    lonely = [adapters[3] | {"max_steps": 9}]
    results = run(tmp_path / "run", model, lonely, pipeline=_local(4))
    assert not one_stage["d"].differences(outcome(results, "d"))


def test_recompute_and_a_short_queue_change_no_bit(tmp_path, model, adapters, one_stage):
    results = run(tmp_path / "run", model, adapters, recompute=True, max_active=2, pipeline=_local(3))
    for name, alone in one_stage.items():
        assert not alone.differences(outcome(results, name)), name


def test_an_early_end_and_a_nan_over_stages_change_no_bit(tmp_path, model, adapters, one_stage, monkeypatch):
    original = AdapterState.__init__

    def poisoned(self, config, *args):
        original(self, config, *args)
        if config.name == "c" and len(self.master):
            self.master[:64] = math.nan
            self.refresh()

    def on_step(report):
        return "end" if (report.adapter, report.step) == ("a", 2) else None

    monkeypatch.setattr(AdapterState, "__init__", poisoned)
    results = run(tmp_path / "run", model, adapters, on_step, microbatch_tokens=90, pipeline=_local(4))
    for name in "bd":
        assert not one_stage[name].differences(outcome(results, name)), name
    assert results.adapters["c"].state == "failed"
    ended = outcome(results, "a")
    assert ended.losses == one_stage["a"].losses[:2]
    shorter = run(tmp_path / "one", model, adapters, on_step)
    assert not ended.differences(outcome(shorter, "a"))


def test_an_error_on_a_later_stage_is_the_one_that_is_raised(tmp_path, model, adapters, monkeypatch):
    original = AdapterState.__init__

    def failing(self, config, targets, shapes, layers, *args):
        if 3 in layers:
            raise RuntimeError("stage with layer 3 broke")
        original(self, config, targets, shapes, layers, *args)

    monkeypatch.setattr(AdapterState, "__init__", failing)
    with pytest.raises(RuntimeError, match="layer 3 broke"):
        run(tmp_path / "run", model, adapters, pipeline=_local(4))
