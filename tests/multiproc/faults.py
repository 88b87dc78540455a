"""Runs of the real command over processes in which a rank is ended with SIGKILL at a chosen point of its work."""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import FORKS, ROOT, Ended, Running, wait


@dataclass(frozen=True)
class Place:
    """A point of the work: a function, on which rank it is watched (negative: from the end), before it or behind it."""

    function: str
    rank: int
    behind: bool = False


PLACES = {
    "load": (Place("mlora.models.weights:Checkpoint.layer", -1),),
    "F": (Place("mlora.pipeline.stage:Stage.forward", 0), Place("mlora.pipeline.stage:Stage.forward", -1)),
    "B": (Place("mlora.pipeline.stage:Stage.backward", -1), Place("mlora.pipeline.stage:Stage.backward", 0)),
    "between STEPs": (
        Place("mlora.pipeline.stage:Stage.step", 0, behind=True),
        Place("mlora.pipeline.stage:Stage.step", -1),
    ),
    "save": (
        Place("mlora.files:sync_path", 0),
        Place("mlora.pipeline.stage:Stage.snapshot", -1),
        Place("mlora.checkpoint.versions:_sealed", 0),
    ),
    "plan": (Place("mlora.pipeline.schedule.planner:Planner.window", 0),),
    "export": (Place("mlora.checkpoint.peft_files:_compare", 0), Place("mlora.engine.exporter:model_card", 0)),
}


@dataclass(frozen=True)
class Kill:
    """SIGKILL for rank ``victim`` at the ``call``-th time that a place is reached."""

    phase: str
    place: Place
    call: int
    victim: int


def drawn(phase: str, world: int, seed: int) -> Kill:
    """A kill in this phase; the same for the same arguments."""
    rng = random.Random(f"{phase} {world} {seed}")
    place = PLACES[phase][seed % len(PLACES[phase])]
    last = {"load": 1, "export": 2, "plan": 3}.get(phase, 9)
    return Kill(phase, place, rng.randint(1, last), rng.randrange(world))


def run_ranks(words: Sequence[str], world: int, kill: Kill | None = None, deadline_s: float = 120) -> list[Ended]:
    """``mlora train WORDS`` as torchrun would start it, each rank a fork of a process that has imported all."""
    folder, port = Path(tempfile.mkdtemp()), _free_port()
    running = []
    for rank in range(world):
        output = folder / f"{rank}.txt"
        output.touch()
        process = FORKS.Process(target=_rank, args=(rank, world, port, list(words), folder, kill), daemon=True)
        process.start()
        (folder / f"{rank}.pid").write_text(str(process.pid))
        running.append(Running(process, output))
    (folder / "started").touch()
    return wait(running, deadline_s)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _rank(rank: int, world: int, port: int, words: list[str], folder: Path, kill: Kill | None) -> None:
    """The main function of a rank."""
    import sys

    descriptor = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    while not (folder / "started").exists():
        time.sleep(0.01)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(port)
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    if kill is not None and kill.place.rank % world == rank:
        _arm(kill, folder)
    from mlora.cli import main

    sys.stdout.reconfigure(line_buffering=True)
    code = main(["train", *words])
    sys.stdout.flush()
    sys.exit(code)


def _arm(kill: Kill, folder: Path) -> None:
    module, _, path = kill.place.function.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), []

    def watched(*arguments, **keys):
        calls.append(1)
        due = len(calls) == kill.call
        if due and not kill.place.behind:
            _kill(kill, folder)
        result = original(*arguments, **keys)
        if due and kill.place.behind:
            _kill(kill, folder)
        return result

    setattr(owner, name, watched)


def _kill(kill: Kill, folder: Path) -> None:
    (folder / "killed").touch()
    print(f"fault: SIGKILL for rank {kill.victim} in {kill.phase}", flush=True)
    os.kill(int((folder / f"{kill.victim}.pid").read_text()), signal.SIGKILL)
