"""Stages as processes: links of two ranks each, over gloo on CPUs and NCCL on GPUs.

Every neighbour and direction has a process group of its own. A two-rank group carries one-way traffic only, so an
early receive never stands in front of a send, and no group is created in the middle of training, where one side
might wait for the other in vain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlora.pipeline.transport.base import (
    NOTE_BYTES,
    OPERATION_TIMEOUT,
    Direction,
    Link,
    Spec,
    Transport,
    TransportError,
)
from mlora.pipeline.transport.control import Control

Message = tuple[Tensor, ...]
T = TypeVar("T")
_MOST_BLOCKS = 2  # of a device that a message may occupy while adapters are computed on the others


def distributed_transport(
    store: dist.Store,
    ranks: Sequence[int],
    rank: int,
    device: torch.device | str = "cpu",
    backend: Literal["gloo", "nccl"] | None = None,
) -> Transport:
    """The Transport of ``rank``, connected to its neighbours when this returns.

    ``ranks`` are the global ranks of one replica in stage order; all of them must call. The default backend is NCCL
    for a CUDA device and gloo for the CPU; gloo on a CUDA device goes through host memory. Raises TransportError.
    """
    device = torch.device(device)
    stage, links = ranks.index(rank), {}
    # Edges 0, 2, 4 … connect at the same time, then 1, 3, 5 …: no stage waits for a chain of others.
    for edge in sorted(range(max(stage - 1, 0), min(stage + 1, len(ranks) - 1)), key=lambda e: e % 2):
        neighbour = edge + 1 if stage == edge else edge
        for direction in Direction:
            group_store = dist.PrefixStore(f"transport/{ranks[0]}/{edge}/{direction.name}", store)
            peer = f"stage {neighbour} (rank {ranks[neighbour]})"
            make = _link_class(device, backend)
            links[direction, neighbour] = make(group_store, side=stage - edge, peer=peer, device=device)
    return Transport(stage, len(ranks), links)


def distributed_control(store: dist.Store, rank: int, world: int) -> Control:
    """The Control of ``rank`` over gloo; all ranks must call. Raises TransportError."""
    links: dict[int, Link] = {}
    for other in range(1, world) if rank == 0 else (rank,):
        peer = other if rank == 0 else 0
        group_store = dist.PrefixStore(f"control/{other}", store)
        links[peer] = GlooLink(group_store, side=int(rank > 0), peer=f"rank {peer}", device=torch.device("cpu"))
    return Control(rank, world, links)


def _link_class(device: torch.device, backend: str | None) -> Callable[..., Link]:
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    return NcclLink if backend == "nccl" else GlooLink


class GlooLink:
    """A link between two ranks over gloo. ``side`` is 0 on one of them and 1 on the other."""

    def __init__(self, store: dist.Store, side: int, peer: str, device: torch.device) -> None:
        self._peer, self._other, self._device = peer, 1 - side, device
        self._group: Any = _raising(peer, dist.ProcessGroupGloo, store, side, 2, OPERATION_TIMEOUT)
        self._sends = _Completer(peer)
        self._receives = _Completer(peer)

    def send(self, tensors: Sequence[Tensor], note: str = "") -> None:
        self._sends.check()
        host = (_note_tensor(note), *(tensor.detach().to("cpu").contiguous() for tensor in tensors))
        self._sends.submit(self._post(self._group.send, host), host)

    def receive(self, specs: Sequence[Spec]) -> GlooPending:
        self._receives.check()
        host = (_note_tensor(""), *(torch.empty(spec.shape, dtype=spec.dtype) for spec in specs))
        return GlooPending(self._receives.submit(self._post(self._group.recv, host), host), self._device)

    def close(self) -> None:
        self._sends.drain()
        self._sends.stop()
        self._receives.stop()

    def abort(self) -> None:
        self._sends.abort("the transport was aborted")
        self._receives.abort("the transport was aborted")

    def _post(self, operation: Callable[..., dist.Work], host: Message) -> list[dist.Work]:
        return [_raising(self._peer, operation, [tensor], self._other, 0) for tensor in host if tensor.numel()]


@dataclass(frozen=True)
class GlooPending:
    """A receive posted on a GlooLink."""

    future: Future[Message]
    device: torch.device

    @property
    def note(self) -> str:
        return bytes(self.future.result()[0].tolist()).rstrip(b"\0").decode(errors="ignore")

    def wait(self) -> Message:
        return tuple(tensor.to(self.device) for tensor in self.future.result()[1:])


class _Completer:
    """Waits for posted works in order, in a thread of its own.

    Gloo knows that a work is done only by waiting for it, and nothing can wake a thread that does. So this one waits
    instead of the caller: the caller waits for a future, which an abort can end, and sent tensors are let go of when
    they have left.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._jobs: SimpleQueue[tuple[list[dist.Work], Message, Future[Message]] | None] = SimpleQueue()
        self._open: deque[Future[Message]] = deque()
        self._lock = threading.Lock()
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def submit(self, works: list[dist.Work], message: Message) -> Future[Message]:
        """A future that holds ``message`` when all works are done."""
        future: Future[Message] = Future()
        with self._lock:
            self.check()
            self._open.append(future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"messages of {self._peer}", daemon=True)
            self._thread.start()
        self._jobs.put((works, message, future))
        return future

    def check(self) -> None:
        """Raise TransportError if a work failed or this was aborted."""
        if self._error:
            raise TransportError(self._error)

    def drain(self) -> None:
        """Wait for all that was submitted."""
        with self._lock:
            self.check()
            last = self._open[-1] if self._open else None
        if last:
            last.result()

    def stop(self) -> None:
        """End the thread, unless something that will never be done holds it.

        A thread that is inside torch while Python shuts down takes the whole process with it.
        """
        self._jobs.put(None)
        if self._thread and not self._open:
            self._thread.join()

    def abort(self, reason: str) -> None:
        with self._lock:
            self._error = self._error or reason
            while self._open:
                self._open.popleft().set_exception(TransportError(self._error))

    def _run(self) -> None:
        while job := self._jobs.get():
            works, message, future = job
            try:
                for work in works:
                    _raising(self._peer, work.wait)
            except TransportError as error:
                self.abort(str(error))
                return
            with self._lock:
                if self._error:
                    return
                self._open.popleft()
            future.set_result(message)
            del job, works, message, future  # the queue's next wait must not keep a sent message alive


class NcclLink:
    """A one-way link between two ranks over NCCL.

    A kernel that sends or receives waits on its device for the other side's, and holds up whatever waits for an idle
    device (loading a kernel at its first use, freeing memory). So neither may wait for something that a host has yet to
    do. A message leaves when the receiver's host has called for it, from a thread of its own; from the call until the
    message is there, the receiver's host does nothing else.
    """

    def __init__(self, store: dist.Store, side: int, peer: str, device: torch.device) -> None:
        self._peer, self._other, self._device = peer, 1 - side, device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        options.config.max_ctas = _MOST_BLOCKS
        self._notices, self._calls = (
            GlooLink(dist.PrefixStore(name, store), side, peer, torch.device("cpu")) for name in ("notices", "calls")
        )
        self._group: Any = _raising(peer, dist.ProcessGroupNCCL, dist.PrefixStore("nccl", store), side, 2, options)
        self._stream = torch.cuda.Stream(device)
        self._unsent: deque[tuple[Future[list[dist.Work]], Message]] = deque()
        self._due: deque[NcclPending] = deque()
        self._aborted = False
        self._connect(side)

    def send(self, tensors: Sequence[Tensor], note: str = "") -> None:
        self._forget_sent()
        message = tuple(tensor.detach().to(self._device).contiguous() for tensor in tensors)
        made = torch.cuda.current_stream(self._device).record_event()
        posted: Future[list[dist.Work]] = Future()
        self._unsent.append((posted, message))
        self._notices.send([], note)
        self._calls.receive([]).future.add_done_callback(partial(self._leave, message, made, posted))

    def receive(self, specs: Sequence[Spec]) -> NcclPending:
        self.check()
        self._due.append(NcclPending(self, self._notices.receive([]), tuple(specs)))
        return self._due[-1]

    def take(self) -> None:
        """Receive the first message that is due, beside whatever the current stream still does."""
        pending = self._due.popleft()
        pending.notice.wait()
        with torch.cuda.stream(self._stream):
            message = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in pending.specs)
            self._calls.send([])  # behind the allocation, which may wait for an idle device
            self._wait_for(self._post(self._group.recv, message))
        self._stream.synchronize()
        self.check()
        for tensor in message:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        pending.message = message

    def close(self) -> None:
        while self._unsent:
            self._wait_for(self._unsent.popleft()[0].result())
        torch.cuda.current_stream(self._device).synchronize()
        self.check()
        self._notices.close()
        self._calls.close()
        _raising(self._peer, self._group.shutdown)

    def abort(self) -> None:
        self._aborted = True
        self._notices.abort()
        self._calls.abort()
        self._group.abort()

    def check(self) -> None:
        """Raise TransportError if the link was aborted: what came in since may be anything."""
        if self._aborted:
            raise TransportError("the transport was aborted")

    def _leave(
        self, message: Message, made: torch.cuda.Event, posted: Future[list[dist.Work]], called: Future[Message]
    ) -> None:
        """Post the message, which the peer has called for, behind what makes it."""
        try:
            called.result()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(made)
                posted.set_result(self._post(self._group.send, message))
        except Exception as error:  # whoever sends or closes next raises it
            posted.set_exception(error)

    def _connect(self, side: int) -> None:
        """Exchange one number both ways: NCCL connects with the first message, and both sides must be there."""
        both = (self._group.recv, self._group.send) if side else (self._group.send, self._group.recv)
        for operation in both:
            self._wait_for(self._post(operation, (torch.zeros(1, device=self._device),)))
        torch.cuda.current_stream(self._device).synchronize()

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            self.check()
            _raising(self._peer, work.wait)
        self.check()

    def _post(self, operation: Callable[..., dist.Work], message: Message) -> list[dist.Work]:
        self.check()
        return [_raising(self._peer, operation, [tensor], self._other, 0) for tensor in message if tensor.numel()]

    def _forget_sent(self) -> None:
        while self._unsent and self._unsent[0][0].done():
            if not all(work.is_completed() for work in self._unsent[0][0].result()):
                return
            self._unsent.popleft()


@dataclass(eq=False)
class NcclPending:
    """A receive announced on an NcclLink."""

    link: NcclLink
    notice: GlooPending
    specs: tuple[Spec, ...]
    message: Message | None = None

    @property
    def note(self) -> str:
        return self.notice.note

    def wait(self) -> Message:
        while self.message is None:  # messages arrive in their order, whichever is waited for
            self.link.take()
        return self.message


def _note_tensor(note: str) -> Tensor:
    text = note.encode()[:NOTE_BYTES]
    return torch.tensor(list(text.ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)


def _raising(peer: str, call: Callable[..., T], *args: object) -> T:
    """The call's result; torch's errors become a TransportError of one line that names the peer."""
    try:
        return call(*args)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe")):
            text = "the connection was closed: its process has ended"
        raise TransportError(f"{peer}: {text[:300]}") from error
