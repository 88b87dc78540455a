"""``init_from``: an adapter begins with the matrices of another one, and what differs is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlora import UserError, cli
from mlora.config import data_config
from mlora.engine.evaluate import evaluate
from mlora.engine.trained import read_trained
from mlora.engine.use import Models
from mlora.types import Note
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import save_tiny

KEYS = {"r": 4, "learning_rate": 1e-2, "warmup_steps": 0, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose adapter has learnt something."""
    folder = tmp_path_factory.mktemp("first")
    model = save_tiny(folder / "model", "llama3.2")
    data = write_rows(folder / "rows.jsonl", 24, seed=1)
    results = run(folder / "run", model, [{"name": "one", "dataset": str(data), "max_steps": 12, **KEYS}])
    return folder, outcome(results, "one")


def _second(first, folder, name="two", **keys):
    source = first[0]
    adapter = {"dataset": str(source / "rows.jsonl"), **KEYS, "init_from": str(source / "run/adapters/one")}
    return run(folder, source / "model", [{"name": name, "max_steps": 2, **adapter, **keys}])


def test_training_begins_with_the_other_adapters_matrices(first, tmp_path):
    """At rate 0 nothing moves, so what is exported is what was read, and the first loss is what ``eval`` finds."""
    results = _second(first, tmp_path / "run", learning_rate=0.0, per_device_train_batch_size=24)
    found = outcome(results, "two")
    assert found.weights.keys() == first[1].weights.keys()
    assert all(torch.equal(found.weights[key], x) for key, x in first[1].weights.items())
    model = AutoModelForCausalLM.from_pretrained(first[0] / "model", dtype=torch.float32)
    assert PeftModel.from_pretrained(model, first[0] / "run/adapters/one")
    (evaluation,) = evaluate(Models([first[0] / "run"]), data_config(first[0] / "rows.jsonl"))
    assert found.losses[0] == pytest.approx(evaluation.loss, rel=1e-6)
    assert found.losses[0] < 0.8 * first[1].losses[0]


def test_it_goes_on_learning_over_two_stages_with_the_same_bits(first, tmp_path, capsys):
    one = outcome(_second(first, tmp_path / "one", max_steps=4), "two")
    two = run(
        tmp_path / "stages",
        first[0] / "model",
        [
            {
                "name": "two",
                "dataset": str(first[0] / "rows.jsonl"),
                "max_steps": 4,
                **KEYS,
                "init_from": str(first[0] / "run/adapters/one"),
            }
        ],
        pipeline={"stages": 2, "transport": "local"},
    )
    assert outcome(two, "two").differences(one) == []
    assert one.losses[0] < 0.8 * first[1].losses[0] and one.differences(first[1])
    assert f"begins with {first[0] / 'run/adapters/one'}; with the same settings" in capsys.readouterr().out


def test_what_differs_is_named(first, tmp_path, capsys):
    _second(first, tmp_path / "run", lora_alpha=8, lora_dropout=0.1)
    out = capsys.readouterr().out
    assert "lora_alpha is 8 here and was 32 there; lora_dropout is 0.1 here and was 0 there" in out
    assert "its update counts 0.25 times as much as there" in out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"r": 8}, r"init_from: .*one has r 4, not 8; write r: 4"),
        ({"target_modules": ["q_proj"]}, r"is not configured here \(18 modules differ\).*q_proj, k_proj, v_proj"),
        ({"init_from": "/nowhere"}, r"init_from: /nowhere/adapter_config.json: cannot be read"),
        ({"init_from": 5}, r"init_from: expected a path"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_before_anything_is_written(first, tmp_path, keys, message):
    with pytest.raises(UserError, match=message) as caught:
        _second(first, tmp_path / "run", **keys)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_another_base_is_refused(first, tmp_path):
    other = save_tiny(tmp_path / "other", "llama3.2", num_hidden_layers=2)
    adapter = {"name": "two", "dataset": str(first[0] / "rows.jsonl"), **KEYS}
    with pytest.raises(UserError, match=r"init_from: .*made for another model"):
        run(tmp_path / "run", other, [{**adapter, "init_from": str(first[0] / "run/adapters/one")}])


def test_a_run_that_goes_on_takes_its_checkpoint_and_not_the_beginning(first, tmp_path):
    import mlora

    whole = outcome(_second(first, tmp_path / "whole", max_steps=6), "two")
    adapter = {"name": "two", "dataset": str(first[0] / "rows.jsonl"), **KEYS, "max_steps": 6}
    adapter["init_from"] = str(first[0] / "run/adapters/one")
    config = {"base_model": str(first[0] / "model"), "output_dir": str(tmp_path / "cut"), "adapters": [adapter]}
    config |= {"save_steps": 1}

    def interrupt(report):
        if report.step == 3:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        mlora.train(config, on_step=interrupt)
    results = mlora.train(config, resume="auto")
    assert outcome(results, "two").differences(whole) == []
    assert load_file(tmp_path / "cut/adapters/two/adapter_model.safetensors")


def test_what_pefts_file_asks_for_beyond_plain_lora_is_refused_or_told(first, tmp_path, recwarn):
    folder = tmp_path / "adapter"
    shutil.copytree(first[0] / "run/adapters/one", folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path / "peft")
    all_fields = json.loads((tmp_path / "peft/adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(all_fields))
    read_trained(folder)
    assert not [one for one in recwarn if issubclass(one.category, Note)]
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"new_config": {"x": 1}, "old_config": None}))
    with pytest.warns(Note, match="adapter_config.json: new_config is not known here and is left aside"):
        read_trained(folder)
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"kasa_config": {"beta": 1e-4}}))
    with pytest.raises(UserError, match=r"kasa_config: .* is not supported: KaSA changes the frozen weights"):
        read_trained(folder)


def test_a_runs_folder_where_one_adapter_is_asked_for(first, tmp_path, capsys):
    for command in (["merge", str(first[0] / "run"), str(tmp_path / "x")],
                    ["export", str(first[0] / "run"), str(tmp_path / "x"), "--portable"]):  # fmt: skip
        assert cli.main(command) == 2
        assert f"run: is a run's folder, and one adapter is asked for; give {first[0]}/run/adapters/one" in (
            capsys.readouterr().err
        )
    with pytest.raises(UserError, match=r"adapters\[two\].init_from: .*run: is a run's folder, and one adapter is"):
        _second(first, tmp_path / "run", init_from=str(first[0] / "run"))
