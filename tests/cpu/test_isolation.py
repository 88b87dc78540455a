"""Invariant 6: data, disk or an exception of one adapter park it alone, no other bit changes, and it can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
import torch

import mlora
from mlora.adapters.optimizer import Optimizer
from mlora.checkpoint import versions
from mlora.engine.status import read_status
from mlora.pipeline.stage import Stage
from tests.cpu.runs import config, outcome, write_rows

NAMES = "abc"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "max_steps": 8, "warmup_steps": 0, "per_device_train_batch_size": 3}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 12, i, 20)) for i, name in enumerate(NAMES)}
    return [common | {"name": name, "dataset": rows[name], "r": 8, "lora_dropout": 0.1} for name in NAMES]


@pytest.fixture(scope="module")
def undisturbed(model, adapters, tmp_path_factory):
    results = mlora.train(config(model, adapters, tmp_path_factory.mktemp("one") / "run"))
    return {name: outcome(results, name) for name in NAMES}


def assert_only_b_is_parked(results, undisturbed, folder, reason):
    assert results.failed == ("b",)
    for name in "ac":
        assert not undisturbed[name].differences(outcome(results, name)), name
    shown = read_status(folder)["adapters"]["b"]
    assert shown["state"] == "failed" and reason in shown["reason"]
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (parked,) = [line for line in last if "state" in line]
    assert parked["adapter"] == "b" and reason in parked["reason"] and parked["step"] == shown["checkpoint"]["step"]


def assert_resumed(model, adapters, folder, undisturbed):
    results = mlora.train(config(model, adapters, folder, 2), resume="auto")
    for name in NAMES:
        assert not undisturbed[name].differences(outcome(results, name)), name


@pytest.mark.parametrize("stages", [1, 3])
def test_data_that_become_unreadable(tmp_path, model, adapters, undisturbed, monkeypatch, stages):
    """The token cache of one adapter is cut under the run; when it is whole again the adapter goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for index in (0, 2, 1):  # the last entry built is b's
        mlora.train(config(model, [adapters[index] | {"max_steps": 1}], tmp_path / f"built{index}"))
    entry = max((tmp_path / "cache/mlora/tokens").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    whole = (entry / "ids").read_bytes()

    def cut(report):
        if (report.adapter, report.step) == ("b", 1):
            os.truncate(entry / "ids", 0)

    folder = tmp_path / "run"
    small = config(model, adapters, folder, stages, microbatch_tokens=32)  # so that not all is planned ahead by then
    results = mlora.train(small, on_step=cut)
    assert_only_b_is_parked(results, undisturbed, folder, "its data cannot be read any more: the token cache")
    with (entry / "ids").open("r+b") as file:
        file.write(whole)
    assert_resumed(model, adapters, folder, undisturbed)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("layers, full", [([4], 0), ([2, 1, 1], 0), ([2, 1, 1], 2)])
def test_an_adapter_for_which_a_stage_has_no_room_is_parked(
    tmp_path, model, adapters, undisturbed, monkeypatch, layers, full, goes_on
):
    """``full`` is the first layer of that stage; with ``goes_on`` the adapter joins it from a checkpoint."""
    folder, original, raised = tmp_path / "run", Optimizer._zero_moments, []
    stages = config(model, adapters, folder, save_steps=3)
    stages["pipeline"] = {"stages": len(layers), "transport": "local", "layers": layers}

    def ended(report):
        if report.step == 5:
            raise KeyboardInterrupt

    def too_large(self):
        if self._state.config.name == "b" and self._state.layers.start == full and not raised:
            raised.append(full)
            raise torch.OutOfMemoryError("no room")
        return original(self)

    if goes_on:
        with pytest.raises(KeyboardInterrupt):
            mlora.train(stages, on_step=ended)
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "_zero_moments", too_large)
        results = mlora.train(stages, resume="auto" if goes_on else None)
    assert_only_b_is_parked(results, undisturbed, folder, "could not be taken in: OutOfMemoryError: no room")
    assert_resumed(model, adapters, folder, undisturbed)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_what_an_exception_has_parked_goes_on_from_its_last_good_step(
    tmp_path, model, adapters, undisturbed, monkeypatch, method
):
    original, forward, holding = getattr(Stage, method), Stage.forward, {}

    def remember(self, batch, *rest):
        holding[self, batch.microbatch.index] = batch.microbatch
        return breaks(self, batch, *rest) if method == "forward" else forward(self, batch, *rest)

    def breaks(self, first, *rest):
        microbatch = first.microbatch if method == "forward" else holding[self, first]
        if self.model.layers.start == 2 and any(s.adapter == 1 and s.step == 4 for s in microbatch.segments):
            raise MemoryError("no room")
        return original(self, first, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "forward", remember)
        if method == "backward":
            patch.setattr(Stage, "backward", breaks)
        folder = tmp_path / "run"
        two = config(model, adapters, folder) | {"pipeline": {"stages": 2, "transport": "local", "layers": [2, 2]}}
        results = mlora.train(two)
    assert_only_b_is_parked(results, undisturbed, folder, "stage 1: MemoryError: no room")
    assert_resumed(model, adapters, folder, undisturbed)


def test_a_checkpoint_that_cannot_be_written_costs_only_itself(
    tmp_path, model, adapters, undisturbed, monkeypatch, capsys
):
    original = versions.safetensors.torch.save_file

    def full(tensors, path):
        if "/b/" in str(path) and "step6" in str(path):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(versions.safetensors.torch, "save_file", full)
    results = mlora.train(config(model, adapters, tmp_path / "run", save_steps=3))
    for name in NAMES:
        assert not undisturbed[name].differences(outcome(results, name)), name
    shown = capsys.readouterr().out
    assert "b  checkpoint of step 6 not written, 000001-step3 stands: " in shown
    assert "bytes: No space left on device" in shown
    assert [path.name for path in versions.versions(tmp_path / "run/checkpoints/b")] == ["000001-step3", "000002-step8"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_loses_nothing_that_was_saved(small_disk, model, adapters, undisturbed, capsys):
    """From b's third step on nothing can be written; the run ends, and goes on when there is room again."""

    def fill(report):
        if report.adapter == "b" and report.step >= 3:  # again, since what was under way then may have left room
            with (small_disk / "other").open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    folder = small_disk / "run"
    results = mlora.train(config(model, adapters, folder, save_steps=1), on_step=fill)
    assert set(results.failed) == set(NAMES) and "not exported" in results.adapters["a"].reason
    assert all(len(results.adapters[name].reports) == 8 for name in NAMES), "training itself goes on"
    shown = capsys.readouterr().out
    assert " not written, 0000" in shown and " stands: " in shown and "it needs " in shown
    (small_disk / "other").unlink()
    assert_resumed(model, adapters, folder, undisturbed)


def test_a_disk_that_is_full_when_a_run_goes_on_is_a_line_and_changes_nothing(small_disk, model, adapters, undisturbed):
    folder = small_disk / "run"

    def crash(report):
        if (report.adapter, report.step) == ("b", 5):
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        mlora.train(config(model, adapters, folder, save_steps=2), on_step=crash)
    before = (folder / "metrics.jsonl").read_text()
    with (small_disk / "other").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with pytest.raises(mlora.UserError, match=r"output_dir: metrics.jsonl cannot be written: No space left"):
        mlora.train(config(model, adapters, folder), resume="auto")
    assert (folder / "metrics.jsonl").read_text() == before
    (small_disk / "other").unlink()
    assert_resumed(model, adapters, folder, undisturbed)


def test_data_that_are_gone_when_a_run_goes_on_park_their_adapter(tmp_path, model, adapters, undisturbed):
    """A fresh run with such a mistake is refused before anything is written; one that goes on is the others' too."""
    moved = tmp_path / "b.jsonl"
    shutil.copy(adapters[1]["dataset"], moved)
    mine = [adapters[0], adapters[1] | {"dataset": str(moved)}, adapters[2]]
    folder = tmp_path / "run"

    def crash(report):
        if (report.adapter, report.step) == ("b", 5):
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        mlora.train(config(model, mine, folder, save_steps=2), on_step=crash)
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(mlora.UserError, match=r"b\.jsonl: cannot be read: No such file"):
        mlora.train(config(model, mine, tmp_path / "fresh"), resume="auto")
    results = mlora.train(config(model, mine, folder), resume="auto")
    assert results.failed == ("b",) and "b.jsonl: cannot be read" in results.adapters["b"].reason
    for name in "ac":
        assert not undisturbed[name].differences(outcome(results, name)), name
    shown = read_status(folder)["adapters"]["b"]
    assert shown["state"] == "failed" and "b.jsonl" in shown["reason"] and shown["checkpoint"]["step"] == 4
    (tmp_path / "elsewhere").rename(moved)
    assert_resumed(model, mine, folder, undisturbed)
