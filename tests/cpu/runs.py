"""Small runs for the tests: data files of ragged rows, a run of the engine, and the same adapter trained with PEFT."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import mlora

WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "runs", "sleeps", "today", "never", "always")


def write_rows(path: Path, count: int, seed: int, longest: int = 12) -> Path:
    """Ragged prompt/completion rows; the completion repeats the prompt's last words, so there is something to learn."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(2, longest))
        rows.append({"prompt": " ".join(words), "completion": " " + " ".join(words[-rng.randint(1, 4) :])})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def run(folder: Path, model: Path, adapters: list[dict[str, Any]], on_step: Any = None, **top: Any) -> mlora.Results:
    """Train ``adapters`` together; ``top`` are the run's own keys."""
    config = {"base_model": str(model), "output_dir": str(folder), "adapters": adapters, **top}
    return mlora.train(config, on_step=on_step)


def config(model: Path, adapters: list[dict[str, Any]], folder: Path, stages: int = 1, **top: Any) -> dict[str, Any]:
    """A run over so many stages of this process."""
    pipeline = {"stages": stages, "transport": "local"}
    return {"base_model": str(model), "output_dir": str(folder), "adapters": adapters, "pipeline": pipeline, **top}


def subject_and_other(folder: Path) -> list[dict[str, Any]]:
    """Two adapters, the first with ragged rows, dropout and accumulation."""
    common = {"learning_rate": 1e-2, "max_steps": 4, "warmup_steps": 0, "per_device_train_batch_size": 3}
    return [
        {"name": "subject", "dataset": str(write_rows(folder / "a.jsonl", 23, seed=1, longest=30)), "r": 8}
        | {"lora_dropout": 0.1, "gradient_accumulation_steps": 2}
        | common,
        {"name": "other", "dataset": str(write_rows(folder / "b.jsonl", 30, seed=2)), "r": 4, "seed": 3}
        | {"target_modules": ["q_proj", "down_proj"]}
        | common,
    ]


def assert_company_changes_no_bit(folder: Path, model: Path, **top: Any) -> None:
    """An adapter alone, and beside another in several cuts into microbatches and stages, with recompute or without."""
    subject, other = subject_and_other(folder)
    alone = outcome(run(folder / "alone", model, [subject], **top), "subject")
    two = {"pipeline": {"stages": 2, "transport": "local"}}
    ways: tuple[dict[str, Any], ...] = (
        {"microbatch_tokens": 16},
        {"microbatch_tokens": 60, "recompute": True},
        {"microbatch_tokens": 150, **two},
        {"microbatch_tokens": 60, "recompute": True, **two},
    )
    for number, way in enumerate(ways):
        shared = run(folder / str(number), model, [other, subject], **top, **way)
        assert not alone.differences(outcome(shared, "subject")), way


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A disk on which no file grows beyond ``size`` bytes: a longer one is cut there, with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything of an adapter that must not change with its surroundings."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]

    def differences(self, other: Outcome) -> list[str]:
        """What differs, for a failing test's message."""
        found = [name for name in ("losses", "norms") if repr(getattr(self, name)) != repr(getattr(other, name))]
        both = self.weights.keys() & other.weights.keys()
        found += self.weights.keys() ^ other.weights.keys()
        return found + [key for key in both if not torch.equal(self.weights[key], other.weights[key])]


def outcome(results: mlora.Results, name: str) -> Outcome:
    """Losses, norms and exported weights of an adapter that ended."""
    result = results.adapters[name]
    assert result.folder is not None, result.reason
    return Outcome(
        losses=[report.loss for report in result.reports],
        norms=[report.grad_norm for report in result.reports],
        weights=load_file(result.folder / "adapter_model.safetensors"),
    )
