"""One stage: a slice of the frozen model, the adapters on it, and the microbatches in flight.

A microbatch's segments come with it as an argument; the stage never has a "current" microbatch. What an adapter's step
needs (losses, sums of squares) is handed out when the step closes, and the step is then applied or discarded.

Letters: T packed rows, N rows with a target, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from mlora.adapters.optimizer import Optimizer
from mlora.adapters.state import AdapterState
from mlora.ops.batch_lora import LoraGroup
from mlora.ops.cross_entropy import CHUNK_ROWS, linear_cross_entropy
from mlora.ops.exact import exact_sum
from mlora.types import IGNORE, MERGED_LINEARS, ROW_MULTIPLE, Microbatch, StepDecision, padded

Banks = dict[int, dict[str, dict[int, LoraGroup]]]  # layer -> merged linear -> slot -> matrices


class SliceModel(Protocol):
    """What a stage needs of the model (mlora.models.decoder.Decoder has it)."""

    layers: range
    is_first: bool
    is_last: bool
    head_VD: torch.Tensor
    width: int
    dtype: torch.dtype
    device: torch.device

    def pack(self, microbatch: Microbatch) -> Any: ...
    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor: ...
    def run(self, x_TD: torch.Tensor, packed: Any, banks: Mapping[int, Any], recompute: bool) -> torch.Tensor: ...
    def norm(self, x_TD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Batch:
    """A microbatch with its tokens. ``targets_T[i]`` is the label of the token that row i predicts, or IGNORE."""

    microbatch: Microbatch
    input_ids_T: torch.Tensor
    targets_T: torch.Tensor


@dataclass(frozen=True)
class StepSums:
    """One stage's part of a step: Σ loss over its target tokens (0 except on the last stage), Σ grad² of each layer."""

    loss: float
    squares: tuple[float, ...]


@dataclass(frozen=True)
class _Flight:
    """Kept between F and B: the leaf that entered, what left, and on the last stage the gradient of what left."""

    x_TD: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor | None


class Stage:
    """Runs F, B, E and STEP for one slice of the model."""

    def __init__(self, model: SliceModel, recompute: bool = False) -> None:
        self.model = model
        self._recompute = recompute
        self._banks = _empty_banks(model.layers)
        self._without_dropout = _empty_banks(model.layers)
        self._optimizers: dict[int, Optimizer] = {}
        self._states: dict[int, AdapterState] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._flights: dict[int, _Flight] = {}

    def join(self, slot: int, state: AdapterState) -> None:
        """Put an adapter into a free slot."""
        assert slot not in self._states, f"slot {slot} is taken"
        self._states[slot], self._optimizers[slot], self._losses[slot] = state, Optimizer(state), []
        for layer, banks in self._banks.items():
            for merged, bank in banks.items():
                group = state.group(layer, merged)
                if group is not None:
                    bank[slot] = group
                    self._without_dropout[layer][merged][slot] = replace(group, dropout=0.0)

    def leave(self, slot: int) -> None:
        """Free the slot. The adapter must have no microbatch in flight."""
        del self._states[slot], self._optimizers[slot], self._losses[slot]
        for banks in (*self._banks.values(), *self._without_dropout.values()):
            for bank in banks.values():
                bank.pop(slot, None)

    def forward(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor | None:
        """F: the rows that go to the next stage; None on the last, which forms loss and its gradient at once."""
        microbatch = batch.microbatch
        x_TD = self.model.embed(batch.input_ids_T) if x_TD is None else x_TD
        x_TD = x_TD.detach().requires_grad_()
        with torch.enable_grad():
            out = self.model.run(x_TD, self.model.pack(microbatch), self._banks, self._recompute)
            if not self.model.is_last:
                self._flights[microbatch.index] = _Flight(x_TD, out, None)
                return out.detach()
            rows_N, labels_N, weights_N = _targets(batch)
            out = self.model.norm(out)[rows_N]
        nll_N, dout = linear_cross_entropy(out.detach(), self.model.head_VD, labels_N, weights_N)
        self._keep_losses(batch, nll_N)
        self._flights[microbatch.index] = _Flight(x_TD, out, dout)
        return None

    def backward(self, index: int, dout_TD: torch.Tensor | None = None) -> torch.Tensor:
        """B of microbatch ``index``: adds to the adapters' gradients, returns dX for the stage before."""
        flight = self._flights.pop(index)
        torch.autograd.backward(flight.out, flight.dout if dout_TD is None else dout_TD)
        assert flight.x_TD.grad is not None
        return flight.x_TD.grad

    @torch.no_grad()
    def evaluate(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor:
        """E: forward only, without dropout; on the last stage the logits [T, V], else the rows for the next stage."""
        x_TD = self.model.embed(batch.input_ids_T) if x_TD is None else x_TD
        out = self.model.run(x_TD, self.model.pack(batch.microbatch), self._without_dropout, recompute=False)
        return self.model.norm(out) @ self.model.head_VD.T if self.model.is_last else out

    def forget(self, index: int) -> None:
        """Drop what is kept of microbatch ``index``, which could not be computed here or on another stage."""
        self._flights.pop(index, None)

    def reset(self, slot: int) -> None:
        """Drop the slot's unfinished step: gradients and losses."""
        self._losses[slot] = []
        self._optimizers[slot].skip()

    def close_step(self, slot: int) -> StepSums:
        """What this stage knows of the slot's step once all its B's are done."""
        losses, self._losses[slot] = self._losses[slot], []
        loss = exact_sum(x for part in losses for x in part.double().tolist())
        return StepSums(loss, tuple(self._states[slot].sums_of_squares()))

    def step(self, slot: int, decision: StepDecision) -> None:
        """STEP: update the adapter's weights, or leave weights and moments as they are where the step is skipped."""
        if decision.skip:
            self._optimizers[slot].skip()
        else:
            self._optimizers[slot].step(decision.learning_rate, decision.coefficient)

    def snapshot(self, slot: int) -> dict[str, torch.Tensor]:
        """Host copies of the slot's matrices, moments and AdamW's count, see ``Optimizer.snapshot``."""
        return self._optimizers[slot].snapshot()

    def restore(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a snapshot, perhaps of other stages, into the slot."""
        self._optimizers[slot].restore(tensors)

    def _keep_losses(self, batch: Batch, nll_N: torch.Tensor) -> None:
        start = 0
        for segment in batch.microbatch.segments:
            count = int((batch.targets_T[segment.start : segment.stop] != IGNORE).sum())
            self._losses[segment.slot].append(nll_N[start : start + count])
            start += count


def _empty_banks(layers: range) -> Banks:
    return {layer: {merged: {} for merged in MERGED_LINEARS} for layer in layers}


def _targets(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with a target, their labels and weights, padded with weight-0 rows: on a GPU to whole chunks of the head."""
    weights_T = torch.zeros(batch.targets_T.shape[0], dtype=torch.float64)
    for segment in batch.microbatch.segments:
        weights_T[segment.start : segment.stop] = 1 / segment.target_tokens
    rows_N = (batch.targets_T != IGNORE).nonzero()[:, 0]
    device = batch.input_ids_T.device
    extra = padded(len(rows_N), ROW_MULTIPLE if device.type == "cpu" else CHUNK_ROWS) - len(rows_N)
    weights_N = torch.nn.functional.pad(weights_T[rows_N], (0, extra))
    rows_N = torch.nn.functional.pad(rows_N, (0, extra))
    labels_N = batch.targets_T[rows_N].clamp(min=0)
    return rows_N.to(device), labels_N.to(device), weights_N.to(device)
