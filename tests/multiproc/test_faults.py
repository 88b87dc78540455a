"""Invariant 4 over processes: kill -9 of any rank at any moment, restart, also with another number of stages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from faults import PLACES, Kill, drawn, run_ranks
from test_training import assert_same, result

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

RESTARTS = (1, 4, 2, 3)  # processes of the run that goes on
SMOLLM2 = Path.home() / ".cache/mlora/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    model = save_tiny(folder / "model", "llama3.2", num_hidden_layers=4)
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 20, i, 25)) for i, name in enumerate("abc")}
    return {
        "base_model": str(model),
        "microbatch_tokens": 90,
        "save_steps": 1,
        "defaults": {"learning_rate": 0.01, "max_steps": 5, "warmup_steps": 1},
        "adapters": [
            {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5}
            | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"], "max_steps": 2},
            {"name": "c", "dataset": rows["c"], "r": 16, "layers_to_transform": [3], "use_rslora": True},
        ],
    }


@pytest.fixture(scope="module")
def tally():
    """What the report says at the end."""
    counts = {"runs": 0, "kills": 0, "steps repeated": 0, "steps done": 0}
    yield counts
    print("\nfaults:", counts)


def write_config(config: dict[str, Any], folder: Path, **changes: Any) -> list[str]:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config | {"output_dir": str(folder)} | changes))
    return [str(path)]


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    (ended,) = run_ranks(write_config(config, folder), 1)
    assert ended.code == 0, ended.output
    return folder


def check(config, undisturbed, folder, world, kill: Kill, restarted: int, tally, deadline_s=120) -> None:
    """One run that is killed, and one that goes on from it; all files and numbers are those of the undisturbed run."""
    words = write_config(config, folder)
    ended = run_ranks(words, world, kill, deadline_s)
    outputs = "\n".join(one.output for one in ended)
    assert "fault: SIGKILL" in outputs, f"{kill} was never reached:\n{outputs}"
    assert ended[kill.victim].code == -9
    assert all(one.code not in (0, None) and one.seconds < 60 + deadline_s for one in ended), outputs
    before = _last_steps(folder)
    for rank in run_ranks([*words, "--resume", "auto"], restarted, deadline_s=deadline_s):
        assert rank.code == 0, rank.output
        for name, step in re.findall(r"^(\w+): (?:goes on|stays \w+) behind step (\d+)", rank.output, re.MULTILINE):
            tally["steps repeated"] += max(0, before.get(name, 0) - int(step))
    tally["runs"] += 2
    tally["kills"] += 1
    tally["steps done"] += sum(before.values())
    assert_same(undisturbed, folder)
    for path in sorted((undisturbed / "adapters").rglob("*")):
        if path.is_file() and path.suffix in (".safetensors", ".json", ".md", ".jinja"):
            own = folder / "adapters" / path.relative_to(undisturbed / "adapters")
            assert own.read_bytes() == path.read_bytes(), own


def _last_steps(folder: Path) -> dict[str, int]:
    return (
        {name: len(numbers) for name, numbers in result(folder)[0].items()}
        if (folder / "metrics.jsonl").exists()
        else {}
    )


@pytest.mark.parametrize(
    "phase, world, restarted", [("F", 2, 4), ("between STEPs", 4, 1), ("save", 2, 2), ("export", 4, 3)]
)
def test_a_kill_changes_no_bit(config, undisturbed, tmp_path, tally, phase, world, restarted):
    check(config, undisturbed, tmp_path / "run", world, drawn(phase, world, 0), restarted, tally)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("phase", PLACES)
def test_kills_in_every_phase_change_no_bit(config, undisturbed, tmp_path, tally, phase, world, seed):
    restarted = RESTARTS[(seed + world) % len(RESTARTS)]
    check(config, undisturbed, tmp_path / "run", world, drawn(phase, world, seed), restarted, tally)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make demo prepares the model")
def test_kills_on_smollm2_change_no_bit(config, tmp_path, tally):
    small = config | {
        "base_model": str(SMOLLM2),
        "defaults": {"learning_rate": 1e-3, "max_steps": 3, "warmup_steps": 0},
    }
    small["adapters"] = [
        {key: value for key, value in adapter.items() if key not in ("max_steps", "layers_to_transform")}
        for adapter in config["adapters"]
    ]
    (ended,) = run_ranks(write_config(small, tmp_path / "undisturbed"), 1, deadline_s=400)
    assert ended.code == 0, ended.output
    for seed, phase in enumerate(("F", "B", "between STEPs", "save", "export")):
        kill = drawn(phase, 2, seed)
        check(small, tmp_path / "undisturbed", tmp_path / str(seed), 2, kill, 1 + seed % 2, tally, deadline_s=400)
