"""The order of calls of NcclLink where there is no GPU: gloo stands for NCCL, and nothing for CUDA's streams."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transport_suite import NAMES, run_check

from mlora.pipeline.transport import distributed

DEADLINE_S = 60


class GlooAsNccl:
    def __init__(self, store, side, size, options):
        self._group = dist.ProcessGroupGloo(store, side, size, options._timeout)

    @staticmethod
    def Options():
        return SimpleNamespace(config=SimpleNamespace())

    def send(self, *message):
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
