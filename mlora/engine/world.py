"""The processes of a run, as torchrun describes them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch.distributed as dist

from mlora.pipeline.transport.board import Board
from mlora.pipeline.transport.liveness import START_S
from mlora.pipeline.transport.store import open_store
from mlora.types import UserError

_STARTS = "mlora/starts"  # how often rank 0 has come
_POLL_S = 0.1
_NOT_HERE = "the first rank has not come, or has ended"


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of a run."""

    rank: int
    size: int
    local_rank: int

    def open_store(self) -> dist.Store:
        """A part of the run's store for this start: torchrun's own where its agent serves one, else rank 0 serves it.

        Raises UserError naming host and port.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = open_store(host, port, serve=self.rank == 0 and not served)
        if self.rank == 0:
            return _part(store, store.add(_STARTS, 1))
        try:
            return _part(store, self._start(store))
        except (RuntimeError, TimeoutError) as error:
            raise UserError(f"rendezvous at {host}:{port} failed: {_NOT_HERE}; its own output says why") from error

    def _start(self, store: dist.Store) -> int:
        """The number of the start to which this process belongs: rank 0 is alive there, and this rank was never in it.

        The restart counts of torchrun do not tell: each counts what failed on its own host. Alive is who has come, or
        beaten, since this process looks. Raises TimeoutError where rank 0 does not come.
        """
        number, deadline = store.add(_STARTS, 0), time.monotonic() + START_S
        board, came = Board(_part(store, number)), False
        before = board.beats(0)
        while time.monotonic() < deadline:
            if (latest := store.add(_STARTS, 0)) != number:
                number, board, came = latest, Board(_part(store, latest)), True
            if (came or board.beats(0) != before) and not board.beats(self.rank):
                return number
            time.sleep(_POLL_S)
        raise TimeoutError


def _part(store: dist.Store, start: int) -> dist.Store:
    return dist.PrefixStore(f"mlora/{start}", store)


def is_first_rank() -> bool:
    """Whether this process is the one that shows and writes."""
    return os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether somebody started this process who may pass a signal on that reaches it anyhow: torchrun, Slurm."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" in os.environ


def torchrun_world() -> World | None:
    """This process's place if torchrun started it, else None."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    env = os.environ
    return World(rank=int(env["RANK"]), size=int(env["WORLD_SIZE"]), local_rank=int(env.get("LOCAL_RANK", env["RANK"])))
