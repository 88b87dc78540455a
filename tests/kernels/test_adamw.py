"""AdamW as one kernel against torch's own, over steps with clipping and decay, and through the engine's optimizer."""

from __future__ import annotations

import pytest
import torch

from mlora import parse_config
from mlora.adapters import optimizer as optimizers
from mlora.adapters.optimizer import Optimizer
from mlora.adapters.state import AdapterState
from mlora.ops.kernels.adamw import adamw
from mlora.types import LINEAR_MODULES
from tests.kernels.lora_cases import DEVICE


def _random(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 1000, 5000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_torchs(size, decay):
    betas, eps, rate = (0.9, 0.999), 1e-8, 1e-2
    theirs = torch.nn.Parameter(_random(size, 0).double())
    optimizer = torch.optim.AdamW([theirs], lr=rate, betas=betas, eps=eps, weight_decay=decay)
    master = theirs.detach().float().to(DEVICE)
    moments = (torch.zeros_like(master), torch.zeros_like(master))
    compute = torch.full_like(master, float("nan"), dtype=torch.float16)
    for count in range(1, 7):
        gradient, coefficient = _random(size, count) * 10.0 ** (count - 4), 1.0 / count
        theirs.grad = gradient.double() * coefficient
        optimizer.param_groups[0]["lr"] = rate / count
        optimizer.step()
        grad = gradient.to(DEVICE)
        adamw(master, grad, moments, compute, coefficient, rate / count, betas, eps, decay, count)
        assert not grad.any()
    torch.testing.assert_close(master.cpu().double(), theirs.detach(), rtol=2e-6, atol=2e-6)
    state = optimizer.state[theirs]
    for ours, key in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(
            ours.cpu().double(), state[key], rtol=2e-6, atol=1e-6 * state[key].abs().max().item()
        )
    assert torch.equal(compute, master.half())


def test_a_small_decay_is_not_rounded_away():
    """1 - 1e-6 in float32 would be off by 6 %."""
    master = torch.ones(8, device=DEVICE)
    for count in range(1, 2001):
        zeros = [torch.zeros_like(master) for _ in range(3)]
        adamw(master, zeros[0], (zeros[1], zeros[2]), master.clone(), 1.0, 1e-4, (0.9, 0.999), 1e-8, 1e-2, count)
    assert master[0].item() == pytest.approx((1 - 1e-6) ** 2000, abs=4e-5)


@pytest.mark.parametrize("ratio", [1, 5])
def test_the_engines_optimizer_takes_the_same_steps_with_the_kernel_and_without(ratio, monkeypatch):
    """With LoRA+ too, and a change from one to the other on the way, as between a GPU and a CPU."""
    keys = {"name": "a", "dataset": "x", "r": 3, "init_lora_weights": False, "rank_pattern": {"up_proj": 5}}
    keys |= {"loraplus_lr_ratio": ratio, "weight_decay": 0.1}
    config = parse_config({"base_model": "b", "adapters": [keys]}).adapters[0]
    shapes = {"up_proj": (40, 24), "down_proj": (24, 40)}
    targets = [f"model.layers.{layer}.mlp.{kind}" for layer in (0, 1) for kind in shapes]
    found = []
    for with_kernel in ((True, True, True), (False, False, False), (True, False, True)):
        saved = {}
        for step, kernel in enumerate(with_kernel):
            monkeypatch.setattr(optimizers, "has_kernels", lambda x, kernel=kernel: kernel)
            places = {kind: shapes.get(kind, (8, 8)) for kind in LINEAR_MODULES}
            state = AdapterState(config, targets, places, range(2), torch.float32, torch.device(DEVICE))
            optimizer = Optimizer(state)
            if saved:
                optimizer.restore(saved)
            for name, pair in state.named(state.grad).items():
                for kind, grad in zip("AB", pair, strict=True):
                    grad.copy_(_random(grad.shape, step + len(name) + ord(kind)))
            optimizer.step(1e-2, 0.5)
            saved = {name: tensor.clone() for name, tensor in optimizer.snapshot().items()}
        found.append(saved)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
