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
