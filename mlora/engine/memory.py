"""How much memory a stage needs: weights, adapters with their optimizer state, and what its microbatches keep.

On one H200 in bf16 (Llama-3.1-8B shape, r=16 on all linears; jobs x samples x tokens) prediction and measured peak
were 44.6 and 44.5 GiB for 8x2x512, 39.0 and 38.8 without adapters, 32.7 and 32.5 for 8x1x512, 61.5 and 61.3 for
32x1x256, 18.9 and 18.7 for 1x1x512. The temporaries of a row were fitted to these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from mlora.config import AdapterConfig, RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.base import Base
from mlora.models.quantised import buffer_bytes
from mlora.models.spec import ModelSpec, Quantization, linear_shapes
from mlora.ops.cross_entropy import CHUNK_ROWS
from mlora.types import LINEAR_PATHS, module_name, padded

USED = 0.92  # of a card's memory; the rest is for the driver, the allocator's gaps and communicators
CAPS = (8192, 4096, 2048, 1024)  # microbatches of more rows bring no more speed
_ON_CPU = 2048  # rows of a microbatch
_ENOUGH = 4096  # rows; below, recompute with larger microbatches is tried first


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one stage."""

    weights: int
    adapters: int
    microbatches: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.microbatches

    def __str__(self) -> str:
        parts = f"weights {_gib(self.weights)}, adapters {_gib(self.adapters)}, microbatches {_gib(self.microbatches)}"
        return f"{_gib(self.total)} GiB ({parts})"


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The memory of every stage of a run.

    Args:
        layers: of each stage. in_flight: microbatches that each keeps.
        adapters: those that train at once, with the global names of their modules.
        quantization: how the layers' linears are kept; None: in ``dtype``.
    """

    spec: ModelSpec
    dtype: torch.dtype
    layers: Sequence[int]
    in_flight: Sequence[int]
    adapters: Sequence[tuple[AdapterConfig, Collection[str]]]
    quantization: Quantization | None = None

    def need(self, stage: int, rows: int, recompute: bool) -> Need:
        """What ``stage`` needs for microbatches of at most so many rows."""
        return Need(
            weights=self._weights(stage),
            adapters=sum(self._adapter(config, targets, stage) for config, targets in self.adapters),
            microbatches=self._microbatches(stage, rows, recompute),
        )

    def largest(self, rows: int, recompute: bool) -> tuple[int, Need]:
        """The stage that needs most, and how much."""
        needs = [(stage, self.need(stage, rows, recompute)) for stage in range(len(self.layers))]
        return max(needs, key=lambda pair: pair[1].total)

    def choose(self, device_bytes: int, longest: int, recompute: bool | None) -> tuple[int, bool]:
        """Rows of a microbatch and whether to recompute, so that all stages fit; ``recompute`` None: as needed.

        Microbatches as large as they bring speed are tried first, without recompute; smaller ones only down to 4,096
        rows before recompute is tried. Where nothing fits, the smallest: the run then says what is missing.
        """
        plain = [(cap, False) for cap in CAPS if cap >= _ENOUGH]
        again = [(cap, True) for cap in CAPS]
        rest = [(cap, False) for cap in CAPS if cap < _ENOUGH]
        tries = {None: [*plain, *again, *rest], True: again, False: [*plain, *rest]}[recompute]
        for cap, with_recompute in tries:
            if self.largest(max(cap, longest), with_recompute)[1].total <= USED * device_bytes:
                return cap, with_recompute
        return CAPS[-1], recompute is not False

    def _weights(self, stage: int) -> int:
        spec = self.spec
        start = sum(self.layers[:stage])
        layers = sum(self._layer(index) for index in range(start, start + self.layers[stage]))
        buffer = buffer_bytes(spec, self.quantization, self.dtype)
        table, first, last = spec.vocab_size * spec.hidden_size, stage == 0, stage == len(self.layers) - 1
        tables = 1 if first and last and spec.tied else first + last
        return layers + buffer + self.dtype.itemsize * tables * table

    def _layer(self, index: int) -> int:
        total = self.dtype.itemsize * 2 * self.spec.hidden_size
        shapes, quantization = linear_shapes(self.spec), self.quantization
        for path in LINEAR_PATHS:
            rows, columns = shapes[path.split(".")[-1]]
            if quantization is None or module_name(index, path) in quantization.dense:
                total += self.dtype.itemsize * rows * columns
            else:
                total += quantization.weight_bytes(rows, columns)
        return total

    def _adapter(self, config: AdapterConfig, targets: Collection[str], stage: int) -> int:
        """Masters, gradients and moments in float32 and the compute copy, of the stage's share of the layers."""
        shapes = linear_shapes(self.spec)
        elements = sum(config.rank(name) * sum(shapes[name.split(".")[-1]]) for name in targets)
        elements = elements * self.layers[stage] // self.spec.num_layers
        wide = torch.promote_types(self.dtype, torch.float32).itemsize
        mask = config.loraplus_lr_ratio != 1  # which elements are of B
        return elements * (mask + (2 if config.optim == "sgd" else 4) * wide + self.dtype.itemsize)

    def _microbatches(self, stage: int, rows: int, recompute: bool) -> int:
        spec, item, layers = self.spec, self.dtype.itemsize, self.layers[stage]
        attended = spec.num_heads * spec.head_dim
        qkv = attended + 2 * spec.num_kv_heads * spec.head_dim
        cap = padded(max((config.largest_rank for config, _ in self.adapters), default=1))
        shrunk = cap * len(LINEAR_PATHS) if self.adapters else 0
        rest = spec.hidden_size + qkv * (2 if spec.qk_norm else 1) + attended + 2 * spec.intermediate_size + shrunk
        kept = layers * (item * (spec.hidden_size + (0 if recompute else rest)) + 4 * spec.num_heads)
        passing = item * (spec.intermediate_size + 8 * spec.hidden_size + (rest if recompute else 0))
        if self.quantization and self.quantization.kind == "fp8":
            passing += 2 * spec.intermediate_size  # dy of gate and up once more, in one byte
        logits = 2 * CHUNK_ROWS * spec.vocab_size * item if stage == len(self.layers) - 1 else 0
        return rows * (self.in_flight[stage] * kept + passing) + logits


def fitted(
    config: RunConfig, base: Base, layers: Sequence[int], in_flight: Sequence[int], adapters: Sequence[AdapterRun]
) -> RunConfig:
    """The configuration with what says "auto" chosen for the GPU that is here; without one, 2,048 rows."""
    if base.device.type == "cpu":
        tokens, recompute = _ON_CPU, False
    else:
        active = sorted(adapters, key=lambda adapter: -sum(map(adapter.config.rank, adapter.targets)))[
            : config.max_active
        ]
        model = MemoryModel(
            spec=base.spec,
            dtype=base.dtype,
            layers=layers,
            in_flight=in_flight,
            adapters=[(adapter.config, adapter.targets) for adapter in active],
            quantization=base.quantization,
        )
        longest = max(int(max(adapter.data.lengths)) for adapter in adapters)
        tokens, recompute = _fit(config, model, longest, base.device)
    return replace(
        config,
        microbatch_tokens=tokens if config.microbatch_tokens == "auto" else config.microbatch_tokens,
        recompute=recompute if config.recompute == "auto" else config.recompute,
    )


def rows_of(config: RunConfig) -> int:
    """The most rows of a microbatch, of a configuration that was fitted."""
    assert isinstance(config.microbatch_tokens, int), "the configuration still says auto"
    return config.microbatch_tokens


def _fit(config: RunConfig, model: MemoryModel, longest: int, device: torch.device) -> tuple[int, bool]:
    total = torch.cuda.get_device_properties(device).total_memory
    wanted = None if config.recompute == "auto" else config.recompute
    tokens, recompute = model.choose(total, longest, wanted)
    if config.microbatch_tokens != "auto":
        tokens = config.microbatch_tokens
        rows = max(tokens, longest)
        recompute = model.largest(rows, False)[1].total > USED * total if wanted is None else wanted
    stage, need = model.largest(max(tokens, longest), recompute)
    how = f"microbatches of {tokens} rows {'with' if recompute else 'without'} recompute"
    print(f"memory: stage {stage} needs about {need} of {_gib(total)} GiB, for {how}", flush=True)
    return tokens, recompute


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
