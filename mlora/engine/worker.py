"""One stage at work: its slice of the model, its part of every adapter, and the executor that walks the stream."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mlora.adapters.state import AdapterState
from mlora.config import RunConfig
from mlora.engine.base import model_digest
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization, choose_quantization
from mlora.models.spec import linear_shapes, load_spec
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.executor import Decider, Entry, Executor
from mlora.pipeline.stage import Stage
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control
from mlora.types import Microbatch, UserError

_LAST = 200  # actions that are looked at to say how full microbatches are

Deliver = Callable[[Entry, Mapping[str, torch.Tensor]], None]
Fetch = Callable[[Entry], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every stage must know of a run, as plain data."""

    config: RunConfig
    first_layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    replicas: int
    dtype: torch.dtype
    model_digest: str


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a stage computes, and how it speaks with others.

    ``transport`` carries its microbatches and ``stages`` reaches the stages of its replica; None where there is one.
    ``world`` reaches all ranks; None in one process.
    """

    device: torch.device
    transport: Transport | None = None
    stages: Control | None = None
    world: Control | None = None

    @property
    def stage(self) -> int:
        """From 0."""
        return self.transport.stage if self.transport else 0


def check_model(job: Job) -> None:
    """Raises UserError where this host has other files of the base model than the first rank."""
    if model_digest(resolve_base_model(job.config.base_model)) != job.model_digest:
        raise UserError(
            f"base_model: {job.config.base_model} on {socket.gethostname()} is not the model that the first rank has; "
            "copy the same files to every host"
        )


class Worker:
    """Builds a stage, and the executor that runs its row.

    Args:
        deliver: takes an adapter's snapshot of this stage when it leaves or is saved, see ``Stage.snapshot``.
        fetch: brings the snapshot with which an adapter joins that goes on from a checkpoint.
        decider: on stage 0, decides about steps.
    """

    def __init__(
        self,
        job: Job,
        seat: Seat,
        deliver: Deliver,
        fetch: Fetch,
        decider: Decider | None = None,
    ) -> None:
        folder, transport = resolve_base_model(job.config.base_model), seat.transport
        self._job, self._device, self._deliver, self._fetch = job, seat.device, deliver, fetch
        self.waited_s = 0.0  # for snapshots
        self._spec = load_spec(folder)
        self._layers = range(*job.first_layers[seat.stage : seat.stage + 2])
        checkpoint = Checkpoint(folder, self._spec)
        quantization = choose_quantization(job.config, self._spec, checkpoint)
        check_quantization(quantization, job.dtype, seat.device)
        model = Decoder(self._spec, checkpoint, self._layers, job.dtype, seat.device, quantization)
        # while one thread captures a graph, no other may allocate or launch: CUDA ends the capture
        graphs = transport is None or not transport.in_process
        self._stage = Stage(model, job.config.recompute is True, graphs)
        self.executor = Executor(self._stage, transport, job.in_flight, job.first_layers, self._meet, decider)

    def microbatches(self) -> list[Microbatch]:
        """The ones whose forward this stage has run last. Any thread may ask."""
        last = self.executor.timeline[-_LAST:]
        return [timed.action.microbatch for timed in last if timed.action.kind == "F" and timed.action.microbatch]

    def _meet(self, entry: Entry) -> None:
        if entry.kind == "reset":
            self._stage.reset(entry.slot)
            return
        if entry.kind == "join":
            self._join(entry)
            return
        start = time.perf_counter()
        self._deliver(entry, self._stage.snapshot(entry.slot, moments=entry.kind != "keep"))
        self.waited_s += time.perf_counter() - start
        if entry.kind == "leave":
            self._stage.leave(entry.slot)

    def _join(self, entry: Entry) -> None:
        """An adapter for which there is no room is held on the host, so that it is parked and the others go on."""
        assert entry.config is not None
        shapes, dtype = linear_shapes(self._spec), self._job.dtype
        state_on = partial(AdapterState, entry.config, entry.targets, shapes, self._layers, dtype)
        reason = ""
        try:
            self._stage.join(entry.slot, state_on(self._device))
        except AssertionError:
            raise  # a bug of ours
        except Exception as error:
            traceback.print_exc()
            reason = f"the adapter could not be taken in: {type(error).__name__}: {error}"
        if reason:  # behind the handler, which keeps alive what was taken of the memory
            self._stage.hold(entry.slot, state_on(torch.device("cpu")), reason)
        if entry.restored:
            self._stage.restore(entry.slot, self._fetch(entry))
