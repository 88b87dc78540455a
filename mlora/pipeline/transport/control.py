"""Plain data and host tensors between rank 0 and all other ranks of a run, beside the stages' own messages."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mlora.pipeline.transport.base import Link, Spec


class Control:
    """A star around rank 0. Nothing that is sent waits for its receiver.

    Objects are pickled, which is safe here and only here: both ends are processes of the same run. Between two ranks
    everything arrives in order, so rank 0 must ask for what a rank sends in the order in which that rank sends it.
    """

    def __init__(self, rank: int, world: int, links: Mapping[int, Link]) -> None:
        self.rank = rank
        self.world = world
        self._links = links  # rank 0: to every other rank; else: to rank 0

    def publish(self, obj: Any) -> None:
        """From rank 0 to all others, which take it with ``next``. Raises TransportError."""
        assert self.rank == 0, "only rank 0 publishes"
        body = _pickled(obj)
        for link in self._links.values():
            _send_bytes(link, body)

    def next(self) -> Any:
        """The next published object, waiting for it; on every rank but 0. Raises TransportError."""
        return _receive_object(self._links[0])

    def send(self, rank: int, obj: Any) -> None:
        """From rank 0 to one other rank, which takes it with ``next``. Raises TransportError."""
        _send_bytes(self._links[rank], _pickled(obj))

    def report(self, obj: Any) -> None:
        """To rank 0, which takes it with ``receive``. Raises TransportError."""
        _send_bytes(self._links[0], _pickled(obj))

    def receive(self, rank: int) -> Any:
        """On rank 0: the next object that ``rank`` reported, waiting for it. Raises TransportError."""
        return _receive_object(self._links[rank])

    def send_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Send copies to rank 0, so that the tensors may change at once. Raises TransportError."""
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        header = {name: Spec(tuple(copy.shape), copy.dtype) for name, copy in copies.items()}
        _send_bytes(self._links[0], _pickled(header))
        self._links[0].send(list(copies.values()))

    def receive_tensors(self, rank: int) -> dict[str, Tensor]:
        """On rank 0: what ``rank`` sent, as CPU tensors in the sender's order of names. Raises TransportError."""
        header: dict[str, Spec] = _receive_object(self._links[rank])
        tensors = self._links[rank].receive(list(header.values())).wait()
        return dict(zip(header, tensors, strict=True))

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """All ranks give an object; rank 0 gets them in order of rank, the others None. Raises TransportError."""
        if self.rank:
            self.report(obj)
            return None
        return [obj] + [self.receive(rank) for rank in range(1, self.world)]

    def close(self) -> None:
        """Wait until everything sent has arrived. Raises TransportError where it cannot."""
        for link in self._links.values():
            link.close()

    def abort(self) -> None:
        """Make every waiting call raise TransportError, and every later one. From any thread."""
        for link in self._links.values():
            link.abort()


def _pickled(obj: Any) -> Tensor:
    buffer = io.BytesIO()
    pickle.dump(obj, buffer, protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _send_bytes(link: Link, body: Tensor) -> None:
    link.send([torch.tensor([body.numel()])])
    link.send([body])


def _receive_object(link: Link) -> Any:
    (length,) = link.receive([Spec((1,), torch.int64)]).wait()
    (body,) = link.receive([Spec((int(length),), torch.uint8)]).wait()
    return pickle.loads(body.numpy().data)
