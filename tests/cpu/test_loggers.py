"""report_to: what TensorBoard, W&B and MLflow were given is read back with their own readers; one that fails costs
nothing but itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlora
from mlora import UserError, parse_config
from mlora.engine import loggers
from mlora.engine.loggers import Loggers
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]
NAMES = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "learning_rate"}
EVAL = {"eval/loss": "eval_loss", "eval/accuracy": "eval_accuracy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loggers")
    save_tiny(folder / "model", "llama2")
    write_rows(folder / "rows.jsonl", 20, seed=1)
    return folder


def _adapters(folder, **keys):
    common = {"dataset": str(folder / "rows.jsonl"), "r": 4, "max_steps": 4, "warmup_steps": 0, **keys}
    return [{"name": "a", **common, "val_size": 4, "eval_steps": 2}, {"name": "b", **common, "learning_rate": 1e-2}]


def _metrics(run_dir: Path, adapter: str) -> dict[str, list[tuple[int, float]]]:
    """What metrics.jsonl has, under the loggers' names."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name, key in (NAMES | EVAL).items():
            if entry["adapter"] == adapter and key in entry:
                found.setdefault(name, []).append((entry["step"], float(entry[key])))
    return found


def _scalars(run_dir: Path, adapter: str) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard" / adapter)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag in NAMES | EVAL]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def _same(found: dict, expected: dict) -> bool:
    """The same steps, and values within float32, which TensorBoard keeps."""
    assert found.keys() == expected.keys()
    for name, pairs in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in pairs]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in pairs], rel=1e-6)
    return True


def test_tensorboards_reader_reads_back_a_run_for_each_adapter(folder):
    run(folder / "board", folder / "model", _adapters(folder), report_to=["tensorboard"])
    assert _same(_scalars(folder / "board", "a"), _metrics(folder / "board", "a"))
    assert _same(_scalars(folder / "board", "b"), _metrics(folder / "board", "b"))
    assert len(_metrics(folder / "board", "a")["eval/loss"]) == 2 and "eval/loss" not in _scalars(folder / "board", "b")


def test_a_run_that_goes_on_has_each_step_once(folder):
    config = {"base_model": str(folder / "model"), "output_dir": str(folder / "on"), "adapters": _adapters(folder)}
    config["report_to"] = ["tensorboard"]
    mlora.train(config | {"save_steps": 2}, on_step=lambda report: "end" if report.step == 3 else None)
    config["adapters"] = _adapters(folder, max_steps=6)
    mlora.train(config, resume="auto", allow_changed=True)
    assert [step for step, _ in _scalars(folder / "on", "b")["train/loss"]] == [1, 2, 3]
    newest = sorted((folder / "on/checkpoints/b").iterdir())[-1]
    shutil.rmtree(newest)  # as if it had been killed behind step 2
    mlora.train(config, resume="auto", allow_changed=True)
    assert _same(_scalars(folder / "on", "b"), _metrics(folder / "on", "b"))
    assert [step for step, _ in _scalars(folder / "on", "b")["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_mlflow_has_a_run_for_each_adapter(folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}/mlruns")
    adapters = _adapters(folder)
    adapters[1] |= {"learning_rate": 1e9, "weight_decay": 1e9, "max_grad_norm": 0, "max_steps": 5}
    run(folder / "flow", folder / "model", adapters, report_to=["mlflow"])
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mlora").experiment_id
    runs = {r.info.run_name: r for r in client.search_runs([experiment])}
    assert {name: r.info.status for name, r in runs.items()} == {"flow/a": "FINISHED", "flow/b": "FAILED"}
    assert runs["flow/a"].data.params["r"] == "4"
    found = {}
    for name in NAMES | EVAL:
        found[name] = [(m.step, m.value) for m in client.get_metric_history(runs["flow/a"].info.run_id, name)]
    assert _same(found, _metrics(folder / "flow", "a"))
    losses = [m.value for m in client.get_metric_history(runs["flow/b"].info.run_id, "train/loss")]
    assert math.isnan(losses[-1])


def _wandb_records(data: bytes):
    """W&B's messages in a file of its own form: LevelDB's log, blocks of 32 KiB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)  # kind: 1 all, 2 first, 3 middle, 4 last piece
        whole = (b"" if kind in (1, 2) else whole) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)


def test_wandb_writes_a_run_for_each_adapter_offline(folder, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    run(folder / "weights", folder / "model", _adapters(folder), report_to=["wandb"])
    ids = json.loads((folder / "weights/report_to.json").read_text())["wandb"]
    for adapter in "ab":
        (file,) = (folder / "wandb").glob(f"offline-run-*/run-{ids[adapter]}.wandb")
        found = {}
        for record in _wandb_records(file.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.display_name, record.run.run_group) == (adapter, "weights")
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                if name in NAMES | EVAL:
                    found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
        assert _same(found, _metrics(folder / "weights", adapter))


def test_one_that_fails_is_named_once_and_the_others_get_everything(folder, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    results = run(folder / "half", folder / "model", _adapters(folder), report_to=["mlflow", "tensorboard"])
    assert not results.failed
    assert capsys.readouterr().out.count("report_to: mlflow gets nothing more, the training goes on") == 1
    assert _same(_scalars(folder / "half", "a"), _metrics(folder / "half", "a"))


def test_a_disk_that_does_not_take_it_costs_nothing_else(folder, capsys):
    (folder / "full").mkdir()
    (folder / "full/tensorboard").write_text("a file in the way")
    config = {"base_model": str(folder / "model"), "output_dir": str(folder / "full"), "adapters": _adapters(folder)}
    results = mlora.train(config | {"report_to": ["tensorboard"]}, overwrite=True)
    assert not results.failed
    assert capsys.readouterr().out.count("report_to: tensorboard gets nothing more") == 1


@pytest.mark.timed
def test_a_slow_one_makes_nobody_wait(tmp_path, monkeypatch, capsys):
    class Slow:
        def __init__(self, output_dir):
            pass

        def start(self, config, done):
            time.sleep(60)

    monkeypatch.setitem(loggers._MADE, "wandb", Slow)
    monkeypatch.setattr(loggers, "_CLOSE_S", 0.5)
    slow = Loggers(("wandb",), tmp_path)
    slow.open()
    begin = time.monotonic()
    slow.start(parse_config(_plain()).adapters[0], 0)
    for step in range(1000):
        slow.log({"adapter": "a", "step": step, "loss": 1.0})
    assert time.monotonic() - begin < 0.3
    slow.close({})
    assert 0.4 < time.monotonic() - begin < 5
    assert "wandb has not taken everything within" in capsys.readouterr().out


def _plain(**top):
    return {"base_model": "base", "adapters": [{"name": "a", "dataset": "rows.jsonl"}], **top}


def test_the_key_is_a_list_or_a_word(folder):
    assert parse_config(_plain(report_to="wandb")).report_to == ("wandb",)
    assert parse_config(_plain(report_to="none")).report_to == ()
    assert parse_config(_plain(report_to=["tensorboard", "mlflow"])).report_to == ("tensorboard", "mlflow")
    with pytest.raises(UserError, match=r"report_to: 'wanb' is not one of tensorboard, wandb, mlflow; did you mean"):
        parse_config(_plain(report_to=["tensorboard", "wanb"]))
    with pytest.raises(UserError, match=r"report_to: 'all' is not one of"):
        parse_config(_plain(report_to="all"))
    with pytest.raises(UserError, match=r"defaults.report_to: belongs to the run"):
        parse_config(_plain(defaults={"report_to": "wandb"}))
    with pytest.raises(UserError, match=r"use_wandb: unknown key; write report_to: \[wandb\]"):
        parse_config(_plain(use_wandb=True))


def test_a_missing_package_is_named_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"report_to: wandb is not installed: pip install 'mlora-engine\[wandb\]'"):
        run(folder / "missing", folder / "model", _adapters(folder), report_to=["wandb"])
    assert not (folder / "missing").exists()


def test_wandb_without_a_key_is_named_before_anything_is_written(folder, tmp_path):
    pytest.importorskip("wandb")
    config = tmp_path / "run.yaml"
    tree = {"base_model": str(folder / "model"), "output_dir": "run", "adapters": _adapters(folder)}
    config.write_text(json.dumps(tree | {"report_to": "wandb"}))
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mlora", "train", str(config)]
    done = subprocess.run(
        command, check=False, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "mlora: report_to: wandb has no key; run wandb login, or set WANDB_MODE=offline" in done.stderr
