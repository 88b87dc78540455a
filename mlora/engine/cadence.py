"""When an adapter is due for a checkpoint. Time decides only what is saved, never what is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mlora.config import RunConfig

_LEAST_S = 60.0
_WRITES = 20  # the wait is this many times what a write of all adapters takes, so writing costs a twentieth at most


class Cadence:
    """One per replica. While a checkpoint of an adapter is being written, time alone makes no other one due."""

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._seconds, self._clock = config.save_steps, config.save_seconds, clock
        self._last: dict[str, float] = {}
        self._writing: set[str] = set()
        self._write_s: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float | None:
        """The least time between two checkpoints of an adapter; None where only steps count."""
        if self._seconds is not None or self._steps is not None:
            return self._seconds
        return max(_LEAST_S, _WRITES * sum(self._write_s.values()))

    def __str__(self) -> str:
        with self._lock:
            parts = [f"{self._steps} steps"] if self._steps else []
            parts += [f"{self.seconds:.0f} s"] if self.seconds else []
        return " or ".join(parts)

    def start(self, adapter: str) -> None:
        """The adapter's clock starts."""
        with self._lock:
            self._last[adapter] = self._clock()

    def due(self, adapter: str, step: int) -> bool:
        """Whether to save the adapter behind ``step`` (from 1); if so, ``wrote`` is called when it is written."""
        with self._lock:
            now, seconds = self._clock(), self.seconds
            by_step = self._steps is not None and step % self._steps == 0
            by_time = seconds is not None and now - self._last[adapter] >= seconds
            if not by_step and (not by_time or adapter in self._writing):
                return False
            self._last[adapter] = now
            self._writing.add(adapter)
            return True

    def wrote(self, adapter: str, seconds: float) -> None:
        """The write that ``due`` asked for is over, done or failed, and has taken ``seconds``."""
        with self._lock:
            self._writing.discard(adapter)
            self._write_s[adapter] = seconds
