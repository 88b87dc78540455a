"""The configuration: what is read, what is refused, and that errors name key and remedy on one line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlora import UserError, cli, load_config, parse_config
from mlora.config import REFUSED, AdapterConfig, DatasetConfig, PipelineConfig, RunConfig, apply_overrides

ROOT = Path(__file__).parents[2]


def _tree(top=None, **adapter):
    return {"base_model": "base", "adapters": [{"name": "a", "dataset": "rows.jsonl", **adapter}], **(top or {})}


def _adapter(**keys) -> AdapterConfig:
    return parse_config(_tree(**keys)).adapters[0]


def _message(tree) -> str:
    with pytest.raises(UserError) as caught:
        parse_config(tree)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reading_a_configuration_needs_no_torch():
    code = (
        "import sys, mlora, mlora.config, mlora.types, mlora.cli\n"
        "mlora.parse_config({'base_model': 'b', 'adapters': [{'name': 'a', 'dataset': 'x'}]})\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_defaults():
    config = parse_config(_tree())
    assert config == RunConfig(
        base_model="base", adapters=(AdapterConfig(name="a", dataset=DatasetConfig(path=Path("rows.jsonl"))),)
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", "2e-4", 2e-4),  # YAML 1.1 reads it as text
        ("learning_rate", 1, 1.0),
        ("r", 8.0, 8),
        ("r", "8", 8),
        ("lora_alpha", 4.5, 4.5),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("target_modules", ["q_proj"], ("q_proj",)),
        ("target_modules", ".*q_proj", ".*q_proj"),
        ("exclude_modules", None, None),
        ("layers_to_transform", [0, 2], (0, 2)),
        ("init_lora_weights", "gaussian", "gaussian"),
        ("init_lora_weights", False, False),
        ("warmup_steps", 0.1, 0.1),
        ("max_grad_norm", 0, 0.0),
    ],
)
def test_values_are_converted(key, value, expected):
    found = getattr(_adapter(**{key: value}), key)
    assert found == expected and type(found) is type(expected)


BAD = {
    "unknown key": ({"learningrate": 1}, "adapters[a].learningrate: unknown key; did you mean 'learning_rate'?"),
    "unlike any key": ({"zzz": 1}, "adapters[a].zzz: unknown key; known keys: adam_beta1"),
    "text for a number": ({"r": "many"}, "adapters[a].r: expected a whole number, found text 'many'"),
    "truth for a number": ({"r": True}, "adapters[a].r: expected a whole number, found a truth value"),
    "a part of a rank": ({"r": 8.5}, "adapters[a].r: expected a whole number"),
    "nothing for a number": ({"r": None}, "adapters[a].r: expected a whole number, found nothing"),
    "a list for a number": ({"learning_rate": [1]}, "adapters[a].learning_rate: expected a number, found a list"),
    "not a number": ({"learning_rate": "nan"}, "adapters[a].learning_rate: expected a number"),
    "infinite rate": ({"learning_rate": "inf"}, "adapters[a].learning_rate: inf is outside"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "adapters[a].lora_alpha: inf is outside"),
    "number for truth": ({"use_rslora": 1}, "adapters[a].use_rslora: expected true or false"),
    "a set of choices": ({"optim": "adamw"}, "adapters[a].optim: 'adamw' is not one of adamw_torch, sgd; did you mean"),
    "unknown schedule": ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'?"),
    "another schedule": ({"lr_scheduler_type": "cosine_with_min_lr"}, "did you mean 'cosine'?"),
    "r 0": ({"r": 0}, "adapters[a].r: 0 is outside 1"),
    "negative rate": ({"learning_rate": -1}, "adapters[a].learning_rate: -1.0 is outside 0.0"),
    "dropout 1": ({"lora_dropout": 1}, "adapters[a].lora_dropout: 1.0 is outside"),
    "beta 1": ({"adam_beta2": 1}, "adapters[a].adam_beta2: 1.0 is outside"),
    "alpha 0": ({"lora_alpha": 0}, "adapters[a].lora_alpha: 0 would make the adapter do nothing"),
    "max_steps 0": ({"max_steps": 0}, "adapters[a].max_steps: 0 trains nothing; write -1"),
    "no targets": ({"target_modules": []}, "adapters[a].target_modules: empty"),
    "head": (
        {"target_modules": ["lm_head"]},
        "adapters[a].target_modules: 'lm_head' is not supported: embedding and head",
    ),
    "embedding": ({"target_modules": ["model.embed_tokens"]}, "'model.embed_tokens' is not supported"),
    "two to evaluate on": ({"val_size": 0.1, "eval_dataset": "x.jsonl"}, "eval_dataset and val_size both name rows"),
    "half a row": ({"val_size": 1.5}, "adapters[a].val_size: 1.5 is neither a share below 1 nor a number of rows"),
    "no shares": ({"eval_steps": []}, "adapters[a].eval_steps: a list holds shares"),
    "share above 1": ({"eval_steps": [0.5, 20]}, "adapters[a].eval_steps: a list holds shares"),
    "half a step": ({"eval_steps": 2.5}, "adapters[a].eval_steps: 2.5 is neither"),
    "never": ({"eval_steps": 0}, "adapters[a].eval_steps: 0 is neither"),
    "no patience": ({"val_size": 1, "early_stopping_patience": 0}, "early_stopping_patience: 0 is not a positive"),
    "best of nothing": ({"load_best_model_at_end": True}, "load_best_model_at_end: needs rows to evaluate on"),
    "patience with nothing": ({"early_stopping_patience": 2}, "early_stopping_patience: needs rows to evaluate on"),
    "layers of a pattern": ({"target_modules": ".*q_proj", "layers_to_transform": 1}, "works with a list of target"),
    "pissa": (
        {"init_lora_weights": "pissa_niter_4"},
        "adapters[a].init_lora_weights: 'pissa_niter_4' is not supported: P",
    ),
    "olora": ({"init_lora_weights": "olora"}, "'olora' is not supported: OLoRA"),
    "corda": ({"init_lora_weights": "corda"}, "'corda' is not supported: CorDA"),
    "eva": ({"init_lora_weights": "eva"}, "'eva' is not supported: EVA"),
    "loftq": ({"init_lora_weights": "loftq"}, "'loftq' is not supported: LoftQ"),
    "unknown init": ({"init_lora_weights": "kaiming"}, "is not one of true, false, gaussian, orthogonal"),
    "odd orthogonal rank": (
        {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 5}},
        "adapters[a].r: 5 is odd",
    ),
    "no pattern": ({"rank_pattern": {"q_(proj": 5}}, "adapters[a].rank_pattern: 'q_(proj' is no valid regular"),
    "a list of ranks": ({"rank_pattern": [4]}, "adapters[a].rank_pattern: expected a mapping of names"),
    "rank 0": ({"rank_pattern": {"q_proj": 0}}, "adapters[a].rank_pattern: q_proj: 0 is not a positive number"),
    "negative alpha": ({"alpha_pattern": {"q_proj": -1}}, "adapters[a].alpha_pattern: q_proj: -1 is not a positive"),
    "ratio 0": ({"loraplus_lr_ratio": 0}, "adapters[a].loraplus_lr_ratio: 0.0 is outside"),
    "odd orthogonal": ({"init_lora_weights": "orthogonal", "r": 5}, "adapters[a].r: 5 is odd"),
    "constant with warm-up": (
        {"lr_scheduler_type": "constant", "warmup_steps": 10},
        "adapters[a].warmup_steps: constant has no warm-up; write lr_scheduler_type: constant_with_warmup",
    ),
    "a folder's name": ({"name": "../a"}, "adapters[../a].name: '../a' is also a folder's name"),
    "a number as name": ({"name": 7}, "adapters[7].name: expected text, found a number 7"),
    "dataset missing": ({"dataset": None}, "adapters[0].dataset: missing"),
    "dataset without path": ({"dataset": {"format": "text"}}, "adapters[a].dataset: expected a file's path"),
    "dataset's key": (
        {"dataset": {"path": "x", "colums": {}}},
        "adapters[a].dataset.colums: unknown key; did you mean",
    ),
    "dataset's format": (
        {"dataset": {"path": "x", "format": "alpacca"}},
        "adapters[a].dataset.format: 'alpacca' is not one",
    ),
    "dataset's columns": (
        {"dataset": {"path": "x", "columns": {"prompt": 3}}},
        "dataset.columns: expected a mapping of",
    ),
}


@pytest.mark.parametrize(("keys", "message"), BAD.values(), ids=BAD)
def test_a_mistake_in_an_adapter_is_named(keys, message):
    assert message in _message(_tree(**keys))


TOP_BAD = {
    "unknown key": ({"microbatch_token": 1}, "microbatch_token: unknown key; did you mean 'microbatch_tokens'?"),
    "no adapters": ({"adapters": []}, "adapters: the list is empty"),
    "adapters missing": ({"adapters": None}, "adapters: missing; write a block for each adapter, such as"),
    "adapters a block": ({"adapters": {"name": "a"}}, "adapters: expected a list of adapters, found a block"),
    "an adapter as text": ({"adapters": ["a"]}, "adapters[0]: expected a block with name and dataset, found text"),
    "cap 0": ({"microbatch_tokens": 0}, "microbatch_tokens: 0 is not a positive number"),
    "dtype": ({"dtype": "bf16"}, "dtype: 'bf16' is not one of auto, float32, bfloat16, float16, float64"),
    "a word in capitals": (
        {"quantization": "NF4"},
        "quantization: 'NF4' is not one of nf4, fp4, int8, fp8; did you mean 'nf4'?",
    ),
    "an element": (
        {"quantization_skip_modules": [1]},
        "quantization_skip_modules: expected a list of which each is text, found a list [1]",
    ),
    "another program's key": (
        {"bnb_4bit_compute_dtype": "bfloat16"},
        "bnb_4bit_compute_dtype: unknown key; write dtype",
    ),
    "device": ({"device": "gpu"}, "device: 'gpu' is not one of auto, cpu, cuda"),
    "defaults a list": ({"defaults": [1]}, "defaults: expected a block of adapter keys, found a list"),
    "defaults name": ({"defaults": {"name": "x"}}, "defaults.name: every adapter has its own name"),
    "defaults unknown": ({"defaults": {"rr": 1}}, "defaults.rr: unknown key"),
    "defaults refused": ({"defaults": {"use_dora": True}}, "defaults.use_dora: True is not supported: DoRA"),
    "save_steps": ({"save_steps": 0}, "save_steps: 0 is not a positive number"),
    "save_seconds": ({"save_seconds": 0}, "save_seconds: 0 is not a positive number of seconds"),
    "save_total_limit": ({"save_total_limit": 0}, "save_total_limit: 0 is not a positive number"),
    "pipeline": ({"pipeline": {"stage": 2}}, "pipeline.stage: unknown key; did you mean 'stages'?"),
}


@pytest.mark.parametrize(("keys", "message"), TOP_BAD.values(), ids=TOP_BAD)
def test_a_mistake_in_a_run_is_named(keys, message):
    assert message in _message(_tree(top=keys))


@pytest.mark.parametrize(("tree", "found"), [(None, "nothing"), (3, "a number"), ("run.yaml", "text")])
def test_a_configuration_is_a_mapping(tree, found):
    assert _message(tree) == f"expected keys such as base_model and adapters, found {found}"


def test_base_model_is_needed():
    assert "base_model: missing" in _message({"adapters": [{"name": "a", "dataset": "x"}]})


WANTED = {  # what one would write to ask for it
    "use_dora": True,
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "target_parameters": ["experts"],
    "fan_in_fan_out": True,
    "lora_bias": True,
    "loftq_config": {"loftq_bits": 4},
    "alora_invocation_tokens": [1],
    "velora_config": {"num_groups": 4},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 2},
    "arrow_config": {"top_k": 2},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"stable_gamma": 16},
    "megatron_config": {"tensor_model_parallel_size": 2},
    "layers_pattern": "h",
    "task_type": "SEQ_CLS",
    "peft_type": "IA3",
}


def test_every_refused_key_is_tried():
    assert WANTED.keys() == REFUSED.keys()


@pytest.mark.parametrize("key", WANTED)
def test_what_the_engine_does_not_do_is_refused_by_name_and_its_neutral_value_is_taken(key):
    message = _message(_tree(**{key: WANTED[key]}))
    assert message.startswith(f"adapters[a].{key}: {WANTED[key]!r} is not supported: ") and "leave it out" in message
    for neutral in REFUSED[key][0]:
        assert _adapter(**{key: neutral}) == _adapter()


@pytest.mark.parametrize("names", [("a", "a"), ("Sql", "sQL")])
def test_names_must_differ_in_more_than_case(names):
    tree = {"base_model": "b", "adapters": [{"name": name, "dataset": "x"} for name in names]}
    assert f"two adapters are called {names[0]!r}" in _message(tree)


def test_a_constant_rate_needs_no_word_about_warm_up():
    assert _adapter(lr_scheduler_type="constant").lr_scheduler_type == "constant"
    assert _adapter(lr_scheduler_type="constant", warmup_steps=0).warmup_steps == 0
    assert _adapter(lr_scheduler_type="constant_with_warmup", warmup_steps=10).warmup_steps == 10


def test_defaults_hold_for_every_adapter_that_says_nothing_else():
    tree = {
        "base_model": "b",
        "defaults": {"r": 4, "learning_rate": "1e-3"},
        "adapters": [{"name": "a", "dataset": "x"}, {"name": "b", "dataset": "x", "r": 8}],
    }
    first, second = parse_config(tree).adapters
    assert (first.r, first.learning_rate, second.r, second.learning_rate) == (4, 1e-3, 8, 1e-3)


def _gridded(entry, **defaults):
    return parse_config({"base_model": "b", "defaults": defaults, "adapters": [entry]}).adapters


def test_a_grid_makes_an_adapter_of_each_combination():
    grid = {"r": [8, 16], "learning_rate": ["1e-4", 0.02], "lora_alpha": [2.5]}
    made = _gridded({"name": "s", "dataset": "x", "seed": 7, "grid": grid})
    assert {(a.name, a.r, a.learning_rate, a.lora_alpha, a.seed) for a in made} == {
        ("s-r8-lr1e-4-alpha2.5", 8, 1e-4, 2.5, 7),
        ("s-r8-lr0.02-alpha2.5", 8, 0.02, 2.5, 7),
        ("s-r16-lr1e-4-alpha2.5", 16, 1e-4, 2.5, 7),
        ("s-r16-lr0.02-alpha2.5", 16, 0.02, 2.5, 7),
    }


def test_a_grid_under_defaults_holds_for_adapters_without_one():
    assert [a.name for a in _gridded({"name": "s", "dataset": "x"}, grid={"r": [1, 2]})] == ["s-r1", "s-r2"]
    assert [a.name for a in _gridded({"name": "s", "dataset": "x", "grid": None}, grid={"r": [1, 2]})] == ["s"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"grid": [8]}, "adapters[s].grid: expected lists of values such as {r: [8, 16]}, found a list"),
        ({"grid": {"seed": [1, 2]}}, "adapters[s].grid.seed: a grid is over r, learning_rate, lora_alpha"),
        ({"grid": {"r": 8}}, "adapters[s].grid.r: expected a list of values, found a number"),
        ({"grid": {"r": []}}, "adapters[s].grid.r: expected a list of values, found an empty one"),
        ({"grid": {"r": [8, "x"]}}, "adapters[s].grid.r: expected a whole number, found text 'x'"),
        ({"grid": {"r": [8]}, "r": 4}, "adapters[s].grid.r: adapters[s].r is given too; keep one of them"),
        ({"grid": {"r": [8, 8]}}, "two adapters are called 's-r8'"),
        ({"grid": {"r": [0]}}, "adapters[s-r0].r: 0 is outside"),
    ],
)
def test_a_mistake_in_a_grid_is_named(entry, message):
    assert message in _message({"base_model": "b", "adapters": [{"name": "s", "dataset": "x", **entry}]})


YAML = """\
base_model: base
defaults: {r: 4}
adapters:
  - name: sql
    dataset: data/sql.jsonl
  - name: v1.5
    dataset: {path: /data/rows.jsonl, chat_template: chat.jinja}
  - name: mixed
    dataset: [{path: a.csv, weight: 1}, {path: b.csv, weight: 2}]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "base").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


def test_relative_paths_count_from_the_files_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    config = load_config(file)
    sql, other, mixed = config.adapters
    assert sql.dataset.path == tmp_path / "data/sql.jsonl"
    assert other.dataset == DatasetConfig(path=Path("/data/rows.jsonl"), chat_template=str(tmp_path / "chat.jinja"))
    assert [source.path for source in mixed.sources] == [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert config.base_model == str(tmp_path / "base")
    assert config.output_dir == tmp_path / "runs/default"


def test_a_hub_id_stays_as_it_is(file):
    assert load_config(file, ["base_model=org/model"]).base_model == "org/model"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("defaults.r=8", lambda c: c.adapters[0].r == 8 and c.adapters[1].r == 8),
        ("adapters.sql.r=8", lambda c: c.adapters[0].r == 8 and c.adapters[1].r == 4),
        ("adapters.v1.5.r=8", lambda c: c.adapters[1].r == 8 and c.adapters[0].r == 4),
        ("adapters.sql.learning_rate=1e-3", lambda c: c.adapters[0].learning_rate == 1e-3),
        (
            "adapters.sql.target_modules=[q_proj, v_proj]",
            lambda c: c.adapters[0].target_modules == ("q_proj", "v_proj"),
        ),
        ("adapters.sql.dataset.format=alpaca", lambda c: c.adapters[0].dataset.format == "alpaca"),
        (
            "adapters.sql.dataset.columns.prompt=question",
            lambda c: c.adapters[0].dataset.columns == {"prompt": "question"},
        ),
        (
            "adapters.mixed.dataset.1.weight=3",
            lambda c: [source.weight for source in c.adapters[2].sources] == [1, 3],
        ),
        ("recompute=true", lambda c: c.recompute is True),
        ("pipeline.stages=2", lambda c: c.pipeline.stages == 2),
        ("output_dir=a=b", lambda c: c.output_dir.name == "a=b"),
    ],
)
def test_overrides(file, override, read):
    assert read(load_config(file, [override]))


def test_an_override_finds_the_adapter_with_the_whole_name():
    adapters = [{"dataset": "none"}, {"name": "a", "r": 1}, {"name": "a.b", "r": 2}]
    changed = apply_overrides({"adapters": adapters}, ["adapters.a.b.r=4", "adapters.a.r=8"])
    assert [adapter.get("r") for adapter in changed["adapters"]] == [None, 8, 4]
    with pytest.raises(UserError, match="there is no adapter of that name"):
        apply_overrides({"adapters": adapters}, ["adapters.None.r=4"])


def test_the_last_override_counts(file):
    assert load_config(file, ["defaults.r=8", "defaults.r=2"]).adapters[0].r == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("r", "override r: expected KEY=VALUE"),
        ("=3", "override =3: expected KEY=VALUE"),
        ("adapters.none.r=8", "override adapters.none.r=8: there is no adapter of that name"),
        ("adapters.sql=8", "override adapters.sql=8: adapters is not a block"),
        ("base_model.x.y=8", "override base_model.x.y=8: x is not inside a block"),
        ("base_model.x=8", "override base_model.x=8: base_model is not a block"),
        ("defaults.r=[1", "override defaults.r=[1: the value is not valid YAML"),
        ("defaults.rank=1", "defaults.rank: unknown key"),
    ],
)
def test_a_mistake_in_an_override_is_named(file, override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "run.yaml: not valid YAML"),
        ("", "run.yaml: expected keys such as base_model and adapters, found nothing"),
        ("- a", "found a list; if these are data: mlora init .*run.yaml writes a configuration for it"),
        (b"\xff\xfe\xfa", "run.yaml: not valid YAML"),
    ],
)
def test_a_damaged_file_is_named(file, text, message):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_file_of_data_is_called_one(tmp_path, suffix):
    file = tmp_path / f"rows.{suffix}"
    with pytest.raises(UserError, match=f"is a file of data and not a configuration; mlora init {file} writes"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "no.yaml")


def test_adding_a_key_is_a_decision():
    def keys(cls):
        return " ".join(field.name for field in dataclasses.fields(cls))

    assert keys(RunConfig) == (
        "base_model adapters output_dir dtype device quantization double_quantization quantization_skip_modules "
        "microbatch_tokens max_active pipeline recompute save_steps save_seconds save_total_limit report_to"
    )
    assert keys(PipelineConfig) == "stages replicas layers in_flight transport"
    assert keys(DatasetConfig) == (
        "path format columns chat_template train_on hub subset split revision max_samples weight"
    )
    assert keys(AdapterConfig) == (
        "name dataset r lora_alpha rank_pattern alpha_pattern lora_dropout target_modules exclude_modules "
        "layers_to_transform use_rslora init_lora_weights init_from learning_rate loraplus_lr_ratio lr_scheduler_type "
        "warmup_steps num_train_epochs max_steps "
        "per_device_train_batch_size gradient_accumulation_steps max_grad_norm optim weight_decay adam_beta1 "
        "adam_beta2 adam_epsilon seed max_length logging_steps max_nonfinite_steps eval_dataset val_size eval_steps "
        "load_best_model_at_end early_stopping_patience early_stopping_threshold"
    )


def test_a_key_given_as_an_option_is_told_where_it_goes(capsys):
    for words, told in ((["train", "run.yaml", "--r", "8"], True), (["status", "run", "--r", "8"], False)):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert ("a key of the file is changed with --set" in capsys.readouterr().err) is told


def test_adding_a_flag_is_a_decision():
    parser = cli._parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    flags = {
        name: " ".join(option for action in command._actions for option in action.option_strings or [action.dest])
        for name, command in commands.choices.items()
    }
    assert flags == {
        "train": "-h --help config --set --overwrite --resume --allow-changed --nproc",
        "plan": "-h --help config --stages --set --picture",
        "status": "-h --help run_dir --json",
        "add": "-h --help run_dir file",
        "stop": "-h --help run_dir name",
        "verify": "-h --help output_dir",
        "check": "-h --help config --set",
        "schema": "-h --help",
        "init": "-h --help files --output --base-model",
        "merge": "-h --help adapter output --base --dtype --dequantised",
        "export": "-h --help adapter output --portable",
        "generate": "-h --help places --base --with-base --dtype --device --json --stages --nproc --prompt --file "
        "--system --plain "
        "--set --max-new-tokens --temperature --top-p --seed --batch-size",
        "eval": "-h --help places --base --with-base --dtype --device --json --stages --nproc --file --set",
        "compare": "-h --help runs --picture",
        "report": "-h --help run_dir --output",
        "env": "-h --help",
    }


OF_COMMANDS_ALONE = ("cli.py", "engine/inbox.py", "engine/starter.py")


def _named_options(path):
    """Each option in the texts of a module that is not a docstring, with what stands behind it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef)}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for text in texts:
        if text not in docs:
            yield from re.findall(r"(?<!\S)--(overwrite|resume|allow|base|dtype|dequ|set|max-n)([\w-]*)(.*)", text)


def test_a_message_that_python_sees_names_the_argument_too():
    named = [
        option
        for path in (ROOT / "mlora").rglob("*.py")
        if path.relative_to(ROOT / "mlora").as_posix() not in OF_COMMANDS_ALONE
        for option in _named_options(path)
    ]
    assert len(named) > 5
    for begin, end, behind in named:
        argument = f"{begin}{end}".replace("-", "_")
        assert re.match(rf"( \w+)? \({argument}=", behind), f"--{begin}{end}{behind}"


def test_the_table_of_keys_has_every_one_with_its_default():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE))
    words = {None: "null", True: "true", False: "false"}
    values = dataclasses.asdict(_adapter())
    defaults = {
        field.name: words[values[field.name]]
        if isinstance(values[field.name], bool | None)
        else str(values[field.name])
        for field in dataclasses.fields(AdapterConfig)
        if field.name not in ("name", "dataset")
    }
    assert table == defaults
