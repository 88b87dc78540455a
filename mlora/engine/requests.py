"""What is asked of a run while it runs. Any thread may ask, and twice the same; stage 0 of each replica looks between
its actions."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlora.engine.adapter_run import AdapterRun
from mlora.types import Interrupted

_STOP, _END = "signal ", "end "


class Requests:
    """The wishes that have not been met yet, and the signal, if any, that stops the run.

    ``waits_for_more``: whether the run goes on elsewhere when all adapters here have ended, and others may be added.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.waits_for_more: Callable[[], bool] = lambda: False
        self._ends: set[str] = set()
        self._arrived: list[AdapterRun] = []
        self._lock = threading.Lock()

    def ask(self, what: str) -> None:
        """Take a wish in the form in which it travels between ranks, see ``stop`` and ``end``."""
        if what.startswith(_STOP):
            self.signal = self.signal or int(what.removeprefix(_STOP))
            return
        with self._lock:
            self._ends.add(what.removeprefix(_END))

    def check(self) -> None:
        """Raises Interrupted where a signal stops the run."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def add(self, adapter: AdapterRun) -> None:
        """An adapter to be trained too."""
        with self._lock:
            self._arrived.append(adapter)

    def arrived(self) -> list[AdapterRun]:
        """The adapters added since the last call."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def ends(self, adapter: str) -> bool:
        """Whether somebody asked to end this adapter."""
        return adapter in self._ends


def stop(signal: int) -> str:
    """The wish to stop the whole run because of a signal."""
    return f"{_STOP}{signal}"


def end(adapter: str) -> str:
    """The wish to end one adapter as if its last step were done."""
    return f"{_END}{adapter}"
