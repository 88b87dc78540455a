"""A grid's adapters at the end of a run, ranked by what they came to."""

from __future__ import annotations

import pytest

from mlora import cli
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    save_tiny(folder / "model", "llama2")
    write_rows(folder / "rows.jsonl", 24, seed=1)
    return folder


def _run(folder, name, capsys, **keys):
    """The results and the ranked table's lines."""
    grid = {"r": [2, 4], "learning_rate": [1e-3, 2e-2]}
    keys |= {"dataset": str(folder / "rows.jsonl"), "max_steps": 6, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    adapters = [{"name": "g", **keys, "grid": grid}, {"name": "other", **keys, "seed": 5}]
    results = run(folder / name, folder / "model", adapters)
    return results, _table(capsys.readouterr().out)


def _table(out):
    _, *tables = out.split("\nrank ")
    assert len(tables) == 1, "one grid, one table"
    return [line.split() for line in tables[0].split("report: ")[0].splitlines()]


def test_without_evaluation_the_last_loss_ranks(folder, capsys):
    results, (title, *rows) = _run(folder, "plain", capsys)
    assert title[-2:] == ["last", "loss"] and [row[0] for row in rows] == list("1234")
    wanted = sorted((r.loss, name) for name, r in results.adapters.items() if name != "other")
    assert [(row[1], row[-1]) for row in rows] == [(name, f"{loss:.4f}") for loss, name in wanted]
    assert {tuple(row[2:5]) for row in rows} >= {("2", "0.001", "32"), ("4", "0.02", "32")}


def test_the_best_evaluation_ranks(folder, capsys):
    results, (title, *rows) = _run(folder, "evaluated", capsys, val_size=5, eval_steps=2)
    assert title[-3:] == ["best", "eval", "loss"]
    found = {name: min(e.loss for e in r.evaluations) for name, r in results.adapters.items() if name != "other"}
    assert [row[1] for row in rows] == sorted(found, key=found.get)
    assert [row[-1] for row in rows] == [f"{loss:.4f}" for loss in sorted(found.values())]
    assert cli.main(["compare", str(folder / "evaluated")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "eval loss" in lines[0] and [line.split()[1] for line in lines[1:6]] == sorted(
        row.split()[1] for row in lines[1:6]
    )


def test_one_that_came_to_nothing_is_last(folder, capsys):
    keys = {"dataset": str(folder / "rows.jsonl"), "max_steps": 6, "warmup_steps": 0, "max_nonfinite_steps": 1}
    adapters = [{"name": "g", **keys, "weight_decay": 1e9, "grid": {"learning_rate": [1e9, 1e-30]}}]
    run(folder / "failed", folder / "model", adapters)
    rows = _table(capsys.readouterr().out)[1:]
    assert [row[1] for row in rows] == ["g-lr1e-30", "g-lr1e9"]
    assert rows[1][-1] == "-"
