"""SIGTERM, SIGINT and SIGHUP of a run in one process: a checkpoint, the exit code, and the second one at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mlora
from mlora.checkpoint.versions import read_version, versions
from mlora.engine.status import read_status
from tests.cpu.runs import outcome, write_rows
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]
STEPS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2")


@pytest.fixture(scope="module")
def tree(model, tmp_path_factory):
    rows = str(write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 12, 1, 30))
    common = {"dataset": rows, "r": 4, "learning_rate": 1e-3, "max_steps": STEPS, "lora_dropout": 0.1}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 5}
    return {"base_model": str(model), "adapters": [common | {"name": "a"}, common | sizes | {"name": "b"}]}


@pytest.fixture(scope="module")
def alone(tree, tmp_path_factory):
    results = mlora.train(tree | {"output_dir": str(tmp_path_factory.mktemp("alone") / "run")})
    return {name: outcome(results, name) for name in "ab"}


def started(path: Path, code: str = "") -> subprocess.Popen[str]:
    """``mlora train PATH`` behind some code of ours."""
    return command(["train", str(path)], code)


def command(words: list[str], code: str) -> subprocess.Popen[str]:
    """``mlora`` behind some code of ours; a background shell may have left SIGINT ignored."""
    script = f"{textwrap.dedent(code)}\nimport sys\nfrom mlora.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", script, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )


def test_a_log_on_a_full_disk_costs_its_lines_not_the_run(tmp_path, tree, alone):
    config = write(tree, tmp_path / "run")
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "mlora", "train", str(config)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        assert subprocess.run(words, env=environment, stdout=full, stderr=full, check=False).returncode == 0
    for name in "ab":
        assert not alone[name].weights.keys() ^ load(tmp_path / "run", name).keys()
        assert all(torch.equal(alone[name].weights[key], x) for key, x in load(tmp_path / "run", name).items())


def load(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapters" / name / "adapter_model.safetensors")


def write(tree, folder: Path) -> Path:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(tree | {"output_dir": str(folder)}))
    return path


def wait_for(process, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"{text!r} was not printed: {process.stderr.read()}")


@pytest.mark.parametrize("number, stages", [(signal.SIGINT, 1), (signal.SIGTERM, 3), (signal.SIGHUP, 1)])
def test_the_first_signal_saves_and_ends_and_nothing_is_lost(tmp_path, tree, alone, number, stages):
    tree = tree | {"pipeline": {"stages": stages, "transport": "local"}}
    folder = tmp_path / "run"
    process = started(write(tree, folder))
    wait_for(process, "a  step 10/")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == "mlora: interrupted; --resume auto goes on from the checkpoints"
    assert "a  stopped: by a signal" in out
    steps = {name: shown["step"] for name, shown in read_status(folder)["adapters"].items()}
    for name in "ab":
        manifest = read_version(versions(folder / f"checkpoints/{name}")[-1]).manifest
        assert manifest.step == steps[name] and manifest.state == "stopped"
    assert 10 <= steps["a"] < STEPS
    results = mlora.train(tree | {"output_dir": str(folder)}, resume="auto")
    for name in "ab":
        assert not alone[name].differences(outcome(results, name)), name


STUCK = """
import time
from mlora.engine import signals
from mlora.pipeline.stage import Stage
signals._LIMIT_S = {limit}
forward, calls = Stage.forward, []
def stuck(self, *arguments):
    calls.append(1)
    if len(calls) == 9:
        print("stuck", flush=True)
        time.sleep(600)
    return forward(self, *arguments)
Stage.forward = stuck
"""


def test_a_second_signal_ends_at_once(tmp_path, tree):
    process = started(write(tree, tmp_path / "run"), STUCK.format(limit=600))
    wait_for(process, "stuck")
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert err.splitlines()[-1] == "mlora: ended by SIGINT: a second signal"


def test_what_does_not_fit_the_time_is_left_and_said(tmp_path, tree):
    process = started(write(tree | {"save_steps": 2}, tmp_path / "run"), STUCK.format(limit=1))
    wait_for(process, "stuck")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1].endswith("nothing more was saved within 1 s; the last checkpoints stand")
    assert read_version(versions(tmp_path / "run/checkpoints/a")[-1]).manifest.step in (2, 4, 6, 8)


@pytest.fixture
def listening():
    """A background shell lets its children ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_a_handler_of_somebody_else_stays(tmp_path, tree):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        small = [adapter | {"max_steps": 3} for adapter in tree["adapters"]]
        mlora.train(
            tree | {"output_dir": str(tmp_path / "run"), "adapters": small},
            on_step=lambda report: os.kill(os.getpid(), signal.SIGTERM) if report.step == 2 else None,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("listening")
def test_a_caller_in_python_gets_an_interrupt(tmp_path, tree):
    with pytest.raises(mlora.Interrupted) as caught:
        mlora.train(
            tree | {"output_dir": str(tmp_path / "run")},
            on_step=lambda report: (
                os.kill(os.getpid(), signal.SIGINT) if (report.adapter, report.step) == ("a", 7) else None
            ),
        )
    assert isinstance(caught.value, KeyboardInterrupt) and caught.value.signal == signal.SIGINT
    assert versions(tmp_path / "run/checkpoints/a")


def test_what_is_passed_on_is_not_a_second_signal(tmp_path, tree):
    process = started(write(tree, tmp_path / "run"))
    wait_for(process, "a  step 10/")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "mlora: interrupted; --resume auto goes on from the checkpoints"


SLOW = """
import time
from mlora.engine.merge import _Source
tensor, calls = _Source.tensor, []
def slow(self, name):
    calls.append(name)
    if len(calls) > {fast}:
        print("slow", flush=True)
        time.sleep(0.2)
    return tensor(self, name)
_Source.tensor = slow
"""


@pytest.mark.parametrize(("number", "fast"), [(signal.SIGTERM, 3), (signal.SIGINT, 35)])
def test_a_merge_that_is_ended_leaves_nothing(tmp_path, tree, number, fast):
    """While it writes its 30 tensors, and while it compares logits."""
    small = [tree["adapters"][0] | {"max_steps": 2}]
    mlora.train(tree | {"output_dir": str(tmp_path / "run"), "adapters": small})
    words = ["merge", str(tmp_path / "run/adapters/a"), str(tmp_path / "out/merged")]
    process = command(words, SLOW.format(fast=fast))
    wait_for(process, "slow")
    assert len(list((tmp_path / "out").iterdir())) == 1
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and err.splitlines() == ["mlora: interrupted"]
    assert list((tmp_path / "out").iterdir()) == []
