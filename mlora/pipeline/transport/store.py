"""The key-value store through which the ranks of a run find each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from mlora.pipeline.transport.base import OPERATION_TIMEOUT
from mlora.types import UserError

T = TypeVar("T")
_RETRY_S = 0.5


def open_store(host: str, port: int, *, serve: bool, timeout_s: float = 50) -> dist.TCPStore:
    """Connect to the store at ``host:port``, or serve it there (one rank does; port 0 takes a free one: ``.port``).

    Raises UserError naming host and port when the port is taken, the name does not resolve, or nobody answers in time.
    """
    deadline = time.monotonic() + timeout_s
    try:
        _wait_until_resolved(host, port, deadline)
        left = max(1.0, deadline - time.monotonic())
        return _within(left, lambda: dist.TCPStore(host, port, None, serve, OPERATION_TIMEOUT, wait_for_workers=False))
    except (OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"rendezvous at {host}:{port} failed: {text[:200]}; {_advice(error, serve)}") from error


def _wait_until_resolved(host: str, port: int, deadline: float) -> None:
    """A new host's name may take a while to be known. Raises OSError with the last reason at the deadline."""
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError:
            if time.monotonic() + _RETRY_S > deadline:
                raise
            time.sleep(_RETRY_S)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result. Raises TimeoutError where it takes longer, and leaves it waiting: torch's own limits do not
    hold where a foreign service takes the connection and says nothing, and a thread that comes back from torch while
    Python shuts down would take the process with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no store of this run has answered there for {seconds:.0f} s") from None


def _advice(error: Exception, serve: bool) -> str:
    if isinstance(error, socket.gaierror):
        return "this host cannot resolve the name; check MASTER_ADDR"
    return "choose a free port" if serve else "is the first rank running there, and can this host reach it?"
