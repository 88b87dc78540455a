"""The benchmarks that a CPU can run, at sizes of a few seconds: they keep up with what they measure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]
TINY = ("--shape", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("base") / "model", "llama3.2"))


def benchmark(name, *arguments):
    """What ``benchmarks/NAME.py`` prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rows_of(page, first):
    """Cells of the table's rows whose first one begins so."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines()]
    return [row for row in cells if row[0].startswith(first)]


def test_one_linear():
    """It compares its ways' outputs and gradients before it times them."""
    page = benchmark("one_linear", *TINY, "--rows", "112x64/128/4x16", "112x64/128/4x16/0.1")
    for row in rows_of(page, "112x64"):
        assert float(row[1]) > 0 and float(row[2]) > 1, row
    assert len(rows_of(page, "112x64")) == 2


def test_throughput_trains_what_peft_trains(tmp_path):
    out = tmp_path / "out"
    benchmark("throughput", *TINY, "--out", out, "--rows", "mlora/2x2x32", "peft/1x4x32")
    ours, peft = (json.loads(line) for line in out.read_text().splitlines())
    assert ours["tokens"] == peft["tokens"] == 2 * 2 * 32
    assert ours["loss"] == pytest.approx(peft["loss"], rel=0.05)


def test_sharing(model):
    options = ["--adapters", "2", "--rows", "1", "--tokens", "16", "--repeats", "1"]
    assert len(rows_of(benchmark("sharing", "--model", model, *options), "mLoRA")) == 2


def test_quality(model, tmp_path):
    files = [write_rows(tmp_path / f"{task}.jsonl", 20, seed, 30) for seed, task in enumerate(("one", "two"))]
    options = ["--device", "cpu", "--bases", "dense", "nf4", "--steps", "2", "--seeds", "0", "1"]
    page = benchmark("quality", model, *files, *options)
    assert [len(row) for row in rows_of(page, "one")] == [3, 2], page


def test_stages_are_put_together():
    """The stream is so short that over two stages its ramps meet."""
    options = ["--stages", "1", "2", "--microbatch-tokens", "256", "--stream", "1", "--rows", "mlora/4x2x32"]
    alone, two = rows_of(benchmark("stages", *TINY, *options), "mlora/4x2x32")
    assert (alone[3], two[3]) == ("2", "1 / 1")
    assert two[4].count("/") == two[5].count("/") == 1
    assert min(float(row[6].replace(",", "")) for row in (alone, two)) > 0
    assert two[7:] == ["nan", "nan%"]
