"""Mistakes that only a program can make are told like any other."""

from __future__ import annotations

import pytest

import mlora
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    rows = str(write_rows(folder / "rows.jsonl", 8, 1))
    model = save_tiny(folder / "model", "llama2")
    run(folder / "run", model, [{"name": "a", "dataset": rows, "r": 4, "max_steps": 2, "warmup_steps": 0}])
    return folder


def evaluated(trained, *places, **keys):
    return mlora.evaluate(mlora.Models(*places, **keys), mlora.data_config(trained / "rows.jsonl"))


CALLS = {
    "resume": (lambda t: mlora.train({}, resume=True), "resume: expected 'auto' or a run's folder, found True"),
    "one override": (lambda t: mlora.train({}, overrides="a=1"), "overrides: expected a list of texts, such as"),
    "a mapping": (lambda t: mlora.load_config(t / "run/run.json", {"a": 1}), "overrides: expected a list of texts"),
    "of data": (lambda t: mlora.data_config("x", "max_length=8"), "overrides: expected a list of texts"),
    "rows": (
        lambda t: mlora.parse_config({"base_model": "x", "adapters": [{"name": "a", "dataset": [{"text": "b"}]}]}),
        "adapters[a].dataset[0]: expected a file's path or a block with path or hub, found a block; rows themselves",
    ),
    "one place": (lambda t: evaluated(t, str(t / "run")), "places: give a list of folders, such as ["),
    "dtype": (lambda t: evaluated(t, [t / "run"], dtype="bf16"), "dtype: 'bf16' is not one of auto, float32"),
    "device": (lambda t: evaluated(t, [t / "run"], device="mps"), "device: 'mps' is not one of auto, cpu, cuda"),
    "merged dtype": (lambda t: mlora.merge(t / "run/adapters/a", t / "m", dtype="bf16"), "dtype: 'bf16' is not one of"),
    "a run to merge": (
        lambda t: mlora.merge(t / "run", t / "m"),
        "run/adapter_config.json: cannot be read: No such file or directory; give the folder of an adapter, such as",
    ),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_a_mistake_of_a_program_is_one_line(trained, call, message):
    with pytest.raises(mlora.UserError) as caught:
        call(trained)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_folders_may_be_texts(trained, tmp_path):
    merged = mlora.merge(str(trained / "run/adapters/a"), str(tmp_path / "merged"))
    assert merged.folder == tmp_path / "merged" and (merged.folder / "config.json").exists()
