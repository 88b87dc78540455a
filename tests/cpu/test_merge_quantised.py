"""Adapters of quantised bases say so, and ``mlora merge`` takes the original weights or the dequantised ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mlora import cli
from mlora.config import data_config
from mlora.engine.evaluate import evaluate
from mlora.engine.merge import merge
from mlora.engine.trained import read_trained
from mlora.engine.use import Models
from mlora.engine.verify import verify_run
from mlora.models.spec import Quantization
from mlora.types import UserError
from tests.cpu.runs import run, write_rows
from tests.cpu.test_fp8 import needs_products
from tests.cpu.test_quantised import KINDS, bnb_config, dequantised_copy, with_bitsandbytes
from tests.cpu.tiny import save_tiny, tiny_tokenizer

IDS = torch.arange(3, 40)[None]
BASES = {"nf4 double": KINDS["nf4 double"], "int8": KINDS["int8"], "fp8": Quantization(kind="fp8")}


def _run(folder: Path, model: Path, **keys: object) -> Path:
    data = write_rows(folder / "rows.jsonl", 12, seed=1)
    adapter = {"name": "a", "dataset": str(data), "learning_rate": 2e-2, "max_steps": 3, "warmup_steps": 0, "r": 8}
    run(folder / "run", model, [adapter], **keys)
    return folder / "run" / "adapters" / "a"


def _keys(quantization: Quantization) -> dict[str, object]:
    return {"quantization": quantization.kind} | ({"double_quantization": True} if quantization.double else {})


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=needs_products if name == "fp8" else ()) for name in BASES]
)
def trained(request, tmp_path_factory):
    """How the base was quantised, its folder, the adapter's."""
    folder = tmp_path_factory.mktemp("merge")
    model = save_tiny(folder / "model", "llama3.1", shards=2)
    skipped = ["layers.1"]
    adapter = _run(folder, model, **_keys(BASES[request.param]), quantization_skip_modules=skipped)
    return BASES[request.param], model, adapter


def _logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_the_files_say_how_the_base_was_kept(trained):
    quantization, _, adapter = trained
    kept, dtype = read_trained(adapter).kept
    assert (kept.kind, kept.double, dtype) == (quantization.kind, quantization.double, torch.float32)
    assert len(kept.dense) == 7 and all(name.startswith("model.layers.1.") for name in kept.dense)
    assert f"with its linears kept as {quantization}" in (adapter / "README.md").read_text()


def test_files_of_a_plain_base_say_nothing(tmp_path):
    adapter = _run(tmp_path, save_tiny(tmp_path / "model", "llama2"))
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_trained(adapter).kept is None and "kept as" not in (adapter / "README.md").read_text()


def test_a_damaged_note_is_told(trained, tmp_path, capsys):
    _, _, adapter = trained
    weights = load_file(adapter / "adapter_model.safetensors")
    for note in ("{", "[]", '{"kind": "nf4"}', '{"dtype": "no", "dense": []}'):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
        save_file(weights, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt", "base_quantization": note})
        assert cli.main(["merge", str(tmp_path / "a"), str(tmp_path / "m")]) == 2
        assert "adapter_model.safetensors: its metadata are damaged" in capsys.readouterr().err


def test_the_original_weights_or_the_dequantised_ones(trained, tmp_path):
    """The dequantised ones give the logits of training, the original ones do not; each merge knows both differences."""
    quantization, model, adapter = trained
    original = merge(adapter, tmp_path / "original")
    dequantised = merge(adapter, tmp_path / "dequantised", dequantised=True)
    assert dequantised.max_difference <= 1e-5 * dequantised.scale < 1e-3 * original.scale < original.max_difference
    assert dequantised.other_difference == pytest.approx(original.max_difference, rel=1e-3)
    assert original.other_difference == pytest.approx(dequantised.max_difference, rel=1)
    assert (original.quantization.kind, original.changed) == (quantization.kind, dequantised.changed)
    plain = _logits(model, adapter)
    assert (_logits(tmp_path / "original") - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert (_logits(tmp_path / "dequantised") - plain).abs().max() > 1e-3 * plain.abs().max()


def test_adapters_are_asked_on_the_base_as_it_was_kept(trained, tmp_path):
    quantization, model, adapter = trained
    merge(adapter, tmp_path / "dequantised", dequantised=True)
    rows = data_config(write_rows(tmp_path / "rows.jsonl", 6, seed=2))
    (asked,) = evaluate(Models([adapter], dtype="float32"), rows)
    (merged,) = evaluate(Models([], base=str(tmp_path / "dequantised"), dtype="float32"), rows)
    # FP8's products round the rows too
    assert asked.loss == pytest.approx(merged.loss, rel=2e-2 if quantization.kind == "fp8" else 1e-5)
    plain = _run(tmp_path, model)
    with pytest.raises(UserError, match=r"differently kept bases \(a: .*, b: not quantised\)"):
        evaluate(Models([adapter, plain.rename(tmp_path / "b")]), rows)


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_a_stored_base_is_merged_dequantised(tmp_path, name, capsys):
    """As PEFT on a dense model of the dequantised weights; the new model is no quantised one any more."""
    model = save_tiny(tmp_path / "model", "llama3.1")
    stored = tmp_path / "stored"
    with_bitsandbytes(model, bnb_config(KINDS[name]), torch.float32).save_pretrained(stored)
    tiny_tokenizer().save_pretrained(stored)
    adapter = _run(tmp_path, stored)
    assert cli.main(["merge", str(adapter), str(tmp_path / "refused")]) == 2
    assert "or --dequantised (dequantised=True) to merge into what they stand for" in capsys.readouterr().err
    assert cli.main(["merge", str(adapter), str(tmp_path / "merged"), "--dequantised"]) == 0
    out = capsys.readouterr().out
    assert "21 modules merged into the dequantised weights, written as float32" in out
    assert f"logits of adapter on base ({KINDS[name]}, as it was trained)" in out and "they would" not in out
    theirs = _logits(dequantised_copy(model, KINDS[name], tmp_path / "dense"), adapter)
    assert (_logits(tmp_path / "merged") - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_a_dtype_in_which_weights_are_packed_is_not_theirs(tmp_path):
    """bitsandbytes packs bytes into whichever dtype suits whoever shards them."""
    config = bnb_config(KINDS["nf4"], bnb_4bit_quant_storage=torch.float16)
    stored = tmp_path / "stored"
    with_bitsandbytes(save_tiny(tmp_path / "model", "qwen2"), config, torch.bfloat16).save_pretrained(stored)
    tiny_tokenizer().save_pretrained(stored)
    assert merge(_run(tmp_path, stored), tmp_path / "merged", dequantised=True).dtype == "bfloat16"
    assert {x.dtype for x in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_a_head_that_is_stored_quantised_is_dequantised(tmp_path, name):
    """transformers leaves the head as it is only where llm_int8_skip_modules is not given."""
    stored, config = tmp_path / "stored", bnb_config(KINDS[name], llm_int8_skip_modules=["k_proj"])
    with_bitsandbytes(save_tiny(tmp_path / "model", "llama3.1"), config, torch.float32).save_pretrained(stored)
    tiny_tokenizer().save_pretrained(stored)
    assert not load_file(stored / "model.safetensors")["lm_head.weight"].is_floating_point()
    adapter = _run(tmp_path, stored)
    (check,) = verify_run(tmp_path / "run")
    assert check.ok, check
    merged = merge(adapter, tmp_path / "merged", dequantised=True)
    assert merged.max_difference <= 1e-5 * merged.scale
    theirs = AutoModelForCausalLM.from_pretrained(stored).dequantize()
    ours = load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(ours, theirs.lm_head.weight, rtol=1e-6, atol=0)


def test_the_command_prints_both_differences(trained, tmp_path, capsys):
    quantization, _, adapter = trained
    assert cli.main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    out = capsys.readouterr().out
    assert "modules merged into the original weights, written as float32" in out
    assert f"adapter on base ({quantization}, as it was trained)" in out
    assert "merged into the dequantised weights they would differ by" in out


def test_nothing_to_dequantise(tmp_path, capsys):
    adapter = _run(tmp_path, save_tiny(tmp_path / "model", "llama2"))
    assert cli.main(["merge", str(adapter), str(tmp_path / "merged"), "--dequantised"]) == 2
    assert "say that its base was quantised; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
