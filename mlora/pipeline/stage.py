"""One stage: a slice of the frozen model, the adapters on it, and the microbatches in flight.

A microbatch's segments come with it as an argument; the stage never has a "current" microbatch. What an adapter's step
needs (losses, sums of squares) is handed out when the step closes, and the step is then applied or discarded.

Letters: T packed rows, N rows with a target, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mlora.adapters.optimizer import Optimizer
from mlora.adapters.state import AdapterState
from mlora.ops.batch_lora import LinearBank
from mlora.ops.cross_entropy import CHUNK_ROWS, linear_cross_entropy, linear_cross_entropy_scores, logits
from mlora.ops.devices import Fetched, sent
from mlora.ops.exact import exact_sum
from mlora.pipeline.graphs import MOST_ROWS, Graphs
from mlora.pipeline.graphs import Flight as GraphFlight
from mlora.types import IGNORE, MERGED_LINEARS, ROW_MULTIPLE, Microbatch, Segment, StepDecision, padded

# Gradients of one token in thousands would vanish in float16; a power of two is taken out exactly.
_FLOAT16_SCALE = 2.0**12

Banks = Mapping[int, Mapping[str, LinearBank]]  # layer -> merged linear -> matrices by slot


class SliceModel(Protocol):
    """What a stage needs of the model (mlora.models.decoder.Decoder has it)."""

    layers: range
    is_first: bool
    is_last: bool
    head_VD: torch.Tensor
    width: int
    dtype: torch.dtype
    device: torch.device

    def pack(self, microbatch: Microbatch, dropout: bool = True) -> Any: ...
    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor: ...
    def infer(self, x_TD: torch.Tensor, packed: Any, banks: Banks) -> torch.Tensor: ...
    def forward(self, x_TD: torch.Tensor, packed: Any, banks: Banks, recompute: bool) -> tuple[torch.Tensor, Any]: ...
    def backward(self, kept: Any, dx_TD: torch.Tensor) -> torch.Tensor: ...
    def norm(self, x_TD: torch.Tensor) -> torch.Tensor: ...
    def norm_backward(self, x_TD: torch.Tensor, dnormed_TD: torch.Tensor) -> torch.Tensor: ...


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
    """Kept between F and B: what the model keeps, and on the last stage the gradient of what left its layers."""

    segments: tuple[Segment, ...]
    kept: Any
    dout_TD: torch.Tensor | None


@dataclass(frozen=True)
class _Closing:
    """What a stage knows of a step whose B's are done, on its way to the host: loss of each token, Σ grad² by layer."""

    losses: Fetched
    squares: Fetched


class Stage:
    """Runs F, B, E and STEP for one slice of the model. ``graphs``: whether CUDA graphs may be captured."""

    def __init__(self, model: SliceModel, recompute: bool = False, graphs: bool = True) -> None:
        self.model = model
        self._recompute = recompute
        self._most_graph_rows = MOST_ROWS if graphs else 0
        self._banks: Banks = {
            layer: {merged: LinearBank(len(paths)) for merged, paths in MERGED_LINEARS.items()}
            for layer in model.layers
        }
        self._optimizers: dict[int, Optimizer] = {}
        self._states: dict[int, AdapterState] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._held: dict[int, str] = {}
        self._flights: dict[int, _Flight] = {}
        self._closing: dict[int, _Closing] = {}
        self._graphs = Graphs(self._run, model.backward)
        self._scale = _FLOAT16_SCALE if model.dtype == torch.float16 else 1.0

    @property
    def banks(self) -> Banks:
        """The matrices of the adapters that have joined; they change with them."""
        return self._banks

    def join(self, slot: int, state: AdapterState) -> None:
        """Put an adapter into a free slot."""
        assert slot not in self._states, f"slot {slot} is taken"
        self._states[slot], self._optimizers[slot], self._losses[slot] = state, Optimizer(state), []
        for layer, banks in self._banks.items():
            for merged, bank in banks.items():
                group = state.group(layer, merged)
                if group is not None:
                    bank.put(slot, group)

    def hold(self, slot: int, state: AdapterState, reason: str) -> None:
        """Put an adapter that cannot compute here into a free slot: its microbatches raise ``reason``."""
        self._states[slot], self._optimizers[slot], self._losses[slot] = state, Optimizer(state), []
        self._held[slot] = reason

    def leave(self, slot: int) -> None:
        """Free the slot. The adapter must have no microbatch in flight."""
        self._held.pop(slot, None)
        del self._states[slot], self._optimizers[slot], self._losses[slot]
        for banks in self._banks.values():
            for bank in banks.values():
                bank.remove(slot)

    @torch.no_grad()
    def forward(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor | None:
        """F: the rows that go to the next stage; None on the last, which forms loss and its gradient at once."""
        model, microbatch = self.model, batch.microbatch
        self._check_held(microbatch)
        targets = _targets(batch, self._scale) if model.is_last else None
        x_TD = model.embed(batch.input_ids_T) if x_TD is None else x_TD
        out_TD, kept = self._forward(x_TD, model.pack(microbatch))
        dout_TD = self._loss(batch, out_TD, *targets) if targets else None
        self._flights[microbatch.index] = _Flight(microbatch.segments, kept, dout_TD)
        return None if model.is_last else out_TD

    @torch.no_grad()
    def backward(self, index: int, dout_TD: torch.Tensor | None = None) -> torch.Tensor:
        """B of microbatch ``index``: adds to the adapters' gradients, returns dX for the stage before."""
        flight = self._flights.pop(index)
        dout_TD = flight.dout_TD if dout_TD is None else dout_TD
        assert dout_TD is not None
        if isinstance(flight.kept, GraphFlight):
            dx_TD = self._graphs.backward(flight.kept, dout_TD)
        else:
            dx_TD = self.model.backward(flight.kept, dout_TD)
        for segment in flight.segments:
            if segment.ends_step:
                self._closing[segment.slot] = self._close(segment.slot)
        return dx_TD

    @torch.no_grad()
    def evaluate(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Forward only, without dropout; on the last stage the logits [T, V], else the rows for the next stage."""
        out = self._infer(batch, x_TD)
        return logits(self.model.norm(out), self.model.head_VD) if self.model.is_last else out

    @torch.no_grad()
    def score(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor:
        """E: forward only, without dropout; the rows for the next stage, on the last one the samples' scores.

        Scores are float64 [samples, 2] on the host: Σ loss of a sample's target tokens, rounded once, and how many of
        them have the largest logit. A sample's scores do not depend on the microbatch that it travels in.
        """
        out_TD = self._infer(batch, x_TD)
        return self._scores(batch, out_TD) if self.model.is_last else out_TD

    def forget(self, index: int) -> None:
        """Drop what is kept of microbatch ``index``, which could not be computed here or on another stage."""
        flight = self._flights.pop(index, None)
        if flight and isinstance(flight.kept, GraphFlight):
            self._graphs.forget(flight.kept)

    def reset(self, slot: int) -> None:
        """Drop the slot's unfinished step: gradients and losses."""
        self._losses[slot] = []
        self._optimizers[slot].skip()

    def close_step(self, slot: int) -> StepSums:
        """What this stage knows of the slot's step once all its B's are done."""
        closing = self._closing.pop(slot, None) or self._close(slot)  # a poisoned B has closed nothing
        squares = tuple(square / self._scale**2 for square in closing.squares.tolist())
        return StepSums(exact_sum(closing.losses.tolist()), squares)

    def step(self, slot: int, decision: StepDecision) -> None:
        """STEP: update the adapter's weights, or leave weights and moments as they are where the step is skipped."""
        if decision.skip:
            self._optimizers[slot].skip()
        else:
            self._optimizers[slot].step(decision.learning_rate, decision.coefficient / self._scale)

    def _forward(self, x_TD: torch.Tensor, packed: Any) -> tuple[torch.Tensor, Any]:
        if x_TD.is_cuda and len(x_TD) <= self._most_graph_rows:
            banks = [bank for banks in self._banks.values() for bank in banks.values()]
            return self._graphs.forward(x_TD, packed, tuple(bank.layout(x_TD.device) for bank in banks))
        return self._run(x_TD, packed)

    def _run(self, x_TD: torch.Tensor, packed: Any) -> tuple[torch.Tensor, Any]:
        return self.model.forward(x_TD, packed, self._banks, self._recompute)

    def _check_held(self, microbatch: Microbatch) -> None:
        for segment in microbatch.segments:
            if segment.slot in self._held:
                raise RuntimeError(self._held[segment.slot])

    def _infer(self, batch: Batch, x_TD: torch.Tensor | None) -> torch.Tensor:
        self._check_held(batch.microbatch)
        x_TD = self.model.embed(batch.input_ids_T) if x_TD is None else x_TD
        return self.model.infer(x_TD, self.model.pack(batch.microbatch, dropout=False), self._banks)

    def _scores(self, batch: Batch, out_TD: torch.Tensor) -> torch.Tensor:
        rows_N, labels_N, _ = _targets(batch, self._scale)
        hidden_ND = self.model.norm(out_TD[rows_N])
        nll_N, correct_N = linear_cross_entropy_scores(hidden_ND, self.model.head_VD, labels_N)
        losses, correct = nll_N.double().tolist(), correct_N.tolist()
        scores, start = [], 0
        for segment in batch.microbatch.segments:
            for _, first, last in segment.sample_rows():
                stop = start + int((batch.targets_T[first:last] != IGNORE).sum())
                scores.append((exact_sum(losses[start:stop]), float(sum(correct[start:stop]))))
                start = stop
        return torch.tensor(scores, dtype=torch.float64)

    def _close(self, slot: int) -> _Closing:
        losses, self._losses[slot] = self._losses[slot], []
        loss = torch.cat(losses) if losses else torch.zeros(0)
        return _Closing(Fetched(loss.double()), Fetched(self._states[slot].sums_of_squares()))

    def _loss(
        self, batch: Batch, out_TD: torch.Tensor, rows_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor
    ) -> torch.Tensor:
        """Keeps the losses of the rows with a target; returns the gradient of ``out_TD``, zero in all other rows."""
        out_ND = out_TD[rows_N]
        nll_N, dnormed_ND = linear_cross_entropy(self.model.norm(out_ND), self.model.head_VD, labels_N, weights_N)
        dout_ND = self.model.norm_backward(out_ND, dnormed_ND)
        self._keep_losses(batch, nll_N)
        count = int((batch.targets_T != IGNORE).sum())
        return torch.zeros_like(out_TD).index_copy_(0, rows_N[:count], dout_ND[:count])

    def snapshot(self, slot: int, moments: bool = True) -> dict[str, torch.Tensor]:
        """Host copies of the slot's matrices, moments and AdamW's count, see ``Optimizer.snapshot``."""
        return self._optimizers[slot].snapshot(moments)

    def restore(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a snapshot, perhaps of other stages, into the slot."""
        self._optimizers[slot].restore(tensors)

    def _keep_losses(self, batch: Batch, nll_N: torch.Tensor) -> None:
        start = 0
        for segment in batch.microbatch.segments:
            count = int((batch.targets_T[segment.start : segment.stop] != IGNORE).sum())
            self._losses[segment.slot].append(nll_N[start : start + count])
            start += count


def _targets(batch: Batch, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with a target, their labels and weights, padded with weight-0 rows: on a GPU to whole chunks of the head."""
    weights_T = torch.zeros(batch.targets_T.shape[0], dtype=torch.float64)
    for segment in batch.microbatch.segments:
        weights_T[segment.start : segment.stop] = scale / segment.target_tokens
    rows_N = (batch.targets_T != IGNORE).nonzero()[:, 0]
    device = batch.input_ids_T.device
    extra = padded(len(rows_N), ROW_MULTIPLE if device.type == "cpu" else CHUNK_ROWS) - len(rows_N)
    weights_N = torch.nn.functional.pad(weights_T[rows_N], (0, extra))
    rows_N = torch.nn.functional.pad(rows_N, (0, extra))
    labels_N = batch.targets_T[rows_N].clamp(min=0)
    return sent(rows_N, device), sent(labels_N, device), sent(weights_N, device)
