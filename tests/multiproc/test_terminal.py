"""The command at a terminal: readers that go away, few letters, few columns, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    save_tiny(folder / "model", "llama3.2")
    write_rows(folder / "rows.jsonl", 30, seed=1)
    return folder


@pytest.fixture
def folder(base, tmp_path):
    """A configuration of a run that takes many steps."""
    adapter = {"name": "a", "dataset": str(base / "rows.jsonl"), "max_steps": 25, "warmup_steps": 0}
    (tmp_path / "run.yaml").write_text(json.dumps({"base_model": str(base / "model"), "adapters": [adapter]}))
    return tmp_path


def _start(folder, *words, **env):
    command = [sys.executable, "-m", "mlora", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)


@pytest.mark.parametrize("words", [(), ("--nproc", "2")])
def test_a_training_goes_on_when_nobody_reads_along(folder, words):
    process = _start(folder, "train", "run.yaml", *words)
    assert process.stdout.readline()
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(120) == 0
    assert (folder / "runs/default/adapters/a/adapter_config.json").exists()


def test_other_commands_end_quietly_when_nobody_reads_along(folder, base):
    process = _start(folder, "generate", "--base", str(base / "model"), "--file", str(base / "rows.jsonl"), "--json")
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(120) == 1


def test_letters_that_the_locale_lacks_are_spelled_out(folder, base):
    (folder / "rows.jsonl").write_text('{"prompt": "\u65e5", "completion": " \u672c"}', encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ("check", "run.yaml", "--set", "adapters.a.dataset=rows.jsonl")
    finished = _start(folder, *words, **locale)
    out, err = finished.communicate(timeout=120)
    assert finished.returncode == 0, err
    assert "\\u65e5[[ \\u672c" in out


def test_few_columns_break_nothing(folder):
    finished = _start(folder, "train", "--help", COLUMNS="40")
    out, _ = finished.communicate(timeout=120)
    assert finished.returncode == 0 and max(map(len, out.splitlines())) <= 40


@pytest.mark.parametrize("words", [(), ("--nproc", "2")])
def test_ctrl_c_is_one_line_of_all_processes(folder, words):
    process = _start(folder, "train", "run.yaml", "--set", "adapters.a.max_steps=100000", *words)
    assert any("tokens/s" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    own = [line for line in err.splitlines() if line.startswith("mlora: ")]  # torchrun says more
    assert own == ["mlora: interrupted; --resume auto goes on from the checkpoints"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--nproc", "2")])
@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5, 4.5, 6.0])
def test_ctrl_c_at_any_moment_is_one_line(folder, words, seconds):
    process = _start(folder, "train", "run.yaml", "--set", "adapters.a.max_steps=100000", *words)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in out + err
    assert err.splitlines()[-1].startswith("mlora: interrupted")
