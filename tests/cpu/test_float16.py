"""float16: the power of two in the tokens' weights keeps small gradients, and nothing else sees it."""

from __future__ import annotations

import pytest

from mlora.pipeline import stage
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float16")
    rows = str(write_rows(folder / "rows.jsonl", 40, 0, 30))
    adapter = {"name": "a", "dataset": rows, "r": 8, "learning_rate": 3e-3, "max_steps": 100, "warmup_steps": 1}
    return save_tiny(folder / "model", "llama3.2"), adapter | {"per_device_train_batch_size": 8}, folder


def _train(case, name, **top):
    model, adapter, folder = case
    return outcome(run(folder / name, model, [adapter], **top), "a")


def test_after_100_steps_the_loss_is_that_of_float32(case):
    half, full = _train(case, "half", dtype="float16"), _train(case, "full", dtype="float32")
    assert full.losses[-1] < 0.7 * full.losses[1]
    assert half.losses[-1] == pytest.approx(full.losses[-1], rel=0.01)
    assert half.norms[0] == pytest.approx(full.norms[0], rel=0.01)


def test_the_power_of_two_leaves_no_trace_where_nothing_vanishes(case, monkeypatch):
    """In float32 it only moves exponents: every bit stays."""
    model, adapter, folder = case
    plain = outcome(run(folder / "plain", model, [adapter | {"max_steps": 10}], dtype="float32"), "a")

    original = stage.Stage.__init__

    def scaled(self, *arguments, **options):
        original(self, *arguments, **options)
        self._scale = stage._FLOAT16_SCALE

    monkeypatch.setattr(stage.Stage, "__init__", scaled)
    with_scale = outcome(run(folder / "scaled", model, [adapter | {"max_steps": 10}], dtype="float32"), "a")
    assert not plain.differences(with_scale)
