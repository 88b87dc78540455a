"""What must not depend on the number of processes, and what each of them may take of the host's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_failures import started
from test_training import train
from transformers import get_scheduler

from mlora.types import LINEAR_MODULES
from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

LAYERS = 4
STEPS, WARMUP, RATE = 8, 2, 0.01
PROCESSES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The same run over 1, 2 and 4 processes. ``one`` and ``two`` differ in their number of steps only."""
    folder = tmp_path_factory.mktemp("checks")
    model = save_tiny(folder / "model", "llama3.2", num_hidden_layers=LAYERS)
    rows = str(write_rows(folder / "rows.jsonl", 24, 0, 25))
    plain = {"dataset": rows, "r": 4, "lr_scheduler_type": "constant", "warmup_steps": 0}
    curve = {
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
    }
    config = {
        "base_model": str(model),
        "microbatch_tokens": 120,
        "defaults": {"learning_rate": RATE, "per_device_train_batch_size": 2},
        "adapters": [
            plain | {"name": "one", "max_steps": 1},
            plain | {"name": "two", "max_steps": 2},
            curve | {"name": "curve", "dataset": rows, "r": 8, "max_grad_norm": 0.5},
        ],
    }
    found = {}
    for processes in PROCESSES:
        found[processes] = folder / f"run{processes}"
        finished = train(config, found[processes], *(("--nproc", str(processes)) if processes > 1 else ()))
        assert finished.returncode == 0, finished.stderr
    return found


def logged(folder: Path, adapter: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["adapter"] == adapter]


def exported(folder: Path, adapter: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapters" / adapter / "adapter_model.safetensors")


@pytest.mark.parametrize("adapter", ["one", "two", "curve"])
@pytest.mark.parametrize("processes", PROCESSES[1:])
def test_the_gradient_norm_is_that_of_one_process(runs, processes, adapter):
    norms, alone = ([entry["grad_norm"] for entry in logged(runs[n], adapter)] for n in (processes, 1))
    assert norms == alone
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("processes", PROCESSES)
def test_the_rate_ticks_once_a_step_to_the_end_of_the_schedule(runs, processes):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    schedule = get_scheduler("cosine", optimizer, WARMUP, STEPS)
    expected = []
    for _ in range(STEPS):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    entries = logged(runs[processes], "curve")
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    assert [entry["learning_rate"] for entry in entries] == pytest.approx(expected, rel=1e-12)
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("processes", PROCESSES)
def test_every_b_moves_in_the_first_step_and_every_a_in_the_second(runs, processes):
    one, two = exported(runs[processes], "one"), exported(runs[processes], "two")
    for name, tensor in one.items():
        if ".lora_B." in name:
            assert (tensor != 0).any(), name
        else:
            assert (tensor != two[name]).any(), name


@pytest.mark.parametrize("processes", PROCESSES)
def test_all_layers_of_all_stages_are_in_one_file(runs, processes):
    for adapter in ("one", "two", "curve"):
        folder = runs[processes] / "adapters" / adapter
        assert [path.name for path in folder.glob("*.safetensors*")] == ["adapter_model.safetensors"]
        names = set(exported(runs[processes], adapter))
        assert names == {
            f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"
            for layer in range(LAYERS)
            for module in LINEAR_MODULES
            for block in ["mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"]
            for side in "AB"
        }


def _peaks(model: Path, folder: Path) -> dict[int, int]:
    """The most bytes that each of four ranks has held at once when the first step is logged."""
    rows = str(write_rows(folder.with_suffix(".jsonl"), 8, 0))
    adapter = {"name": "a", "dataset": rows, "r": 4, "per_device_train_batch_size": 2, "max_steps": 1_000_000}
    with started({"base_model": str(model), "adapters": [adapter]}, folder, "--nproc", "4") as run:
        run.wait_for_metrics()
        lines = {rank: Path(f"/proc/{pid}/status").read_text().splitlines() for rank, pid in run.ranks().items()}
    return {rank: 1024 * int(line.split()[1]) for rank in lines for line in lines[rank] if line.startswith("VmHWM")}


def test_no_process_holds_much_more_than_its_share_of_the_model(tmp_path):
    """Eight fat layers over four processes; what a rank holds with a tiny model is not the model's."""
    size = {"hidden_size": 1024, "intermediate_size": 2720, "num_attention_heads": 16, "num_key_value_heads": 16}
    fat = save_tiny(tmp_path / "fat", "llama2", num_hidden_layers=8, **size)
    tiny = save_tiny(tmp_path / "tiny", "llama2", num_hidden_layers=8)
    weights = (fat / "model.safetensors").stat().st_size
    peaks, idle = _peaks(fat, tmp_path / "run"), _peaks(tiny, tmp_path / "idle")
    assert sorted(peaks) == [0, 1, 2, 3]
    shares = {rank: (peaks[rank] - idle[rank]) / weights for rank in peaks}
    assert 0.25 <= min(shares.values()) <= max(shares.values()) < 0.5, shares
