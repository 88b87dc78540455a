"""SIGTERM, SIGINT, and SIGHUP from a closed terminal: the first stops the run at the next point of the stream, the
second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OURS_TO_TAKE = (signal.SIG_DFL, signal.default_int_handler)
_ECHO_S = 3.0  # within which a signal is passed on
_LIMIT_S = 20.0  # torchrun kills 30 s after its signal


class StopSignals:
    """A context manager in which signals are requests. Where a handler of somebody else's is set, it stays.

    Python runs handlers in the main thread only, which may hang in a connection; so a signal's number goes through a
    pipe to a thread.

    Args:
        ask: called, in that thread, with the number of the first signal.
        launched: whether somebody passes signals on. What comes within 3 s of the first is then the same wish: Slurm
            signals torchrun and the ranks, and torchrun passes it on to the ranks. Without, a second Ctrl-C is a second
            wish at any time, but not a second SIGTERM: ``timeout`` sends two, to its child and to the group.
        hopeless: whether nothing is left to be saved, since another rank has failed; then the process ends at once.
        farewell: called with a reason before the process ends without having stopped.
    """

    def __init__(
        self,
        ask: Callable[[int], None],
        launched: bool,
        hopeless: Callable[[], bool] = lambda: False,
        farewell: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._ask, self._launched, self._hopeless, self._farewell = ask, launched, hopeless, farewell
        self._left = threading.Event()
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler in _OURS_TO_TAKE:
                self._before[number] = handler
                signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._left.set()
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)

    def _listen(self) -> None:
        """One byte for each signal, none when the pipe is closed."""
        first: float | None = None
        while data := os.read(self._reading, 1):
            number = data[0]
            if number not in self._before:
                continue
            if first is not None and not self._is_echo(number, time.monotonic() - first):
                _end(number, "a second signal")
            if self._hopeless():
                self._farewell(f"ended by {signal.Signals(number).name}; what its launcher shows on that host says why")
                _end(number)
            if first is not None:
                continue
            first = time.monotonic()
            self._ask(number)
            threading.Thread(target=self._limit, args=(number,), name="limit", daemon=True).start()
        os.close(self._reading)

    def _is_echo(self, number: int, after_s: float) -> bool:
        return after_s <= _ECHO_S and (self._launched or number != signal.SIGINT)

    def _limit(self, number: int) -> None:
        if not self._left.wait(_LIMIT_S):
            self._farewell(f"ended by {signal.Signals(number).name} before all was saved")
            _end(number, f"nothing more was saved within {_LIMIT_S:.0f} s; the last checkpoints stand")


def _end(number: int, reason: str = "") -> None:
    if reason:
        sys.stderr.write(f"mlora: ended by {signal.Signals(number).name}: {reason}\n")
        sys.stderr.flush()
    os._exit(128 + number)
