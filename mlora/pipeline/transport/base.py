"""What the executor sees: one Transport per stage, made of one-way links to the stages beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

# A replica waits until the last one has ended, all ranks until the first has read its data; that a rank still lives is
# Liveness's business. torch counts in milliseconds, of which 25 days are too many for 32 bits.
OPERATION_TIMEOUT = timedelta(days=24)


NOTE_BYTES = 256


class TransportError(RuntimeError):
    """A message cannot arrive: the peer has gone or the transport was aborted. Seldom the first cause of a failure."""


class Direction(IntEnum):
    """Where a message goes; the value is what it adds to the stage."""

    FORWARD = 1
    BACKWARD = -1


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor that is to arrive; both sides know it from the window, so none travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending(Protocol):
    """A posted receive."""

    @property
    def note(self) -> str:
        """What the sender noted, waiting for the message on the host. Raises TransportError."""

    def wait(self) -> tuple[Tensor, ...]:
        """The message's tensors when they are there, on the stage's device, the caller's own. Raises TransportError."""


class Link(Protocol):
    """An ordered connection to one peer, used by one thread (``abort`` may come from any)."""

    def send(self, tensors: Sequence[Tensor], note: str = "") -> None: ...

    def receive(self, specs: Sequence[Spec]) -> Pending: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Transport:
    """A stage's messages. Links are keyed by direction and neighbour, so a receive never holds up a send.

    ``in_process``: whether the stages are threads of this process.
    """

    def __init__(
        self, stage: int, stages: int, links: Mapping[tuple[Direction, int], Link], in_process: bool = False
    ) -> None:
        self.stage = stage
        self.stages = stages
        self.in_process = in_process
        self._links = links
        self._aborted = False

    def send(self, direction: Direction, tensors: Sequence[Tensor], note: str = "") -> None:
        """Send one message to the next stage in ``direction`` without waiting for it.

        ``note`` goes with it on the host, cut to NOTE_BYTES.

        Messages of a direction arrive in the order in which they were sent. The tensors are kept until they have
        left; the caller must not write to them. Raises TransportError.
        """
        self._link(direction, self.stage + direction).send(tensors, note)

    def receive(self, direction: Direction, specs: Sequence[Spec]) -> Pending:
        """Post the receive of the next message that travels in ``direction``. Raises TransportError."""
        return self._link(direction, self.stage - direction).receive(specs)

    def close(self) -> None:
        """Wait until everything sent has left, then let go of the connections. Wait for all posted receives before.

        Raises TransportError where a message could not leave.
        """
        for link in self._links.values():
            link.close()

    def abort(self) -> None:
        """Make every call of this process that waits raise TransportError, and every later one. From any thread."""
        self._aborted = True  # before any link wakes somebody who goes on to the next
        for link in self._links.values():
            link.abort()

    def _link(self, direction: Direction, neighbour: int) -> Link:
        assert 0 <= neighbour < self.stages, f"stage {self.stage} of {self.stages} has no stage {neighbour} beside it"
        if self._aborted:
            raise TransportError("the transport was aborted")
        return self._links[direction, neighbour]
