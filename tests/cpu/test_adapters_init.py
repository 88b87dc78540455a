"""How A and B start: PEFT's distributions, drawn by adapter seed and module name alone."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mlora import parse_config
from mlora.adapters.init import initial_matrices

NAME, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
IN, OUT, R = 600, 400, 16


def _config(**keys):
    adapter = {"name": "a", "dataset": "x.jsonl", "r": R, **keys}
    return parse_config({"base_model": "base", "adapters": [adapter]}).adapters[0]


def _pefts(init, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    base = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(IN, OUT)})
    config = LoraConfig(r=R, lora_alpha=R, target_modules=["q_proj"], init_lora_weights=init)
    layer = get_peft_model(base, config).base_model.model["q_proj"]
    return layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach().T


INITS = [True, False, "gaussian", "orthogonal"]


@pytest.mark.parametrize("init", INITS)
def test_shapes_and_spread_are_pefts(init):
    ours, theirs = initial_matrices(_config(init_lora_weights=init), NAME, IN, OUT), _pefts(init)
    for mine, other, limit in zip(ours, theirs, (0.03, 0.05), strict=True):
        assert mine.shape == other.shape and mine.dtype == torch.float64
        assert mine.std().item() == pytest.approx(other.std().item(), rel=limit)
        assert abs(mine.mean().item()) <= 5 * other.std().item() / math.sqrt(mine.numel())
        if other.any():  # the tails tell a uniform distribution from a normal one
            assert (mine / mine.std()).pow(4).mean().item() == pytest.approx(
                (other / other.std()).double().pow(4).mean().item(), rel=0.15
            )


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_b_starts_at_zero(init):
    assert not initial_matrices(_config(init_lora_weights=init), NAME, IN, OUT)[1].any()


def test_uniform_a_keeps_its_bound_and_gaussian_its_deviation():
    a, _ = initial_matrices(_config(), NAME, IN, OUT)
    assert 0.99 / math.sqrt(IN) < a.abs().max() <= 1 / math.sqrt(IN)
    a, _ = initial_matrices(_config(init_lora_weights="gaussian"), NAME, IN, OUT)
    assert a.std().item() == pytest.approx(1 / R, rel=0.03) and a.abs().max() > 3 / R


def test_orthogonal_a_and_b_cancel():
    """As in PEFT, B·A is zero and A·Aᵀ is not."""
    for a, b in (initial_matrices(_config(init_lora_weights="orthogonal"), NAME, IN, OUT), _pefts("orthogonal")):
        assert (b.T.double() @ a.double()).abs().max() < 1e-5
        assert a.norm() > 1 and b.norm() > 1
        assert (
            torch.linalg.matrix_rank(a.double(), rtol=1e-5) == torch.linalg.matrix_rank(b.double(), rtol=1e-5) == R // 2
        )


@pytest.mark.parametrize("init", INITS)
def test_a_draw_depends_on_seed_and_module_and_on_nothing_else(init):
    def draw(name=NAME, **keys):
        return torch.cat(
            [x.flatten() for x in initial_matrices(_config(init_lora_weights=init, **keys), name, IN, OUT)]
        )

    first = draw()
    assert torch.equal(first, draw(name=NAME))
    renamed = parse_config({"base_model": "m", "adapters": [{"name": "b", "dataset": "y", "r": R}]}).adapters[0]
    if init is True:
        assert torch.equal(initial_matrices(renamed, NAME, IN, OUT)[0].flatten(), first[: R * IN])
    for other in (draw(name=OTHER), draw(seed=43)):
        assert (first == other).double().mean() < 0.6 and not torch.equal(first, other)
