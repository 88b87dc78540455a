"""``mlora compare``: what it reads back of runs, and a picture that is one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from PIL import Image

from mlora import cli
from mlora.engine.compare import differences, draw, read_curves
from mlora.pipeline.schedule import colour
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    model = save_tiny(folder / "model", "llama2")
    keys = {"dataset": str(write_rows(folder / "rows.jsonl", 12, seed=1)), "max_steps": 3, "warmup_steps": 0}
    results = [
        run(folder / name, model, [{"name": "a", **keys, "r": r}, {"name": "b", **keys, "learning_rate": 1e-2}])
        for name, r in (("one", 4), ("two", 8))
    ]
    return folder, results


def test_the_curves_are_the_runs_losses(runs):
    folder, results = runs
    curves = {curve.name: curve for curve in read_curves([folder / "one", folder / "two"])}
    assert list(curves) == ["one/a", "one/b", "two/a", "two/b"]
    for result, name in zip(results, ("one", "two"), strict=True):
        for adapter in "ab":
            curve, reports = curves[f"{name}/{adapter}"], result.adapters[adapter].reports
            assert curve.losses == [r.loss for r in reports] and curve.steps == [1, 2, 3]
            assert curve.tokens == reports[-1].num_tokens and curve.state == "ended"
            assert curve.best == min((r.loss, r.step) for r in reports)


def test_the_table_is_ranked_and_names_what_differs(runs, capsys):
    assert cli.main(["compare", str(runs[0] / "one"), str(runs[0] / "two")]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[4]) for line in lines[1:5]]
    assert losses == sorted(losses)
    order = [line.split()[0] for line in lines[1:5]]
    ranks = [{"one/a": "4", "two/a": "8"}.get(name, "16") for name in order]
    assert f"  r: {', '.join(ranks)}" in lines and not any(line.startswith("  seed") for line in lines)


def test_the_same_file_by_another_path_is_no_difference(tmp_path, monkeypatch, capsys):
    model = save_tiny(tmp_path / "model", "llama2")
    rows = write_rows(tmp_path / "rows.jsonl", 12, seed=1)
    monkeypatch.chdir(tmp_path)
    for name, dataset in (("one", str(rows)), ("two", "rows.jsonl")):
        run(tmp_path / name, model, [{"name": "a", "dataset": dataset, "max_steps": 2, "warmup_steps": 0}])
    assert cli.main(["compare", "one", "two"]) == 0
    assert "differs" not in capsys.readouterr().out


def test_the_last_step_is_shown_where_it_was_not_logged(tmp_path, capsys):
    model = save_tiny(tmp_path / "model", "llama2")
    keys = {"dataset": str(write_rows(tmp_path / "rows.jsonl", 12, seed=1)), "warmup_steps": 0}
    adapter = {"name": "a", **keys, "max_steps": 9, "logging_steps": 2}
    run(tmp_path / "one", model, [adapter], lambda report: "end" if report.step == 3 else None)
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["one/a", "ended", "3"]


def test_what_only_some_adapters_have_is_named(tmp_path, capsys):
    model, rows = save_tiny(tmp_path / "model", "llama2"), str(write_rows(tmp_path / "rows.jsonl", 12, seed=1))
    more = str(write_rows(tmp_path / "more.jsonl", 5, seed=2))
    keys = {"max_steps": 2, "warmup_steps": 0}
    adapters = [
        {"name": "plain", "dataset": rows},
        {"name": "mixed", "dataset": [{"path": rows, "weight": 1}, {"path": more, "weight": 3}]},
        {"name": "ranks", "dataset": rows, "rank_pattern": {"down_proj": 4}},
        {"name": "judged", "dataset": [rows], "eval_dataset": {"path": more}},
    ]
    run(tmp_path / "one", model, [adapter | keys for adapter in adapters])
    curves = read_curves([tmp_path / "one"])
    assert differences(curves) == {
        "dataset.path": [rows, str([rows, more]), rows, rows],
        "dataset.weight": ["None", "[1.0, 3.0]", "None", "None"],
        "rank_pattern": ["{}", "{}", "{'down_proj': 4}", "{}"],
        "eval_dataset.path": ["None", "None", "None", more],
    }
    assert differences([replace(curves[0], keys={}), curves[1]]) == {}


def test_the_picture_is_a_png_of_the_curves(runs, tmp_path, capsys):
    file = tmp_path / "losses.png"
    assert cli.main(["compare", str(runs[0] / "one"), "--picture", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    assert cli.main(["compare", str(runs[0] / "one"), "--picture", "/nowhere/x.png"]) == 2
    assert "--picture /nowhere/x.png: cannot be written" in capsys.readouterr().err


def test_a_cut_line_and_lines_of_another_kind_are_left_out(runs, tmp_path):
    (tmp_path / "status.json").write_text((runs[0] / "one" / "status.json").read_text())
    lines = (runs[0] / "one" / "metrics.jsonl").read_text().splitlines()
    other = json.dumps({"adapter": "a", "step": 2, "state": "failed", "reason": "x"})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:2], other, lines[2][:30]]))
    curves = read_curves([tmp_path])
    assert sum(len(curve.losses) for curve in curves) == 2 and all(curve.keys == {} for curve in curves)


def test_mistakes(runs, tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert cli.main(["compare", str(runs[0] / "one"), str(runs[0] / "one")]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_an_adapters_colour_is_that_of_the_timeline(runs):
    picture = Image.open(io.BytesIO(draw(read_curves([runs[0] / "one"])))).convert("RGB")
    drawn = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in picture.getcolors(1 << 24)}
    assert colour(0, 0.45) in drawn and colour(1, 0.45) in drawn
