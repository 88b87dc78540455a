"""Evaluations over gloo processes, stages and replicas: rank 0 has the numbers of one process, and its best weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny
from tests.multiproc.test_training import train


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    model = save_tiny(folder / "model", "llama3.2", num_hidden_layers=4)
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 20, i, 20)) for i, name in enumerate("abh")}
    return {
        "base_model": str(model),
        "microbatch_tokens": 90,
        "defaults": {"learning_rate": 0.2, "max_steps": 12, "warmup_steps": 0, "per_device_train_batch_size": 3}
        | {"eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True},
        "adapters": [
            {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "eval_dataset": rows["h"]},
            {"name": "b", "dataset": rows["b"], "r": 4, "val_size": 4, "learning_rate": 0.5},
        ],
    }


def result(folder: Path) -> tuple[dict[str, list[Any]], dict[str, Any], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = {name: [x for x in lines if x["adapter"] == name and "eval_loss" in x] for name in "ab"}
    status = json.loads((folder / "status.json").read_text())["adapters"]
    kept = {name: {key: status[name][key] for key in ("step", "reason", "eval_loss", "best_step")} for name in "ab"}
    return evaluations, kept, {n: load_file(folder / "adapters" / n / "adapter_model.safetensors") for n in "ab"}


@pytest.mark.parametrize("stages, replicas", [(2, 1), (1, 2)])
def test_processes_give_the_bits_of_one(config, tmp_path, stages, replicas):
    alone, together = tmp_path / "alone", tmp_path / "together"
    finished = train(config, alone)
    assert finished.returncode == 0, finished.stderr
    finished = train(config, together, "--nproc", "2", stages=stages, replicas=replicas)
    assert finished.returncode == 0, finished.stderr
    (evaluations, kept, tensors), (evaluations2, kept2, tensors2) = result(alone), result(together)
    assert evaluations == evaluations2
    assert kept == kept2
    assert any(status["best_step"] < status["step"] for status in kept.values())
    for name in "ab":
        assert all(tensors[name][key].equal(tensors2[name][key]) for key in tensors[name])
