"""The live view of a run on a terminal: a line for the engine, and a row per adapter. It reads, in a thread of its own,
what the run keeps anyway, so the training never waits for it; what is printed meanwhile appears above it."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlora.engine.adapter_run import AdapterRun, StepReport
from mlora.types import Microbatch

_EVERY_S = 0.5
_SAMPLES = 64  # of an adapter's progress, from which speed and rest are told
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_BAR_STEPS = 8  # losses that are averaged for one bar
_WIDTH = 16  # bars of a curve
_ORDER = ("training", "retrying", "failed", "waiting", "stopped", "cancelled", "ended")  # if not all have room
_STYLES = {"failed": "red", "retrying": "yellow", "waiting": "dim", "ended": "green"}
# The columns, the dearest first: on a narrow terminal the last ones go.
_COLUMNS = ("adapter", "step", "loss", "left", "state", "curve", "tokens/s", "rate", "norm")
_SHOWN = ("adapter", "state", "step", "loss", "curve", "rate", "norm", "tokens/s", "left")  # in this order


def terminal() -> Console | None:
    """Standard output as a terminal whose cursor can be moved; None where it is none: then plain lines are right."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    console = Console(file=sys.stdout)
    return None if console.is_dumb_terminal else console


class LiveView:
    """Rows of the adapters and what the first stage does.

    Args:
        console: where it is shown.
        adapters: the run's own list, to which others may be added.
        microbatches: gives the ones that the first stage has run last.
        capacity: rows of a full microbatch.
        device: whose memory is shown.
    """

    def __init__(
        self,
        console: Console,
        adapters: Sequence[AdapterRun],
        microbatches: Callable[[], Iterable[Microbatch]],
        capacity: int,
        device: torch.device,
    ) -> None:
        self._console, self._adapters = console, adapters
        self._microbatches, self._capacity, self._device = microbatches, capacity, device
        self._ascii = is_ascii(console.encoding, os.environ)
        self._progress: dict[int, deque[tuple[float, int, int]]] = {}  # time, step, tokens of each adapter

    def shown(self) -> AbstractContextManager[object]:
        """The context in which it is on the screen. It goes at the end: the table of results takes its place."""
        self._live = _Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=1 / _EVERY_S,
            transient=True,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        return self._live

    def render(self) -> RenderableType:
        """What is to be seen now. Whatever goes wrong here must not reach the training."""
        try:
            adapters = sorted(self._adapters, key=lambda adapter: _ORDER.index(adapter.state))
            self._look(time.monotonic())
            room = max(1, self._console.height - 5)
            rows = adapters if len(adapters) <= room else adapters[: room - 1]
            table = self._table([self._row(adapter) for adapter in rows])
            return Group(self._engine(), table, *_rest(adapters[len(rows) :]))
        except Exception as error:
            return Text(f"no live view: {type(error).__name__}: {error}")

    def _look(self, now: float) -> None:
        for adapter in self._adapters:
            step, tokens = len(adapter.reports), adapter.reports[-1].num_tokens if adapter.reports else 0
            seen = self._progress.setdefault(adapter.index, deque(maxlen=_SAMPLES))
            if adapter.state == "training" and (not seen or seen[-1][1] != step):
                seen.append((now, step, tokens))

    def _engine(self) -> Text:
        speed = sum(self._speed(adapter)[0] for adapter in self._adapters)
        microbatches = [m for m in self._microbatches() if m.tokens]
        parts = [f"{speed:,.0f} tokens/s", f"memory {memory(self._device)}"]
        if microbatches:
            fill = sum(m.tokens for m in microbatches) / sum(max(m.tokens, self._capacity) for m in microbatches)
            parts.append(f"microbatches {fill:.0%} full")
        return Text("engine  " + "   ".join(parts), style="bold")

    def _speed(self, adapter: AdapterRun) -> tuple[float, float]:
        """Tokens and steps per second; 0 where nothing is known."""
        seen = self._progress.get(adapter.index)
        if adapter.state != "training" or seen is None or len(seen) < 2:
            return 0.0, 0.0
        (start, first, before), (stop, last, after) = seen[0], seen[-1]
        return (after - before) / (stop - start), (last - first) / (stop - start)

    def _row(self, adapter: AdapterRun) -> dict[str, Text]:
        last = adapter.reports[-1] if adapter.reports else None
        tokens, steps = self._speed(adapter)
        left = (adapter.total_steps - len(adapter.reports)) / steps if steps else None
        cells = {
            "adapter": adapter.config.name,
            "state": adapter.state,
            "step": f"{len(adapter.reports)}/{adapter.total_steps}",
            "loss": f"{last.loss:.4f}" if last else "",
            "curve": curve(adapter.reports, _ASCII_BARS if self._ascii else _BARS),
            "rate": f"{last.learning_rate:.2e}" if last else "",
            "norm": f"{last.grad_norm:.3g}" if last else "",
            "tokens/s": f"{tokens:,.0f}" if tokens else "",
            "left": _clock(left) if left is not None else "",
        }
        found = {name: Text(text) for name, text in cells.items()}
        found["state"].stylize(_STYLES.get(adapter.state, ""))
        return found

    def _table(self, rows: Sequence[Mapping[str, Text]]) -> Table:
        """As many columns as the terminal is wide for, beside a third of it for the names; these get what is left."""
        width = self._console.width
        for count in range(len(_COLUMNS), 1, -1):
            kept = [name for name in _SHOWN if name in _COLUMNS[:count]]
            table = self._columns(kept, rows, width // 3)
            left = width - Measurement.get(self._console, self._console.options.update(width=10_000), table).maximum
            if left >= 0:
                break
        return self._columns(kept, rows, width // 3 + max(0, left))

    def _columns(self, kept: Sequence[str], rows: Sequence[Mapping[str, Text]], longest: int) -> Table:
        """The table with these columns. ``longest``: characters of a name."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in kept:
            right = name not in ("adapter", "state", "curve")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="crop")
        for row in rows:
            name = shortened(row["adapter"].plain, longest, "~" if self._ascii else "…")
            table.add_row(*(Text(name) if key == "adapter" else row[key] for key in kept))
        return table


class _Live(Live):
    """rich's, for a program whose threads print, and that may be ended at once."""

    def start(self, refresh: bool = False) -> None:
        """The cursor stays visible, since nothing might bring it back.

        A print that comes between a refresh and the place that it was computed for would leave a part of the view
        behind, so the two exclude each other. Both streams are kept as long as this: Python's print, in another
        thread, holds no reference to what it writes to.
        """
        super().start(refresh=True)
        self.console.show_cursor(True)
        self.streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, FileProxy)]
        for stream in self.streams:
            stream.write = self._alone(stream.write)  # type: ignore[method-assign]
            stream.flush = self._alone(stream.flush)  # type: ignore[method-assign]

    def _alone(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any) -> Any:
            with self._lock:
                return act(*arguments)

        return acting


def is_ascii(encoding: str, environment: Mapping[str, str]) -> bool:
    """Whether only ASCII is shown: for other encodings than UTF-8, and in locale C, where Python writes UTF-8 still."""
    named = environment.get("LC_ALL") or environment.get("LANG")
    return not encoding.lower().startswith("utf") or named in ("C", "POSIX")


def shortened(name: str, longest: int, mark: str) -> str:
    """A name that is too long without its middle: those of a grid differ at the end."""
    tail = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[: longest - 1 - tail]}{mark}{name[len(name) - tail :]}"


def curve(reports: Sequence[StepReport], bars: str) -> str:
    """The losses of all steps as bars of several heights, lowest to highest."""
    count = len(reports)
    width = min(_WIDTH, count)
    groups = [reports[i * count // width : (i + 1) * count // width][-_BAR_STEPS:] for i in range(width)]
    means = [sum(report.loss for report in group) / len(group) for group in groups]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    top = len(bars) - 1
    return "".join("!" if mean not in finite else bars[round((mean - low) / (span or 1.0) * top)] for mean in means)


def memory(device: torch.device) -> str:
    """What this process has of the device's memory, on a CPU of the host's."""
    if device.type == "cuda":
        used, of = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
        return f"{used / 2**30:.1f} of {of / 2**30:.0f} GiB"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.2f} GiB"


def _rest(adapters: Sequence[AdapterRun]) -> list[Text]:
    """A line for those that had no room."""
    states = [adapter.state for adapter in adapters]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [Text(f"and {counts}", style="dim")] if states else []


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
