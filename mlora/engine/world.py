"""The processes of a run, as torchrun describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from mlora.pipeline.transport.store import open_store


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of a run."""

    rank: int
    size: int
    local_rank: int

    def open_store(self) -> dist.Store:
        """The run's store: torchrun's own where its agent serves one, else rank 0 serves it.

        A restart gets a fresh part of the store. Raises UserError naming host and port.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = open_store(host, port, serve=self.rank == 0 and not served)
        return dist.PrefixStore(f"mlora/{torchrun_restarts()}", store)


def is_first_rank() -> bool:
    """Whether this process is the one that shows and writes."""
    return os.environ.get("RANK", "0") == "0"


def torchrun_restarts() -> int:
    """How often torchrun has started this run anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_launched() -> bool:
    """Whether somebody started this process who may pass a signal on that reaches it anyhow: torchrun, Slurm."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" in os.environ


def torchrun_world() -> World | None:
    """This process's place if torchrun started it, else None."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    env = os.environ
    return World(rank=int(env["RANK"]), size=int(env["WORLD_SIZE"]), local_rank=int(env.get("LOCAL_RANK", env["RANK"])))
