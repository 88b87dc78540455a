"""What the processes of the tests do: each function gets the store, its rank, the number of ranks, and arguments."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from control_suite import run_control
from transport_suite import NAMES, close_delivers_pending_sends, run_check

from mlora.pipeline.transport.base import Direction, Spec
from mlora.pipeline.transport.board import Board
from mlora.pipeline.transport.distributed import distributed_control, distributed_transport
from mlora.pipeline.transport.liveness import Liveness
from mlora.types import UserError

LIMITS = {"silent_s": 8.0, "beat_s": 0.2, "grace_s": 4.0}


def all_checks(store, rank, world, device="cpu", backend=""):
    """Every conformance check: those that leave a transport open share one; the abort has its own."""
    device = own_device(rank, device)
    for part, names in (("open", NAMES[:-1]), ("aborted", NAMES[-1:])):
        part = dist.PrefixStore(part, store)
        started = time.monotonic()
        transport = distributed_transport(part, range(world), rank, device, backend or None)
        print(f"connected: {time.monotonic() - started:.1f} s", flush=True)
        for name in names:
            started = time.monotonic()
            run_check(name, transport, device, close=name == NAMES[-2])
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        wait_for_all(part, rank, world)
    if device != "cpu":
        sys.stdout.flush()
        os._exit(0)  # communicators that were aborted may not survive torch's own clean-up


def own_device(rank, device):
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    return device


def wait_for_all(store, rank, world):
    """Nobody tears a connection down while another still works with it; rank 0, with the store, goes last."""
    store.set(f"arrived/{rank}", "")
    store.wait([f"arrived/{other}" for other in range(world)])
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in range(world)])


def end_right_after_close(store, rank, world):
    """The first process has ended before the second has read anything."""
    transport = distributed_transport(store, range(world), rank)
    close_delivers_pending_sends(transport, "cpu")
    transport.close()
    os._exit(0)


def two_replicas(store, rank, world):
    """Two pipelines of two stages side by side, and one control channel over all ranks."""
    ranks = [0, 1] if rank < 2 else [2, 3]
    transport = distributed_transport(store, ranks, rank)
    control = distributed_control(store, rank, world)
    peer = ranks[1 - transport.stage]
    direction = Direction.BACKWARD if transport.stage else Direction.FORWARD
    transport.send(direction, [torch.tensor([rank])])
    (received,) = transport.receive(Direction(-direction), [Spec((1,), torch.int64)]).wait()
    assert received.item() == peer
    run_control(control, large=4_000)
    transport.close()


def control(store, rank, world, large):
    run_control(distributed_control(store, rank, world), int(large))


def publish_does_not_wait(store, rank, world):
    """Rank 0 publishes more than sockets buffer before anybody listens."""
    channel = distributed_control(store, rank, world)
    if rank == 0:
        started = time.monotonic()
        for _ in range(5):
            channel.publish(b"x" * 20_000_000)
        assert time.monotonic() - started < 1.5
        store.set("published", "")
    else:
        store.wait(["published"])
        assert all(len(channel.next()) == 20_000_000 for _ in range(5))
    channel.close()


def control_abort(store, rank, world):
    channel = distributed_control(store, rank, world)
    if rank:
        threading.Timer(0.3, channel.abort).start()
        try:
            channel.next()
        except RuntimeError as error:
            assert "aborted" in str(error)
            print("woken", flush=True)
    wait_for_all(store, rank, world)


def sleep(store, rank, world):
    time.sleep(600)


def watched(store, rank, world, work, device="cpu"):
    """A run with a pipeline and a control channel under a watch; ``work`` is one of the functions below."""
    with Liveness(store, rank, world, **LIMITS) as liveness:
        device = own_device(rank, device)
        transport = distributed_transport(store, range(world), rank, device)
        channel = distributed_control(store, rank, world)
        liveness.abort_on_failure(transport.abort)
        liveness.abort_on_failure(channel.abort)
        exchange(transport, device)
        print("started", flush=True)
        globals()[work](transport, channel)
        transport.close()
        channel.close()


def silent_peer_calls_back(store, *_):
    """Rank 1 beats twice; a callback in place of the default one leaves the rest to its owner."""
    peer = Board(store)
    peer.set_host(1, "elsewhere")
    peer.beat(1)
    liveness = Liveness(store, 0, 2, on_failure=lambda reason: print(reason, flush=True), silent_s=0.5, beat_s=0.05)
    time.sleep(0.4)
    peer.beat(1)
    time.sleep(0.3)
    print("too early" if aborted(liveness) else "", end="")
    time.sleep(0.8)
    assert aborted(liveness)


def aborted(liveness):
    """Whether the watch has noticed a failure: an abort that is added later is called at once."""
    called = []
    liveness.abort_on_failure(lambda: called.append(True))
    return bool(called)


def exchange(transport, device="cpu"):
    """One message up and one down the pipeline."""
    for direction in Direction:
        if 0 <= transport.stage - direction < transport.stages:
            transport.receive(direction, [Spec((1,), torch.float32)]).wait()
        if 0 <= transport.stage + direction < transport.stages:
            transport.send(direction, [torch.ones(1, device=device)])


def exchange_for_ever(transport, _):
    while True:
        exchange(transport)
        time.sleep(0.01)


def rank_1_raises(transport, _):
    if transport.stage == 1:
        raise ValueError("the loader of adapter 'b'\nis broken")
    exchange_for_ever(transport, _)


def rank_1_has_a_user_error(transport, _):
    if transport.stage == 1:
        raise UserError("data.jsonl:7, column 'text': not text; write text")
    exchange_for_ever(transport, _)


def rank_0_raises(transport, channel):
    if transport.stage == 0:
        raise ValueError("the plan is empty")
    channel.next()


def clean(transport, _):
    exchange(transport)


def stall_on_rank_1(transport, _):
    """Longer than a silent peer may be."""
    if transport.stage == 1:
        time.sleep(LIMITS["silent_s"] * 1.7)
    exchange(transport)


def late_end_of_rank_2(transport, _):
    """The others have ended long before."""
    if transport.stage == 2:
        time.sleep(LIMITS["silent_s"] * 1.5)


def stuck_main_thread(transport, _):
    """Rank 1 fails; rank 2 neither computes nor waits for a message, so no abort can wake it."""
    if transport.stage == 1:
        raise ValueError("rank 1 is broken")
    if transport.stage == 2:
        time.sleep(600)
    exchange_for_ever(transport, _)
