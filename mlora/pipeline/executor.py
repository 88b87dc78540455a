"""The interpreter of a stage's row: one loop for one stage or many, in a process or over a network.

Messages. Down with F or E: the rows ``[T, D]`` of the microbatch, then five float64 numbers for each STEP that the
position carries (rate, coefficient, skip, save, keep). Up with B: dX ``[T, D]``, then for each step that ends in the
microbatch Σ loss and Σ grad² of every layer from the sender's first to the model's last. Up behind E: the scores of the
microbatch's samples, ``[samples, 2]``. Shapes follow from the stream, so none travels.

Poison. A stage that cannot compute a microbatch (out of memory, an exception) sends zeros of the planned shape with a
note of what happened; the other stages pass the note on instead of computing, so no receive is left open, and stage 0
tells the coordinator. Weights change only in STEP, so nothing else is undone.

Letters: T packed rows, D model dim.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from mlora.config import AdapterConfig
from mlora.ops.devices import sent
from mlora.pipeline.schedule import Action, Position, StageRow, StepRef, Timed, drain
from mlora.pipeline.stage import Batch, Stage
from mlora.pipeline.transport.base import Direction, Pending, Spec, Transport, TransportError
from mlora.types import Microbatch, Segment, StepDecision

_REMEMBERED = 20_000  # actions in the timeline; a run of weeks must not fill the memory
_AHEAD = 8  # actions of the row that are looked at early, so that their receives are posted before they are due


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A change of the stream that every stage meets at the same point: before a position, or beside a STEP.

    An adapter joins or leaves its slot, its unfinished step is dropped ("reset"), what it is after ``step`` is saved
    (right behind that STEP), or its weights after ``step`` are kept as its best (right before the next STEP).
    Who joins brings its ``config`` and ``targets``; ``restored``: from a checkpoint, whose tensors follow.
    """

    kind: Literal["join", "leave", "reset", "save", "keep"]
    slot: int
    adapter: int
    step: int = -1
    config: AdapterConfig | None = None
    targets: tuple[str, ...] = ()
    restored: bool = False


@dataclass(frozen=True, kw_only=True)
class Window:
    """A planned part of the stream with its tokens, as plain data. ``inputs`` are ids and targets by position."""

    entries: tuple[Entry, ...]
    positions: tuple[Position, ...]
    inputs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Sums:
    """What is known of a step that ends: its segment, Σ loss, Σ grad² of the layers from this stage's first on."""

    position: int
    segment: Segment
    loss: float
    squares: tuple[float, ...]


class Decider(Protocol):
    """Who decides about steps, beside stage 0. A position tells one attempt at a step from another."""

    def close_step(
        self, position: int, segment: Segment, loss_sum: float, squares: Sequence[float]
    ) -> StepDecision: ...

    def evaluated(self, microbatch: Microbatch, scores: Sequence[Sequence[float]]) -> None: ...

    def poisoned(self, microbatch: Microbatch, note: str) -> None: ...

    def halted(self) -> bool: ...


class Executor:
    """Runs one stage's row.

    Args:
        stage: the slice of the model with its adapters.
        transport: this stage's messages; None where there is one stage.
        in_flight: w(s) of every stage.
        first_layers: the first layer of every stage, and behind them the number of layers.
        meet: called for every entry of the stream, in its place.
        decider: on stage 0, decides how a step is taken and hears of microbatches that could not be computed.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport | None,
        in_flight: Sequence[int],
        first_layers: Sequence[int],
        meet: Callable[[Entry], None],
        decider: Decider | None = None,
    ) -> None:
        index = transport.stage if transport else 0
        self._stage, self._transport, self._index = stage, transport, index
        self._in_flight, self._layers = in_flight, first_layers
        self._meet, self._decider = meet, decider
        self._row = StageRow(index, in_flight)
        self._positions: dict[int, Position] = {}
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pending: dict[tuple[str, int], Pending] = {}
        self._arrived: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, torch.Tensor] = {}
        self._poison: dict[int, str] = {}
        self._sums: dict[StepRef, _Sums] = {}
        self._decisions: dict[StepRef, StepDecision] = {}
        self._epoch = time.time() - time.perf_counter()  # one clock for all stages of a host
        self._times: deque[Timed] = deque(maxlen=_REMEMBERED)
        self._do = {
            "F": self._forward,
            "E": self._evaluate,
            "B": self._backward,
            "STEP": self._step,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }

    @property
    def timeline(self) -> list[Timed]:
        """When the last actions ran, in seconds since 1970."""
        return list(self._times)

    def run(self, windows: Iterable[Window]) -> None:
        """Walk the stream to its end."""
        index = 0
        for window in windows:
            for entry in window.entries:
                self._meet(entry)
            self._inputs.update(window.inputs)
            self._walk(window.positions)
            index = window.positions[-1].index + 1 if window.positions else index
        self._walk(drain(index, self._in_flight))

    def _walk(self, positions: Sequence[Position]) -> None:
        """All actions of these positions. A stage never waits for the next window with an action of this one undone:
        the stage that plans it may be waiting for just that."""
        recent = {i: old for i, old in self._positions.items() if i >= max(self._positions) - self._in_flight[0]}
        self._positions = recent | {position.index: position for position in positions}
        actions = [action for position in positions for action in self._row.tick(position)]
        posted = 0
        for done, action in enumerate(actions):
            while posted < min(done + _AHEAD, len(actions)):
                self._post(actions[posted])
                posted += 1
            start = time.perf_counter()
            self._do[action.kind](action)
            self._times.append(Timed(action, self._epoch + start, self._epoch + time.perf_counter()))

    def _post(self, item: Action) -> None:
        if not item.kind.startswith("RECV"):
            return
        assert self._transport is not None and item.position is not None
        down = item.kind == "RECV_F"
        specs = self._forward_specs(item.position) if down else self._backward_specs(item.position)
        direction = Direction.FORWARD if down else Direction.BACKWARD
        self._pending[item.kind, item.position] = self._transport.receive(direction, specs)

    def _forward_specs(self, index: int) -> list[Spec]:
        position = self._positions[index]
        specs = [self._rows_spec(position.microbatch)] if position.microbatch else []
        return [*specs, Spec((len(position.steps), 5), torch.float64)] if position.steps else specs

    def _backward_specs(self, index: int) -> list[Spec]:
        microbatch = self._positions[index].microbatch
        assert microbatch is not None
        if self._positions[index].forward_only:
            return [_scores_spec(microbatch)]
        ended = len(_ended(microbatch))
        numbers = 1 + self._layers[-1] - self._layers[self._index + 1]
        specs = [self._rows_spec(microbatch)]
        return [*specs, Spec((ended, numbers), torch.float64)] if ended else specs

    def _rows_spec(self, microbatch: Microbatch) -> Spec:
        return Spec((microbatch.rows, self._stage.model.width), self._stage.model.dtype)

    def _receive_forward(self, action: Action) -> None:
        position = self._positions[_place(action)]
        tensors = list(self._take("RECV_F", position.index))
        if position.microbatch:
            self._arrived[position.index] = tensors.pop(0)
        for ref, numbers in zip(position.steps, tensors[0].tolist() if position.steps else [], strict=True):
            rate, coefficient, *flags = numbers
            self._decisions[ref] = StepDecision(rate, coefficient, *map(bool, flags))

    def _send_forward(self, action: Action) -> None:
        position = self._positions[_place(action)]
        tensors = [self._leaving.pop(position.index)] if position.microbatch else []
        if position.steps:
            decisions = [self._decisions.pop(ref) for ref in position.steps]
            rows = [(d.learning_rate, d.coefficient, d.skip, d.save, d.keep) for d in decisions]
            tensors.append(torch.tensor(rows, dtype=torch.float64, device=self._stage.model.device))
        assert self._transport is not None
        self._transport.send(Direction.FORWARD, tensors, self._poison.get(position.index, ""))

    def _receive_backward(self, action: Action) -> None:
        index = _place(action)
        tensors = self._take("RECV_B", index)
        if self._positions[index].forward_only:
            self._leaving[index] = tensors[0]
            self._take_scores(action)
            return
        self._arrived[index] = tensors[0]
        ended = _ended(action.microbatch)
        for segment, (loss, *squares) in zip(ended, tensors[1].tolist() if ended else [], strict=True):
            self._sums[_ref(segment)] = _Sums(index, segment, loss, tuple(squares))

    def _send_backward(self, action: Action) -> None:
        index = _place(action)
        tensors = [self._leaving.pop(index)]
        trains = self._positions[index].trains
        ended = [self._sums.pop(_ref(segment)) for segment in _ended(action.microbatch)] if trains else []
        if ended:
            rows = [(sums.loss, *sums.squares) for sums in ended]
            tensors.append(torch.tensor(rows, dtype=torch.float64, device=self._stage.model.device))
        assert self._transport is not None
        self._transport.send(Direction.BACKWARD, tensors, self._poison.pop(index, ""))

    def _forward(self, action: Action) -> None:
        out_TD = self._compute(action, self._stage.forward)
        if not self._stage.model.is_last:
            self._leaving[_place(action)] = self._zeros(action) if out_TD is None else out_TD

    def _evaluate(self, action: Action) -> None:
        out = self._compute(action, self._stage.score)
        if not self._stage.model.is_last:
            self._leaving[_place(action)] = self._zeros(action) if out is None else out
            return
        assert action.microbatch is not None
        spec = _scores_spec(action.microbatch)
        scores = torch.zeros(spec.shape, dtype=spec.dtype) if out is None else out
        self._leaving[_place(action)] = scores.to(self._stage.model.device)
        self._take_scores(action)

    def _take_scores(self, action: Action) -> None:
        """On stage 0, where an evaluation's scores end."""
        if self._decider is None:
            return
        index, microbatch = _place(action), action.microbatch
        assert microbatch is not None
        scores = self._leaving.pop(index)
        if index in self._poison:
            self._decider.poisoned(microbatch, self._poison.pop(index))
        else:
            self._decider.evaluated(microbatch, scores.tolist())

    def _compute(
        self, action: Action, work: Callable[[Batch, torch.Tensor | None], torch.Tensor | None]
    ) -> torch.Tensor | None:
        index, batch = _place(action), self._batch(action)
        x_TD = self._arrived.pop(index, None)
        return self._attempt(action, lambda: work(batch, x_TD))

    def _backward(self, action: Action) -> None:
        index = _place(action)
        arrived = self._arrived.pop(index, None)
        dx_TD = self._attempt(action, lambda: self._stage.backward(index, arrived))
        if self._index > 0:
            self._leaving[index] = self._zeros(action) if dx_TD is None else dx_TD
        elif index in self._poison:
            assert self._decider is not None and action.microbatch is not None
            self._decider.poisoned(action.microbatch, self._poison.pop(index))
        for segment in _ended(action.microbatch):
            own, ref = self._stage.close_step(segment.slot), _ref(segment)
            later = self._sums.get(ref, _Sums(index, segment, own.loss, ()))
            self._sums[ref] = _Sums(index, segment, later.loss, (*own.squares, *later.squares))

    def _attempt(self, action: Action, work: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """The work's result, or None where the microbatch is poisoned, here or before."""
        index = _place(action)
        if self._decider is not None and self._decider.halted():
            self._poison.setdefault(index, "the run is being stopped")  # what is planned passes by without work
        if index not in self._poison:
            try:
                return work()
            except (TransportError, AssertionError):
                raise  # another process's end, or a bug of ours: that is not one microbatch's fault
            except Exception as error:
                self._poison[index] = f"{action} on stage {self._index}: {_told(action, error)}"
                traceback.print_exc()
        self._stage.forget(index)
        return None

    def _zeros(self, action: Action) -> torch.Tensor:
        assert action.microbatch is not None
        spec = self._rows_spec(action.microbatch)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._stage.model.device)

    def _take(self, kind: str, index: int) -> tuple[torch.Tensor, ...]:
        """The message of a posted receive; a note in it poisons the microbatch here too."""
        pending = self._pending.pop((kind, index))
        if pending.note:
            self._poison[index] = pending.note
        return pending.wait()

    def _step(self, action: Action) -> None:
        ref = action.step
        assert ref is not None
        if self._decider is not None:
            sums = self._sums.pop(ref)
            self._decisions[ref] = self._decider.close_step(sums.position, sums.segment, sums.loss, sums.squares)
        if self._decisions[ref].keep:
            self._meet(Entry(kind="keep", slot=ref.slot, adapter=ref.adapter, step=ref.step - 1))
        self._stage.step(ref.slot, self._decisions[ref])
        if self._decisions[ref].save:
            self._meet(Entry(kind="save", slot=ref.slot, adapter=ref.adapter, step=ref.step))
        if self._stage.model.is_last:
            del self._decisions[ref]

    def _batch(self, action: Action) -> Batch:
        assert action.microbatch is not None
        input_ids_T, targets_T = self._inputs.pop(action.microbatch.index)
        return Batch(action.microbatch, sent(input_ids_T, self._stage.model.device), targets_T)


def _told(action: Action, error: Exception) -> str:
    """What went wrong, and for a full memory what to do."""
    if isinstance(error, torch.OutOfMemoryError) and action.microbatch is not None:
        lengths = action.microbatch.sample_lengths()
        return (
            f"out of memory with {action.microbatch.rows} rows of {len(lengths)} samples, the longest of "
            f"{max(lengths)} tokens; lower microbatch_tokens or the adapter's max_length, or write recompute: true"
        )
    return f"{type(error).__name__}: {error}"


def _place(action: Action) -> int:
    assert action.position is not None
    return action.position


def _ended(microbatch: Microbatch | None) -> list[Segment]:
    assert microbatch is not None
    return [segment for segment in microbatch.segments if segment.ends_step]


def _scores_spec(microbatch: Microbatch) -> Spec:
    return Spec((len(microbatch.sample_lengths()), 2), torch.float64)


def _ref(segment: Segment) -> StepRef:
    return StepRef(adapter=segment.adapter, slot=segment.slot, step=segment.step)
