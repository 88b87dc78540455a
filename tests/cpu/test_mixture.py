"""A mixture of files of several kinds in real runs: epochs, order, resume, and replicas that get its tokens."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pyarrow.parquet
import pytest

import mlora
from mlora import UserError, parse_config
from mlora.engine.inbox import changed_keys
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import save_tiny


class Crash(Exception):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """6 rows as JSONL, 8 as CSV, 12 as Parquet; each row is in one file only."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        [json.loads(line) for line in write_rows(folder / f"{count}.jsonl", count, count).read_text().splitlines()]
        for count in (6, 8, 12)
    ]
    with (folder / "8.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows[1])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[2]), folder / "12.parquet")
    (folder / "all.jsonl").write_text("\n".join(json.dumps(row) for part in rows for row in part))
    return folder


def adapter(dataset, **keys):
    common = {
        "r": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "lora_dropout": 0.1,
    }
    return {"name": "a", "dataset": dataset, **common, **keys}


def mixture(files, *weights):
    names = ("6.jsonl", "8.csv", "12.parquet")
    sources = [{"path": str(files / name)} for name in names]
    return (
        [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)] if weights else sources
    )


def test_files_of_three_kinds_train_as_one_file_with_the_same_rows(model, files, tmp_path, capsys):
    parts = outcome(run(tmp_path / "parts", model, [adapter(mixture(files))]), "a")
    assert "a: 8.csv: 8 rows: 8 kept, 0 of them truncated; " in capsys.readouterr().out
    whole = outcome(run(tmp_path / "whole", model, [adapter(str(files / "all.jsonl"))]), "a")
    assert parts.differences(whole) == [] and len(parts.losses) == 14


def test_max_samples_takes_the_first_rows(model, files, tmp_path):
    first = {"path": str(files / "all.jsonl"), "max_samples": 6}
    some = outcome(run(tmp_path / "some", model, [adapter(first)]), "a")
    file = outcome(run(tmp_path / "file", model, [adapter(str(files / "6.jsonl"))]), "a")
    assert some.differences(file) == []


def test_weights_decide_the_epoch_and_a_mixture_resumes_bit_for_bit(model, files, tmp_path, capsys):
    mixed = adapter(mixture(files, 1, 1, 2))
    whole = run(tmp_path / "whole", model, [mixed])
    # 8 rows of CSV are a quarter of an epoch of 32; the 12 of Parquet are its half, so 4 of them come twice.
    printed = capsys.readouterr().out
    for line in ("6.jsonl: 6", "8.csv: 8", "12.parquet: 12"):
        assert f"a: {line} rows: " in printed
    assert "; 8 of an epoch's 32 rows" in printed and "; 16 of an epoch's 32 rows" in printed
    assert len(whole.adapters["a"].reports) == 16
    assert outcome(whole, "a").differences(outcome(run(tmp_path / "even", model, [adapter(mixture(files))]), "a"))

    def crash(report):
        if report.step == 9:
            raise Crash

    with pytest.raises(Crash):
        run(tmp_path / "run", model, [mixed], on_step=crash, save_steps=2)
    config = {"base_model": str(model), "output_dir": str(tmp_path / "run"), "save_steps": 2}
    with pytest.raises(UserError, match=r"6.jsonl, .*8.csv, .*12.parquet give other tokens, or other shares of them"):
        mlora.train(config | {"adapters": [adapter(mixture(files, 1, 1, 1))]}, resume="auto")
    results = mlora.train(config | {"adapters": [mixed]}, resume="auto")
    assert outcome(results, "a").differences(outcome(whole, "a")) == []


def test_a_source_that_cannot_be_read_ends_the_start_with_its_name(model, files, tmp_path):
    (tmp_path / "bad.csv").write_text("prompt,completion\na,b\nc\n")
    with pytest.raises(UserError, match=r"bad.csv:3: 1 cells for 2 columns"):
        run(tmp_path / "run", model, [adapter([*mixture(files), str(tmp_path / "bad.csv")])])


def test_a_mixture_that_is_left_for_a_live_run_has_whole_paths_and_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = [
        {"path": "x.csv", "weight": 2, "columns": {"text": "t"}, "chat_template": "chat.jinja"},
        {"hub": "org/rows", "split": "test", "max_samples": 3, "weight": 1},
    ]
    (left,) = parse_config({"base_model": "b", "adapters": [{"name": "a", "dataset": dataset}]}).adapters
    tree = json.loads(json.dumps(changed_keys(left)))
    monkeypatch.chdir("/")
    (found,) = parse_config({"base_model": "b", "adapters": [tree]}).adapters
    file, remote = left.sources
    whole = replace(file, path=tmp_path / "x.csv", chat_template=str(tmp_path / "chat.jinja"))
    assert found == replace(left, dataset=(whole, remote))
