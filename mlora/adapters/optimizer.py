"""An adapter's own optimizer and learning-rate clock, over its flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mlora.adapters.state import AdapterState
from mlora.config import AdapterConfig
from mlora.ops.devices import has_kernels, kernels, on_host

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments
COUNT = "optimizer.step"  # AdamW's count of the steps that it has taken, the same on every stage


def warmup_steps(config: AdapterConfig, total_steps: int) -> int:
    """``warmup_steps`` below 1 is a share of all steps, rounded up, as in transformers."""
    share = config.warmup_steps
    return int(share) if share >= 1 else math.ceil(share * total_steps)


def learning_rate(config: AdapterConfig, step: int, total_steps: int) -> float:
    """The rate of step ``step`` (from 0): transformers' curves, so the first warm-up step has rate 0."""
    kind, warmup = config.lr_scheduler_type, warmup_steps(config, total_steps)
    if kind != "constant" and step < warmup:
        return config.learning_rate * step / max(1, warmup)
    progress = (step - warmup) / max(1, total_steps - warmup)
    if kind == "linear":
        return config.learning_rate * max(0.0, 1 - progress)
    if kind == "cosine":
        return config.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
    return config.learning_rate


def clip_coefficient(norm: float, max_grad_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 0 switches clipping off."""
    return min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm > 0 else 1.0


class Optimizer:
    """torch's own AdamW or SGD on the flat master, or on a GPU AdamW as one kernel with torch's state.

    A step that is skipped leaves moments and AdamW's count alone.
    """

    def __init__(self, state: AdapterState) -> None:
        self._state = state
        self._parameter = torch.nn.Parameter(state.master, requires_grad=False)
        config = state.config
        if config.optim == "sgd":
            self._torch: torch.optim.Optimizer = torch.optim.SGD(
                [self._parameter], lr=config.learning_rate, weight_decay=config.weight_decay
            )
        else:
            self._torch = torch.optim.AdamW(
                [self._parameter],
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                weight_decay=config.weight_decay,
            )

    def step(self, learning_rate: float, coefficient: float) -> None:
        """Clip, update the masters, refresh the compute copy, clear the gradients."""
        if has_kernels(self._state.master) and isinstance(self._torch, torch.optim.AdamW):
            self._adamw(learning_rate, coefficient)
            return
        if coefficient != 1.0:
            self._state.grad.mul_(coefficient)
        self._torch.param_groups[0]["lr"] = learning_rate
        self._parameter.grad = self._state.grad
        self._torch.step()
        self._state.refresh()
        self.skip()

    def _adamw(self, learning_rate: float, coefficient: float) -> None:
        state, config = self._state, self._state.config
        kept = self._torch.state[self._parameter]
        if not kept:
            kept |= {"step": torch.tensor(0.0)} | {key: torch.zeros_like(state.master) for key in MOMENTS}
        kept["step"] += 1
        kernels("adamw").adamw(
            state.master,
            state.grad,
            tuple(kept[key] for key in MOMENTS),
            state.compute,
            coefficient,
            learning_rate,
            (config.adam_beta1, config.adam_beta2),
            config.adam_epsilon,
            config.weight_decay,
            int(kept["step"]),
        )

    def skip(self) -> None:
        """Forget the gradients of the step."""
        self._state.grad.zero_()

    def snapshot(self, moments: bool = True) -> dict[str, torch.Tensor]:
        """Host copies of matrices and moments as ``MODULE.A`` and ``MODULE.A.exp_avg``, and AdamW's count as ``COUNT``.

        One copy of each flat buffer; what is returned are views of them. Without ``moments`` the matrices alone.
        """
        kept = self._torch.state.get(self._parameter, {}) if moments else {}
        flats = {"": self._state.master} | {f".{key}": kept[key] for key in MOMENTS if key in kept}
        found: dict[str, torch.Tensor] = {}
        for suffix, flat in zip(flats, on_host(list(flats.values())), strict=True):
            for name, pair in self._state.named(flat).items():
                found |= {f"{name}.{k}{suffix}": x for k, x in zip("AB", pair, strict=True)}
        return found | ({COUNT: kept["step"].to("cpu", copy=True)} if "step" in kept else {})

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``snapshot`` gave, on this stage or on several others; names of other layers are ignored."""
        own = self._state.matrices()
        self._state.load({name: (tensors[f"{name}.A"], tensors[f"{name}.B"]) for name in own})
        if COUNT not in tensors:
            return
        kept = self._torch.state[self._parameter]
        kept["step"] = tensors[COUNT].to("cpu", copy=True)
        for key in MOMENTS:
            kept[key] = torch.zeros_like(self._state.master)
            for name, pair in self._state.named(kept[key]).items():
                for k, moment in zip("AB", pair, strict=True):
                    moment.copy_(tensors[f"{name}.{k}.{key}"])
