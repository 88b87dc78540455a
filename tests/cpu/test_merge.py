"""``mlora merge``, ``export --portable`` and ``eval`` against transformers and PEFT."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlora import UserError, cli
from mlora.config import data_config
from mlora.data import open_source, open_tokens
from mlora.engine import progress
from mlora.engine.evaluate import evaluate
from mlora.engine.merge import merge
from mlora.engine.portable import export_portable
from mlora.engine.prepare import cache_folder
from mlora.engine.use import Models
from mlora.models.tokenizer import load_tokenizer
from mlora.tasks import SftTask
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import VOCAB, save_tiny

ADAPTERS = {
    "wide": {"r": 8, "max_steps": 25},
    "rs": {"r": 3, "use_rslora": True, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "mixed": {"r": 2, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"layers.1.*": 9}, "use_rslora": True},
    "layer": {"r": 2, "target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]},
}
IDS = torch.arange(3, 40)[None]


def _run(folder, model):
    data = write_rows(folder / "rows.jsonl", 12, seed=1)
    keys = {"dataset": str(data), "learning_rate": 2e-2, "max_steps": 3, "warmup_steps": 0}
    run(folder / "run", model, [{"name": name, **keys, **more} for name, more in ADAPTERS.items()])
    return folder / "run"


@pytest.fixture(scope="module", params=["llama2", "qwen3"])
def trained(request, tmp_path_factory):
    """Sharded with a head of its own, and in one file with a tied one."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(folder / "model", request.param, shards=3 if request.param == "llama2" else 1)
    return _run(folder, model)


def _logits(folder, adapter=None, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("name", ADAPTERS)
def test_transformers_loads_the_merged_model_and_gives_pefts_logits(trained, tmp_path, name):
    adapter, base = trained / "adapters" / name, trained.parent / "model"
    merged = merge(adapter, tmp_path / "merged")
    theirs, ours = _logits(base, adapter), _logits(tmp_path / "merged")
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (theirs - _logits(base)).abs().max() > 1e-2 * theirs.abs().max()
    assert merged.max_difference <= 1e-5 * merged.scale and merged.changed > 1e-2 * merged.scale
    assert merged.dtype == "float32"
    files = {path.name for path in base.iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == files
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_modules_without_adapter_keep_their_bits(trained, tmp_path):
    merge(trained / "adapters" / "layer", tmp_path / "merged")
    changed = set()
    for path in (trained.parent / "model").glob("*.safetensors"):
        base, merged = load_file(path), load_file(tmp_path / "merged" / path.name)
        assert base.keys() == merged.keys()
        changed |= {key for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {"model.layers.1.self_attn.v_proj.weight", "model.layers.1.mlp.up_proj.weight"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_written_and_its_rounding_reported(trained, tmp_path, dtype):
    merged = merge(trained / "adapters" / "wide", tmp_path / "merged", dtype=dtype)
    kinds = {x.dtype for path in (tmp_path / "merged").glob("*.safetensors") for x in load_file(path).values()}
    assert kinds == {getattr(torch, dtype)} and merged.dtype == dtype
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == dtype
    theirs, ours = _logits(trained.parent / "model", trained / "adapters" / "wide"), _logits(tmp_path / "merged")
    assert 1e-5 * merged.scale < merged.max_difference < 0.1 * merged.scale
    assert 1e-5 < (ours - theirs).abs().max() / theirs.abs().max() < 0.1


def test_a_bfloat16_base_is_rounded_once(tmp_path):
    """In float32 and then rounded, as torch itself does it; adding rounded products would differ."""
    folder = _run(tmp_path, save_tiny(tmp_path / "model", "smollm2", dtype=torch.bfloat16))
    merge(folder / "adapters" / "wide", tmp_path / "merged")
    weights = load_file(folder / "adapters" / "wide" / "adapter_model.safetensors")
    name = "model.layers.2.mlp.down_proj"
    a, b = (weights[f"base_model.model.{name}.lora_{k}.weight"].double() for k in "AB")
    base = load_file(tmp_path / "model" / "model.safetensors")[f"{name}.weight"]
    exact = base.double() + 4.0 * (b @ a)
    found = load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert (found == exact.bfloat16()).float().mean() > 0.999


def test_what_cannot_be_merged_is_told_and_leaves_nothing(trained, tmp_path, capsys):
    adapter = trained / "adapters" / "wide"
    other = save_tiny(tmp_path / "other", "llama2", num_hidden_layers=2)
    assert cli.main(["merge", str(adapter), str(tmp_path / "m"), "--base", str(other)]) == 2
    assert "made for another model" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    assert cli.main(["merge", str(adapter), str(tmp_path / "taken")]) == 2
    assert f"{tmp_path / 'taken'}: is there already" in capsys.readouterr().err
    shutil.copytree(adapter, tmp_path / "huge")
    weights = {key: x * 3e4 for key, x in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(weights, tmp_path / "huge" / "adapter_model.safetensors")
    assert cli.main(["merge", str(tmp_path / "huge"), str(tmp_path / "m"), "--dtype", "float16"]) == 2
    assert "not finite in float16 once merged; choose dtype" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["huge", "other", "taken"]


def test_a_full_disk_names_the_bytes(trained, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(UserError, match=r"merged: cannot be written, it needs [\d,]{7} bytes: No space left"):
            merge(trained / "adapters" / "wide", disk / "merged")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_command_states_dtype_and_difference(trained, tmp_path, capsys):
    assert cli.main(["merge", str(trained / "adapters" / "rs"), str(tmp_path / "merged")]) == 0
    out = capsys.readouterr().out
    assert "written as float32" in out and "differ by at most" in out


def test_a_long_command_says_how_far_it_is(trained, tmp_path, capsys, monkeypatch):
    adapter, rows = trained / "adapters" / "rs", write_rows(tmp_path / "held-out.jsonl", 5, seed=5)
    assert cli.main(["merge", str(adapter), str(tmp_path / "short")]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_EVERY_S", 0)
    assert cli.main(["merge", str(adapter), str(tmp_path / "long")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("merging: 1 of ") and lines[-1] == "comparing logits: 3 of 3 layers"
    assert cli.main(["eval", str(adapter), "--with-base", "--file", str(rows)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "evaluating: 10 of 10 rows"


def test_the_portable_form_of_rslora_gives_the_same_logits(trained, tmp_path, capsys):
    assert cli.main(["export", str(trained / "adapters" / "rs"), str(tmp_path / "out"), "--portable"]) == 0
    assert "use_rslora false, lora_alpha 8.66025" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["use_rslora"] is False and config["lora_alpha"] == pytest.approx(5 * math.sqrt(3))
    base = trained.parent / "model"
    theirs, ours = _logits(base, trained / "adapters" / "rs"), _logits(base, tmp_path / "out")
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert "Portable form" in (tmp_path / "out" / "README.md").read_text()


def test_what_is_no_rslora_is_copied(trained, tmp_path):
    assert export_portable(trained / "adapters" / "wide", tmp_path / "out") is None
    for path in (trained / "adapters" / "wide").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def _reference(base, adapter, path):
    """transformers' loss of each row by itself, weighted by its tokens; and how many tokens are the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()
    task = SftTask(data_config(path).dataset, load_tokenizer(base, VOCAB), 256, VOCAB)
    data = open_tokens(open_source(data_config(path).dataset), task.encode, task.digest, cache_folder() / "tokens")
    total, hits, count = 0.0, 0, 0
    for i in range(len(data)):
        ids, labels = (torch.tensor(x).long()[None] for x in data.sample(i))
        with torch.no_grad():
            out = model(ids, labels=labels)
        targets = labels[0, 1:]
        kept = targets != -100
        total, count = total + float(out.loss) * int(kept.sum()), count + int(kept.sum())
        hits += int((out.logits[0, :-1].argmax(-1) == targets)[kept].sum())
    return total / count, hits / count, count


def test_loss_and_accuracy_are_those_of_transformers(trained, tmp_path):
    path = write_rows(tmp_path / "held-out.jsonl", 40, seed=5, longest=40)
    found = evaluate(Models([trained], with_base=True), data_config(path))
    assert [evaluation.adapter for evaluation in found] == ["base", "layer", "mixed", "rs", "wide"]
    for evaluation in found:
        adapter = None if evaluation.adapter == "base" else trained / "adapters" / evaluation.adapter
        loss, accuracy, count = _reference(trained.parent / "model", adapter, path)
        assert evaluation.loss == pytest.approx(loss, rel=1e-5) and evaluation.accuracy == accuracy
        assert evaluation.target_tokens == count and evaluation.rows == 40
        assert evaluation.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert len({evaluation.loss for evaluation in found}) == 1 + len(ADAPTERS)
    assert found[-1].accuracy > 0.1, "an accuracy of nothing proves nothing"


def test_an_adapters_loss_is_the_same_alone(trained, tmp_path):
    path = write_rows(tmp_path / "held-out.jsonl", 20, seed=5)
    together = evaluate(Models([trained], with_base=True), data_config(path))
    alone = evaluate(Models([trained / "adapters" / "rs"]), data_config(path))
    assert alone == [e for e in together if e.adapter == "rs"]
    for stages in (2, 3):
        assert evaluate(Models([trained], with_base=True, stages=stages), data_config(path)) == together


def test_the_command_prints_a_table_or_json(trained, tmp_path, capsys):
    path = write_rows(tmp_path / "held-out.jsonl", 5, seed=5)
    assert cli.main(["eval", str(trained), "--file", str(path)]) == 0
    assert capsys.readouterr().out.startswith("adapter     rows     tokens      loss  perplexity  accuracy\n")
    assert cli.main(["eval", str(trained), "--file", str(path), "--json", "--set", "max_length=60"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["adapter"] for entry in entries] == ["layer", "mixed", "rs", "wide"]
    assert cli.main(["eval", str(trained), "--file", str(path), "--set", "dataset.format=messages"]) == 2
    assert "held-out.jsonl:1" in capsys.readouterr().err
