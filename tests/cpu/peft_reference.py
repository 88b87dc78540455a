"""The reference: transformers + PEFT + torch.optim on the same samples, with the engine's dropout masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, get_scheduler
from transformers.models.llama import modeling_llama

from mlora.adapters.init import initial_matrices
from mlora.adapters.targets import match_targets
from mlora.config import AdapterConfig
from mlora.data import Sampler, TokenData
from mlora.ops.random import keep_mask, key_for


@dataclass
class Reference:
    """What PEFT came to. ``moved`` and ``start`` are by the exported file's keys."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)


class EngineDropout(torch.nn.Module):
    """Takes the place of PEFT's dropout and draws the engine's mask for the sample that is passing."""

    def __init__(self, config: AdapterConfig, name: str, clock: dict[str, int]) -> None:
        super().__init__()
        self.config, self.key, self.clock = config, key_for(config.seed, name), clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.config.lora_dropout
        keep = keep_mask(self.key, self.clock["step"], self.clock["ordinal"], x.shape[-2], x.shape[-1], p)
        return torch.where(keep.to(x.device), x / (1 - p), 0.0)


def train_with_peft(
    model_folder: Path,
    config: AdapterConfig,
    data: TokenData,
    total_steps: int,
    warmup: int,
    dtype: torch.dtype,
    quantization: BitsAndBytesConfig | None = None,
    device: str = "cpu",
) -> Reference:
    """The whole training, one sample at a time, the loss divided by the step's own count of shifted labels."""
    model = _build(model_folder, config, dtype, quantization, device)
    clock: dict[str, int] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout") and config.lora_dropout > 0:
            module.lora_dropout["default"] = EngineDropout(config, name.removeprefix("base_model.model."), clock)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(config, model, parameters)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, warmup, total_steps)
    sampler = Sampler(len(data), config.seed, config.rows_per_step)
    reference = Reference(start=_tensors(model))
    for step in range(total_steps):
        indices = sorted(sampler.indices(step), key=lambda i: (-data.lengths[i], i))
        targets = sum(int((data.sample(i)[1][1:] != -100).sum()) for i in indices)
        loss = 0.0
        for ordinal, index in enumerate(indices):
            clock.update(step=step, ordinal=ordinal)
            ids, labels = (torch.tensor(x).long().to(device) for x in data.sample(index))
            logits = model(ids[None]).logits[0, :-1]
            part = F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100) / targets
            part.backward()
            loss += part.item()
        limit = config.max_grad_norm if config.max_grad_norm > 0 else float("inf")
        reference.losses.append(loss)
        reference.norms.append(torch.nn.utils.clip_grad_norm_(parameters, limit).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    reference.weights = _tensors(model)
    return reference


def exact_norms(monkeypatch) -> None:
    """transformers' RMSNorm works in float32 whatever the model's dtype; a float64 comparison needs float64."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def _build(
    folder: Path, config: AdapterConfig, dtype: torch.dtype, quantization: BitsAndBytesConfig | None, device: str
) -> torch.nn.Module:
    quantised = {"quantization_config": quantization, "device_map": device} if quantization else {}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **quantised)
    if not quantised:
        base.to(device)
    targets = config.target_modules
    model = get_peft_model(
        base,
        LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=config.use_rslora,
            rank_pattern=dict(config.rank_pattern),
            alpha_pattern=dict(config.alpha_pattern),
            layers_to_transform=None if config.layers_to_transform is None else list(config.layers_to_transform),
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=False,
    )
    modules = dict(model.named_modules())
    for name in match_targets(config, base.config.num_hidden_layers):
        layer = modules[f"base_model.model.{name}"]
        a, b = initial_matrices(config, name, layer.in_features, layer.out_features)
        layer.lora_A["default"].weight.data = a.to(device, dtype)
        layer.lora_B["default"].weight.data = b.T.contiguous().to(device, dtype)
    return model.train()


def _optimizer(
    config: AdapterConfig, model: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    if config.optim == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    keys = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.loraplus_lr_ratio == 1:
        return torch.optim.AdamW(parameters, weight_decay=config.weight_decay, **keys)
    return create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        loraplus_lr_ratio=config.loraplus_lr_ratio,
        loraplus_weight_decay=config.weight_decay,
        **keys,
    )


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace(".default", ""): parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
