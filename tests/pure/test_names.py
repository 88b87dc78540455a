"""Other programs' names: each is taken with a note, or refused with the name to write; none silently."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from mlora import cli, names, parse_config
from mlora.config import REFUSED, AdapterConfig, DatasetConfig, RunConfig
from mlora.types import Note, UserError

ROOT = Path(__file__).parents[2]


def read(top=None, dataset="x.jsonl", **adapter):
    """The configuration and the notes that reading it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = parse_config(
            {"base_model": "b", "adapters": [{"name": "a", "dataset": dataset, **adapter}], **(top or {})}
        )
    assert all(warning.category is Note for warning in caught)
    return config, [str(warning.message) for warning in caught]


def message(*args, **keys):
    with pytest.raises(UserError) as caught:
        read(*args, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "cls"), [(names.RUN, RunConfig), (names.ADAPTER, AdapterConfig), (names.DATASET, DatasetConfig)]
)
def test_every_alias_leads_to_a_key_and_is_none(table, cls):
    keys = {field.name for field in dataclasses.fields(cls)}
    assert set(table.values()) <= keys | (set(REFUSED) if cls is AdapterConfig else set()) and not set(table) & keys


def test_the_page_on_names_has_every_alias_beside_its_key():
    rows = [
        line.split("|")[1:3]
        for line in (ROOT / "docs/names.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    for alias, name in (names.RUN | names.ADAPTER | names.DATASET).items():
        if not alias.startswith("peft_"):
            assert any((f"`{name}`" in here or name in REFUSED) and f"`{alias}" in also for here, also in rows), alias


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("max_seq_length", 512, "max_length", 512),
        ("cutoff_len", "512", "max_length", 512),
        ("sequence_len", 512, "max_length", 512),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("warmup_ratio", 0, "warmup_steps", 0.0),
        ("lora_rank", 4, "r", 4),
        ("lora_target", "all", "target_modules", "all-linear"),
        ("lora_target", "q_proj, v_proj", "target_modules", ("q_proj", "v_proj")),
        ("lora_target_modules", ["q_proj"], "target_modules", ("q_proj",)),
        ("lora_target_linear", True, "target_modules", "all-linear"),
        ("optimizer", "adamw_torch_fused", "optim", "adamw_torch"),
        ("optimizer", "sgd", "optim", "sgd"),
        ("micro_batch_size", 2, "per_device_train_batch_size", 2),
        ("num_epochs", 1.5, "num_train_epochs", 1.5),
        ("lr", "1e-3", "learning_rate", 1e-3),
        ("val_set_size", 0.05, "val_size", 0.05),
        ("test_datasets", [{"path": "/h"}], "eval_dataset", DatasetConfig(path=Path("/h"))),
        ("lora_model_dir", "/x", "init_from", Path("/x")),
    ],
)
def test_an_adapters_key_under_another_name(key, value, name, expected):
    config, notes = read(**{key: value})
    assert getattr(config.adapters[0], name) == expected
    assert any(note.startswith(f"adapters[a].{key}: read as {name}: ") for note in notes)
    assert getattr(read(top={"defaults": {key: value}})[0].adapters[0], name) == expected


@pytest.mark.parametrize("key", ["resume_from_checkpoint", "wandb_project", "special_tokens", "local_rank", "debug"])
def test_an_empty_key_of_another_program_asks_for_nothing(key):
    for config, notes in (read(**{key: None}), read(top={key: None})):
        assert config == read()[0] and len(notes) == 1
        assert notes[0].endswith(f"{key}: has no effect: it asks for nothing")


def test_rows_to_evaluate_on_may_stand_in_a_list_alone():
    assert read(eval_dataset=["/h"])[0] == read(eval_dataset="/h")[0]


def test_another_word_for_a_value():
    config, notes = read(optim="adamw_torch_fused")
    assert config.adapters[0].optim == "adamw_torch"
    assert notes == ["adapters[a].optim: adamw_torch_fused is computed as adamw_torch"]


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        ({"model_name_or_path": "m"}, "base_model", "m"),
        ({"gradient_checkpointing": True}, "recompute", True),
        ({"use_gradient_checkpointing": "unsloth"}, "recompute", True),
        ({"torch_dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"bf16": True}, "dtype", "bfloat16"),
        ({"fp16": True, "bf16": False}, "dtype", "float16"),
        ({"bf16": "auto"}, "dtype", "auto"),
    ],
)
def test_a_runs_key_under_another_name(keys, name, expected):
    tree = {"base_model": "b", "adapters": [{"name": "a", "dataset": "x"}], **keys}
    if name == "base_model":
        del tree["base_model"]
    with pytest.warns(Note):
        assert getattr(parse_config(tree), name) == expected


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"file_name": "r.csv"}, {"label": "r.csv"}),
        ({"data_files": ["r.csv"]}, {"label": "r.csv"}),
        ({"hf_hub_url": "o/n", "name": "main", "split": "test"}, {"hub": "o/n", "subset": "main", "split": "test"}),
        ({"path": "r", "type": "completion"}, {"format": "text"}),
        ({"path": "r", "type": "chat_template"}, {"format": "messages"}),
        ({"path": "r", "formatting": "sharegpt", "num_samples": 3}, {"format": "sharegpt", "max_samples": 3}),
    ],
)
def test_a_data_sets_key_under_another_name(dataset, expected):
    config, notes = read(dataset=dataset)
    (source,) = config.adapters[0].sources
    assert {key: getattr(source, key) for key in expected} == expected
    assert notes and all(note.startswith("adapters[a].dataset.") for note in notes)


def test_axolotls_list_of_data_sets():
    tree = {
        "base_model": "b",
        "adapters": [{"name": "a", "datasets": [{"path": "x", "type": "alpaca"}, {"path": "y"}]}],
    }
    with pytest.warns(Note, match="read as dataset"):
        sources = parse_config(tree).adapters[0].sources
    assert [(source.label, source.format) for source in sources] == [("x", "alpaca"), ("y", "auto")]


@pytest.mark.parametrize("key", sorted(names._IDLE))
def test_what_is_so_anyway_is_taken_with_a_note(key):
    for config, notes in (read(**{key: True}), read(top={key: True})):
        assert config == read()[0]
        assert len(notes) == 1 and f"{key}: has no effect: " in notes[0]


@pytest.mark.parametrize("key", sorted(names._FIXED))
def test_a_choice_of_other_programs_that_is_none_here(key):
    config, notes = read(**{key: names._FIXED[key][0][0]})
    assert config == read()[0] and notes == [f"adapters[a].{key}: has no effect: it is so anyway"]
    other = not names._FIXED[key][0][0]
    assert message(**{key: other}) == f"adapters[a].{key}: {other!r} is not supported: {names._FIXED[key][1]}"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: message(max_seq_length=5, max_length=6), "adapters[a].max_seq_length: is another name of max_length"),
        (lambda: message(max_seq_length=5, cutoff_len=5), "adapters[a].cutoff_len: is another name of max_length"),
        (lambda: message(warmup_ratio=1), "adapters[a].warmup_ratio: 1 is no share of all steps"),
        (lambda: message(warmup_ratio="x"), "adapters[a].warmup_steps: expected a number"),
        (lambda: message(lora_target_linear=False), "lora_target_linear: False leaves the modules open"),
        (lambda: message(evals_per_epoch=4), "adapters[a].evals_per_epoch: unknown key; write eval_steps"),
        (lambda: message(eval_strategy="epoch"), "adapters[a].eval_strategy: 'epoch' is not supported: write ev"),
        (lambda: message(top={"deepspeed": "zero.json"}), "deepspeed: 'zero.json' is not supported: write pipeline:"),
        (lambda: message(test_datasets=["x", "y"]), "adapters[a].test_datasets: one data set is evaluated on"),
        (lambda: message(eval_dataset=["x", "y"]), "adapters[a].eval_dataset: one data set is evaluated on; write its"),
        (lambda: message(eval_dataset=[]), "adapters[a].eval_dataset: one data set is evaluated on"),
        (lambda: message(top={"defaults": {"eval_dataset": ["x", "y"]}}), "defaults.eval_dataset: one data set is ev"),
        (lambda: message(additional_target=["lm_head"]), "adapters[a].modules_to_save: ['lm_head'] is not supported"),
        (lambda: message(batch_size=8), "a step has per_device_train_batch_size × gradient_accumulation_steps rows"),
        (lambda: message(template="llama3"), "adapters[a].template: unknown key; the tokenizer's own chat template is"),
        (lambda: message(chat_template="x"), "adapters[a].chat_template: belongs to the data: write chat_tem"),
        (lambda: message(max_samples=3), "adapters[a].max_samples: belongs to the data: write max_samples"),
        (lambda: message(gradient_checkpointing=True), "belongs to the run: write recompute at the top of the file"),
        (lambda: message(bf16=True), "adapters[a].bf16: belongs to the run: write dtype at the top of the file"),
        (lambda: message(wandb_project="x"), "adapters[a].wandb_project: unknown key; set WANDB_PROJECT in the"),
        (lambda: message(top={"nproc": 2}), "nproc: unknown key; start with --nproc N, or with torchrun"),
        (lambda: message(top={"stages": 2}), "stages: unknown key; write pipeline: {stages: N} at the top of the file"),
        (lambda: message(output_dir="x"), "adapters[a].output_dir: belongs to the run: write output_dir at the top"),
        (lambda: message(top={"learning_rate": 1}), "learning_rate: belongs to an adapter: write learning_rate under"),
        (lambda: message(top={"lora_r": 1}), "lora_r: belongs to an adapter: write r under defaults"),
        (lambda: message(dataset={"path": "x", "cutoff_len": 3}), "dataset.cutoff_len: belongs to an adapter: write"),
        (lambda: message(top={"load_in_4bit": True}), "load_in_4bit: True is not supported: write quantization: nf4"),
        (lambda: message(top={"bf16": True, "dtype": "float16"}), "bf16: dtype is given too"),
        (lambda: message(top={"bf16": True, "fp16": True}), "fp16: dtype is given too"),
        (lambda: message(top={"bf16": 3}), "bf16: expected true or false, found 3"),
        (lambda: message(top={"defaults": {"datasets": "x"}}), "defaults.dataset: every adapter has its own dataset"),
        (lambda: message(dataset={"data_files": ["a", "b"]}), "data_files: several files are a list under dataset"),
        (lambda: message(dataset={"path": ["a", "b"]}), "adapters[a].dataset.path: several files are a list under"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_to_write(found, expected):
    assert expected in found()


def lines(*args, **keys):
    with pytest.raises(UserError) as caught:
        read(*args, **keys)
    return str(caught.value).split("\n")


def test_all_that_is_wrong_is_said_at_once():
    found = lines(
        dataset={"path": "x", "roles": ["x"], "field_messages": "turns"},
        top={"deepspeed": "z.json", "microbatch_tokens": "x", "pipeline": {"stage": 2}, "defaults": {"template": "t"}},
        bf16=True,
        optim="lion",
        r="x",
        use_dora=True,
        learningrate=1,
        abc=1,
        xyz=1,
    )
    expected = [
        "defaults.template: unknown key; the tokenizer's own chat template",
        "adapters[a].bf16: belongs to the run",
        "adapters[a].use_dora: True is not supported",
        "adapters[a].learningrate: unknown key; did you mean 'learning_rate'?",
        "adapters[a].abc, xyz: unknown keys; known keys: adam_beta1",
        "adapters[a].dataset.roles: unknown key; the usual names",
        "adapters[a].dataset.field_messages: unknown key; write columns",
        "adapters[a].optim: 'lion' is not one of",
        "adapters[a].r: expected a whole number",
        "deepspeed: 'z.json' is not supported",
        "pipeline.stage: unknown key",
        "microbatch_tokens: 'x' is not one of",
    ]
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_a_fault_of_a_gridded_block_is_said_once():
    found = lines(grid={"r": [4, 8], "lr": [1e-4, 1e-3]}, optim="lion", template="t")
    assert [line.split(":")[0] for line in found] == ["adapters[a].template", "adapters[a].optim"]


def test_a_file_of_another_program_is_told_all_its_keys(tmp_path, capsys):
    path = tmp_path / "axolotl.yml"
    path.write_text(
        "base_model: b\ndatasets: [{path: o/n, type: alpaca}]\nlora_r: 8\nmicro_batch_size: 2\nload_in_4bit: true\n"
    )
    assert cli.main(["check", str(path)]) == 2
    assert [line.split(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "mlora: adapters: missing",
        "mlora: datasets: belongs to an adapter: write dataset beside the adapter's name",
        "mlora: lora_r: belongs to an adapter: write r under defaults, or beside the adapter's name",
        "mlora: micro_batch_size: belongs to an adapter: write per_device_train_batch_size under defaults, or beside "
        "the adapter's name",
        "mlora: load_in_4bit: True is not supported: write quantization: nf4 at the top of the file",
    ]


@pytest.mark.parametrize(
    "key", ["loss_watchdog_threshold", "plugins", "eos_token", "dataset_train_split", "bnb_4bit_quant_type", "roles"]
)
def test_a_key_of_another_program_is_no_misspelt_one_of_ours(key):
    for found in (message(**{key: 1}), message(top={key: 1}), message(dataset={"path": "x", key: 1})):
        assert f"{key}: unknown key; " in found and "did you mean" not in found and "known keys" not in found


SOURCES = {
    "nothing": ([], "adapters[a].dataset: the list is empty"),
    "a number": ([3], "adapters[a].dataset[0]: expected a file's path or a block with path or hub, found a number"),
    "two places": ({"path": "x", "hub": "o/n"}, "adapters[a].dataset: give either path, a file, or hub"),
    "a split of a file": ([{"path": "x", "split": "test"}], "adapters[a].dataset[0].split: belongs to a data set on"),
    "a url": ({"hub": "https://hf.co/o/n"}, "adapters[a].dataset.hub: 'https://hf.co/o/n' is no id such as"),
    "no samples": ({"path": "x", "max_samples": 0}, "adapters[a].dataset.max_samples: 0 is not a positive number"),
    "no weight": ({"path": "x", "weight": 0}, "adapters[a].dataset.weight: 0 is outside"),
    "one weight": ({"path": "x", "weight": 1}, "adapters[a].dataset.weight: a share of one data set means nothing"),
    "a weight missing": ([{"path": "x", "weight": 1}, "y"], "adapters[a].dataset[1].weight: missing; give all"),
}


@pytest.mark.parametrize(("dataset", "expected"), SOURCES.values(), ids=SOURCES)
def test_a_mistake_in_the_sources_is_named(dataset, expected):
    assert expected in message(dataset=dataset)


def test_plain_data_of_a_mixture_can_be_read_again():
    dataset = [{"path": "x.csv", "weight": 2, "columns": {"text": "t"}}, {"hub": "o/n", "split": "test", "weight": 1}]
    (adapter,) = read(dataset=dataset)[0].adapters
    (again,) = read(dataset=adapter.plain()["dataset"])[0].adapters
    assert again.plain() == adapter.plain() and again.sources[0].path.is_absolute()
    assert [source.weight for source in adapter.sources] == [2, 1]


def test_notes_are_lines_of_the_command(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("base_model: none\nadapters: [{name: a, dataset: x.jsonl, max_seq_length: 9, packing: true}]\n")
    assert cli.main(["plan", str(path), "--stages", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "mlora: note: adapters[a].max_seq_length: read as max_length: 9",
        "mlora: note: adapters[a].packing: has no effect: rows are always packed without padding",
    ]


def test_the_help_of_train_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 24
    for group in ("when output_dir holds a run already:", "processes:"):
        assert group in text
