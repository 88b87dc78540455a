"""Signals and restarts under torch's own launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_failures import TORCHRUN, injected, started
from test_training import assert_same, train

from mlora.checkpoint.versions import versions
from mlora.engine.inbox import leave_stop
from mlora.engine.start import Start
from mlora.engine.status import launcher, read_status
from mlora.engine.world import World
from mlora.pipeline.transport.board import Board
from mlora.pipeline.transport.store import open_store
from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

ENDED_S = 60


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    model = save_tiny(folder / "model", "llama3.2", num_hidden_layers=4)
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 20, i, 25)) for i, name in enumerate("ab")}
    adapters = [{"name": name, "dataset": rows[name], "r": 4, "lora_dropout": 0.1} for name in "ab"]
    defaults = {"learning_rate": 0.01, "max_steps": 60, "per_device_train_batch_size": 2, "logging_steps": 2}
    return {"base_model": str(model), "defaults": defaults, "adapters": adapters, "microbatch_tokens": 90}


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = train(config, folder)
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.mark.parametrize("who", ["launcher", "another rank"])
def test_a_signal_saves_and_ends_all_and_nothing_is_lost(config, undisturbed, tmp_path, who):
    with started(config, tmp_path / "run", "--nproc", "2") as run:
        run.wait_for_metrics()
        ranks = run.ranks()
        os.kill(run.process.pid if who == "launcher" else ranks[1], signal.SIGTERM)
        assert run.wait(ENDED_S) == 128 + signal.SIGTERM, run.text
        run.wait_until_gone(list(ranks.values()))
    for name, shown in read_status(run.folder)["adapters"].items():
        assert shown["state"] == "stopped" and 0 < shown["step"] < 60, run.text
        assert versions(run.folder / "checkpoints" / name)[-1].name.endswith(f"-step{shown['step']}")
    finished = train(config, run.folder, "--nproc", "3", "--resume", "auto")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(undisturbed, run.folder)


def test_torchrun_brings_a_killed_run_back_by_itself(config, undisturbed, tmp_path):
    """Twice; --overwrite, which stands on the line of every start, replaces the run before and not this one."""
    (tmp_path / "run/adapters").mkdir(parents=True)
    code = """
        import signal
        from mlora.pipeline.stage import Stage
        step, calls = Stage.step, []
        def dies(self, *arguments):
            calls.append(1)
            if len(calls) == 30 and os.environ["TORCHELASTIC_RESTART_COUNT"] in "01":
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *arguments)
        Stage.step = dies
    """
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    environment = injected(tmp_path / "py", code, rank=1)
    kept = config | {"save_steps": 4}
    with started(kept, tmp_path / "run", "--overwrite", launcher=launcher, environment=environment) as run:
        assert run.wait(150) == 0, run.text
    goes_on = [int(step) for step in re.findall(r"^a: goes on behind step (\d+) of 60", run.text, re.MULTILINE)]
    assert len(goes_on) == 2 and 0 < goes_on[0] < goes_on[1], run.text
    assert_same(undisturbed, run.folder)


@pytest.mark.parametrize("was_in_it", [True, False])
def test_a_start_is_not_taken_for_the_one_before(monkeypatch, was_in_it):
    """torchrun keeps its store over restarts, with the failure that the start before left in it."""
    store = open_store("127.0.0.1", 0, serve=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    leader, other = (World(rank=rank, size=2, local_rank=rank) for rank in range(2))
    before = Board(leader.open_store())
    before.beat(0)
    if was_in_it:
        before.beat(1)
    with ThreadPoolExecutor() as threads:
        joined = threads.submit(other.open_store)
        time.sleep(0.5)
        if was_in_it:  # and its first rank, on another host, has not heard yet that this one was killed
            before.beat(0)
            time.sleep(0.5)
        assert not joined.done()
        leader.open_store().set("new", "")
        assert joined.result(10).check(["new"])


def test_only_what_this_torchrun_has_begun_goes_on_by_itself(monkeypatch, tmp_path):
    """Its restart count may be 0 after a restart, where a process of another host has failed; and a process that trains
    twice begins anew."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "logs/attempt_0/0/error.json"))
    status = {"launcher": launcher(), "process": os.getpid() + 1}
    for changes, source in (({}, tmp_path), ({"launcher": "other"}, None), ({"process": os.getpid()}, None)):
        (tmp_path / "status.json").write_text(json.dumps(status | changes))
        assert Start(overwrite=True).source(tmp_path) == source
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    (tmp_path / "status.json").write_text(json.dumps(status | {"launcher": launcher()}))
    assert Start(overwrite=True).source(tmp_path) is None


def test_sigterm_after_a_peers_failure_means_now(config, tmp_path):
    """torchrun sends it to the survivors of a killed rank; they do not try to save for 20 s what cannot be saved."""
    endless = config | {"defaults": {"max_steps": 1_000_000}}
    with started(endless, tmp_path / "run", "--nproc", "3") as run:
        run.wait_for_metrics()
        ranks = run.ranks()
        os.kill(ranks[2], signal.SIGKILL)
        run.wait_until_gone(list(ranks.values()), deadline_s=12)
        assert run.wait(ENDED_S) == 128 + signal.SIGKILL
    assert "interrupted" not in run.text


def test_replicas_save_and_go_on(config, undisturbed, tmp_path):
    """Two pipelines of one stage, stopped by the launcher's signal, go on as such, and what had ended is there too."""
    with started(config | {"pipeline": {"replicas": 2}}, tmp_path / "run", "--nproc", "2") as run:
        run.wait_for_metrics()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(ENDED_S) == 128 + signal.SIGTERM, run.text
    steps = [
        shown["checkpoint"]["step"] for shown in read_status(run.folder)["adapters"].values() if shown["checkpoint"]
    ]
    assert steps and max(steps) < 60
    for _ in range(2):
        finished = train(config, run.folder, "--nproc", "2", "--resume", "auto", replicas=2)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert_same(undisturbed, run.folder)


def test_stop_reaches_an_adapter_of_another_replica(config, tmp_path):
    defaults = {"max_steps": 1_000_000, "warmup_steps": 0, "learning_rate": 1e-3}
    endless = config | {"defaults": defaults, "pipeline": {"replicas": 2}}
    with started(endless, tmp_path / "run", "--nproc", "2") as run:
        run.wait_for_metrics()
        for name in "ab":
            leave_stop(run.folder, name)
        assert run.wait(ENDED_S) == 0, run.text
    for shown in read_status(run.folder)["adapters"].values():
        assert shown["state"] == "ended" and shown["exported"]
        assert shown["reason"] == f"by mlora stop after step {shown['step']}"
