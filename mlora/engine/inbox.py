"""``mlora add`` and ``mlora stop``: files that are left in the run folder and that the first rank picks up."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mlora.config import AdapterConfig, load_adapters, parse_config
from mlora.engine.adapter_run import OVER, AdapterRun
from mlora.engine.output import ADDED, INBOX, is_live
from mlora.engine.requests import end
from mlora.engine.status import read_status
from mlora.files import writable, write_whole
from mlora.types import UserError

_EVERY_S = 1.0
_REFUSED = ".refused"


def leave_adapters(output_dir: Path, file: Path) -> list[str]:
    """Leave the adapters of ``file`` for the live run in ``output_dir``; returns their names. Raises UserError."""
    known = {name.lower() for name in _live_status(output_dir)["adapters"]}
    adapters = load_adapters(file)
    with _alone_in(output_dir / INBOX):
        left = {name.lower() for name in _left(output_dir)}
        for adapter in adapters:
            if adapter.name.lower() in known | left:
                raise UserError(f"{file}: the run has an adapter {adapter.name!r} already; give another name")
        for adapter in adapters:
            path = output_dir / INBOX / f"add-{adapter.name}.json"
            with writable(path):
                write_whole(path, json.dumps(changed_keys(adapter)).encode())
            path.with_suffix(_REFUSED).unlink(missing_ok=True)  # of an earlier try
    return [adapter.name for adapter in adapters]


def _left(output_dir: Path) -> set[str]:
    """The adapters that others have left for the run, taken or not: its status may not show them yet."""
    waiting = {path.stem.removeprefix("add-") for path in (output_dir / INBOX).glob("add-*.json")}
    return waiting | {path.stem for path in (output_dir / ADDED).glob("*.json")}


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While it lasts no other ``mlora add`` leaves anything in the folder, so no two adapters of one name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def leave_stop(output_dir: Path, name: str) -> None:
    """Leave word for the live run in ``output_dir`` that one adapter shall end. Raises UserError."""
    adapters = _live_status(output_dir)["adapters"]
    if name not in adapters:
        raise UserError(f"{output_dir}: the run has no adapter {name!r}; it has {', '.join(adapters)}")
    if adapters[name]["state"] in OVER:
        raise UserError(f"{output_dir}: adapter {name!r} is {adapters[name]['state']} already")
    path = output_dir / INBOX / f"stop-{name}"
    with writable(path):
        path.touch()


def added_adapters(output_dir: Path) -> list[AdapterConfig]:
    """The adapters that were added to the run in ``output_dir`` while it ran."""
    return [_read(path) for path in sorted((output_dir / ADDED).glob("*.json"))]


def carry_added(source: Path, output_dir: Path) -> None:
    """What was added to the run in ``source`` belongs to the one in ``output_dir`` too, which goes on from it.

    Raises UserError where the disk does not take it.
    """
    with writable(f"output_dir: {output_dir / ADDED}"):
        for path in (source / ADDED).glob("*.json"):
            shutil.copyfile(path, output_dir / ADDED / path.name)


def changed_keys(adapter: AdapterConfig) -> dict[str, Any]:
    """An adapter's keys that are not the defaults, as they may stand in a configuration file."""
    defaults = {field.name: field.default for field in dataclasses.fields(AdapterConfig)}
    return {key: value for key, value in adapter.plain().items() if getattr(adapter, key) != defaults[key]}


class Inbox:
    """Looks into the folder every second, in a thread of its own, where it also prepares what is to be added.

    Args:
        output_dir: the run folder.
        adapters: the run's, to which those that are taken are appended.
        prepare: reads and checks an adapter; raises UserError.
        add: takes a prepared adapter into the stream.
        ask: puts a wish before all ranks.
    """

    def __init__(
        self,
        output_dir: Path,
        adapters: list[AdapterRun],
        prepare: Callable[[int, AdapterConfig], AdapterRun],
        add: Callable[[AdapterRun], None],
        ask: Callable[[str], None],
    ) -> None:
        self._inbox, self._added = output_dir / INBOX, output_dir / ADDED
        self._adapters, self._prepare, self._add, self._ask = adapters, prepare, add, ask
        self._asked: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def __enter__(self) -> Inbox:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        if error is not None:
            return  # at once: a large data set that is being added may take minutes, and others wait for the error
        self._thread.join()
        self._end_asked()
        if not any(adapter.state in ("waiting", "stopped") for adapter in self._adapters):
            for path in self._inbox.glob("add-*.json"):
                self._refuse(path, "the run had ended")

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._end_asked()
            for path in sorted(self._inbox.glob("add-*.json")):
                self._take(path)

    def _end_asked(self) -> None:
        """A file goes when its adapter is over: a run that is interrupted in between finds it again."""
        states = {adapter.config.name: adapter.state for adapter in self._adapters}
        for path in sorted(self._inbox.glob("stop-*")):
            name = path.name.removeprefix("stop-")
            if states.get(name, "ended") in OVER:
                path.unlink(missing_ok=True)
            elif name not in self._asked:
                self._asked.add(name)
                self._ask(end(name))

    def _take(self, path: Path) -> None:
        try:
            config = _read(path)
            if config.name.lower() in {adapter.config.name.lower() for adapter in self._adapters}:
                raise UserError("the run has an adapter of that name")
            adapter = self._prepare(len(self._adapters), config)
            path.rename(self._added / f"{config.name}.json")
        except UserError as error:
            self._refuse(path, str(error))
            return
        except Exception as error:  # whatever is wrong with one file must not keep the others waiting
            self._refuse(path, f"{type(error).__name__}: {error}")
            return
        self._adapters.append(adapter)
        self._add(adapter)

    def _refuse(self, path: Path, reason: str) -> None:
        print(f"{path.name} is not taken: {reason}", flush=True)
        with suppress(OSError):  # a full disk costs the reason
            path.write_text(reason, encoding="utf-8")
        path.rename(path.with_suffix(_REFUSED))


def _read(path: Path) -> AdapterConfig:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return parse_config({"base_model": ".", "adapters": [tree]}).adapters[0]


def _live_status(output_dir: Path) -> dict[str, Any]:
    tree = read_status(output_dir)
    if not is_live(output_dir):
        raise UserError(f"{output_dir}: this run is not running; change its configuration and --resume it")
    return tree
