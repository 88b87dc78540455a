"""Invariants 2, 3 and 5 on quantised bases on a GPU, bit for bit: an adapter of a tiny model alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mlora.pipeline import stage
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TWO = {"pipeline": {"stages": 2, "transport": "local"}}
WAYS: dict[str, dict[str, Any]] = {
    "small microbatches": {"microbatch_tokens": 150},
    "recompute": {"microbatch_tokens": 700, "recompute": True},
    "one microbatch": {"microbatch_tokens": 4096},
    "two stages": {"microbatch_tokens": 300, **TWO},
    "two stages, recompute": {"microbatch_tokens": 300, "recompute": True, **TWO},
}


class Company:
    """Trains adapter "a" by itself; ``top`` are the run's keys of every way."""

    def __init__(self, folder: Path, top: dict[str, Any]) -> None:
        self._model, self._top = save_tiny(folder / "model", "llama3.2", num_hidden_layers=4), top
        common = {"learning_rate": 1e-2, "max_steps": 6, "warmup_steps": 1}
        rows = {name: str(write_rows(folder / f"{name}.jsonl", 30, i, 40)) for i, name in enumerate("abc")}
        self._adapters = [
            common | {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5},
            common | {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"]},
            common | {"name": "c", "dataset": rows["c"], "r": 64, "per_device_train_batch_size": 2},
        ]
        self._alone = outcome(run(folder / "alone", self._model, self._adapters[:1], **top), "a")
        assert self._alone.losses[-1] < self._alone.losses[1], "nothing was learnt"

    def differences(self, folder: Path, way: str) -> list[str]:
        """What of adapter "a" differs once two others train beside it."""
        return self._alone.differences(outcome(run(folder, self._model, self._adapters, **self._top, **WAYS[way]), "a"))


@pytest.fixture(scope="module", params=["nf4", "int8", "fp8"])
def company(request, tmp_path_factory):
    if request.param != "fp8":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    elif torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8 units")
    double = {"double_quantization": True} if request.param == "nf4" else {}
    return Company(tmp_path_factory.mktemp("company"), {"quantization": request.param, **double})


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("way", WAYS)
def test_company_cuts_stages_recompute_and_graphs_change_no_bit(company, tmp_path, monkeypatch, way, graphs):
    if not graphs:
        monkeypatch.setattr(stage, "MOST_ROWS", 0)
    assert not company.differences(tmp_path / "run", way)
