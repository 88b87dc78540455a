"""How far a long command is, on standard error: a line every few seconds, so a short one says nothing."""

from __future__ import annotations

import sys
import time

_EVERY_S = 5.0


class Progress:
    """Args:
    what: is being done.
    total: how many ``unit`` there are to do.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done, self._told = 0, time.monotonic()

    def advance(self, by: int = 1) -> None:
        """So many more are done."""
        self._done += by
        now = time.monotonic()
        if now - self._told >= _EVERY_S:
            self._told = now
            print(f"{self._what}: {self._done:,} of {self._total:,} {self._unit}", file=sys.stderr, flush=True)
