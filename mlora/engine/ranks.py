"""The stages of a run as threads of one process or as the processes that torchrun started."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
import torch.distributed as dist

from mlora.engine.coordinator import OnStep
from mlora.engine.device import choose_device, prepare, prepare_for_nccl
from mlora.engine.exporter import tag
from mlora.engine.leader import Leader
from mlora.engine.replicas import lead_replica
from mlora.engine.requests import Requests, stop
from mlora.engine.results import Results
from mlora.engine.signals import StopSignals
from mlora.engine.worker import Job, Worker, model_digest
from mlora.engine.world import World, is_launched
from mlora.models.weights import resolve_base_model
from mlora.pipeline.executor import Entry
from mlora.pipeline.transport.base import Transport, TransportError
from mlora.pipeline.transport.control import Control
from mlora.pipeline.transport.distributed import distributed_control, distributed_transport
from mlora.pipeline.transport.liveness import Liveness
from mlora.pipeline.transport.local import local_controls, local_transports
from mlora.types import UserError

_ECHO_S = 3.0  # within which a launcher passes a signal on


def train_in_threads(leader: Leader) -> Results:
    """All stages in this process, on one device: stage 0 in this thread, each other stage in its own."""
    requests = Requests()
    echo_s = _ECHO_S if is_launched() else 0.0
    with StopSignals(lambda number: requests.ask(stop(number)), echo_s):
        return _train_in_threads(leader, requests)


def _train_in_threads(leader: Leader, requests: Requests) -> Results:
    device = choose_device(leader.job.config.device)
    prepare(device)
    stages = len(leader.job.in_flight)
    if stages == 1:
        return leader.run(device, None, None, requests, requests.ask)
    transports, controls = local_transports(stages, device), local_controls(stages)
    with ThreadPoolExecutor(stages - 1, thread_name_prefix="stage") as threads:
        others = [
            threads.submit(_follow_or_abort, leader.job, device, transport, control)
            for transport, control in zip(transports[1:], controls[1:], strict=True)
        ]
        try:
            return leader.run(device, transports[0], controls[0], requests, requests.ask)
        except BaseException:
            transports[0].abort()
            controls[0].abort()
            _raise_first(others)
            raise


def train_in_processes(world: World, lead: Callable[[int], Leader], on_step: OnStep | None) -> Results:
    """One stage per process. A process that dies or raises ends all others; the first real error is shown last."""
    prepare_for_nccl()
    store = world.open_store()
    requests = Requests()
    with (
        Liveness(store, world.rank, world.size) as watch,
        StopSignals(
            lambda number: _ask_all(requests, watch, stop(number)), _ECHO_S, watch.has_failed, watch.leave_word
        ),
    ):
        watch.on_asked(requests.ask)
        control = distributed_control(store, world.rank, world.size)
        watch.abort_on_failure(control.abort)
        leader = lead(world.size) if world.rank == 0 else None
        job = _share(control, leader.job if leader else None)
        device = _device_of(job, world)
        prepare(device)
        first, ranks = _replica_of(job, world)
        stages = control if job.replicas == 1 else _stage_control(store, world.rank - first, first, len(ranks))
        transport = _transport(job, store, ranks, world.rank, device)
        for channel in (stages, transport):
            if channel is not None and channel is not control:
                watch.abort_on_failure(channel.abort)
        if leader is not None:
            results = leader.run(device, transport, stages, requests, watch.ask, control)
            control.publish(results)
        elif world.rank == first:
            lead_replica(job, device, transport, stages, control, on_step, requests)
            results = control.next()
        else:
            assert transport is not None and stages is not None
            follow(job, device, transport, stages)
            results = control.next()
        for channel in {id(channel): channel for channel in (transport, stages, control)}.values():
            if channel is not None:
                channel.close()
        return results


def _ask_all(requests: Requests, watch: Liveness, what: str) -> None:
    requests.ask(what)
    watch.ask(what)


def _replica_of(job: Job, world: World) -> tuple[int, range]:
    """The first rank of this rank's replica, and all its ranks in the order of stages."""
    stages = len(job.in_flight)
    first = world.rank // stages * stages
    return first, range(first, first + stages)


def _stage_control(store: dist.Store, rank: int, first: int, stages: int) -> Control | None:
    if stages == 1:
        return None
    return distributed_control(dist.PrefixStore(f"replica/{first}", store), rank, stages)


def _transport(job: Job, store: dist.Store, ranks: range, rank: int, device: torch.device) -> Transport | None:
    if len(ranks) == 1:
        return None
    backend = job.config.pipeline.transport
    named: Literal["gloo", "nccl"] | None = backend if backend in ("gloo", "nccl") else None
    return distributed_transport(store, ranks, rank, device, named)


def follow(job: Job, device: torch.device, transport: Transport, control: Control) -> None:
    """Run a stage behind the first, window by window, until the leader ends the stream."""
    _check_model(job)

    def deliver(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> None:
        control.report(tag(entry))
        control.send_tensors(tensors)

    worker = Worker(job, device, transport, deliver, lambda entry: control.next())
    worker.run(iter(control.next, None))
    control.gather_objects(worker.executor.timeline)


def _follow_or_abort(job: Job, device: torch.device, transport: Transport, control: Control) -> None:
    try:
        follow(job, device, transport, control)
    except BaseException:
        transport.abort()
        control.abort()
        raise


def _raise_first(others: list[Future[None]]) -> None:
    """Raise a stage's own error rather than the broken connection that it left to the others."""
    errors = [error for other in others if (error := other.exception()) is not None]
    for error in errors:
        if not isinstance(error, TransportError):
            raise error


def _share(control: Control, job: Job | None) -> Job:
    if job is None:
        return control.next()
    control.publish(job)
    return job


def _device_of(job: Job, world: World) -> torch.device:
    device = choose_device(job.config.device)
    if device.type == "cpu":
        return device
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _check_model(job: Job) -> None:
    if model_digest(resolve_base_model(job.config.base_model)) != job.model_digest:
        raise UserError(
            f"base_model: {job.config.base_model} on {socket.gethostname()} is not the model that the first rank has; "
            "copy the same files to every host"
        )
