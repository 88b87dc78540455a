"""Invariant 1: an adapter's losses, norms and weights are those of transformers + PEFT + torch.optim."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import BitsAndBytesConfig

from mlora import parse_config
from mlora.adapters.optimizer import warmup_steps
from mlora.adapters.state import AdapterState
from mlora.data import open_source, open_tokens
from mlora.engine.prepare import cache_folder
from mlora.models.tokenizer import load_tokenizer
from mlora.tasks import SftTask
from tests.cpu.peft_reference import Reference, exact_norms, train_with_peft
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import VOCAB, save_tiny

STEPS = 40


@pytest.fixture
def exported_exactly(monkeypatch):
    """The masters themselves: what is exported is rounded to float32."""
    kept = {}
    original = AdapterState.matrices

    def spy(self):
        matrices = original(self)
        kept.setdefault(self.config.name, {}).update(matrices)  # of every stage
        return matrices

    monkeypatch.setattr(AdapterState, "matrices", spy)
    return kept


def _adapters(folder, steps=STEPS):
    return [
        {
            "name": "wide",
            "dataset": str(write_rows(folder / "wide.jsonl", 70, seed=1)),
            "r": 8,
            "lora_dropout": 0.1,
            "learning_rate": 5e-3,
            "max_steps": steps,
            "warmup_steps": 5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 1.0,
            "weight_decay": 0.01,
            "seed": 7,
        },
        {
            "name": "narrow",
            "dataset": str(write_rows(folder / "narrow.jsonl", 33, seed=2, longest=20)),
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "layers_to_transform": [0, 2],
            "learning_rate": 1e-2,
            "lr_scheduler_type": "linear",
            "max_steps": steps,
            "per_device_train_batch_size": 3,
            "max_grad_norm": 0.5,
        },
        {
            "name": "plain",
            "dataset": str(write_rows(folder / "plain.jsonl", 20, seed=3)),
            "r": 16,
            "optim": "sgd",
            "target_modules": "all-linear",
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "max_steps": steps,
            "per_device_train_batch_size": 4,
        },
    ]


def _plus(folder):
    """LoRA+ with other ranks and alphas in some modules, two of them in one merged linear."""
    return {
        "name": "plus",
        "dataset": str(write_rows(folder / "plus.jsonl", 30, seed=4)),
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 7, r"layers\.[01]\.mlp\.(up|down)_proj": 2},
        "alpha_pattern": {"v_proj": 20, "^model.layers.1.self_attn.q_proj": 3},
        "learning_rate": 2e-3,
        "loraplus_lr_ratio": 6,
        "weight_decay": 0.3,
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "lora_dropout": 0.1,
    }


def _reference(model, adapter, dtype, quantization=None) -> Reference:
    config = parse_config({"base_model": "x", "adapters": [adapter]}).adapters[0]
    task = SftTask(config.dataset, load_tokenizer(model, VOCAB), 256, VOCAB)
    data = open_tokens(open_source(config.dataset), task.encode, task.digest, cache_folder() / "tokens")
    steps = config.max_steps
    return train_with_peft(model, config, data, steps, warmup_steps(config, steps), dtype, quantization)


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


def _distance(matrices, reference: Reference) -> float:
    """‖w - w_ref‖ / ‖w_ref - w₀‖ over all matrices."""
    off = moved = 0.0
    assert 2 * len(matrices) == len(reference.weights)
    for name, (a, b) in matrices.items():
        for kind, ours in (("A", a), ("B", b.T)):
            key = f"base_model.model.{name}.lora_{kind}.weight"
            off += float((ours.double() - reference.weights[key].double()).square().sum())
            moved += float((reference.weights[key].double() - reference.start[key].double()).square().sum())
    return math.sqrt(off / moved)


@pytest.mark.parametrize(("dtype", "scalars", "weights"), [("float64", 1e-9, 1e-9), ("float32", 1e-5, 1e-3)])
def test_adapters_together_equal_their_own_peft_runs(tmp_path, monkeypatch, exported_exactly, dtype, scalars, weights):
    if dtype == "float64":
        exact_norms(monkeypatch)
    model = save_tiny(tmp_path / "model", "llama3.1")
    adapters = [*_adapters(tmp_path), _plus(tmp_path)]
    results = run(tmp_path / "run", model, adapters, dtype=dtype, microbatch_tokens=100)
    for adapter in adapters:
        reports = results.adapters[adapter["name"]].reports
        reference = _reference(model, adapter, getattr(torch, dtype))
        assert reference.losses[-1] < 0.7 * reference.losses[0], "the reference has learnt nothing"
        if "max_grad_norm" in adapter:
            assert max(reference.norms) > adapter["max_grad_norm"], "clipping was never active"
        assert _relative([r.loss for r in reports], reference.losses) <= scalars
        assert _relative([r.grad_norm for r in reports], reference.norms) <= scalars
        assert _distance(exported_exactly[adapter["name"]], reference) <= weights


QUANTISED = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", QUANTISED)
def test_on_a_quantised_base_they_equal_peft_on_bitsandbytes(tmp_path, exported_exactly, kind, stages):
    """In float32, which is bitsandbytes' finest: with int8 it then multiplies by dequantised weights too, on a CPU."""
    model = save_tiny(tmp_path / "model", "llama3.1")
    adapters = _adapters(tmp_path, steps=20)
    asked = {"quantization": kind} | ({"double_quantization": True} if kind == "nf4" else {})
    pipeline = {"stages": stages, "transport": "local"}
    results = run(tmp_path / "run", model, adapters, dtype="float32", microbatch_tokens=100, pipeline=pipeline, **asked)
    for adapter in adapters:
        reports = results.adapters[adapter["name"]].reports
        reference = _reference(model, adapter, torch.float32, QUANTISED[kind])
        dense = _reference(model, adapter | {"max_steps": 1}, torch.float32)
        assert _relative(dense.losses, reference.losses[:1]) > 1e-4, "the base is not quantised"
        assert reference.losses[-1] < 0.9 * reference.losses[0], "the reference has learnt nothing"
        assert _relative([r.loss for r in reports], reference.losses) <= 1e-5
        assert _relative([r.grad_norm for r in reports], reference.norms) <= 1e-5
        assert _distance(exported_exactly[adapter["name"]], reference) <= 1e-3
