"""NCCL between processes of one host, several of them on one GPU if need be.

Runs without pytest's command too: python tests/gpu/test_transport_nccl.py
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiproc"))
from harness import check_all_passed, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def environments(world):
    """NCCL refuses two ranks on one GPU of one host; ranks that say they are on different hosts may share it."""
    return [{"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"} for rank in range(world)]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_conformance(stages):
    check_all_passed(run("processes:all_checks", stages, "cuda", deadline_s=100, environments=environments(stages)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_conformance_on_two_gpus():
    check_all_passed(run("processes:all_checks", 2, "cuda", deadline_s=100))


def test_gloo_between_gpus():
    check_all_passed(run("processes:all_checks", 2, "cuda", "gloo", deadline_s=100))


def test_an_error_aborts_nccl():
    ended = run("processes:watched", 3, "rank_1_raises", "cuda", deadline_s=120, environments=environments(3))
    for process in ended:
        assert process.code == 1, process.output
        assert process.last_line.endswith("failed: ValueError: the loader of adapter 'b' is broken"), process.output


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-s", "-p", "no:cacheprovider"]))
