"""Adapters dealt to replicas: each replica trains its own over a whole pipeline, and only status comes back.

Rank 0 reads all data and writes all results. It hands every other replica's leader its adapters with their tokens; that
leader sends back starts, steps and, when an adapter has left, its end and its matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mlora.config import AdapterConfig
from mlora.data import TokenData
from mlora.engine.adapter_run import AdapterRun, State, StepReport
from mlora.engine.coordinator import Coordinator, OnStep, Records
from mlora.engine.exporter import Collect, Exporter, collected
from mlora.engine.recorder import Recorder
from mlora.engine.worker import Job, Worker
from mlora.pipeline.executor import Entry, Window
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control


def deal(adapters: Sequence[AdapterRun], replicas: int) -> list[list[AdapterRun]]:
    """The adapters of each replica: the dearest first, each to the replica that has least to do."""
    dealt: list[list[AdapterRun]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for adapter in sorted(adapters, key=lambda adapter: (-adapter.cost, adapter.index)):
        least = loads.index(min(loads))
        dealt[least].append(adapter)
        loads[least] += adapter.cost
    return [sorted(share, key=lambda adapter: adapter.index) for share in dealt]


@dataclass(frozen=True)
class _Start:
    adapter: str


@dataclass(frozen=True)
class _Step:
    report: StepReport
    config: AdapterConfig


@dataclass(frozen=True)
class _Left:
    adapter: int
    state: State
    reason: str
    reports: list[StepReport]


class RemoteRecorder:
    """Recorder of a replica that does not write: everything goes to rank 0."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def start(self, adapter: str) -> None:
        """The adapter's clock starts."""
        self._control.report(_Start(adapter))

    def step(self, report: StepReport, config: AdapterConfig) -> None:
        """A step's numbers."""
        self._control.report(_Step(report, config))


class RemoteExporter:
    """Exporter of a replica that does not write: an adapter's end and its matrices go to rank 0."""

    def __init__(self, control: Control, collect: Collect) -> None:
        self._control, self._collect = control, collect

    def take(self, adapter: AdapterRun, matrices: Mapping[str, torch.Tensor]) -> None:
        """Send the adapter as it has left the stream."""
        whole = collected(matrices, self._collect)
        self._control.report(_Left(adapter.index, adapter.state, adapter.reason, adapter.reports))
        self._control.send_tensors(whole)

    def finish(self) -> None:
        """Say that nothing follows."""
        self._control.report(None)


def collector(stages: Control | None) -> Collect:
    """Brings a leaving adapter's matrices from the stages behind the first."""
    if stages is None:
        return list
    return lambda: [stages.receive_tensors(rank) for rank in range(1, stages.world)]


def first_stage(
    job: Job,
    adapters: Sequence[AdapterRun],
    device: torch.device,
    transport: Transport | None,
    stages: Control | None,
    recorder: Records,
    exporter: Exporter | RemoteExporter,
    on_step: OnStep | None,
) -> tuple[Worker, Iterator[Window]]:
    """Stage 0 of a replica and the stream that it leads its stages through."""
    by_index = {adapter.index: adapter for adapter in adapters}
    coordinator = Coordinator(job.config, adapters, job.in_flight, recorder, on_step)

    def deliver(entry: Entry, matrices: Mapping[str, torch.Tensor]) -> None:
        exporter.take(by_index[entry.adapter], matrices)

    worker = Worker(job, device, transport, deliver, coordinator)
    return worker, coordinator.windows(stages.publish if stages else None)


def lead_replica(
    job: Job,
    device: torch.device,
    transport: Transport | None,
    stages: Control | None,
    world: Control,
    on_step: OnStep | None,
) -> None:
    """Train what rank 0 hands over, as stage 0 of a replica behind the first."""
    adapters = world.next()
    exporter = RemoteExporter(world, collector(stages))
    recorder = RemoteRecorder(world)
    worker, windows = first_stage(job, adapters, device, transport, stages, recorder, exporter, on_step)
    worker.run(windows)
    exporter.finish()
    if stages:
        stages.gather_objects(worker.executor.timeline)


def hand_over(control: Control, rank: int, adapters: Sequence[AdapterRun]) -> None:
    """Rank 0 gives a replica's leader its adapters with their tokens."""
    control.send(rank, [replace(adapter, data=_in_memory(adapter.data)) for adapter in adapters])


def receive_all(
    control: Control, rank: int, adapters: Sequence[AdapterRun], recorder: Recorder, exporter: Exporter
) -> None:
    """On rank 0, in a thread of its own: write what the replica led by ``rank`` reports, until it has finished."""
    while (message := control.receive(rank)) is not None:
        if isinstance(message, _Start):
            recorder.start(message.adapter)
        elif isinstance(message, _Step):
            recorder.step(message.report, message.config)
        else:
            adapter = next(adapter for adapter in adapters if adapter.index == message.adapter)
            adapter.state, adapter.reason, adapter.reports = message.state, message.reason, message.reports
            exporter.write(adapter, control.receive_tensors(rank))


def _in_memory(data: TokenData) -> TokenData:
    """The same tokens as plain arrays, which travel; mapped files do not."""
    arrays: dict[str, Any] = {
        name: np.array(value) for name, value in vars(data).items() if isinstance(value, np.ndarray)
    }
    return replace(data, **arrays)
