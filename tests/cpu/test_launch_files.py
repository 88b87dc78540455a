"""Every line of launch/ that starts torchrun, or our command, goes through torchrun's own parser, then through ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from mlora.cli import _parser

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
# What Slurm sets, and what slurm.sbatch makes of it.
SLURM = {
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_ID": "7",
    "HEAD_NODE": "host1",
    "PORT": "20007",
    "1": "run.yaml",
}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "mlora-node-0-0.mlora",
    "PET_MASTER_PORT": "29400",
}


def _commands(path: Path) -> Iterator[list[str]]:
    """The commands in a page's shell blocks."""
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def _slurm_command() -> list[str]:
    """What srun starts on each node, its variables filled in."""
    text = (LAUNCH / "slurm.sbatch").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun")]
    filled = re.sub(r"\$\{?(\w+)(?::-\w+)?\}?", lambda match: SLURM[match[1]], line)
    words = shlex.split(filled)
    assert words[-1] == "&", "else the shell hears of a signal only when the run is over"
    return words[words.index("torchrun") : -1]


def _train_job() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())["spec"]


def _parsed(command: list[str]) -> Any:
    """torchrun's arguments; what it will start is a valid command of ours, which trains."""
    assert command[0] == "torchrun"
    arguments = parse_args(command[1:])
    if arguments.module:
        assert arguments.training_script == "mlora"
        words = arguments.training_script_args
    else:
        assert (ROOT / arguments.training_script).samefile(LAUNCH / "train.py")
        words = ["train", *arguments.training_script_args]
    assert words[0] == "train"
    assert _parser().parse_args(words).config.endswith("run.yaml")
    return arguments


PAGES = [command for page in ("launch/README.md", "README.md") for command in _commands(ROOT / page)]


@pytest.mark.parametrize("command", [c for c in PAGES if c[:1] == ["torchrun"]], ids=" ".join)
def test_torchrun_lines_of_the_pages(command):
    arguments = _parsed(command)
    assert arguments.nproc_per_node == "4"
    assert arguments.standalone != (arguments.rdzv_endpoint == "host1:29500")


@pytest.mark.parametrize("command", [c for c in PAGES if c[:2] == ["mlora", "train"]], ids=" ".join)
def test_our_lines_of_the_pages(command):
    assert _parser().parse_args(command[1:]).config == "run.yaml"


def test_the_pages_have_both_kinds_of_line():
    assert {command[0] for command in _commands(LAUNCH / "README.md")} == {"torchrun", "mlora"}


def test_the_script():
    _parsed(["torchrun", "--nproc-per-node", "2", str(LAUNCH / "train.py"), "run.yaml"])


def test_slurm():
    command = _slurm_command()
    arguments = _parsed(command)
    assert command[-2:] == ["--resume", "auto"]
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "4")
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id) == ("c10d", "host1:20007", "7")


def test_kubernetes(monkeypatch):
    for name, value in TRAINER.items():
        monkeypatch.setenv(name, value)
    trainer = _train_job()["trainer"]
    arguments = _parsed([*trainer["command"], *trainer["args"]])
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "4", 1)
    assert (arguments.master_addr, arguments.master_port) == ("mlora-node-0-0.mlora", 29400)
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_kubernetes_mounts_what_it_declares_and_reads_what_it_mounts():
    (patch,) = _train_job()["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert _train_job()["trainer"]["args"][-1].startswith(mounts["config"] + "/")
