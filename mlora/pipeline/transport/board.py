"""What ranks write about themselves into the store: beats, clean ends, and the first failure of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch.distributed as dist

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure. ``host`` is empty where unknown. ``consequence``: it only saw that another rank was gone."""

    rank: int
    host: str
    reason: str
    trace: str = ""
    consequence: bool = False
    code: int = 1  # with which all ranks end

    @property
    def line(self) -> str:
        return f"rank {self.rank}{' on ' if self.host else ''}{self.host} failed: {self.reason}"


class Board:
    """The store's keys. Every call raises RuntimeError when the store's host or process is gone.

    A connection serves one call at a time, so each thread has a Board of its own.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("liveness", store.clone())  # type: ignore[attr-defined]

    def beat(self, rank: int) -> None:
        self._store.add(f"beat/{rank}", 1)

    def beats(self, rank: int) -> int:
        """How often ``rank`` has beaten; 0 before it has started."""
        return self._store.add(f"beat/{rank}", 0)

    def set_host(self, rank: int, host: str) -> None:
        self._store.set(f"host/{rank}", host)

    def host(self, rank: int) -> str:
        return self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else ""

    def mark(self, what: str, rank: int) -> None:
        self._store.set(f"{what}/{rank}", "")

    def marked(self, what: str, rank: int) -> bool:
        return self._store.check([f"{what}/{rank}"])

    def all_marked(self, what: str, ranks: Iterable[int], wait_s: float) -> bool:
        """Whether all ranks are marked, waiting up to ``wait_s`` seconds for it."""
        return self._wait([f"{what}/{rank}" for rank in ranks], wait_s)

    def ask(self, what: str) -> None:
        """Put a wish before all ranks."""
        self._store.set(f"ask/{self._store.add('asks', 1)}", what)

    def asked(self, seen: int) -> list[str]:
        """The wishes behind the first ``seen``."""
        return [self._store.get(f"ask/{i}").decode() for i in range(seen + 1, self._store.add("asks", 0) + 1)]

    def report(self, failure: Failure) -> None:
        """Write a failure unless one of its kind is there: the store decides which was first."""
        self._store.compare_set(_key(failure.consequence), "", json.dumps(asdict(failure)))

    def first_failure(self, wait_s: float = 0) -> Failure | None:
        """The first real failure, waiting up to ``wait_s`` seconds for one; else the first consequence; else None."""
        if wait_s:
            self._wait([_key(consequence=False)], wait_s)
        for consequence in (False, True):
            if self._store.check([_key(consequence)]):
                return Failure(**json.loads(self._store.get(_key(consequence))))
        return None

    def _wait(self, keys: list[str], wait_s: float) -> bool:
        """Whether all keys are there. (The store's own wait logs every timeout, and blocks all else meanwhile.)"""
        deadline = time.monotonic() + wait_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _key(consequence: bool) -> str:
    return "consequence" if consequence else "failure"
