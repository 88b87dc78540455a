"""Invariants 2, 3 and 5 on a GPU, bit for bit, for the shapes listed here: a tiny model, SmolLM2's widths, Llama-8B's.

Select one with -k, as in -k "smollm2 and bfloat16".
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mlora.checkpoint.versions import versions
from mlora.pipeline import stage
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import save_tiny
from tests.multiproc.test_failures import ENDED_S, started
from tests.multiproc.test_training import assert_same, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = {
    "tiny": {"num_hidden_layers": 4},
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 4,
    },
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
    },
}
CASES = [
    ("tiny", "bfloat16"),
    ("tiny", "float32"),
    ("smollm2", "bfloat16"),
    ("smollm2", "float32"),
    ("llama8b", "bfloat16"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    shape, dtype = request.param
    folder = tmp_path_factory.mktemp(shape)
    model = save_tiny(folder / "model", "llama3.2", **SHAPES[shape])
    common = {"learning_rate": 1e-3 if shape == "llama8b" else 1e-2, "max_steps": 6, "warmup_steps": 1}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 30, i, 40)) for i, name in enumerate("abc")}
    adapters = [
        common | {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5},
        common | {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"]},
        common | {"name": "c", "dataset": rows["c"], "r": 64, "per_device_train_batch_size": 2},
    ]
    alone = outcome(run(folder / "alone", model, adapters[:1], dtype=dtype), "a")
    return model, adapters, dtype, alone, folder


@pytest.mark.parametrize("cap", [150, 700, 4096])
def test_company_cuts_and_recompute_change_no_bit(case, tmp_path, cap):
    model, adapters, dtype, alone, _ = case
    shared = run(tmp_path / "run", model, adapters, dtype=dtype, microbatch_tokens=cap, recompute=cap == 700)
    assert not alone.differences(outcome(shared, "a"))
    assert alone.losses[-1] < alone.losses[1]


@pytest.mark.parametrize("cap", [700, 2500])
def test_graphs_change_no_bit(case, tmp_path, cap, monkeypatch):
    """With 2500 rows some microbatches are above the limit and some below."""
    model, adapters, dtype, alone, _ = case
    monkeypatch.setattr(stage, "MOST_ROWS", 0)
    eager = run(tmp_path / "run", model, adapters, dtype=dtype, microbatch_tokens=cap)
    assert not alone.differences(outcome(eager, "a"))


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_in_one_process_change_no_bit(case, tmp_path, stages):
    model, adapters, dtype, alone, _ = case
    pipeline = {"stages": stages, "transport": "local"}
    shared = run(tmp_path / "run", model, adapters, dtype=dtype, microbatch_tokens=300, pipeline=pipeline)
    assert not alone.differences(outcome(shared, "a"))


@pytest.mark.parametrize("processes", [2, 4])
def test_nccl_processes_on_one_gpu_change_no_bit(case, tmp_path, processes):
    assert_same_over_nccl(case, tmp_path, processes, str(Path(__file__).with_name("one_gpu.py")))


@pytest.mark.parametrize("processes", [2, 4])
def test_nccl_processes_on_gpus_of_their_own_change_no_bit(case, tmp_path, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA devices")
    assert_same_over_nccl(case, tmp_path, processes, "-m", "mlora")


def assert_same_over_nccl(case, folder, processes, *program):
    model, adapters, dtype, _, shared = case
    one = shared / "one"
    if not one.exists():
        run(one, model, adapters, dtype=dtype, microbatch_tokens=300)
    path = folder / "run.json"
    config = {"base_model": str(model), "dtype": dtype, "microbatch_tokens": 300, "adapters": adapters}
    path.write_text(json.dumps(config | {"output_dir": str(folder / "run"), "pipeline": {"transport": "nccl"}}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    finished = subprocess.run(
        [*launcher, *program, "train", str(path)],
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(one, folder / "run")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_and_the_run_goes_on_with_the_same_bits(tmp_path, victim):
    model = save_tiny(tmp_path / "model", "llama3.2", **SHAPES["tiny"])
    rows = {name: str(write_rows(tmp_path / f"{name}.jsonl", 30, i, 40)) for i, name in enumerate("abc")}
    config = {
        "base_model": str(model),
        "microbatch_tokens": 300,
        "save_steps": 5,
        "defaults": {"learning_rate": 1e-2, "max_steps": 200, "per_device_train_batch_size": 1, "lora_dropout": 0.1},
        "adapters": [{"name": name, "dataset": path} for name, path in rows.items()],
    }
    undisturbed = train(config, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    with started(config, tmp_path / "run", "--nproc", "2") as killed:
        killed.wait_for_metrics()
        wait_for_checkpoint(killed)
        ranks, before = killed.ranks(), time.monotonic()
        os.kill(ranks[victim], signal.SIGKILL)
        assert killed.wait(ENDED_S) == 128 + signal.SIGKILL, killed.text
        killed.wait_until_gone(list(ranks.values()))
        print(f"rank {victim} killed: all had ended within {time.monotonic() - before:.1f} s")
    finished = train(config, tmp_path / "run", "--nproc", "2", "--resume", "auto")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"goes on behind step \d+ of 200", finished.stdout), finished.stdout
    assert_same(tmp_path / "undisturbed", tmp_path / "run")


def wait_for_checkpoint(started_run, deadline_s=90):
    end = time.monotonic() + deadline_s
    while not versions(started_run.folder / "checkpoints/a"):
        assert started_run.process.poll() is None and time.monotonic() < end, started_run.text
        time.sleep(0.02)
