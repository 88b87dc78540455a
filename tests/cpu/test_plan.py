"""``mlora plan`` of runs that are not one pipeline of all adapters, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from mlora import cli
from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture
def config(tmp_path):
    rows = [(name, str(write_rows(tmp_path / f"{name}.jsonl", 12, 0))) for name in "abc"]
    adapters = [{"name": name, "dataset": path, "max_steps": 2 + 10 * (name == "b")} for name, path in rows]
    tree = {"base_model": str(save_tiny(tmp_path / "model", "llama3.2")), "adapters": adapters}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tree))
    return path


def test_of_replicas_the_first_is_planned_with_its_own_adapters(config, tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    words = ["plan", str(config), "--stages", "2", "--picture", str(picture), "--set", "pipeline.replicas=2"]
    assert cli.main(words) == 0
    assert "the first of 2 replicas, with b\n" in capsys.readouterr().out
    steps = {event["name"] for event in json.loads(picture.with_suffix(".trace.json").read_text())["traceEvents"]}
    assert any("STEP1" in name for name in steps)
    assert not any("STEP0" in name or "STEP2" in name for name in steps)


@pytest.mark.parametrize(("words", "stages"), [((), 1), (("stages=2",), 2), (("layers=[1, 2]",), 2)])
def test_the_stages_may_stand_in_the_configuration(config, tmp_path, capsys, words, stages):
    keys = [word for key in words for word in ("--set", f"pipeline.{key}")]
    assert cli.main(["plan", str(config), "--picture", str(tmp_path / "plan.svg"), *keys]) == 0
    assert len(re.findall(r"^\d+ +\d+ - \d+ ", capsys.readouterr().out, re.MULTILINE)) == stages


def test_a_picture_that_would_not_be_one_is_refused(config, tmp_path, capsys):
    picture = tmp_path / "plan.png"
    assert cli.main(["plan", str(config), "--stages", "2", "--picture", str(picture)]) == 2
    assert "give a name that ends in .svg" in capsys.readouterr().err
    assert not picture.exists()
