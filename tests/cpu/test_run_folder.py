"""The run folder keeps what is not ours and what is not yet replaced; one run at a time has it; other mistakes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from pathlib import Path

import pytest
import torch

import mlora
from mlora import UserError
from mlora.adapters.state import AdapterState
from mlora.engine.output import is_live, take_output
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama2")


@pytest.fixture
def adapter(tmp_path):
    rows = str(write_rows(tmp_path / "rows.jsonl", 8, 1))
    return {"name": "a", "dataset": rows, "r": 4, "max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-2}


def _config(model, folder, *adapters):
    return {"base_model": str(model), "output_dir": str(folder), "adapters": list(adapters)}


def test_overwrite_keeps_the_adapters_of_before_until_the_new_ones_are_written(tmp_path, model, adapter, monkeypatch):
    folder = tmp_path / "run"
    run(folder, model, [adapter])
    first = (folder / "adapters/a/adapter_model.safetensors").read_bytes()
    diverging = adapter | {"learning_rate": 1e9, "weight_decay": 1e9, "max_steps": 4, "max_grad_norm": 0}
    failed = mlora.train(_config(model, folder, diverging), overwrite=True)
    assert failed.failed == ("a",)
    assert (folder / "adapters.previous/a/adapter_model.safetensors").read_bytes() == first
    mlora.train(_config(model, folder, adapter), overwrite=True)
    assert (folder / "adapters/a/adapter_model.safetensors").read_bytes() == first
    assert not (folder / "adapters.previous").exists() and not (folder / ".lock").exists()


def test_what_is_no_adapter_is_never_deleted(tmp_path, model, adapter):
    folder = tmp_path / "run"
    run(folder, model, [adapter])
    (folder / "adapters/mine").mkdir()
    with pytest.raises(UserError, match=r"adapters/mine is not from a run"):
        mlora.train(_config(model, folder, adapter), overwrite=True)


def test_a_run_folder_that_holds_its_own_data_is_refused(tmp_path, model, adapter):
    folder = tmp_path / "run"
    (folder / "adapters").mkdir(parents=True)
    inside = write_rows(folder / "adapters/train.jsonl", 8, 1)
    with pytest.raises(UserError, match=r"adapters\[a\].dataset .* lies inside it"):
        mlora.train(_config(model, folder, adapter | {"dataset": str(inside)}), overwrite=True)
    assert inside.exists()


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, model, adapter):
    config = _config(model, tmp_path / "run", adapter)
    lock = take_output(mlora.parse_config(config), overwrite=False)
    with pytest.raises(UserError, match="in use by another run"):
        mlora.train(config, overwrite=True)
    lock.close()
    mlora.train(config, overwrite=True)


@pytest.mark.parametrize("keys", [{}, {"overwrite": True}, {"resume": "auto"}])
def test_a_folder_in_use_is_refused_before_anything_is_read(tmp_path, model, adapter, keys):
    config = _config(model, tmp_path / "run", adapter | {"dataset": "nowhere.jsonl"})
    lock = take_output(mlora.parse_config(config), overwrite=False)
    with pytest.raises(UserError, match="is in use by another run; give another folder, or mlora add"):
        mlora.train(config, **keys)
    lock.close()


def test_a_read_only_folder_is_refused_before_anything_is_read(tmp_path, model, adapter, monkeypatch):
    mount = tmp_path / "mount"
    mount.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != mount)
    config = _config(model, mount / "deep" / "run", adapter | {"dataset": "nowhere.jsonl"})
    with pytest.raises(UserError, match=r"cannot be written: .*mount is read-only; give another folder"):
        mlora.train(config)


def test_what_is_no_checkpoint_and_links_to_elsewhere_are_never_touched(tmp_path, model, adapter):
    folder = tmp_path / "run"
    run(folder, model, [adapter])
    (folder / "checkpoints/a/notes.txt").write_text("mine")
    for keys in ({"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=r"checkpoints/a/notes.txt is not from a run"):
            mlora.train(_config(model, folder, adapter), **keys)
    (folder / "checkpoints/a/notes.txt").unlink()
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"run/checkpoints is not from a run"):
        mlora.train(_config(model, folder, adapter), resume="auto")
    assert (tmp_path / "elsewhere/a").is_dir()


def test_overwrite_keeps_the_checkpoints_of_before_until_the_run_is_complete(tmp_path, model, adapter):
    folder = tmp_path / "run"
    run(folder, model, [adapter])
    diverging = adapter | {"learning_rate": 1e9, "weight_decay": 1e9, "max_steps": 4, "max_grad_norm": 0}
    mlora.train(_config(model, folder, diverging), overwrite=True)
    assert [path.name for path in (folder / "checkpoints.previous/a").iterdir()] == ["000001-step2"]
    mlora.train(_config(model, folder, adapter), overwrite=True)
    assert not (folder / "checkpoints.previous").exists()


@pytest.mark.parametrize(
    "pattern", [".*self_attn.*", r"model\.layers\.1\..*", ".*(q_proj|lm_head)", ".*q_proj|.*embed_tokens"]
)
def test_a_pattern_that_peft_would_take_further_is_refused(tmp_path, model, adapter, pattern):
    with pytest.raises(UserError, match="also matches"):
        run(tmp_path / "run", model, [adapter | {"target_modules": pattern}])


def test_an_adapter_whose_last_step_was_not_finite_has_failed(tmp_path, model, adapter, monkeypatch):
    original, calls = AdapterState.sums_of_squares, []

    def last_is_infinite(self):
        calls.append(self)
        return torch.tensor([math.inf]) if len(calls) == 2 else original(self)

    monkeypatch.setattr(AdapterState, "sums_of_squares", last_is_infinite)
    result = run(tmp_path / "run", model, [adapter]).adapters["a"]
    assert result.state == "failed" and "last step was not finite" in result.reason and result.folder is None


def test_a_run_whose_warm_up_never_ends_is_refused_before_training(tmp_path, model, adapter):
    with pytest.raises(UserError, match=r"learning rate is 0 in all of its 1 steps .* write warmup_steps: 0"):
        run(tmp_path / "run", model, [adapter | {"max_steps": 1, "warmup_steps": 0.03}])


@pytest.mark.parametrize("wish", [True, "stop"])
def test_on_step_may_return_end_or_cancel_only(tmp_path, model, adapter, wish):
    with pytest.raises(UserError, match="return None, 'end' or 'cancel'"):
        run(tmp_path / "run", model, [adapter], lambda report: wish)


def test_overrides_apply_to_plain_data_too(tmp_path, model, adapter):
    config = _config(model, tmp_path / "run", adapter)
    results = mlora.train(config, overrides=["adapters.a.max_steps=3"])
    assert len(results.adapters["a"].reports) == 3 and config["adapters"][0]["max_steps"] == 2
    with pytest.raises(UserError, match="unknown key"):
        mlora.train(config, overrides=["nonsense=1"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("base_model: x\nbase_model: y\n", "'base_model' stands twice"),
        (
            "base_model: x\nadapters:\n  - name: a\n    r: 8\n    r: 4\n",
            "'r' stands twice in the block that begins in line 3",
        ),
        ("seed: 2024-13-45\n", "not valid YAML"),
        ("r: !!int abc\n", "not valid YAML"),
        ("[" * 3000, "not valid YAML"),
    ],
)
def test_what_yaml_lets_pass_or_chokes_on_is_one_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        mlora.load_config(path)
    assert "\n" not in str(error.value)


def test_a_metrics_file_that_cannot_be_written_costs_the_file_not_the_run(tmp_path, model, adapter, capsys):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    def fill(report):
        for frame in (f for f in _recorders if f._file is not None):
            frame._file = Full()

    from mlora.engine.recorder import Recorder

    _recorders = []
    original = Recorder.open

    def opened(self, *arguments):
        original(self, *arguments)
        _recorders.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "open", opened)
        results = run(tmp_path / "run", model, [adapter], fill)
    assert results.adapters["a"].state == "ended"
    assert "No space left on device; the run goes on without it" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])) == 8


def test_a_glance_at_the_folder_does_not_keep_a_run_from_it(tmp_path, model, adapter):
    """``mlora status`` locks the file for a moment, and may do so just when a run begins."""
    folder = tmp_path / "run"
    folder.mkdir()
    looking = (folder / ".lock").open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.3, looking.close).start()
    take_output(mlora.parse_config(_config(model, folder, adapter)), overwrite=False).close()


def test_a_lock_whose_file_the_run_before_deletes_is_none(tmp_path, model, adapter, monkeypatch):
    """Else a third run would find no file, and both would have the folder."""
    folder, flock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def late(lock, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        (folder / ".lock").unlink()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with take_output(mlora.parse_config(_config(model, folder, adapter)), overwrite=False):
        assert is_live(folder)


def test_a_caller_may_go_on_while_it_handles_the_error(tmp_path, model, adapter):
    """The error's traceback still holds all that the failed run had opened."""
    config = _config(model, tmp_path / "run", adapter)

    def crash(report):
        raise RuntimeError("crash")

    try:
        mlora.train(config, on_step=crash)
    except RuntimeError:
        assert not mlora.train(config, resume="auto").failed
    else:
        pytest.fail("it should have raised")
