"""``mlora eval`` and ``mlora generate`` over torchrun's processes: what one process prints, printed once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    model = save_tiny(folder / "model", "llama3.2")
    keys = {"dataset": str(write_rows(folder / "rows.jsonl", 12, seed=1)), "max_steps": 4, "warmup_steps": 0}
    keys["learning_rate"] = 2e-2
    run(folder / "run", model, [{"name": "a", "r": 4, **keys}, {"name": "b", "r": 8, **keys}])
    return folder


def _mlora(folder, *words):
    command = [sys.executable, "-m", "mlora", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [("eval",), ("generate", "--max-new-tokens", "8")])
def test_processes_print_what_one_does(folder, command):
    words = (*command, "run", "--with-base", "--json", "--file", "rows.jsonl")
    alone, together = _mlora(folder, *words), _mlora(folder, *words, "--nproc", "3")
    assert alone.returncode == together.returncode == 0, together.stderr
    assert alone.stdout == together.stdout and len(alone.stdout.splitlines()) >= 3


def test_a_mistake_is_said_in_the_first_ranks_words(folder):
    finished = _mlora(folder, "eval", "nowhere", "--file", "rows.jsonl", "--nproc", "2")
    assert finished.returncode == 2 and finished.stdout == ""
    assert "nowhere: there is no adapter" in finished.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("--stages", "2"), ("--nproc", "2")])
def test_ctrl_c_is_no_traceback(folder, words):
    command = (
        sys.executable,
        "-u",
        "-m",
        "mlora",
        "generate",
        "run",
        "--file",
        "rows.jsonl",
        "--max-new-tokens",
        "200",
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    many = ("--batch-size", "1", *words)
    with subprocess.Popen([*command, *many], cwd=folder, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err and err.strip()
