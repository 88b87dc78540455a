"""Adding and stopping adapters while a run goes, without a drain, and what ``mlora status`` shows of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import mlora
from mlora import UserError, cli
from mlora.engine import inbox, leader
from mlora.engine.inbox import Inbox, leave_adapters, leave_stop
from mlora.engine.output import ADDED, INBOX
from mlora.engine.status import read_status, status_table
from tests.cpu.runs import config, outcome, write_rows

ENDLESS = 20_000  # minutes: a test that fails ends, too
DEADLINE_S = 60


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "warmup_steps": 0, "per_device_train_batch_size": 2, "r": 4, "max_steps": 6}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 12, i, 20)) for i, name in enumerate("abc")}
    return [common | {"name": name, "dataset": rows[name]} for name in "abc"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(inbox, "_EVERY_S", 0.02)


def other_thread(work):
    """Runs ``work`` beside the training; returns a function that waits for it and raises what it raised."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()

    def join():
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        for error in errors:
            raise error

    return join


def until(folder, condition):
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            tree = read_status(folder)
            if tree["live"] and condition(tree["adapters"]):
                return tree
        except UserError:
            pass
        assert time.monotonic() < end, tree
        time.sleep(0.02)


def until_refused(folder, name):
    end = time.monotonic() + DEADLINE_S
    while name not in read_status(folder)["refused"]:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("stages", [1, 3])
def test_add_and_stop_change_no_bit_of_anybody(tmp_path, model, adapters, stages):
    """b joins a run of an endless a and takes a free slot; when it has ended, a is stopped, and c had been beside."""
    alone = mlora.train(config(model, adapters, tmp_path / "alone"))
    folder = tmp_path / "run"
    (tmp_path / "b.yaml").write_text(json.dumps({"adapters": [adapters[1]]}))

    def beside():
        until(folder, lambda shown: shown["a"]["step"] >= 2)
        assert cli.main(["add", str(folder), str(tmp_path / "b.yaml")]) == 0
        until(folder, lambda shown: shown.get("b", {}).get("state") == "ended")
        assert cli.main(["stop", str(folder), "a"]) == 0

    join = other_thread(beside)
    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}, adapters[2]]
    results = mlora.train(config(model, endless, folder, stages))
    join()
    for name in "bc":
        assert not outcome(alone, name).differences(outcome(results, name)), name
    stopped = results.adapters["a"]
    assert stopped.state == "ended" and stopped.folder is not None
    assert stopped.reason == f"by mlora stop after step {len(stopped.reports)}"
    assert list((folder / "inbox").iterdir()) == []
    again = mlora.train(config(model, endless, folder), resume="auto", on_step=lambda report: pytest.fail("trained"))
    assert {name: result.state for name, result in again.adapters.items()} == dict.fromkeys("acb", "ended")


def test_an_added_adapter_is_resumed_too(tmp_path, model, adapters):
    folder = tmp_path / "run"
    (tmp_path / "more.yaml").write_text(json.dumps({"adapters": adapters[1:2], "defaults": {"lora_alpha": 8}}))
    left = []

    def on_step(report):
        if not left:
            left.extend(leave_adapters(folder, tmp_path / "more.yaml"))
        if (report.adapter, report.step) == ("b", 3):
            raise RuntimeError("crash")
        time.sleep(0.01)

    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}]
    with pytest.raises(RuntimeError, match="crash"):
        mlora.train(config(model, endless, folder, save_steps=2), on_step=on_step)
    assert list(json.loads((folder / "run.json").read_text())["data"]) == ["a", "b"]
    ended = mlora.train(
        config(model, endless, folder), resume="auto", on_step=lambda r: "end" if r.adapter == "a" else None
    )
    alone = mlora.train(config(model, [adapters[1] | {"lora_alpha": 8}], tmp_path / "alone"))
    assert not outcome(alone, "b").differences(outcome(ended, "b"))


def test_what_cannot_be_added_or_stopped_is_named(tmp_path, model, adapters, capsys):
    folder = tmp_path / "run"
    files = {
        "again": {"adapters": [adapters[0]]},
        "case": {"adapters": [adapters[0] | {"name": "A"}]},
        "top": {"adapters": adapters[1:2], "output_dir": "elsewhere"},
        "outside": {"adapters": [adapters[1] | {"name": "../b"}]},
        "missing": {"adapters": [adapters[1] | {"name": "missing", "dataset": "none.jsonl"}]},
    }
    for name, tree in files.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(tree))
    said = {}

    def beside():
        until(folder, lambda shown: shown["a"]["step"] >= 1)
        for name in files:
            try:
                leave_adapters(folder, tmp_path / f"{name}.yaml")
            except UserError as error:
                said[name] = str(error)
        with pytest.raises(UserError, match=r"the run has no adapter 'x'; it has a"):
            leave_stop(folder, "x")
        until_refused(folder, "missing")
        assert "missing: not added: " in status_table(read_status(folder))
        leave_stop(folder, "a")

    join = other_thread(beside)
    results = mlora.train(config(model, [adapters[0] | {"max_steps": ENDLESS}], folder))
    join()
    assert results.adapters["a"].state == "ended", "what others want to add does not disturb it"
    assert "has an adapter 'a' already" in said["again"] and "has an adapter 'A' already" in said["case"]
    assert "output_dir: only adapters and defaults can be added to a run" in said["top"]
    assert "'../b' is also a folder's name" in said["outside"]
    assert "missing" not in said and "none.jsonl: cannot be read" in capsys.readouterr().out
    for call in (lambda: leave_stop(folder, "a"), lambda: leave_adapters(folder, tmp_path / "again.yaml")):
        with pytest.raises(UserError, match="this run is not running; change its configuration and --resume it"):
            call()


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"adapters": {"a": 3}, "updated": 1.0}', '{"adapters": ["a"]}', '{"adapters": {}}', "{", "[" * 10**5],
)
def test_status_of_a_foreign_folder(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UserError, match=r"holds no run: status\.json"):
        read_status(tmp_path)


def test_two_that_add_the_same_name_and_one_that_tries_again(tmp_path, model, adapters):
    """Whoever comes second hears so, before and behind the run's look into its inbox; a later success is one."""
    folder, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    for name, tree in {"first": {"r": 4}, "second": {"r": 8, "name": "B"}, "again": {"dataset": str(rows)}}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"adapters": [adapters[1] | tree]}))

    def beside():
        until(folder, lambda shown: shown["a"]["step"] >= 1)
        leave_adapters(folder, tmp_path / "again.yaml")
        until_refused(folder, "b")
        shutil.copy(adapters[1]["dataset"], rows)
        leave_adapters(folder, tmp_path / "first.yaml")
        for _ in range(2):
            with pytest.raises(UserError, match="the run has an adapter 'B' already"):
                leave_adapters(folder, tmp_path / "second.yaml")
            tree = until(folder, lambda shown: "b" in shown)
        assert tree["refused"] == {}
        leave_stop(folder, "a")

    join = other_thread(beside)
    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}]
    results = mlora.train(config(model, endless, folder))
    join()
    assert results.adapters["b"].state == "ended"


def test_one_file_that_breaks_does_not_keep_the_next_waiting(tmp_path, model, adapters, monkeypatch):
    prepare = leader.prepare_adapter

    def breaks(index, adapter, *rest):
        if adapter.name == "b":
            raise MemoryError("no room")
        return prepare(index, adapter, *rest)

    folder = tmp_path / "run"
    for name, adapter in zip("bc", adapters[1:], strict=True):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"adapters": [adapter]}))

    def beside():
        until(folder, lambda shown: shown["a"]["step"] >= 1)
        monkeypatch.setattr(leader, "prepare_adapter", breaks)
        leave_adapters(folder, tmp_path / "b.yaml")
        until_refused(folder, "b")
        leave_adapters(folder, tmp_path / "c.yaml")
        tree = until(folder, lambda shown: "c" in shown)
        assert tree["refused"] == {"b": "MemoryError: no room"}
        leave_stop(folder, "a")

    join = other_thread(beside)
    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}]
    assert mlora.train(config(model, endless, folder)).adapters["c"].state == "ended"
    join()


def test_an_adapter_may_begin_with_one_of_the_same_run_and_is_resumed(tmp_path, model, adapters, monkeypatch):
    """Its path counts from another folder than the run's, and lies in the run folder, which resuming leaves alone."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    tree = {"adapters": [adapters[1] | {"init_from": "../run/adapters/c"}]}
    (elsewhere / "b.yaml").write_text(json.dumps(tree))

    def beside():
        until(folder, lambda shown: shown["c"]["state"] == "ended" and shown["c"]["exported"])
        monkeypatch.chdir(elsewhere)
        leave_adapters(folder, Path("b.yaml"))
        monkeypatch.chdir(tmp_path)
        until(folder, lambda shown: "b" in shown)

    def crash(report):
        if (report.adapter, report.step) == ("b", 3):
            raise RuntimeError("crash")

    join = other_thread(beside)
    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}, adapters[2]]
    with pytest.raises(RuntimeError, match="crash"):
        mlora.train(config(model, endless, folder, save_steps=2), on_step=crash)
    join()
    ended = mlora.train(
        config(model, endless, folder), resume="auto", on_step=lambda r: "end" if r.adapter == "a" else None
    )
    begun = [adapters[1] | {"init_from": str(folder / "adapters/c")}]
    assert not outcome(mlora.train(config(model, begun, tmp_path / "alone")), "b").differences(outcome(ended, "b"))


def test_status_of_a_run_that_ended_and_of_one_that_crashed(tmp_path, model, adapters, capsys):
    folder = tmp_path / "run"

    def on_step(report):
        if (report.adapter, report.step) == ("a", 5):
            assert cli.main(["status", str(folder)]) == 0
            raise RuntimeError("crash")
        return "cancel" if (report.adapter, report.step) == ("c", 2) else None

    with pytest.raises(RuntimeError):
        mlora.train(config(model, adapters, folder, save_steps=2), on_step=on_step)
    live = capsys.readouterr().out
    assert "live; written " in live and " training " in live
    assert cli.main(["status", str(folder), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["live"] is False
    shown = tree["adapters"]
    assert shown["a"]["state"] == "interrupted" and shown["a"]["checkpoint"]["step"] == 4
    assert shown["c"]["state"] == "cancelled" and shown["c"]["reason"] == "by on_step after step 2"
    assert 0 <= time.time() - shown["a"]["checkpoint"]["saved"] < DEADLINE_S
    results = mlora.train(config(model, adapters, folder), resume="auto")
    assert results.adapters["c"].state == "cancelled" and len(results.adapters["c"].reports) == 2
    table = status_table(read_status(folder))
    assert "not running" in table and "6/6" in table and f"{results.adapters['a'].loss:.4f}" in table
    with pytest.raises(UserError, match="holds no run"):
        read_status(tmp_path)


def crashed_with_an_added_one(folder, file, model, adapters, **top):
    """A run of an endless a that has ended right behind taking what is in ``file``, before its first checkpoint."""

    def on_step(report):
        if report.step == 1:
            leave_adapters(folder, file)
        if list((folder / "added").iterdir()):
            raise RuntimeError("crash")
        time.sleep(0.01)

    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}]
    with pytest.raises(RuntimeError, match="crash"):
        mlora.train(config(model, endless, folder, **top), on_step=on_step)
    return endless


def test_an_added_adapter_whose_data_are_gone_does_not_keep_the_run_from_going_on(tmp_path, model, adapters):
    """It had no checkpoint yet, and no file of the user's names it."""
    folder, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    shutil.copy(adapters[1]["dataset"], rows)
    (tmp_path / "b.yaml").write_text(json.dumps({"adapters": [adapters[1] | {"dataset": str(rows)}]}))
    endless = crashed_with_an_added_one(folder, tmp_path / "b.yaml", model, adapters)
    rows.unlink()
    results = mlora.train(config(model, endless, folder), resume="auto", on_step=lambda report: "end")
    assert results.failed == ("b",) and "rows.jsonl: cannot be read" in results.adapters["b"].reason
    assert results.adapters["a"].state == "ended"


def test_an_added_adapter_whose_beginning_is_gone_is_parked_alone(tmp_path, model, adapters, capsys):
    folder, first = tmp_path / "run", tmp_path / "first"
    mlora.train(config(model, adapters[2:], first))
    (tmp_path / "b.yaml").write_text(json.dumps({"adapters": [adapters[1] | {"init_from": str(first / "adapters/c")}]}))
    endless = crashed_with_an_added_one(folder, tmp_path / "b.yaml", model, adapters)
    (first / "adapters/c").rename(tmp_path / "c")
    results = mlora.train(config(model, endless, folder), resume="auto", on_step=lambda report: "end")
    assert results.failed == ("b",) and results.adapters["a"].state == "ended"
    assert "init_from: " in results.adapters["b"].reason and "cannot be read" in results.adapters["b"].reason
    assert f"to leave it out from now on delete {folder / 'added/b.json'}" in capsys.readouterr().out
    (tmp_path / "c").rename(first / "adapters/c")
    results = mlora.train(config(model, endless, folder), resume="auto")
    assert results.adapters["b"].state == "ended", "it is tried again"


def test_what_was_added_to_another_run_goes_on_with_it(tmp_path, model, adapters):
    folder, other = tmp_path / "run", tmp_path / "other"
    (tmp_path / "b.yaml").write_text(json.dumps({"adapters": adapters[1:2]}))
    endless = crashed_with_an_added_one(folder, tmp_path / "b.yaml", model, adapters, save_steps=1)

    def crash(report):
        if (report.adapter, report.step) in (("b", 3), ("a", 500)):
            raise RuntimeError(f"crash of {report.adapter}")

    with pytest.raises(RuntimeError, match="crash of b"):
        mlora.train(config(model, endless, other, save_steps=2), resume=folder, on_step=crash)
    ended = mlora.train(
        config(model, endless, other), resume="auto", on_step=lambda r: "end" if r.adapter == "a" else None
    )
    alone = mlora.train(config(model, adapters[1:2], tmp_path / "alone"))
    assert not outcome(alone, "b").differences(outcome(ended, "b"))


def test_what_was_left_just_before_a_signal_is_taken_when_the_run_goes_on(tmp_path, model, adapters, monkeypatch):
    folder, left = tmp_path / "run", []
    (tmp_path / "b.yaml").write_text(json.dumps({"adapters": [adapters[1]]}))

    def on_step(report):
        if not left:
            left.extend(leave_adapters(folder, tmp_path / "b.yaml"))
            os.kill(os.getpid(), signal.SIGTERM)

    endless = [adapters[0] | {"max_steps": ENDLESS, "lr_scheduler_type": "constant"}]
    monkeypatch.setattr(inbox, "_EVERY_S", 60)
    with pytest.raises(mlora.Interrupted):
        mlora.train(config(model, endless, folder), on_step=on_step)
    monkeypatch.setattr(inbox, "_EVERY_S", 0.02)
    join = other_thread(lambda: (until(folder, lambda shown: "b" in shown), leave_stop(folder, "a")))
    ended = mlora.train(config(model, endless, folder), resume="auto")
    join()
    alone = mlora.train(config(model, adapters[1:2], tmp_path / "alone"))
    assert not outcome(alone, "b").differences(outcome(ended, "b"))


def test_an_error_of_the_run_does_not_wait_for_data_that_are_being_added(tmp_path, adapters):
    for folder in (INBOX, ADDED):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / INBOX / "add-a.json").write_text(json.dumps(adapters[0]))
    reading, enough = threading.Event(), threading.Event()

    def reads_long(*_):
        reading.set()
        enough.wait(10)
        raise UserError("empty")

    before = time.monotonic()
    with pytest.raises(ZeroDivisionError), Inbox(tmp_path, [], reads_long, list.append, list.append):
        assert reading.wait(DEADLINE_S)
        before = time.monotonic()
        raise ZeroDivisionError
    took = time.monotonic() - before
    enough.set()
    assert took < 5
