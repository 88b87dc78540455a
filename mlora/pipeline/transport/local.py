"""Stages as threads of one process: messages are handed over in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mlora.pipeline.transport.base import Direction, Spec, Transport, TransportError
from mlora.pipeline.transport.control import Control


class Message(NamedTuple):
    """What a sender handed over."""

    tensors: tuple[Tensor, ...]
    note: str


def local_transports(stages: int, device: torch.device | str = "cpu") -> list[Transport]:
    """One Transport per stage, all in this process. Aborting one aborts all."""
    hub = _Hub()
    links: list[dict[tuple[Direction, int], LocalLink]] = [{} for _ in range(stages)]
    for stage in range(stages - 1):
        for direction in Direction:
            lower, upper = _link_pair(hub, device)
            links[stage][direction, stage + 1] = lower
            links[stage + 1][direction, stage] = upper
    return [Transport(stage, stages, links[stage], in_process=True) for stage in range(stages)]


def local_controls(world: int) -> list[Control]:
    """One Control per rank, all in this process. Aborting one aborts all."""
    hub = _Hub()
    pairs = {rank: _link_pair(hub, "cpu") for rank in range(1, world)}
    root = Control(0, world, {rank: pair[0] for rank, pair in pairs.items()})
    return [root] + [Control(rank, world, {0: pair[1]}) for rank, pair in pairs.items()]


class _Hub:
    """All channels of one process under one lock, so that an abort reaches every one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channels: list[_Channel] = []
        self.aborted = False

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            for channel in self.channels:
                channel.fail_waiting()


class _Channel:
    """A one-way queue that pairs the n-th message with the n-th receive, whichever comes first."""

    def __init__(self, hub: _Hub) -> None:
        self._hub = hub
        self._messages: deque[Message] = deque()
        self._receives: deque[Future[Message]] = deque()
        hub.channels.append(self)

    def put(self, message: Message) -> None:
        with self._hub.lock:
            self._check()
            if self._receives:
                self._receives.popleft().set_result(message)
            else:
                self._messages.append(message)

    def get(self) -> Future[Message]:
        future: Future[Message] = Future()
        with self._hub.lock:
            self._check()
            if self._messages:
                future.set_result(self._messages.popleft())
            else:
                self._receives.append(future)
        return future

    def fail_waiting(self) -> None:
        while self._receives:
            self._receives.popleft().set_exception(TransportError("the transport was aborted"))

    def _check(self) -> None:
        if self._hub.aborted:
            raise TransportError("the transport was aborted")


@dataclass(frozen=True)
class LocalLink:
    """One end of a pair of channels. Messages are copied: sender and receiver never share memory."""

    hub: _Hub
    outgoing: _Channel
    incoming: _Channel
    device: torch.device | str

    def send(self, tensors: Sequence[Tensor], note: str = "") -> None:
        self.outgoing.put(Message(tuple(tensor.detach().clone() for tensor in tensors), note))

    def receive(self, specs: Sequence[Spec]) -> LocalPending:
        return LocalPending(self.incoming.get(), tuple(specs), self.device)

    def close(self) -> None:
        """Nothing to wait for: a message has left when ``send`` returns."""

    def abort(self) -> None:
        self.hub.abort()


@dataclass(frozen=True)
class LocalPending:
    """A receive posted on a channel."""

    future: Future[Message]
    specs: tuple[Spec, ...]
    device: torch.device | str

    @property
    def note(self) -> str:
        return self.future.result().note

    def wait(self) -> tuple[Tensor, ...]:
        tensors = self.future.result().tensors
        found = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        assert found == self.specs, f"expected {self.specs}, the message holds {found}"
        return tuple(tensor.to(self.device) for tensor in tensors)


def _link_pair(hub: _Hub, device: torch.device | str) -> tuple[LocalLink, LocalLink]:
    up, down = _Channel(hub), _Channel(hub)
    return LocalLink(hub, up, down, device), LocalLink(hub, down, up, device)
