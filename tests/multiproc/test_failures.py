"""How runs over processes fail and end: the real command under torch's own launcher, with failures put in from outside.

A failure is put into a rank by a ``sitecustomize`` module, which Python imports by itself before anything else.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlora.engine.inbox import leave_adapters
from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]
ENDED_S = 60  # after a failure everything is gone within this time
TRAIN = ("-m", "mlora", "train")
TORCHRUN = ("-m", "torch.distributed.run")


@dataclass(frozen=True)
class Run:
    """A started command, with all that it and its ranks print."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]

    def wait(self, deadline_s: float) -> int:
        """The exit code; fails where the command still runs at the deadline."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {deadline_s} s:\n{self.text}")

    def wait_for_metrics(self, deadline_s: float = 90) -> None:
        """Until the first step is logged, so that all ranks are at work."""
        metrics, end = self.folder / "metrics.jsonl", time.monotonic() + deadline_s
        while not metrics.exists() or not metrics.stat().st_size:
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.1)

    def ranks(self) -> dict[int, int]:
        """Process ids of the launcher's ranks."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, KeyError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    found[int(_environment_of(folder)["RANK"])] = int(folder.name)
        return found

    def wait_until_gone(self, pids: Sequence[int], deadline_s: float = ENDED_S) -> None:
        end = time.monotonic() + deadline_s
        while left := [pid for pid in pids if _runs(pid)]:
            assert time.monotonic() < end, f"processes {left} still run:\n{self.text}"
            time.sleep(0.1)


def _environment_of(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def started(
    config: dict[str, Any],
    folder: Path,
    *words: str,
    launcher: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Run]:
    """``prefix python LAUNCHER -m mlora train CONFIG WORDS``; whatever of it still runs at the end is ended."""
    path, output = folder.with_suffix(".json"), folder.with_suffix(".txt")
    path.write_text(json.dumps(config | {"output_dir": str(folder)}))
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (environment or {})
    command = [*prefix, sys.executable, *launcher, *TRAIN, str(path), *words]
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    run = Run(process, folder, output)
    try:
        yield run
    finally:
        left = [*run.ranks().values(), process.pid] if process.poll() is None else []
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def injected(folder: Path, code: str, rank: int | None = None) -> dict[str, str]:
    """The environment in which ``code`` runs before the engine starts, on one rank or on all."""
    condition = f"os.environ.get('RANK') == '{rank}'" if rank is not None else "'RANK' in os.environ"
    folder.mkdir()
    body = textwrap.indent(textwrap.dedent(code), "    ")
    (folder / "sitecustomize.py").write_text(f"import os\nif {condition}:\n{body}")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def logged_steps(folder: Path) -> dict[str, int]:
    """The last logged step of each adapter."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {entry["adapter"]: entry["step"] for entry in entries}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama3.2", num_hidden_layers=4)


@pytest.fixture(scope="module")
def endless(model, tmp_path_factory) -> dict[str, Any]:
    """A run that does not end by itself while a test lasts."""
    folder = tmp_path_factory.mktemp("data")
    names = "abc"
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 24, seed, 25)) for seed, name in enumerate(names)}
    adapters = [{"name": name, "dataset": rows[name], "r": 4, "per_device_train_batch_size": 2} for name in names]
    return {"base_model": str(model), "defaults": {"max_steps": 1_000_000}, "adapters": adapters}


@pytest.fixture(scope="module")
def short(endless) -> dict[str, Any]:
    return endless | {"defaults": {"max_steps": 4}}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_kill_of_a_rank_ends_all_and_the_last_line_names_it(endless, tmp_path, victim):
    with started(endless, tmp_path / "run", "--nproc", "3") as run:
        run.wait_for_metrics()
        ranks = run.ranks()
        os.kill(ranks[victim], signal.SIGKILL)
        assert run.wait(ENDED_S) == 128 + signal.SIGKILL
        run.wait_until_gone(list(ranks.values()))
    assert re.fullmatch(rf"mlora: rank {victim} failed: Signal 9 \(SIGKILL\) .*", run.last_line), run.text


def test_kill_of_the_launcher_ends_all_ranks(endless, tmp_path):
    with started(endless, tmp_path / "run", launcher=(*TORCHRUN, "--standalone", "--nproc-per-node", "2")) as run:
        run.wait_for_metrics()
        ranks = run.ranks()
        assert sorted(ranks) == [0, 1]
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait_until_gone(list(ranks.values()))
    assert re.fullmatch(r"rank [01]: stopped: rank [01] on \S+ failed: its launcher has ended", run.last_line), run.text


def test_torchruns_report_names_the_root_cause(endless, tmp_path):
    code = """
        from mlora.pipeline.stage import Stage
        def breaks(self, *_):
            raise MemoryError("no room for the step")
        Stage.step = breaks
    """
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    with started(endless, tmp_path / "run", launcher=launcher, environment=injected(tmp_path / "py", code, 1)) as run:
        assert run.wait(ENDED_S) == 1
    assert "in breaks" in run.text
    cause = run.text.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank 1 on \S+ failed: MemoryError: no room for the step", cause), run.text


@pytest.mark.parametrize(
    "where, error",
    [
        ("mlora.models.weights.Checkpoint.layer", "OSError: I/O error in layer 2"),
        ("mlora.pipeline.stage.Stage.backward", "AssertionError: the row is out of turn"),
    ],
)
def test_an_exception_on_another_rank_is_shown_with_its_traceback(endless, tmp_path, where, error):
    module, owner, name = where.rsplit(".", 2)
    kind, _, text = error.partition(": ")
    code = f"""
        from {module} import {owner}
        def breaks(self, *_):
            raise {kind}({text!r})
        {owner}.{name} = breaks
    """
    environment = injected(tmp_path / "py", code, rank=2)
    with started(endless, tmp_path / "run", "--nproc", "3", environment=environment) as run:
        assert run.wait(ENDED_S) == 1
    assert "Traceback" in run.text and "in breaks" in run.text, run.text
    assert re.fullmatch(rf"mlora: rank 2 on \S+ failed: {error}", run.last_line), run.text


@pytest.mark.parametrize(
    "owner, name",
    [
        ("mlora.pipeline.stage.Stage", "backward"),  # the first replica's own work, while the second goes on
        ("mlora.engine.leader", "receive_all"),  # writing what the second replica reports, while the first goes on
        ("mlora.engine.exporter", "write_checkpoint"),  # behind the stream
    ],
)
def test_an_exception_on_the_first_rank_ends_all_replicas(endless, tmp_path, owner, name):
    code = f"""
        import pkgutil
        def breaks(*_):
            raise AssertionError("out of turn")
        setattr(pkgutil.resolve_name({owner!r}), {name!r}, breaks)
    """
    config = endless | {"save_steps": 3, "pipeline": {"replicas": 2}}
    environment = injected(tmp_path / "py", code, rank=0)
    with started(config, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        assert run.wait(ENDED_S) == 1
    assert "in breaks" in run.text, run.text
    assert re.fullmatch(r"mlora: rank 0 on \S+ failed: AssertionError: out of turn", run.last_line), run.text


def test_a_signal_that_the_first_rank_has_not_heard_yet_counts(endless, tmp_path):
    """The first replica has ended, the second is stopped, and the wish travels with the heartbeats."""
    code = """
        import time
        from mlora.pipeline.stage import Stage
        from mlora.pipeline.transport.liveness import Liveness
        Liveness.__init__.__kwdefaults__.update(beat_s=30.0)
        forward = Stage.forward
        def slow(self, *arguments):
            time.sleep(0.2 * (os.environ["RANK"] == "1"))
            return forward(self, *arguments)
        Stage.forward = slow
    """
    adapters = [endless["adapters"][0] | {"max_steps": 150}, endless["adapters"][1] | {"max_steps": 100}]
    config = endless | {"adapters": adapters, "pipeline": {"replicas": 2}}
    environment = injected(tmp_path / "py", code)
    with started(config, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        while "a  checkpoint of step 150" not in run.text:
            assert run.process.poll() is None, run.text
            time.sleep(0.1)
        os.kill(run.ranks()[1], signal.SIGTERM)
        assert run.wait(ENDED_S) == 128 + signal.SIGTERM, run.text
    assert "b  stopped: by a signal" in run.text


def test_a_microbatch_that_another_rank_cannot_compute_costs_its_adapters_not_the_run(short, tmp_path):
    code = """
        from mlora.pipeline.stage import Stage
        def breaks(self, *_):
            raise RuntimeError("CUDA out of memory")
        Stage.backward = breaks
    """
    environment = injected(tmp_path / "py", code, rank=1)
    with started(short, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        assert run.wait(ENDED_S) == 3
    assert "on stage 1: RuntimeError: CUDA out of memory" in run.text
    reason = r"its microbatch could not be computed: .* on stage 1: RuntimeError: CUDA out of memory"
    assert re.fullmatch(f"mlora: failed: a, b, c; a: {reason}", run.last_line), run.text


def test_a_host_with_another_model_is_named(endless, tmp_path):
    other = save_tiny(tmp_path / "other", "llama3.2", num_hidden_layers=4, rms_norm_eps=1e-3)
    code = f"""
        import pathlib
        import mlora.engine.worker
        mlora.engine.worker.resolve_base_model = lambda _: pathlib.Path({str(other)!r})
    """
    environment = injected(tmp_path / "py", code, rank=1)
    with started(endless, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        assert run.wait(ENDED_S) == 2
    assert f"on {socket.gethostname()} is not the model that the first rank has" in run.last_line, run.text
    assert "Traceback" not in run.text


def test_two_runs_at_once_on_one_host_both_end(short, tmp_path):
    with (
        started(short, tmp_path / "one", "--nproc", "2") as one,
        started(short, tmp_path / "two", "--nproc", "2") as two,
    ):
        for run in (one, two):
            assert run.wait(120) == 0, run.text
    for run in (one, two):
        assert logged_steps(run.folder) == {"a": 4, "b": 4, "c": 4}
        assert sorted(path.name for path in (run.folder / "adapters").iterdir()) == ["a", "b", "c"]


def _alone(rank: int, address: str, port: int) -> dict[str, str]:
    """What another launcher than torchrun sets."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something else listens, which says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_is_named(short, tmp_path, taken):
    with started(short, tmp_path / "run", environment=_alone(0, "127.0.0.1", taken)) as run:
        assert run.wait(ENDED_S) == 2
    assert re.fullmatch(rf"mlora: rendezvous at 127.0.0.1:{taken} failed: .*; choose a free port", run.last_line)


def test_torchrun_names_a_taken_port(short, tmp_path, taken):
    launcher = (*TORCHRUN, "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(taken))
    with started(short, tmp_path / "run", launcher=launcher) as run:
        assert run.wait(ENDED_S) == 1
    assert re.search(rf"port: {taken}.*address already in use", run.last_line), run.text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_does_not_resolve_is_named(short, tmp_path, rank):
    with started(short, tmp_path / "run", environment=_alone(rank, "no-such-host.invalid", 29500)) as run:
        assert run.wait(ENDED_S) == 2
    assert re.search("no-such-host.invalid:29500 failed: .*cannot resolve the name", run.last_line), run.text
    assert "frame #" not in run.text


@pytest.mark.slow
def test_a_stranger_at_the_rendezvous_is_named(short, tmp_path, taken):
    with started(short, tmp_path / "run", environment=_alone(1, "127.0.0.1", taken)) as run:
        assert run.wait(ENDED_S) == 2
    assert re.search(f"127.0.0.1:{taken} failed: no store of this run has answered", run.last_line), run.text


@pytest.mark.slow
def test_torchrun_names_a_host_that_does_not_resolve(short, tmp_path):
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", "no-such-host.invalid:29500")
    launcher = (*TORCHRUN, "--nproc-per-node", "2", *endpoint, "--rdzv-conf", "read_timeout=15")
    with started(short, tmp_path / "run", launcher=launcher) as run:
        assert run.wait(ENDED_S) == 1
    assert "no-such-host.invalid, 29500" in run.text


STALL = """
    import time
    from mlora.pipeline.stage import Stage
    from mlora.pipeline.transport.liveness import Liveness
    Liveness.__init__.__kwdefaults__.update({limits})
    forward, calls = Stage.forward, []
    def stalls(self, *arguments):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 4:
            time.sleep({seconds})
        return forward(self, *arguments)
    Stage.forward = stalls
"""


@pytest.mark.timed
@pytest.mark.parametrize(
    "seconds, limits", [(5, {"silent_s": 3.0, "beat_s": 0.2}), pytest.param(90, {}, marks=pytest.mark.slow)]
)
def test_a_stall_of_one_rank_ends_nothing(short, tmp_path, seconds, limits):
    environment = injected(tmp_path / "py", STALL.format(seconds=seconds, limits=limits))
    before = time.monotonic()
    with started(short, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        assert run.wait(seconds + 60) == 0, run.text
    assert time.monotonic() - before > seconds
    assert logged_steps(run.folder) == {"a": 4, "b": 4, "c": 4}


def test_a_replica_that_has_ended_waits_for_as_long_as_the_others_take(endless, tmp_path):
    """Here for 6 s, while torch's limits are 600 times as short as they are: an hour."""
    code = """
        import time
        from mlora.pipeline.stage import Stage
        from mlora.pipeline.transport import distributed
        distributed.OPERATION_TIMEOUT /= 600
        step = Stage.step
        def slow(self, *arguments):
            time.sleep(3 * (os.environ["RANK"] == "0"))
            return step(self, *arguments)
        Stage.step = slow
    """
    adapters = [endless["adapters"][0] | {"max_steps": 3}, endless["adapters"][1] | {"max_steps": 2}]
    config = endless | {"adapters": adapters, "pipeline": {"replicas": 2}}
    environment = injected(tmp_path / "py", code)
    with started(config, tmp_path / "run", "--nproc", "2", environment=environment) as run:
        assert run.wait(ENDED_S) == 0, run.text


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_added_when_the_first_replica_has_ended_is_trained(endless, tmp_path, stages):
    code = """
        import time
        from mlora.pipeline.stage import Stage
        forward = Stage.forward
        def slow(self, *arguments):
            time.sleep(0.2 * (int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) // 2))
            return forward(self, *arguments)
        Stage.forward = slow
    """
    first, second, third = endless["adapters"]
    adapters = [first | {"max_steps": 50}, second | {"max_steps": 48}]  # the dearer one goes to the first replica
    config = endless | {"adapters": adapters, "pipeline": {"stages": stages, "replicas": 2}}
    added = tmp_path / "added.json"
    added.write_text(json.dumps({"adapters": [third | {"max_steps": 3}]}))
    environment = injected(tmp_path / "py", code)
    with started(config, tmp_path / "run", "--nproc", str(2 * stages), environment=environment) as run:
        while "a  checkpoint of step 50" not in run.text:
            assert run.process.poll() is None, run.text
            time.sleep(0.1)
        assert leave_adapters(run.folder, added) == ["c"]
        assert run.wait(2 * ENDED_S) == 0, run.text
    assert logged_steps(run.folder) == {"a": 50, "b": 48, "c": 3}


def _rows_of_lengths(path: Path, lengths: Sequence[int]) -> Path:
    """Plain text, a token for each letter, one row for each length."""
    path.write_text("\n".join(json.dumps({"text": "q" * length}) for length in lengths))
    return path


def test_uneven_rows_and_a_last_batch_of_one_row_over_four_processes(model, tmp_path):
    """The only adapter: one microbatch at a time goes through the stages, then two."""
    rows = _rows_of_lengths(tmp_path / "rows.jsonl", [8, 200, 17] * 2 + [8])
    adapter = {"name": "a", "dataset": str(rows), "r": 4, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    config = {"base_model": str(model), "microbatch_tokens": 128, "adapters": [adapter]}
    with started(config, tmp_path / "run", "--nproc", "4") as run:
        assert run.wait(120) == 0, run.text
    assert logged_steps(run.folder) == {"a": 8}
    assert re.search(r"\ba +ended +8\b", run.text), run.text


def test_one_sample_a_step_over_four_processes_ends(model, tmp_path):
    rows = _rows_of_lengths(tmp_path / "rows.jsonl", [30, 8, 17])
    adapter = {"name": "a", "dataset": str(rows), "r": 4, "per_device_train_batch_size": 1, "max_steps": 5}
    with started({"base_model": str(model), "adapters": [adapter]}, tmp_path / "run", "--nproc", "4") as run:
        assert run.wait(120) == 0, run.text
    assert logged_steps(run.folder) == {"a": 5}


def test_200_steps_of_random_lengths_on_four_stages_do_not_hang(model, tmp_path):
    rng = random.Random(0)
    adapters = []
    for name, rows_per_step in (("a", 1), ("b", 2), ("c", 1)):
        rows = _rows_of_lengths(tmp_path / f"{name}.jsonl", [rng.randint(2, 40) for _ in range(25)])
        adapters.append(
            {"name": name, "dataset": str(rows), "r": 4}
            | {"per_device_train_batch_size": rows_per_step, "max_steps": 200, "logging_steps": 50}
        )
    config = {"base_model": str(model), "microbatch_tokens": 64, "adapters": adapters}
    with started(config | {"pipeline": {"stages": 4, "transport": "local"}}, tmp_path / "run") as run:
        assert run.wait(240) == 0, run.text
    assert logged_steps(run.folder) == {"a": 200, "b": 200, "c": 200}
