"""The key-value store through which the ranks of a run find each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from mlora.pipeline.transport.base import OPERATION_TIMEOUT
from mlora.types import UserError


def open_store(host: str, port: int, *, serve: bool, timeout_s: float = 60) -> dist.TCPStore:
    """Connect to the store at ``host:port``, or serve it there (one rank does; port 0 takes a free one: ``.port``).

    Raises UserError naming host and port when the port is taken, the name does not resolve, or nobody answers in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        advice = "choose a free port" if serve else "is the first rank running there, and can this host reach it?"
        raise UserError(f"rendezvous at {host}:{port} failed: {text[:200]}; {advice}") from error
    store.set_timeout(OPERATION_TIMEOUT)
    return store
