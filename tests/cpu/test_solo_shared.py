"""Invariants 2, 5 and 6: neighbours, cuts, recompute and a neighbour's fault change no bit of an adapter."""

from __future__ import annotations

import math

import pytest
import torch

import mlora
from mlora.adapters.state import AdapterState
from tests.cpu.processor import INTEL, STRICT
from tests.cpu.runs import config, outcome, run, write_rows
from tests.cpu.tiny import save_tiny

STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Adapters of different r, targets, dropout, accumulation and length."""
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "max_steps": STEPS, "warmup_steps": 0}
    return {
        "subject": common
        | {"r": 8, "lora_dropout": 0.1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        | {"dataset": str(write_rows(folder / "a.jsonl", 41, seed=1, longest=30))},
        "other": common
        | {"r": 4, "target_modules": ["q_proj", "gate_proj", "down_proj"], "per_device_train_batch_size": 5}
        | {"dataset": str(write_rows(folder / "b.jsonl", 30, seed=2)), "seed": 3},
        "third": common
        | {"r": 64, "lora_dropout": 0.3, "per_device_train_batch_size": 1, "max_steps": 3, "use_rslora": True}
        | {"dataset": str(write_rows(folder / "c.jsonl", 9, seed=3, longest=50))},
    }


@pytest.fixture(scope="module")
def alone(model, adapters, tmp_path_factory):
    """The subject by itself, its whole step in one microbatch."""
    folder = tmp_path_factory.mktemp("alone")
    return outcome(run(folder, model, _named(adapters, "subject")), "subject")


def _named(adapters, *names, **changes):
    return [{"name": name, **adapters[name], **changes.get(name, {})} for name in names]


@pytest.mark.parametrize("order", [("subject", "other", "third"), ("third", "other", "subject")])
@pytest.mark.parametrize("cap", [16, 60, 150, 4096])
def test_company_and_cuts_change_no_bit(tmp_path, model, adapters, alone, order, cap):
    shared = run(tmp_path / "run", model, _named(adapters, *order), microbatch_tokens=cap)
    assert not alone.differences(outcome(shared, "subject"))


def test_the_comparison_can_fail(tmp_path, model, adapters, alone):
    shared = run(tmp_path / "run", model, _named(adapters, "subject", subject={"seed": 43}))
    assert alone.differences(outcome(shared, "subject"))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_no_bit(tmp_path, model, adapters, alone, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        again = run(tmp_path / "run", model, _named(adapters, "subject"), microbatch_tokens=90)
    finally:
        torch.set_num_threads(before)
    assert not alone.differences(outcome(again, "subject"))


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.skipif(not INTEL, reason=STRICT))])
def test_company_stages_and_threads_change_no_bit_at_a_models_widths(tmp_path, threads):
    """A library cuts sums of about 900 terms or more otherwise for many rows, or for several threads."""
    sizes = {"hidden_size": 960, "intermediate_size": 1536, "num_attention_heads": 15, "num_key_value_heads": 5}
    model = save_tiny(tmp_path / "model", "llama2", num_hidden_layers=2, **sizes)
    common = {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 3, "lora_dropout": 0.1}
    one = common | {"name": "subject", "dataset": str(write_rows(tmp_path / "a.jsonl", 7, seed=1, longest=30)), "r": 8}
    two = common | {"name": "other", "dataset": str(write_rows(tmp_path / "b.jsonl", 9, seed=2, longest=150)), "r": 24}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = outcome(run(tmp_path / "alone", model, [one]), "subject")
        torch.set_num_threads(threads)
        for stages in (1, 2):
            shared = mlora.train(config(model, [two, one], tmp_path / f"of_{stages}", stages, microbatch_tokens=400))
            assert not alone.differences(outcome(shared, "subject"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cap", [60, 4096])
def test_recompute_changes_no_bit(tmp_path, model, adapters, alone, cap):
    recomputed = run(
        tmp_path / "run", model, _named(adapters, "other", "subject"), recompute=True, microbatch_tokens=cap
    )
    assert not alone.differences(outcome(recomputed, "subject"))


def test_waiting_in_a_queue_changes_no_bit(tmp_path, model, adapters, alone):
    queued = run(tmp_path / "run", model, _named(adapters, "third", "other", "subject"), max_active=1)
    assert not alone.differences(outcome(queued, "subject"))
    assert all(result.state == "ended" for result in queued.adapters.values())


@pytest.mark.parametrize("decision", ["end", "cancel"])
def test_a_neighbour_that_stops_early_changes_no_bit(tmp_path, model, adapters, alone, decision):
    def on_step(report):
        return decision if report.adapter == "other" and report.step == 2 else None

    shared = run(tmp_path / "run", model, _named(adapters, "other", "subject"), on_step, microbatch_tokens=60)
    assert not alone.differences(outcome(shared, "subject"))
    other = shared.adapters["other"]
    assert len(other.reports) == 2
    assert (other.state, other.folder is None) == (("ended", False) if decision == "end" else ("cancelled", True))


def test_a_neighbours_nan_changes_no_bit_and_the_neighbour_fails_by_name(tmp_path, model, adapters, alone, monkeypatch):
    original = AdapterState.__init__

    def poisoned(self, config, *args):
        original(self, config, *args)
        if config.name == "other":
            self.master[:64] = math.nan
            self.refresh()

    monkeypatch.setattr(AdapterState, "__init__", poisoned)
    shared = run(tmp_path / "run", model, _named(adapters, "other", "subject"), microbatch_tokens=60)
    assert not alone.differences(outcome(shared, "subject"))
    other = shared.adapters["other"]
    assert other.state == "failed" and "not finite in 3 steps in a row" in other.reason
    assert [report.skipped for report in other.reports] == [True] * 3
    assert not (tmp_path / "run" / "adapters" / "other").exists()


def test_a_skipped_step_uses_data_and_rate_but_leaves_weights_and_moments(tmp_path, model, adapters, monkeypatch):
    """Step 3 of the subject is made non-finite once; the run goes on, and its rates are those of an undisturbed run."""
    original = AdapterState.sums_of_squares
    calls = []

    def once_infinite(self):
        calls.append(self)
        return torch.tensor([math.inf]) if len(calls) == 3 else original(self)

    undisturbed = run(tmp_path / "plain", model, _named(adapters, "subject"))
    monkeypatch.setattr(AdapterState, "sums_of_squares", once_infinite)
    disturbed = run(tmp_path / "run", model, _named(adapters, "subject"))
    ours, theirs = (list(x.adapters["subject"].reports) for x in (disturbed, undisturbed))
    assert [r.skipped for r in ours] == [False, False, True] + [False] * (STEPS - 3)
    assert [r.learning_rate for r in ours] == [r.learning_rate for r in theirs]
    assert [r.loss for r in ours[:3]] == [r.loss for r in theirs[:3]]
    assert ours[3].loss != theirs[3].loss
    assert disturbed.adapters["subject"].state == "ended"
