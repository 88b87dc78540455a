"""Invariants over gloo processes, one per stage, started by torch's own launcher: the bits of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

DEADLINE_S = 150


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """Four adapters of different r, targets and length; dropout, clipping and accumulation over ragged rows."""
    folder = tmp_path_factory.mktemp("config")
    model = save_tiny(folder / "model", "llama3.2", num_hidden_layers=4)
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 24, i, 25)) for i, name in enumerate("abcd")}
    return {
        "base_model": str(model),
        "microbatch_tokens": 90,
        "defaults": {"learning_rate": 0.01, "max_steps": 5, "warmup_steps": 1},
        "adapters": [
            {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5}
            | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"], "max_steps": 2},
            {"name": "c", "dataset": rows["c"], "r": 16, "layers_to_transform": [3], "use_rslora": True},
            {"name": "d", "dataset": rows["d"], "r": 64, "per_device_train_batch_size": 1, "max_steps": 6},
        ],
    }


def train(config: dict[str, Any], folder: Path, *arguments: str, **pipeline: Any) -> subprocess.CompletedProcess[str]:
    """``mlora train`` in processes of its own."""
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(config | {"output_dir": str(folder), "pipeline": pipeline}))
    return subprocess.run(
        [sys.executable, "-m", "mlora", "train", str(path), *arguments],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def result(folder: Path) -> tuple[dict[str, list[object]], dict[str, dict[str, Any]]]:
    """Losses and norms by adapter as they were logged, and the exported tensors."""
    numbers: dict[str, list[object]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        numbers.setdefault(entry["adapter"], []).append((entry["step"], entry["loss"], entry["grad_norm"]))
    exported = {path.name: load_file(path / "adapter_model.safetensors") for path in (folder / "adapters").iterdir()}
    return numbers, exported


def assert_same(folder: Path, other: Path) -> None:
    (numbers, exported), (numbers2, exported2) = result(folder), result(other)
    assert numbers == numbers2
    assert exported.keys() == exported2.keys()
    for name, tensors in exported.items():
        assert tensors.keys() == exported2[name].keys()
        assert all(tensors[key].equal(exported2[name][key]) for key in tensors), name


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    finished = train(config, folder)
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_processes_give_the_bits_of_one(config, alone, tmp_path, processes):
    finished = train(config, tmp_path / "run", "--nproc", str(processes))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(alone, tmp_path / "run")


def test_recompute_twice_in_flight_and_a_queue_give_the_bits_of_one(config, alone, tmp_path):
    changed = config | {"recompute": True, "max_active": 3}
    finished = train(changed, tmp_path / "run", "--nproc", "4", in_flight=2)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(alone, tmp_path / "run")


@pytest.mark.parametrize("stages, replicas", [(2, 2), (1, 2)])
def test_replicas_give_the_bits_of_one(config, alone, tmp_path, stages, replicas):
    """Also while each saves all its steps: a first stage must not wait for the snapshots of those behind it."""
    saving, processes = config | {"save_steps": 1}, str(stages * replicas)
    finished = train(saving, tmp_path / "run", "--nproc", processes, stages=stages, replicas=replicas)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    steps = sum(adapter.get("max_steps", 5) for adapter in config["adapters"])
    assert f"checkpoints: {steps} written" in finished.stdout
    assert_same(alone, tmp_path / "run")


def test_processes_that_do_not_make_stages_times_replicas_are_refused(config, tmp_path):
    finished = train(config, tmp_path / "run", "--nproc", "3", stages=2)
    assert finished.returncode == 2
    assert "stages 2 × replicas 1 need 2 processes, but there are 3" in finished.stderr.strip().splitlines()[-1]


def test_a_users_mistake_is_the_last_line_and_ends_all(config, tmp_path):
    broken = config | {"base_model": str(tmp_path / "nowhere")}
    finished = train(broken, tmp_path / "run", "--nproc", "2")
    assert finished.returncode == 2
    assert "nowhere" in finished.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_more_stages_than_layers_is_refused(config, tmp_path):
    finished = train(config, tmp_path / "run", "--nproc", "5")
    assert finished.returncode == 2
    assert "5 stages for a model of 4 layers" in finished.stderr.strip().splitlines()[-1]
