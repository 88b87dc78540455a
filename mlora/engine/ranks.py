"""The stages of a run as threads of one process or as the processes that torchrun started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from mlora.engine.coordinator import OnStep
from mlora.engine.device import choose_device, prepare, prepare_for_nccl
from mlora.engine.exporter import tag
from mlora.engine.replicas import lead_replica
from mlora.engine.requests import Requests, stop
from mlora.engine.signals import StopSignals
from mlora.engine.worker import Job, Seat, Worker, check_model
from mlora.engine.world import World, is_launched, torchrun_world
from mlora.pipeline.executor import Entry
from mlora.pipeline.transport.base import TransportError
from mlora.pipeline.transport.control import Control
from mlora.pipeline.transport.distributed import distributed_control, distributed_transport
from mlora.pipeline.transport.liveness import Liveness
from mlora.pipeline.transport.local import local_controls, local_transports


class Lead(Protocol):
    """What the first rank does, as stage 0. ``job`` is what the other ranks must know, ``run`` gives what all return.

    ``requests`` is what has been asked of this rank, ``ask`` puts a wish before all.
    """

    @property
    def job(self) -> Any: ...

    def run(self, seat: Seat, requests: Requests, ask: Callable[[str], None]) -> Any: ...


Follow = Callable[[Any, Seat], None]  # what a stage behind the first does with the job


def run_stages(lead: Callable[[int], Lead], follow: Follow, on_step: OnStep | None = None) -> Any:
    """Over the processes that torchrun started, else over threads of this one. ``lead`` takes the number of processes;
    it is called on the first rank alone."""
    world = torchrun_world()
    if world is not None and world.size > 1:
        return _run_in_processes(world, lead, follow, on_step)
    requests = Requests()
    leader = lead(1)
    with StopSignals(lambda number: requests.ask(stop(number)), is_launched()):
        return _run_in_threads(leader, follow, requests)


def _run_in_threads(leader: Lead, follow: Follow, requests: Requests) -> Any:
    """All stages on one device: stage 0 in this thread, each other stage in its own."""
    device = choose_device(leader.job.config.device)
    prepare(device)
    stages = len(leader.job.in_flight)
    if stages == 1:
        return leader.run(Seat(device=device), requests, requests.ask)
    channels = zip(local_transports(stages, device), local_controls(stages), strict=True)
    first, *others = [Seat(device=device, transport=transport, stages=control) for transport, control in channels]
    with ThreadPoolExecutor(stages - 1, thread_name_prefix="stage") as threads:
        following = [threads.submit(_or_abort, seat, partial(follow, leader.job, seat)) for seat in others]
        try:
            return _or_abort(first, lambda: leader.run(first, requests, requests.ask))
        except BaseException:
            _raise_first(following)
            raise


def _run_in_processes(world: World, lead: Callable[[int], Lead], follow: Follow, on_step: OnStep | None) -> Any:
    """One stage per process. A process that dies or raises ends all others; the first real error is shown last."""
    prepare_for_nccl()
    store = world.open_store()
    requests = Requests()
    with (
        Liveness(store, world.rank, world.size) as watch,
        StopSignals(lambda number: _ask_all(requests, watch, stop(number)), True, watch.has_failed, watch.leave_word),
    ):
        watch.on_asked(requests.ask)
        control = distributed_control(store, world.rank, world.size)
        watch.abort_on_failure(control.abort)
        leader = lead(world.size) if world.rank == 0 else None
        job = _share(control, leader.job if leader else None)
        seat = _seat(job, world, store, control)
        own = [channel for channel in (seat.transport, seat.stages) if channel is not None and channel is not control]
        for channel in own:
            watch.abort_on_failure(channel.abort)
        results = None
        if leader is not None:
            results = leader.run(seat, requests, watch.ask)
        elif seat.stage == 0:
            lead_replica(job, seat, on_step, requests)
        else:
            follow(job, seat)
        results = _share(control, results)
        for channel in (*own, control):
            channel.close()
        return results


def _ask_all(requests: Requests, watch: Liveness, what: str) -> None:
    requests.ask(what)
    watch.ask(what)


def _seat(job: Job, world: World, store: dist.Store, control: Control) -> Seat:
    """This rank's; the ranks of a replica follow each other in the order of its stages."""
    device, stages = choose_device(job.config.device), len(job.in_flight)
    if device.type == "cuda":
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    prepare(device)
    if stages == 1:
        return Seat(device=device, world=control)
    first, own = world.rank // stages * stages, control
    if job.replicas > 1:
        own = distributed_control(dist.PrefixStore(f"replica/{first}", store), world.rank - first, stages)
    backend = job.config.pipeline.transport
    named: Literal["gloo", "nccl"] | None = backend if backend in ("gloo", "nccl") else None
    transport = distributed_transport(store, range(first, first + stages), world.rank, device, named)
    return Seat(device=device, transport=transport, stages=own, world=control)


def follow_training(job: Job, seat: Seat) -> None:
    """Run a stage behind the first, window by window, until the leader ends the stream."""
    check_model(job)
    control = seat.stages
    assert control is not None

    def deliver(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> None:
        control.report(tag(entry))
        control.send_tensors(tensors)

    worker = Worker(job, seat, deliver, lambda entry: control.next())
    worker.executor.run(iter(control.next, None))
    control.gather_objects(worker.executor.timeline)


def _or_abort(seat: Seat, work: Callable[[], Any]) -> Any:
    """Work whose failure ends that of all other stages."""
    assert seat.transport is not None and seat.stages is not None
    try:
        return work()
    except BaseException:
        seat.transport.abort()
        seat.stages.abort()
        raise


def _raise_first(others: list[Future[None]]) -> None:
    """Raise a stage's own error rather than the broken connection that it left to the others."""
    errors = [error for other in others if (error := other.exception()) is not None]
    for error in errors:
        if not isinstance(error, TransportError):
            raise error


def _share(control: Control, given: Any) -> Any:
    """What rank 0 gives, on every rank."""
    if control.rank:
        return control.next()
    control.publish(given)
    return given
