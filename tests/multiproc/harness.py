"""Runs a function in N processes of one host, each with a deadline."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Importing torch takes seconds: one server does it, and every process is a fork of that server.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "pytest", "mlora.engine.run"])


@dataclass(frozen=True)
class Ended:
    """A process that has ended; ``code`` is negative for a signal, None where the deadline ended it."""

    code: int | None
    output: str
    seconds: float

    @property
    def last_line(self):
        return self.output.strip().splitlines()[-1] if self.output.strip() else ""


@dataclass(frozen=True)
class Running:
    process: multiprocessing.process.BaseProcess
    output: Path

    @property
    def pid(self):
        return self.process.pid


def start(function, world, *arguments, environments=None):
    """Start ``function`` ("module:name", in this folder) in ``world`` processes: name(store, rank, world, *arguments).

    Rank 0 serves the store on a free port of the loopback interface, of which it tells the others through a file.
    """
    folder = Path(tempfile.mkdtemp())
    running = []
    for rank in range(world):
        output = folder / f"{rank}.txt"
        output.touch()
        environment = environments[rank] if environments else {}
        target_arguments = (function, rank, world, folder / "port", arguments, output, environment)
        process = FORKS.Process(target=child, args=target_arguments, daemon=True)
        process.start()
        running.append(Running(process, output))
    return running


def wait(running, deadline_s=60):
    """Wait for all; those still running at the deadline are killed, each by its own id."""
    started, ended = time.monotonic(), {}
    while len(ended) < len(running):
        late = time.monotonic() - started > deadline_s
        for rank, one in enumerate(running):
            if rank in ended or (one.process.is_alive() and not late):
                continue
            code = one.process.exitcode
            if code is None:
                one.process.kill()
            one.process.join()
            ended[rank] = Ended(code, one.output.read_text(), time.monotonic() - started)
        time.sleep(0.02)
    return [ended[rank] for rank in range(len(running))]


def wait_for_text(running, text, deadline_s=60):
    """Until every process has printed ``text``."""
    started = time.monotonic()
    while not all(text in one.output.read_text() for one in running):
        assert time.monotonic() - started < deadline_s, f"{text!r} was not printed in time"
        time.sleep(0.05)


def run(function, world, *arguments, deadline_s=60, environments=None):
    return wait(start(function, world, *arguments, environments=environments), deadline_s)


def run_fresh(function, world, *arguments, deadline_s=60):
    """As ``run``, in new interpreters, which also go through Python's own clean-up at the end."""
    port_file = Path(tempfile.mkdtemp()) / "port"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    commands = [
        [sys.executable, __file__, function, str(rank), str(world), str(port_file), *arguments] for rank in range(world)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    started, ended = time.monotonic(), []
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline_s - (time.monotonic() - started)))
        code = process.poll()
        process.kill()
        ended.append(Ended(code, process.communicate()[0], time.monotonic() - started))
    return ended


def check_all_passed(ended):
    for rank, process in enumerate(ended):
        assert process.code == 0, f"rank {rank} ended with {process.code}:\n{process.output}"


def child(function, rank, world, port_file, arguments, output, environment):
    """The main function of a forked process."""
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    call(function, rank, world, port_file, arguments)


def call(function, rank, world, port_file, arguments):
    import torch

    torch.set_num_threads(1)
    module, name = function.split(":")
    sys.path[:0] = [str(HERE), str(ROOT)]
    function = getattr(__import__(module), name)
    function(rendezvous(rank, port_file), rank, world, *arguments)


def rendezvous(rank, port_file):
    """The store of this run; rank 0 serves it."""
    from mlora.pipeline.transport.store import open_store

    if rank == 0:
        store = open_store("127.0.0.1", 0, serve=True)
        written = port_file.with_suffix(".new")
        written.write_text(str(store.port))
        written.rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.02)
    return open_store("127.0.0.1", int(port_file.read_text()), serve=False)


if __name__ == "__main__":
    _, called, its_rank, its_world, its_port_file, *its_arguments = sys.argv
    call(called, int(its_rank), int(its_world), Path(its_port_file), its_arguments)
