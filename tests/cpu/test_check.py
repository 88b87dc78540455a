"""What ``mlora check``, ``mlora schema`` and ``mlora init`` say, on a tiny model and files of our own."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import pytest

from mlora.cli import main
from mlora.config import AdapterConfig, RunConfig, load_config
from mlora.engine.check import tokenizer_warnings
from mlora.engine.schema import config_schema
from tests.cpu.data_helpers import make_tokenizer
from tests.cpu.runs import files_up_to, write_rows
from tests.cpu.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2")


@pytest.fixture
def config(tmp_path, model):
    rows = [{"prompt": "one two", "completion": " three"}] * 5 + [{"prompt": "one " * 60, "completion": " two"}]
    rows.append({"prompt": "cat", "completion": " dog" * 60})
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_rows(tmp_path / "many.jsonl", 30, 1)
    tree = {"base_model": str(model), "defaults": {"num_train_epochs": 2, "per_device_train_batch_size": 4}}
    tree["adapters"] = [
        {"name": "few", "dataset": "few.jsonl", "max_length": 40, "r": 4, "target_modules": ["q_proj", "down_proj"]},
        {"name": "many", "dataset": "many.jsonl", "val_size": 0.2, "eval_steps": [0.5], "r": 64},
    ]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_check_says_what_would_be_trained_and_writes_nothing(config, capsys):
    assert main(["check", str(config)]) == 0
    text = capsys.readouterr().out
    few, many = text.split("\nfew\n")[1].split("\nmany\n")
    assert "7 read, 6 kept, 1 of them cut" in few
    assert "dropped    1 prompt longer than max_length" in few
    assert "6 matched: 3 q_proj, 3 down_proj" in few
    assert f"r 4: {4 * 3 * (64 + 64 + 112 + 64):,} parameters" in few
    assert "4 steps of 4 rows, 2.00 epochs of 6 rows" in few
    assert "16.7% of the rows are cut at max_length 40" in few
    assert "one two[[ three<|im_end|>]]" in few
    assert few.count("sample ") == 3
    bars = [line.split()[-1] for line in few.splitlines() if " - " in line]
    assert sum(int(count) for count in bars) == 6
    assert "24 rows" in many
    assert "evaluated on 6 held-out rows behind steps 6, 12" in many
    assert "--max-lora-rank 64" in text
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["question,answer", "a b,", "c,d", ","], "2 rows have an empty answer"),
        (["prompt,completion", "a b,", "c, d"], "1 row has an empty answer"),
        (["question,answer", "a b,c", "c,d e"], None),
    ],
)
def test_an_empty_answer_is_a_warning(config, capsys, rows, said):
    (config.parent / "rows.csv").write_text("\n".join(rows))
    assert main(["check", str(config), "--set", "adapters.few.dataset=rows.csv"]) == 0
    few = capsys.readouterr().out.split("\nfew\n")[1].split("\nmany\n")[0]
    assert said in few if said else "empty answer" not in few


def test_an_empty_answer_between_others_is_a_warning(config, capsys):
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "a cb", strict=False)]
    turns[1]["content"] = ""
    (config.parent / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    assert main(["check", str(config), "--set", "adapters.few.dataset=chat.jsonl"]) == 0
    assert "1 row has an empty answer" in capsys.readouterr().out


def test_what_is_missing_here_is_a_warning(config, capsys):
    (config.parent / "taken").write_text("")
    assert main(["check", str(config), "--set", f"output_dir={config.parent / 'taken'}"]) == 0
    assert "warning: a run would not start here: output_dir: " in capsys.readouterr().out


def test_control_characters_of_a_row_are_shown_and_do_nothing_to_the_terminal(config, capsys):
    (config.parent / "text.jsonl").write_text(json.dumps({"text": "one \x1b[2J two\r\nthree"}))
    assert main(["check", str(config), "--set", "adapters.few.dataset=text.jsonl"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\r" not in text
    assert r" \x1b[2J two\x0d" in text


def test_the_first_token_of_a_text_which_nothing_predicts_is_not_marked(config, capsys):
    (config.parent / "text.jsonl").write_text(json.dumps({"text": "one two three"}))
    assert main(["check", str(config), "--set", "adapters.few.dataset=text.jsonl"]) == 0
    few = capsys.readouterr().out.split("\nfew\n")[1]
    tokens, trained = (int(x) for x in re.search(r"sample 1: (\d+) tokens, (\d+) of them trained", few).groups())
    assert trained == tokens - 1
    assert re.search(r"\| [^\[]+\[\[.*three", few)


def test_check_names_the_fault_of_every_adapter(config, capsys):
    faults = ["--set", "adapters.few.dataset=none.jsonl", "--set", "adapters.many.target_modules=[nothing]"]
    assert main(["check", str(config), *faults]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "none.jsonl: cannot be read" in errors[0]
    assert "'nothing' matches no module" in errors[1]


def test_check_looks_at_all_that_a_run_would_refuse(config, capsys):
    faults = {
        "adapters.few.init_from=nowhere": "adapters[few].init_from: ",
        "adapters.few.dataset.chat_template=nowhere": "adapters[few].dataset.chat_template: ",
        "adapters.few.dataset={path: few.jsonl, format: text, columns: {prompt: x}}": "[few].dataset.columns.prompt: ",
        "adapters.few.eval_dataset={path: few.jsonl, format: text, columns: {prompt: x}}": "[few].eval_dataset.columns",
        "adapters.few.dataset=[{path: few.jsonl, weight: 1e-6}, {path: many.jsonl, weight: 1e6}]": (
            "adapters[few].dataset: with these weights an epoch has"
        ),
        "pipeline.layers=[2, 2]": "pipeline.layers: [2, 2] must be 2 positive numbers that add up to 3",
        "pipeline.stages=4": "pipeline.stages: 4 stages for a model of 3 layers",
    }
    for fault, message in faults.items():
        assert main(["check", str(config), "--set", fault]) == 2
        assert message in capsys.readouterr().err


def test_a_logger_that_is_not_installed_here_is_a_warning(config, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["check", str(config), "--set", "report_to=wandb"]) == 0
    assert "warning: a run would not start here: report_to: wandb is not installed" in capsys.readouterr().out


def test_a_tokenizer_that_loses_characters_is_named():
    assert not any("loses" in warning for warning in tokenizer_warnings(tiny_tokenizer()))
    assert any("pad token is its end" in warning for warning in tokenizer_warnings(tiny_tokenizer()))
    lossy = make_tokenizer(kind="bytes", pad_token="<s>")
    lossy.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    (warning,) = tokenizer_warnings(lossy)
    assert "loses characters" in warning
    assert "'A'" in warning


def test_the_schema_has_every_key_and_takes_what_the_reader_takes(config):
    jsonschema = pytest.importorskip("jsonschema")
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"].keys() == {field.name for field in dataclasses.fields(RunConfig)} | {"defaults"}
    assert schema["$defs"]["adapter"]["properties"].keys() >= {
        field.name for field in dataclasses.fields(AdapterConfig)
    }
    tree = json.loads(config.read_text())
    jsonschema.validate(tree, schema)
    for change in ({"microbatch_token": 3}, {"dtype": "int8"}, {"adapters": []}, {"defaults": {"use_dora": True}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tree | change, schema)


@pytest.mark.parametrize("kind", [RunConfig, AdapterConfig])
def test_the_schema_says_what_stands_behind_a_key(kind):
    schema = config_schema()
    properties = schema["properties"] if kind is RunConfig else schema["$defs"]["adapter"]["properties"]
    told = {entry["description"] for entry in properties.values() if "description" in entry}
    written = re.findall(r"  # (.+)$", inspect.getsource(kind).partition("    def ")[0], re.MULTILINE)
    assert written and told >= set(written)


def test_the_schema_is_printed(capsys):
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    r = printed["$defs"]["adapter"]["properties"]["r"]
    assert (r["type"], r["default"]) == ("integer", 16)
    assert "held out" in printed["$defs"]["adapter"]["properties"]["val_size"]["description"]
    assert printed["required"] == ["base_model", "adapters"]


def test_init_writes_a_file_that_loads_and_overwrites_none(tmp_path, model, capsys):
    (tmp_path / "data").mkdir()
    for name in ("my rows.jsonl", "no.jsonl", "NO.json"):
        write_rows(tmp_path / "data" / name, 4, 1)
    files = [str(path) for path in sorted((tmp_path / "data").iterdir())]
    output = tmp_path / "run.yaml"
    command = ["init", *files, "--output", str(output), "--base-model", str(model)]
    assert main(command) == 0
    config = load_config(output)
    assert [adapter.name for adapter in config.adapters] == ["NO", "my-rows", "no-2"]
    assert [adapter.dataset.path.resolve().name for adapter in config.adapters] == [
        file.split("/")[-1] for file in files
    ]
    assert config.base_model == str(model)
    assert "# prompt_completion: prompt, completion" in output.read_text()
    before = output.read_text()
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_text() == before
    assert main(["check", str(output)]) == 0


def test_init_names_the_columns_that_are_read_and_paths_as_they_count(tmp_path, model, monkeypatch, capsys):
    row = {"output": "42", "input": "6 * 7", "instruction": "Compute.", "id": 1}
    (tmp_path / "sums.json").write_text(json.dumps([row]))
    monkeypatch.chdir(tmp_path)
    files = ["sums.json", "--base-model", os.path.relpath(model), "--output", "deep/run.yaml"]
    assert main(["init", *files]) == 0
    assert capsys.readouterr().out.startswith("deep/run.yaml: 1 adapter, sums; look it over")
    assert "# alpaca: instruction, output, input\n" in Path("deep/run.yaml").read_text()
    config = load_config("deep/run.yaml")
    assert config.base_model == str(model.resolve()) and config.adapters[0].dataset.path.exists()


def test_init_of_a_file_of_no_known_format_says_what_there_is(tmp_path, capsys):
    (tmp_path / "odd.jsonl").write_text('{"foo": 1}\n')
    assert main(["init", str(tmp_path / "odd.jsonl"), "--output", str(tmp_path / "run.yaml")]) == 2
    assert "odd.jsonl:1: the format cannot be guessed from the columns foo" in capsys.readouterr().err
    assert main(["init", "org/name", "--output", str(tmp_path / "run.yaml")]) == 2
    assert "a data set on the hub is written hub: org/name" in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


def test_init_on_a_full_disk_leaves_nothing_that_a_second_one_would_find(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 4, 1)
    command = ["init", str(rows), "--output", str(tmp_path / "run.yaml")]
    with files_up_to(100):
        assert main(command) == 2
    assert "run.yaml: cannot be written" in capsys.readouterr().err
    assert main(command) == 0
