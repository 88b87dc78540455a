"""The order of calls of NcclLink where there is no GPU: gloo stands for NCCL, and nothing for CUDA's streams."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transport_suite import NAMES, run_check

from mlora.pipeline.transport import distributed
from mlora.pipeline.transport.base import Direction, Spec

DEADLINE_S = 60


class GlooAsNccl:
    left = 0  # messages, those of connecting too

    def __init__(self, store, side, size, options):
        self._group = dist.ProcessGroupGloo(store, side, size, options._timeout)

    @staticmethod
    def Options():
        return SimpleNamespace(config=SimpleNamespace())

    def send(self, *message):
        GlooAsNccl.left += 1
        return Work(self._group.send(*message))

    def recv(self, *message):
        return Work(self._group.recv(*message))

    def shutdown(self):
        pass

    abort = shutdown


class Work:
    def __init__(self, work):
        self._work, self._waited = work, False

    def wait(self):
        self._work.wait()
        self._waited = True

    def is_completed(self):
        return self._waited


class Stream:
    def __init__(self, device=None):
        pass

    def nothing(self, *args):
        pass

    wait_event = record_event = synchronize = nothing


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", Stream.nothing)


@pytest.mark.parametrize("names", [NAMES[:-1], NAMES[-1:]], ids=["open", "aborted"])
@pytest.mark.parametrize("stages", [2, 3])
def test_conformance(stages, names):
    store, passed = dist.HashStore(), []

    def work(rank):
        transport = distributed.distributed_transport(store, range(stages), rank, "cpu", "nccl")
        for name in names:
            run_check(name, transport, "cpu", close=name == NAMES[-2])
            passed.append((rank, name))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(passed) == sorted((rank, name) for rank in range(stages) for name in names)


@pytest.fixture
def pair():
    """Both ends of a pipeline of two stages."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda r: distributed.distributed_transport(store, range(2), r, "cpu", "nccl"), range(2)))


def test_a_message_leaves_when_it_is_called_for(pair):
    first, last = pair
    left = [GlooAsNccl.left]
    pending = last.receive(Direction.FORWARD, [Spec((3,), torch.float32)])
    first.send(Direction.FORWARD, [torch.ones(3)], note="sent")
    assert pending.note == "sent"
    time.sleep(0.1)
    left.append(GlooAsNccl.left)
    (received,) = pending.wait()
    left.append(GlooAsNccl.left)
    first.close()
    last.close()
    assert received.tolist() == [1, 1, 1]
    assert left == [left[0], left[0], left[0] + 1]


def test_a_message_is_called_for_when_there_is_room_for_it(pair, monkeypatch):
    """Making room may wait until the device is idle, and a message that has left keeps the sender's busy."""
    first, last = pair
    left = GlooAsNccl.left

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    pending = last.receive(Direction.FORWARD, [Spec((3,), torch.float32)])
    first.send(Direction.FORWARD, [torch.ones(3)])
    assert pending.note == ""
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "empty", full)
        pending.wait()
    time.sleep(0.1)
    assert GlooAsNccl.left == left
    first.abort()
    last.abort()


def test_what_keeps_a_message_from_leaving_is_raised(pair, monkeypatch):
    first, last = pair
    errors = []

    def broken(*args):
        raise RuntimeError("an illegal memory access")

    def catching(call):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    monkeypatch.setattr(Stream, "wait_event", broken)
    pending = last.receive(Direction.FORWARD, [Spec((3,), torch.float32)])
    first.send(Direction.FORWARD, [torch.ones(3)])
    waiting, closing = (
        threading.Thread(target=catching, args=(call,), daemon=True) for call in (pending.wait, first.close)
    )
    waiting.start()
    closing.start()
    closing.join(5)
    assert errors == ["an illegal memory access"]
    first.abort()
    last.abort()
