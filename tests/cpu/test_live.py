"""The live view: on a terminal of any width and in any locale, in a real one and with whatever may go wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest
import torch
from rich.console import Console

from mlora.engine.adapter_run import StepReport
from mlora.engine.live import LiveView, curve, is_ascii
from tests.cpu.packing import packed
from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]


def _report(step, loss):
    return StepReport(
        adapter="a",
        step=step,
        total_steps=100,
        epoch=1.0,
        loss=loss,
        grad_norm=1.25,
        learning_rate=2e-4,
        num_tokens=50 * step,
        skipped=False,
    )


def _adapter(index, name, state="training", losses=()):
    """What the view reads of an AdapterRun."""
    reports = [_report(i, loss) for i, loss in enumerate(losses, 1)]
    config = SimpleNamespace(name=name)
    return SimpleNamespace(index=index, config=config, state=state, reports=reports, total_steps=100)


def _shown(adapters, width=120, height=24, encoding="utf-8", waits=0.0) -> list[str]:
    """The lines of a view that is looked at twice, a step of every adapter apart."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    view = LiveView(console, adapters, lambda: [packed({0: [30, 20]})], 100, torch.device("cpu"))
    times = iter((0.0, waits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlora.engine.live.time", SimpleNamespace(monotonic=lambda: next(times)))
        view.render()
        for adapter in adapters:
            if waits and adapter.state == "training":
                adapter.reports.append(_report(len(adapter.reports) + 1, 1.0))
        console.print(view.render())
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


def test_everything_is_shown_where_there_is_room():
    lines = _shown([_adapter(0, "first", losses=[4.0, 3.0, 2.0]), _adapter(1, "second", "waiting")], waits=0.2)
    assert "microbatches 50% full" in lines[0] and "memory" in lines[0]
    assert lines[1].split() == ["adapter", "state", "step", "loss", "curve", "rate", "norm", "tokens/s", "left"]
    name, state, step, loss, bars, rate, norm, speed, left = lines[2].split()
    assert (name, state, step, loss, rate, norm) == ("first", "training", "4/100", "1.0000", "2.00e-04", "1.25")
    assert (bars, speed, left) == ("█▆▃▁", "250", "0:19")
    assert lines[3].split() == ["second", "waiting", "0/100"] and len(lines) == 4
    assert float(lines[0].split()[1]) == float(speed)


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20, 5])
def test_no_line_is_wider_than_the_terminal_and_the_dearest_columns_stay(width):
    adapters = [_adapter(0, "support-r16", losses=[4.0] * 50), _adapter(1, "x" * 100, losses=[3.0])]
    lines = _shown(adapters, width=width, waits=0.01)
    assert max(map(len, lines)) <= width
    if width >= 40:
        assert any("1.0000" in line and "51/100" in line for line in lines)


@pytest.mark.parametrize(("width", "encoding"), [(36, "utf-8"), (40, "utf-8"), (40, "ascii"), (80, "utf-8")])
def test_names_that_differ_at_the_end_can_be_told_apart(width, encoding):
    names = [f"{prefix}-r{r}" for prefix in ("support", "a-long-name-for-tickets-of-all-kinds") for r in (8, 16)]
    lines = _shown([_adapter(i, name, losses=[4.0]) for i, name in enumerate(names)], width, encoding=encoding)
    shown = [line.split()[0] for line in lines if "4.0000" in line]
    assert shown[:2] == names[:2] and len({*shown}) == 4 and [name[-3:] for name in shown[2:]] == ["-r8", "r16"]
    assert max(map(len, lines)) <= width


def test_many_adapters_leave_the_terminal_its_height_and_those_that_matter_are_shown():
    adapters = [_adapter(i, f"a{i}", "ended" if i < 60 else "waiting") for i in range(98)]
    adapters += [_adapter(98, "bad", "failed"), _adapter(99, "good", losses=[1.0])]
    lines = _shown(adapters, height=24)
    assert len(lines) < 24 and lines[2].split()[0] == "good" and lines[3].split()[0] == "bad"
    assert lines[-1] == "and 22 waiting, 60 ended"


def test_in_ascii_nothing_else_is_written():
    adapters = [_adapter(0, "a" * 90, losses=[4.0, float("nan"), 2.0])]
    text = "\n".join(_shown(adapters, width=70, encoding="ascii"))
    assert text.isascii() and "aaaa" in text
    assert curve(adapters[0].reports, "_#") == "#!_"


@pytest.mark.parametrize(
    ("encoding", "environment", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, False),
        ("utf-8", {}, False),
        ("utf-8", {"LANG": "C"}, True),
        ("utf-8", {"LANG": "C", "LC_ALL": "C.UTF-8"}, False),
        ("utf-8", {"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, True),
        ("iso8859-1", {"LANG": "de_DE"}, True),
    ],
)
def test_when_ascii_is_taken(encoding, environment, expected):
    assert is_ascii(encoding, environment) is expected


def test_a_curve_is_the_whole_training_so_far():
    losses = [float(100 - i) for i in range(64)]
    assert curve(_adapter(0, "a", losses=losses).reports, "01234567") == "7766554433221100"
    assert curve([], "01") == "" and curve([_report(1, 2.0)], "01") == "0"


def test_what_goes_wrong_in_it_stays_in_it():
    (line,) = _shown([SimpleNamespace(state="training", index=0)])
    assert line.startswith("no live view: AttributeError")


@dataclass
class Terminal:
    """A command in a terminal that pyte plays. ``seen`` are its screens; ``press`` is sent when a screen has ``at``."""

    command: list[str]
    env: dict[str, str]
    columns: int = 80
    lines: int = 24
    at: Callable[[str], bool] = lambda screen: False
    press: bytes = b""
    seen: list[str] = field(default_factory=list)

    def run(self, limit_s: float = 120.0) -> int:
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.lines, self.columns, 0, 0))
        take = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        command = ["setsid", "--ctty", *self.command]  # Ctrl-C reaches a process only from its own terminal
        process = subprocess.Popen(command, env=self.env, cwd=ROOT, **take)
        os.close(theirs)
        self.screen = pyte.Screen(self.columns, self.lines)
        stream, deadline, pressed = pyte.ByteStream(self.screen), time.monotonic() + limit_s, False
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.5)[0]:
                continue
            try:
                data = os.read(ours, 65536)
            except OSError:
                break
            stream.feed(data)
            self.seen.append("\n".join(line.rstrip() for line in self.screen.display))
            if not pressed and self.at(self.seen[-1]):
                self.hidden = self.screen.cursor.hidden
                os.write(ours, self.press)
                pressed = True
        os.close(ours)
        return process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    save_tiny(folder / "model", "llama2")
    write_rows(folder / "rows.jsonl", 20, seed=1)
    return folder


def _command(folder, steps, output, **top):
    adapters = [{"name": name, "dataset": "rows.jsonl", "r": 4, "max_steps": steps} for name in ("alpha", "beta")]
    tree = {"base_model": "model", "output_dir": output, "adapters": adapters, **top}
    config = folder / f"{output}.yaml"
    config.write_text(json.dumps(tree))
    return [sys.executable, "-m", "mlora", "train", str(config)]


def _env(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LC_") and k not in ("LANG", "COLUMNS", "LINES")}
    return kept | {"TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def test_a_terminal_shows_the_rows_and_at_the_end_the_results(folder):
    terminal = Terminal(
        _command(folder, 60, "wide", pipeline={"stages": 2, "transport": "local"}), _env(LANG="C.UTF-8")
    )
    terminal.lines, terminal.columns = 40, 110
    assert terminal.run() == 0
    rows = [line.split() for screen in terminal.seen for line in screen.splitlines() if line.startswith("alpha  ")]
    training = [row for row in rows if "training" in row and len(row) == 9]
    assert training and any(set(row[4]) <= set("▁▂▃▄▅▆▇█") for row in training)
    last = terminal.seen[-1].rstrip()
    assert "engine " not in last
    assert "alpha    ended          60" in last and "report: " in last
    assert "step 59/60" not in "".join(terminal.seen) and not terminal.screen.cursor.hidden


_CROWD = """
import threading, time, torch
from mlora.engine.live import LiveView, terminal
from tests.cpu.test_live import _adapter

adapters = [_adapter(i, f"n{i}", losses=[1.0]) for i in range(4)]

def talk(k):
    for i in range(60):
        print(f"line {k} {i}", flush=True)
        time.sleep(0.003)

def change(live):
    for i in range(150):
        adapters[:] = [_adapter(k, f"n{k}", losses=[1.0]) for k in range(3 + i % 5)]
        live.refresh()

with LiveView(terminal(), adapters, lambda: [], 100, torch.device("cpu")).shown() as live:
    threads = [threading.Thread(target=talk, args=(k,)) for k in range(4)]
    threads.append(threading.Thread(target=change, args=(live,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_print_while_its_height_changes_leave_nothing_of_it_behind_and_lose_no_line():
    terminal = Terminal([sys.executable, "-c", _CROWD], _env(LANG="C.UTF-8"), lines=400)
    assert terminal.run() == 0
    assert "engine" not in terminal.seen[-1] and terminal.seen[-1].count("line ") == 240
    assert any("engine" in screen for screen in terminal.seen)


def test_forty_columns_without_utf8(folder):
    terminal = Terminal(_command(folder, 60, "narrow"), _env(LC_ALL="C", PYTHONUTF8="0"), columns=40)
    assert terminal.run() == 0
    assert any("alpha" in s and "left" in s and "engine" in s for s in terminal.seen)
    assert all(screen.isascii() for screen in terminal.seen)
    assert "Traceback" not in "".join(terminal.seen)


def test_control_c_saves_and_leaves_the_terminal_as_it_was(folder):
    terminal = Terminal(_command(folder, 100_000, "stopped"), _env(LANG="C.UTF-8"), columns=100, lines=40)
    terminal.at, terminal.press = lambda screen: "training" in screen and "▁" in screen, b"\x03"
    assert terminal.run() == 130
    last = terminal.seen[-1].rstrip()
    assert "interrupted; --resume auto goes on" in last and "alpha  stopped: by a signal" in last
    assert not terminal.hidden and not terminal.screen.cursor.hidden and "engine " not in last


def test_without_a_terminal_there_are_lines(folder):
    done = subprocess.run(
        _command(folder, 2, "lines"), env=_env(), cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    assert "alpha  step 2/2  epoch" in done.stdout and "\x1b" not in done.stdout and "engine" not in done.stdout
    dumb = Terminal(_command(folder, 2, "dumb"), _env(TERM="dumb"), columns=150)
    assert dumb.run() == 0
    assert "alpha  step 2/2  epoch" in dumb.seen[-1] and "engine" not in "".join(dumb.seen)
