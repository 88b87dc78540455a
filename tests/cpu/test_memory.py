"""The memory model: against peaks that were measured on a GPU, and what is chosen with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.throughput import SHAPES
from mlora import parse_config
from mlora.adapters.targets import match_targets
from mlora.engine.memory import CAPS, USED, MemoryModel, fitted, rows_of
from mlora.models.spec import load_spec

GIB = 2**30
# shape, adapters of r=16 on all linears, rows, peak in GiB, in bf16 on one H200 (benchmarks/RESULTS.md)
FITTED = (
    ("llama-8b", 8, 8192, 44.46),
    ("llama-8b", 0, 8192, 38.8),
    ("llama-8b", 8, 4096, 32.5),
    ("llama-8b", 32, 8192, 61.3),
    ("llama-8b", 1, 1024, 18.7),
)
OTHERS = (
    ("llama-8b", 4, 8192, 41.6),
    ("llama-8b", 1, 16384, 63.4),
    ("llama-1b", 8, 8192, 10.6),
    ("llama-1b", 4, 16384, 16.5),
    ("llama-1b", 2, 8192, 9.4),
    ("smollm2", 8, 8192, 3.8),
    ("smollm2", 16, 32768, 12.8),
)


def _spec(folder, shape):
    LlamaConfig(**SHAPES[shape]).save_pretrained(folder)
    return load_spec(folder)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return _spec(tmp_path_factory.mktemp("llama8b"), "llama-8b")


def _model(spec, adapters, layers=None, in_flight=(1,), **changes):
    entry = {"name": "a", "dataset": "none", "r": 16, "lora_alpha": 32} | changes
    config = parse_config({"base_model": "none", "adapters": [entry]}).adapters[0]
    targets = match_targets(config, spec.num_layers)
    return MemoryModel(
        spec=spec,
        dtype=torch.bfloat16,
        layers=layers or (spec.num_layers,),
        in_flight=in_flight,
        adapters=[(config, targets)] * adapters,
    )


@pytest.mark.parametrize(("shape", "adapters", "rows", "peak"), [*FITTED, *OTHERS])
def test_measured_peaks(tmp_path, shape, adapters, rows, peak):
    need = _model(_spec(tmp_path, shape), adapters).need(0, rows, recompute=False)
    assert need.total / GIB == pytest.approx(peak, rel=0.03)


def test_stages_share_what_one_has(spec):
    one = _model(spec, 4).need(0, 4096, False)
    parts = [_model(spec, 4, (8,) * 4, (1,) * 4).need(stage, 4096, False) for stage in range(4)]
    assert sum(part.weights for part in parts) == one.weights
    assert sum(part.adapters for part in parts) == one.adapters
    assert max(part.total for part in parts) < one.total / 2
    deep = _model(spec, 4, (8,) * 4, (4, 3, 2, 1)).need(0, 4096, False)
    assert 3 < deep.microbatches / parts[0].microbatches < 4


def test_fewer_targets_and_sgd_need_less(spec):
    everything = _model(spec, 1).need(0, 1024, False).adapters
    assert _model(spec, 1, target_modules=["q_proj"]).need(0, 1024, False).adapters < everything / 5
    assert _model(spec, 1, optim="sgd").need(0, 1024, False).adapters < 0.6 * everything


@pytest.mark.parametrize("size", [20, 24, 32, 40, 48, 80, 140])
@pytest.mark.parametrize("recompute", [None, True, False])
def test_what_is_chosen_fits_and_is_the_largest_that_does(spec, size, recompute):
    model = _model(spec, 8)
    rows, again = model.choose(size * GIB, 512, recompute)
    assert recompute is None or again == recompute
    fits = [cap for cap in CAPS if model.need(0, cap, again).total <= USED * size * GIB]
    assert rows == (max(fits) if fits else CAPS[-1])
    if recompute is None and again:
        assert model.need(0, 4096, False).total > USED * size * GIB


def test_a_long_sample_counts(spec):
    model = _model(spec, 1)
    assert model.choose(140 * GIB, 512, None) == (8192, False)
    assert model.choose(80 * GIB, 32768, None) == (8192, True)


def test_without_a_gpu_auto_is_2048_rows_and_what_is_written_stays():
    tree = {"base_model": "none", "device": "cpu", "adapters": [{"name": "a", "dataset": "none"}]}
    base = SimpleNamespace(device=torch.device("cpu"))
    config = fitted(parse_config(tree), base, (32,), (1,), [])
    assert rows_of(config) == 2048 and config.recompute is False
    config = fitted(parse_config(tree | {"microbatch_tokens": 300, "recompute": True}), base, (32,), (1,), [])
    assert rows_of(config) == 300 and config.recompute is True
