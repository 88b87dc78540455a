"""Who is still alive, and what failed first.

Every rank counts up a key of its own in the store, from a thread, so that long work in the main thread looks like
life as long as it lets go of Python's lock now and then (sleeping, disk, compilers and kernels do). Operations have
their own, far longer timeouts. A rank that stops counting, a reported failure, or a store that does not answer ends
every rank: the stages of a pipeline are of no use without each other.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from mlora.files import write_whole
from mlora.pipeline.transport.base import TransportError
from mlora.pipeline.transport.board import Board, Failure
from mlora.types import UserError

T = TypeVar("T")
_STORE_GONE = Failure(rank=0, host="", reason="its process or host has ended, the store is gone", consequence=True)
START_S = 300.0  # a rank may start this much after another: importing torch from a cold disk takes minutes
_CALL_S = 0.1  # rank 0 beats so often until all are here: they look for a start in which it does


class Liveness:
    """One rank's watch over the run: a context manager around everything that the rank does.

    Leaving it without an exception marks a clean end. Leaving it with one reports the exception, aborts, prints the
    first real failure of the run as the last line, and raises SystemExit (2 if it was a UserError, else 1). Make and
    close transports inside it, so that a failure is reported before their connections go, and name their ``abort``
    with ``abort_on_failure``.

    The watch has its own connections to ``store``. A peer silent for ``silent_s`` seconds counts as dead.
    ``on_failure`` is called once, in a thread of the watch, with one line, when another rank has failed; the default
    prints it, aborts, and ends the process with code 1 if it still runs ``grace_s`` seconds later.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        on_failure: Callable[[str], None] | None = None,
        silent_s: float = 40.0,
        beat_s: float = 2.0,
        grace_s: float = 10.0,
    ) -> None:
        self._rank, self._world, self._host = rank, world, socket.gethostname()
        self._silent_s, self._beat_s, self._grace_s = silent_s, beat_s, grace_s
        self._on_failure = on_failure or self._end
        self._aborts: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._known: Failure | None = None  # the first failure that this rank has met, its own or another's
        self._code = 1
        self._launched, self._parent = "TORCHELASTIC_RUN_ID" in os.environ, os.getppid()
        self._stop = threading.Event()
        self._store, self._board = store, Board(store)
        self._lost = False  # whether the store was found to be gone; torch logs every call from then on, at length
        self._on_asked: Callable[[str], None] | None = None
        self._seen = 0  # wishes that were passed on
        self._board.set_host(rank, self._host)
        self._last_round = time.monotonic()
        self._threads = [
            threading.Thread(target=self._beat, args=(Board(store),), name="beats", daemon=True),
            threading.Thread(target=self._watch_store, name="watch over the store", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def abort_on_failure(self, abort: Callable[[], None]) -> None:
        """Call ``abort`` (a transport's, a control's) when the run fails; at once if it already has."""
        with self._lock:
            self._aborts.append(abort)
            failed = self._known is not None
        if failed:
            abort()

    def on_asked(self, call: Callable[[str], None]) -> None:
        """Call ``call``, in a thread of the watch, with what any rank asks of all from now on and has asked before."""
        self._on_asked = call

    def ask(self, what: str) -> None:
        """Put a wish before all ranks, this one too: they hear of it within ``beat_s`` seconds. From any thread."""
        self._unless_lost(lambda: Board(self._store).ask(what))

    def has_failed(self) -> bool:
        """Whether a rank has failed: known here, or because torchrun has lost a process on this host. Any thread."""
        return self._known is not None or (self._launched and _a_sibling_is_gone())

    def leave_word(self, reason: str) -> None:
        """Tell the others, within ``beat_s`` seconds, why this rank ends: those on other hosts only see it go."""
        failure = Failure(rank=self._rank, host=self._host, reason=reason, consequence=True)
        tell = partial(self._unless_lost, lambda: Board(self._store).report(failure))
        report = threading.Thread(target=tell, daemon=True)
        report.start()
        report.join(self._beat_s)

    def finish(self) -> None:
        """Mark a clean end: from now on this rank's silence means nothing.

        Rank 0 returns when all others have finished too, since the store may end with it. Raises SystemExit if
        the run fails meanwhile.
        """
        try:
            self._mark_finished()
        except RuntimeError:
            self._lost = True
            self._claim(_STORE_GONE)
        if self._known is not None:
            self._arm_exit()
            self._show_first()
            raise SystemExit(self._code)

    def report_failure(self, error: BaseException) -> None:
        """Write the error into the store for all ranks, abort, and print the run's first real failure as last line.

        The process ends ``grace_s`` seconds later, whatever it does.
        """
        self._arm_exit()
        failure = self._failure(error)
        if self._claim(failure) or not failure.consequence:
            if failure.trace:  # a user's mistake is one line, the last
                self._print(failure.reason)
            self._unless_lost(lambda: self._board.report(failure))
        self._abort()
        self._show_first()

    def __enter__(self) -> Liveness:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            return
        self.report_failure(error)
        raise SystemExit(self._code) from None

    def _mark_finished(self) -> None:
        if self._rank:
            self._end_threads()  # first: once all are marked, rank 0 may end and take the store with it
        self._board.mark("finished", self._rank)
        others = range(1, self._world)
        while self._rank == 0 and self._known is None and not self._board.all_marked("finished", others, self._beat_s):
            continue
        self._end_threads()

    def _end_threads(self) -> None:
        """A thread that is inside torch while Python shuts down takes the whole process with it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._grace_s)

    def _failure(self, error: BaseException) -> Failure:
        interrupted = isinstance(error, KeyboardInterrupt)
        plain = interrupted or isinstance(error, UserError)
        text = " ".join(str(error).split()) or ("interrupted" if interrupted else "")
        return Failure(
            rank=self._rank,
            host=self._host,
            reason=text if plain else f"{type(error).__name__}: {text}".removesuffix(": "),
            trace="" if plain else "".join(traceback.format_exception(error)),
            consequence=isinstance(error, TransportError),
            code=128 + getattr(error, "signal", 2) if interrupted else 2 if plain else 1,
        )

    def _beat(self, board: Board) -> None:
        heard = {peer: (0, time.monotonic()) for peer in range(self._world) if peer != self._rank}
        try:
            while not self._stop.is_set():
                board.beat(self._rank)
                if failure := board.first_failure() or self._orphaned(board) or self._silent_peer(board, heard):
                    self._notice(failure)
                    return
                self._pass_on(board)
                self._last_round = time.monotonic()
                all_here = all(count for count, _ in heard.values())
                self._stop.wait(self._beat_s if all_here or self._rank else _CALL_S)
        except RuntimeError:
            if not self._stop.is_set():
                self._lost = True
                self._notice(_STORE_GONE)

    def _pass_on(self, board: Board) -> None:
        """Wishes that nobody here takes yet are kept."""
        if self._on_asked is not None:
            for what in board.asked(self._seen):
                self._seen += 1
                self._on_asked(what)

    def _orphaned(self, board: Board) -> Failure | None:
        """A Failure, also reported, if torchrun on this host is gone: nobody would end this process or see its end."""
        failure = self._orphan()
        if failure is not None:
            board.report(failure)
        return failure

    def _orphan(self) -> Failure | None:
        if not self._launched or os.getppid() == self._parent:
            return None
        return Failure(rank=self._rank, host=self._host, reason="its launcher has ended")

    def _silent_peer(self, board: Board, heard: dict[int, tuple[int, float]]) -> Failure | None:
        """Look at all peers' counts; a Failure, also reported, for one that is silent too long and has not finished."""
        for peer, (count, since) in heard.items():
            now_count, now = board.beats(peer), time.monotonic()
            limit = self._silent_s if count else START_S
            if now_count != count:
                heard[peer] = (now_count, now)
            elif now - since > limit and not board.marked("finished", peer):
                failure = Failure(rank=peer, host=board.host(peer), reason=f"silent for {limit:g} s")
                board.report(failure)
                return failure
        return None

    def _watch_store(self) -> None:
        """A host that lost its power closes no socket: the beating thread then hangs in the store."""
        while not self._stop.wait(self._beat_s):
            if time.monotonic() - self._last_round > self._silent_s:
                self._notice(Failure(rank=0, host="", reason=f"its store has not answered for {self._silent_s:g} s"))
                return

    def _claim(self, failure: Failure) -> bool:
        """Whether ``failure`` is the first that this rank meets."""
        with self._lock:
            first = self._known is None
            self._known = self._known or failure
        return first

    def _notice(self, failure: Failure) -> None:
        if self._claim(failure):
            self._on_failure(failure.line)

    def _end(self, line: str) -> None:
        self._arm_exit()
        if self._known is None or self._known.code != 2:
            self._print(f"stopping: {line}")
        self._abort()

    def _arm_exit(self) -> None:
        """End the process without its clean-up, which fails beside threads that wait in an aborted connection.

        A thread outside Python does it after the grace time, even if the process hangs in a collective.
        """
        atexit.register(lambda: os._exit(self._code))
        faulthandler.dump_traceback_later(self._grace_s, exit=True, file=os.open(os.devnull, os.O_WRONLY))

    def _abort(self) -> None:
        with self._lock:
            aborts, self._aborts = self._aborts, []
        for abort in aborts:
            abort()

    def _show_first(self) -> None:
        """Print the run's first failure; rank 0, whose store may end with it, then waits until all others have too."""
        failure = self._first_failure()
        self._code = failure.code
        if failure.trace and not failure.consequence and self._rank in (0, failure.rank):
            self._print(failure.trace.rstrip())
        self._unless_lost(lambda: self._board.mark("shown", self._rank))  # before the line: torch logs a lost store
        tell_launcher(failure.line)
        self._print(f"stopped: {failure.line}")
        if self._rank == 0:
            self._unless_lost(self._call_until_shown)

    def _call_until_shown(self) -> None:
        """A rank that starts later than this one fails would else not know that this start is its own."""
        others, deadline = range(1, self._world), time.monotonic() + 3 * self._beat_s
        while not self._board.all_marked("shown", others, _CALL_S) and time.monotonic() < deadline:
            self._board.beat(0)

    def _first_failure(self) -> Failure:
        """The run's; without a store what is known here, and who has taken the store with it."""
        assert self._known is not None
        found = self._unless_lost(lambda: self._board.first_failure(self._beat_s))
        if self._lost and self._known.consequence:
            return self._orphan() or _STORE_GONE
        return found or self._known

    def _unless_lost(self, call: Callable[[], T]) -> T | None:
        """The call's result; None when the store is gone: there is then nobody to tell or to hear."""
        if not self._lost:
            try:
                return call()
            except RuntimeError:
                self._lost = True
        return None

    def _print(self, text: str) -> None:
        sys.stderr.write(f"rank {self._rank}: {text}\n")
        sys.stderr.flush()


def tell_launcher(line: str) -> None:
    """torchrun ends its own report with what it finds in this file. It breaks at half a file, but not at none."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        facts = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError):  # a full disk costs the line in that report, not the one on this rank's screen
            write_whole(Path(path), json.dumps({"message": facts}).encode())


def _a_sibling_is_gone() -> bool:
    """Whether torchrun has fewer processes on this host than it started; False where the system does not tell."""
    parent, alive = os.getppid(), 0
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return False
    for child in children:
        with suppress(OSError):  # a process that has just gone, or a zombie, which has no environment left
            alive += b"LOCAL_RANK=" in Path(f"/proc/{child}/environ").read_bytes()
    return alive < int(os.environ["LOCAL_WORLD_SIZE"])
