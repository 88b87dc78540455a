"""bitsandbytes' bases on CUDA: its own bits, and parity with transformers + PEFT on it.

python -m pytest tests/gpu/test_quantised_cuda.py -s      # also shows how near the two trainings stay
"""

# ruff: noqa: E402 - what needs bitsandbytes is imported where it is there

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

for _needed in ("bitsandbytes", "accelerate", "peft"):
    pytest.importorskip(_needed, reason=f"needs {_needed}")

import bitsandbytes

from mlora import parse_config
from mlora.adapters.optimizer import warmup_steps
from mlora.data import open_source, open_tokens
from mlora.engine.device import prepare
from mlora.engine.memory import MemoryModel
from mlora.engine.prepare import cache_folder
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization
from mlora.models.spec import load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.models.weights import Checkpoint
from mlora.tasks import SftTask
from tests.cpu.peft_reference import train_with_peft
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.test_quantised import (
    KEYS,
    KINDS,
    bnb_config,
    dequantised_copy,
    kept_tensors,
    our_tensors,
    parts,
    with_bitsandbytes,
)
from tests.cpu.tiny import VOCAB, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    prepare(CUDA)
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_weights_are_kept_and_dequantised_as_bitsandbytes_does(model, name, dtype):
    check_quantization(KINDS[name], dtype, CUDA)
    theirs = with_bitsandbytes(model, bnb_config(KINDS[name]), dtype, CUDA)
    for linear, part in parts(model, KINDS[name], dtype, CUDA):
        weight = theirs.get_submodule(linear).weight
        expected, ours = kept_tensors(weight), our_tensors(part)
        out_OD = torch.empty(theirs.get_submodule(linear).out_features, theirs.get_submodule(linear).in_features)
        out_OD = out_OD.to(CUDA, dtype)
        part.write(out_OD)
        if name == "int8":
            expected[1] = expected[1].mul(1.0 / 127.0)
            whole = (weight.data * expected[1][:, None]).to(dtype)
        else:
            whole = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert all(torch.equal(x, y.to(CUDA)) for x, y in zip(ours, expected, strict=True)), linear
        assert torch.equal(out_OD, whole), linear


def _adapter(folder):
    keys = {"learning_rate": 5e-3, "max_steps": 20, "warmup_steps": 5, "max_grad_norm": 1.0, "weight_decay": 0.01}
    rows = str(write_rows(folder / "rows.jsonl", 70, seed=1))
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return {"name": "a", "dataset": rows, "r": 8, "lora_dropout": 0.1, "seed": 7} | keys | batch


def _distance(ours, reference):
    """‖w - w_ref‖ / ‖w_ref - w₀‖ over all matrices."""
    off = sum(float((ours[key].double() - w.double()).square().sum()) for key, w in reference.weights.items())
    moved = sum(float((w - reference.start[key]).double().square().sum()) for key, w in reference.weights.items())
    return math.sqrt(off / moved)


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_twenty_steps_are_those_of_peft(tmp_path, model, name):
    """In float32 on one stage and two. With int8 bitsandbytes rounds activations too on CUDA, so there PEFT gets the
    dense model of the dequantised weights."""
    adapter, kind = _adapter(tmp_path), KINDS[name]
    config = parse_config({"base_model": "x", "adapters": [adapter]}).adapters[0]
    task = SftTask(config.dataset, load_tokenizer(model, VOCAB), 256, VOCAB)
    data = open_tokens(open_source(config.dataset), task.encode, task.digest, cache_folder() / "tokens")
    steps = config.max_steps, warmup_steps(config, config.max_steps)
    int8 = name == "int8"
    base = dequantised_copy(model, kind, tmp_path / "dense", CUDA) if int8 else model
    reference = train_with_peft(
        base, config, data, *steps, torch.float32, None if int8 else bnb_config(kind), device="cuda"
    )
    one_step = replace(config, max_steps=1)
    dense = train_with_peft(model, one_step, data, 1, 0, torch.float32, device="cuda")
    assert abs(dense.losses[0] / reference.losses[0] - 1) > 1e-4, "the base is not quantised"
    assert reference.losses[-1] < 0.9 * reference.losses[0], "the reference has learnt nothing"
    assert max(reference.norms) > config.max_grad_norm, "clipping was never active"
    for stages in (1, 2):
        pipeline = {"stages": stages, "transport": "local"}
        ours = outcome(
            run(tmp_path / str(stages), model, [adapter], dtype="float32", pipeline=pipeline, **KEYS[name]), "a"
        )
        scalars = [
            max(abs(x / y - 1) for x, y in zip(mine, theirs, strict=True))
            for mine, theirs in ((ours.losses, reference.losses), (ours.norms, reference.norms))
        ]
        weights = _distance(ours.weights, reference)
        print(f"{name}, {stages} stages: losses {scalars[0]:.1e}, norms {scalars[1]:.1e}, weights {weights:.1e}")
        assert max(scalars) <= 5e-5 and weights <= 1e-3


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_the_16_bit_model_is_never_on_the_device(tmp_path, name):
    """While loading, and what stays is what the memory model says."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_hidden_layers": 16}
    folder = save_tiny(tmp_path, "llama2", num_key_value_heads=8, dtype=torch.bfloat16, **sizes)
    spec, quantization = load_spec(folder), KINDS[name]
    checkpoint = Checkpoint(folder, spec)

    def predicted(of):
        model = MemoryModel(spec=spec, dtype=torch.bfloat16, layers=(16,), in_flight=(1,), adapters=(), quantization=of)
        return model.need(0, 16, False).weights

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = Decoder(spec, checkpoint, range(16), torch.bfloat16, CUDA, quantization)
    peak, stays = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    assert kept.is_last and peak < 0.8 * predicted(None)
    assert stays == pytest.approx(predicted(quantization), rel=0.05)  # blocks of 512 bytes, rotary tables, codes
