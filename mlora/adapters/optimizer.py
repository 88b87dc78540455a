"""An adapter's own optimizer and learning-rate clock, over its flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

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
    """torch's own AdamW or SGD on the flat master, or on a GPU AdamW as one kernel.

    With LoRA+ (Hayou et al., 2024) the matrices are parameters of their own, those of B with a rate of their own.
    A step that is skipped leaves moments and AdamW's count alone. All its memory is taken at once, so that a step needs
    none of which there might be too little.
    """

    def __init__(self, state: AdapterState) -> None:
        self._state = state
        config, decay = state.config, state.config.weight_decay
        views = self._views(state.master)
        groups = [{"params": [torch.nn.Parameter(x, requires_grad=False) for x in group]} for group in views]
        if config.optim == "sgd":
            self._torch: torch.optim.Optimizer = torch.optim.SGD(groups, lr=config.learning_rate, weight_decay=decay)
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self._torch = torch.optim.AdamW(
                groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, weight_decay=decay
            )
        self._count, self._moments = 0, self._zero_moments() if self._is_adamw else {}  # AdamW's; flat
        self._is_b = self._mask() if self._is_adamw and has_kernels(state.master) else None

    @property
    def _is_adamw(self) -> bool:
        return isinstance(self._torch, torch.optim.AdamW)

    def _views(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """What has one rate: all in one piece, or with LoRA+ every A, and every B."""
        if self._state.config.loraplus_lr_ratio == 1:
            return [[flat]]
        pairs = self._state.named(flat).values()
        return [[a_RD for a_RD, _ in pairs], [b_RO for _, b_RO in pairs]]

    def _mask(self) -> torch.Tensor | None:
        """Which elements have B's rate, for the kernel; None where all have the same."""
        mask = torch.zeros_like(self._state.master, dtype=torch.int8)
        _, *b_views = self._views(mask)
        for b_RO in b_views[0] if b_views else ():
            b_RO.fill_(1)
        return mask if b_views else None

    def step(self, learning_rate: float, coefficient: float) -> None:
        """Clip, update the masters, refresh the compute copy, clear the gradients."""
        state = self._state
        if self._is_adamw:
            self._count += 1
            if has_kernels(state.master):
                self._adamw(learning_rate, coefficient)
                return
        if coefficient != 1.0:
            state.grad.mul_(coefficient)
        rates = (learning_rate, learning_rate * state.config.loraplus_lr_ratio)
        for group, views, rate in zip(self._torch.param_groups, self._views(state.grad), rates, strict=False):
            group["lr"] = rate
            for parameter, grad in zip(group["params"], views, strict=True):
                parameter.grad = grad
        self._torch.step()
        state.refresh()
        self.skip()

    def _zero_moments(self) -> dict[str, torch.Tensor]:
        """As flat buffers, of which views are the state of torch's AdamW."""
        flats = {key: torch.zeros_like(self._state.master) for key in MOMENTS}
        parameters = [parameter for group in self._torch.param_groups for parameter in group["params"]]
        views = [list(chain(*self._views(flat))) for flat in flats.values()]
        for parameter, *moments in zip(parameters, *views, strict=True):
            self._torch.state[parameter] = {"step": torch.tensor(0.0), **dict(zip(MOMENTS, moments, strict=True))}
        return flats

    def _adamw(self, learning_rate: float, coefficient: float) -> None:
        state, config = self._state, self._state.config
        kernels("adamw").adamw(
            state.master,
            state.grad,
            tuple(self._moments.values()),
            state.compute,
            coefficient,
            learning_rate,
            (config.adam_beta1, config.adam_beta2),
            config.adam_epsilon,
            config.weight_decay,
            self._count,
            self._is_b,
            config.loraplus_lr_ratio,
        )

    def skip(self) -> None:
        """Forget the gradients of the step."""
        self._state.grad.zero_()

    def snapshot(self, moments: bool = True) -> dict[str, torch.Tensor]:
        """Host copies of matrices and moments as ``MODULE.A`` and ``MODULE.A.exp_avg``, and AdamW's count as ``COUNT``.

        One copy of each flat buffer; what is returned are views of them. Without ``moments`` the matrices alone.
        """
        kept = self._moments if moments and self._count else {}
        flats = {"": self._state.master} | {f".{key}": flat for key, flat in kept.items()}
        found: dict[str, torch.Tensor] = {}
        for suffix, flat in zip(flats, on_host(list(flats.values())), strict=True):
            for name, pair in self._state.named(flat).items():
                found |= {f"{name}.{k}{suffix}": x for k, x in zip("AB", pair, strict=True)}
        return found | ({COUNT: torch.tensor(float(self._count))} if kept else {})

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``snapshot`` gave, on this stage or on several others; names of other layers are ignored."""
        own = self._state.matrices()
        self._state.load({name: (tensors[f"{name}.A"], tensors[f"{name}.B"]) for name in own})
        if COUNT not in tensors:
            return
        self._count = int(tensors[COUNT])
        for kept in self._torch.state.values():
            kept["step"].fill_(self._count)
        for key, flat in self._moments.items():
            for name, pair in self._state.named(flat).items():
                for k, moment in zip("AB", pair, strict=True):
                    moment.copy_(tensors[f"{name}.{k}.{key}"])
