"""Adapters dealt to replicas: each replica trains its own over a whole pipeline, and only status comes back.

Rank 0 reads all data and writes all results. It hands every other replica's leader its adapters with their tokens; that
leader sends back starts, steps and, when an adapter is saved or leaves, its record and its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mlora.config import AdapterConfig
from mlora.engine.adapter_run import AdapterRun, Record, StepReport
from mlora.engine.cadence import Cadence
from mlora.engine.coordinator import Coordinator, OnStep, Records
from mlora.engine.evaluation import EvaluationReport
from mlora.engine.exporter import Collector, Exporter, InOrder, Tensors, tag
from mlora.engine.recorder import Recorder
from mlora.engine.requests import Requests
from mlora.engine.worker import Job, Seat, Worker
from mlora.pipeline.executor import Entry, Window
from mlora.pipeline.transport.control import Control
from mlora.types import module_name


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
class _Snapshot:
    """An adapter's tensors follow: it is saved or kept as its best, or it leaves."""

    adapter: int
    record: Record
    kind: str


@dataclass(frozen=True)
class _Finished:
    """Nothing follows; ``signal`` has stopped the replica, if not None."""

    signal: int | None


class RemoteRecorder:
    """Recorder of a replica that does not write: everything goes to rank 0, in the order of ``jobs``."""

    def __init__(self, control: Control, jobs: InOrder) -> None:
        self._control, self._jobs = control, jobs

    def start(self, adapter: str, earlier: Sequence[StepReport], config: AdapterConfig) -> None:
        self._jobs.submit(lambda: self._control.report(_Start(adapter)))

    def step(self, report: StepReport, config: AdapterConfig) -> None:
        self._jobs.submit(lambda: self._control.report(report))

    def evaluation(self, report: EvaluationReport) -> None:
        self._jobs.submit(lambda: self._control.report(report))


class RemoteExporter:
    """Exporter of a replica that does not write: an adapter's snapshots go to rank 0, where its end is known by them.

    The stream must not wait for the stages behind the first: they meet a STEP a tick later than the first does.
    What rank 0's disk takes for a write is not known here; the time until it is under way stands for it.
    """

    def __init__(self, control: Control, collector: Collector, cadence: Cadence, jobs: InOrder) -> None:
        self._control, self._collector, self._cadence, self._jobs = control, collector, cadence, jobs

    def take(self, adapter: AdapterRun, record: Record, entry: Entry, tensors: Tensors) -> None:
        """Send the adapter as it is at the entry."""
        self._jobs.submit(lambda: self._send(adapter, record, entry, tensors))

    def _send(self, adapter: AdapterRun, record: Record, entry: Entry, tensors: Tensors) -> None:
        start = time.monotonic()
        whole = self._collector.collect(tag(entry), tensors)
        self._control.report(_Snapshot(adapter.index, record, entry.kind))
        self._control.send_tensors(whole)
        if entry.kind != "keep":
            self._cadence.wrote(adapter.config.name, time.monotonic() - start)


def first_stage(
    job: Job,
    seat: Seat,
    adapters: Sequence[AdapterRun],
    recorder: Records,
    exporter: Exporter | RemoteExporter,
    on_step: OnStep | None,
    requests: Requests,
    cadence: Cadence,
) -> tuple[Worker, Iterator[Window]]:
    """Stage 0 of a replica and the stream that it leads its stages through."""
    stages = seat.stages
    coordinator = Coordinator(job.config, adapters, job.in_flight, recorder, on_step, requests, cadence)

    def deliver(entry: Entry, tensors: Tensors) -> None:
        adapter = coordinator.adapter(entry.adapter)
        exporter.take(adapter, adapter.record(), entry, tensors)

    def fetch(entry: Entry) -> Tensors:
        adapter = coordinator.adapter(entry.adapter)
        tensors, adapter.restored = adapter.restored, None
        assert tensors is not None
        return tensors

    def publish(window: Window | None) -> None:
        """A window, and behind it each stage's part of the checkpoints with which adapters join in it."""
        assert stages is not None
        stages.publish(window)
        for entry in window.entries if window else ():
            if entry.restored:
                tensors = coordinator.adapter(entry.adapter).restored
                assert tensors is not None
                for rank in range(1, stages.world):
                    stages.send(rank, _of_layers(tensors, range(*job.first_layers[rank : rank + 2])))

    worker = Worker(job, seat, deliver, fetch, coordinator)
    return worker, coordinator.windows(publish if stages else None)


def _of_layers(tensors: Tensors, layers: range) -> dict[str, torch.Tensor]:
    """What of a checkpoint belongs to these layers or to all."""
    names = {module_name(layer, "") for layer in layers}
    return {k: x for k, x in tensors.items() if not k.startswith("model.") or any(k.startswith(n) for n in names)}


def lead_replica(job: Job, seat: Seat, on_step: OnStep | None, requests: Requests) -> None:
    """Train what rank 0 hands over, as stage 0 of a replica behind the first."""
    world, cadence, jobs = seat.world, Cadence(job.config), InOrder("reports")
    assert world is not None
    recorder, exporter = RemoteRecorder(world, jobs), RemoteExporter(world, Collector(seat.stages), cadence, jobs)
    try:
        worker, windows = first_stage(job, seat, world.next(), recorder, exporter, on_step, requests, cadence)
        worker.executor.run(windows)
        jobs.submit(lambda: world.report(_Finished(requests.signal)))
        jobs.finish()
    except BaseException:
        jobs.abandon(wait=False)
        raise
    if seat.stages:
        seat.stages.gather_objects(worker.executor.timeline)


def hand_over(control: Control, rank: int, adapters: Sequence[AdapterRun]) -> None:
    """Rank 0 gives a replica's leader its adapters with their tokens."""
    control.send(rank, [_to_travel(adapter) for adapter in adapters])
    for adapter in adapters:
        adapter.restored = None


def receive_all(
    control: Control, rank: int, adapters: Sequence[AdapterRun], recorder: Recorder, exporter: Exporter
) -> int | None:
    """On rank 0, in a thread of its own: write what the replica led by ``rank`` reports, until it has finished.

    Returns the signal that has stopped it, of which this rank may not have heard yet.
    """
    by_name = {adapter.config.name: adapter for adapter in adapters}
    by_index = {adapter.index: adapter for adapter in adapters}
    while not isinstance(message := control.receive(rank), _Finished):
        if isinstance(message, _Start):
            adapter = by_name[message.adapter]
            adapter.state = "training"
            recorder.start(message.adapter, adapter.reports, adapter.config)
        elif isinstance(message, StepReport):
            adapter = by_name[message.adapter]
            adapter.reports.append(message)
            recorder.step(message, adapter.config)
        elif isinstance(message, EvaluationReport):
            by_name[message.adapter].evaluations.append(message)
            recorder.evaluation(message)
        else:
            adapter, record = by_index[message.adapter], message.record
            adapter.state, adapter.reason = record.state, record.reason
            exporter.write(adapter, record, message.kind, control.receive_tensors(rank))
    return message.signal


def _to_travel(adapter: AdapterRun) -> AdapterRun:
    """The same with tokens in memory: mapped files do not travel."""
    held_out = adapter.held_out.in_memory() if adapter.held_out is not None else None
    return replace(adapter, data=adapter.data.in_memory(), held_out=held_out, kept=None)
