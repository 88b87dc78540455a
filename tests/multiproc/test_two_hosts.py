"""Two hosts: network namespaces with names of their own, joined by a cable, and a torchrun with two stages on each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

import pytest
from test_failures import ENDED_S, TORCHRUN, Run, started
from test_training import assert_same, train

from tests.cpu.runs import write_rows
from tests.cpu.tiny import save_tiny

ADDRESSES = {"mlora-a": "10.213.77.1", "mlora-b": "10.213.77.2"}
HOSTS = tuple(ADDRESSES)
LAUNCH = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2")
C10D = ("--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"{HOSTS[0]}:29500")
STATIC = ("--master-addr", HOSTS[0], "--master-port", "29500")  # what Kubeflow's Trainer asks for


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def _why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    missing = [tool for tool in ("ip", "unshare", "sh") if which(tool) is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return f"needs root and iproute2, util-linux: missing {missing or 'root'}"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], check=False, capture_output=True, text=True)
    return probe.stderr.strip()


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@pytest.fixture
def hosts() -> Iterator[None]:
    """Both namespaces, each with its address, and with a hosts file that ``ip netns exec`` lays over /etc/hosts."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True)
            lines = [f"{address} {name}\n" for name, address in ADDRESSES.items()]
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        _ip("link", "add", HOSTS[0], "netns", HOSTS[0], "type", "veth", "peer", "name", HOSTS[1], "netns", HOSTS[1])
        for host, address in ADDRESSES.items():
            _ip("-n", host, "address", "add", f"{address}/24", "dev", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", host, "up")
        yield
    finally:
        for host in HOSTS:
            _ip("netns", "delete", host, check=False)
            (Path("/etc/netns") / host / "hosts").unlink(missing_ok=True)
            (Path("/etc/netns") / host).rmdir()


@contextmanager
def started_on_both(
    config: dict[str, object],
    folder: Path,
    rendezvous: Sequence[str] = C10D,
    by_host: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[list[Run]]:
    """The same line on each host, but for ``by_host``; only the first one's folder is written."""
    with ExitStack() as stack:
        runs = []
        for rank, host in enumerate(HOSTS):
            launcher = (*LAUNCH, *rendezvous, "--node-rank", str(rank), *(by_host or {}).get(host, ()))
            name = ("unshare", "--uts", "sh", "-c", f'echo {host} > /proc/sys/kernel/hostname; exec "$@"', "sh")
            prefix = ("ip", "netns", "exec", host, *name)
            runs.append(stack.enter_context(started(config, folder / host, launcher=launcher, prefix=prefix)))
        yield runs


def check_all_end(runs: Sequence[Run], pids: Sequence[int]) -> None:
    """These launchers end with a code other than 0, and no rank is left, within the time."""
    before = time.monotonic()
    codes = [run.wait(ENDED_S - (time.monotonic() - before)) for run in runs]
    assert 0 not in codes
    runs[0].wait_until_gone(pids, deadline_s=max(1, ENDED_S - (time.monotonic() - before)))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("config")
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 24, seed, 25)) for seed, name in enumerate("ab")}
    return {
        "base_model": str(save_tiny(folder / "model", "llama3.2", num_hidden_layers=4)),
        "microbatch_tokens": 90,
        "adapters": [
            {"name": name, "dataset": rows[name], "r": 4 + 4 * i, "lora_dropout": 0.1, "max_steps": 5}
            for i, name in enumerate("ab")
        ],
    }


@pytest.fixture
def endless(config) -> dict[str, object]:
    return config | {"adapters": [adapter | {"max_steps": 1_000_000} for adapter in config["adapters"]]}


@pytest.mark.parametrize("rendezvous", [C10D, pytest.param(STATIC, marks=pytest.mark.slow)], ids=["c10d", "static"])
def test_two_hosts_give_the_bits_of_one_process(hosts, config, tmp_path, rendezvous):
    with started_on_both(config, tmp_path, rendezvous) as runs:
        for run in runs:
            assert run.wait(120) == 0, run.text
    assert not runs[1].folder.exists()
    alone = train(config, tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    assert_same(tmp_path / "alone", runs[0].folder)


def test_kill_of_a_rank_on_the_other_host_ends_both_hosts(hosts, endless, tmp_path):
    with started_on_both(endless, tmp_path) as runs:
        runs[0].wait_for_metrics()
        ranks = runs[0].ranks() | runs[1].ranks()
        assert sorted(ranks) == [0, 1, 2, 3]
        os.kill(runs[1].ranks()[3], signal.SIGKILL)
        check_all_end(runs, list(ranks.values()))
    causes = [run.text.partition("Root Cause (first observed failure)")[2] for run in runs]
    assert re.search(r"rank +: 3 .*\n.*\(SIGKILL\)", causes[1]), runs[1].text
    assert HOSTS[1] in causes[0], f"the other host does not say where the first cause is shown:\n{runs[0].text}"


def test_kill_of_a_launcher_ends_both_hosts(hosts, endless, tmp_path):
    with started_on_both(endless, tmp_path) as runs:
        runs[0].wait_for_metrics()
        ranks = runs[0].ranks() | runs[1].ranks()
        os.kill(runs[1].process.pid, signal.SIGKILL)
        check_all_end(runs, list(ranks.values()))
    assert re.search(f"rank [23] on {HOSTS[1]} failed: its launcher has ended", runs[0].text), runs[0].text


@pytest.mark.slow
def test_torchrun_brings_both_hosts_back(hosts, config, tmp_path):
    """The first host's torchrun counts no restart, since none of its own processes has failed; one is all there is."""
    longer = config | {
        "save_steps": 3,
        "adapters": [adapter | {"max_steps": 40, "logging_steps": 6} for adapter in config["adapters"]],
    }
    with started_on_both(longer, tmp_path, (*C10D, "--max-restarts", "1")) as runs:
        runs[0].wait_for_metrics()
        os.kill(runs[1].ranks()[3], signal.SIGKILL)
        for run in runs:
            assert run.wait(120) == 0, run.text
    assert len(re.findall(r"^a: goes on behind step", runs[0].text, re.MULTILINE)) == 1, runs[0].text
    alone = train(longer, tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    assert_same(tmp_path / "alone", runs[0].folder)


@pytest.mark.slow
def test_the_host_with_an_address_for_its_name_is_the_first(hosts, config, tmp_path):
    """As launch/README.md says of hosts whose names stand in another order."""
    address = ("--local-addr", ADDRESSES[HOSTS[1]])
    with started_on_both(config, tmp_path, by_host={HOSTS[1]: address}) as runs:
        for run in runs:
            assert run.wait(120) == 0, run.text
    assert not runs[0].folder.exists() and (runs[1].folder / "adapters/a").exists()


@pytest.mark.slow
def test_a_cut_cable_ends_all_ranks_and_the_first_launcher(hosts, endless, tmp_path):
    """The other launcher hangs in a store of its own until the kernel gives the connection up."""
    with started_on_both(endless, tmp_path) as runs:
        runs[0].wait_for_metrics()
        ranks = runs[0].ranks() | runs[1].ranks()
        _ip("-n", HOSTS[1], "link", "set", HOSTS[1], "down")
        check_all_end(runs[:1], list(ranks.values()))
    assert re.search(f"rank [23] on {HOSTS[1]} failed: silent for 40 s", runs[0].text), runs[0].text
    assert "rank 0 failed: its store has not answered for 40 s" in runs[1].text
