import json
import os
import re
import signal
import socket

import pytest
from harness import check_all_passed, run, run_fresh, start, wait, wait_for_text

from mlora.pipeline.transport.board import Board, Failure
from mlora.pipeline.transport.liveness import tell_launcher
from mlora.pipeline.transport.store import open_store
from mlora.types import UserError
from tests.cpu.runs import files_up_to

pytestmark = pytest.mark.timed


def check_failed(ended, pattern, ranks, within_s=20, code=1):
    """All these ranks ended by themselves with ``code``, and the last thing they show matches ``pattern``."""
    for rank in ranks:
        output = f"rank {rank}:\n{ended[rank].output}"
        assert ended[rank].code == code, f"code {ended[rank].code}, {output}"
        assert ended[rank].seconds < within_s, output
        assert re.search(pattern, ended[rank].last_line), output


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_ends_all_others_with_the_rank_named(victim):
    processes = start("processes:watched", 3, "exchange_for_ever")
    wait_for_text(processes, "started")
    os.kill(processes[victim].pid, signal.SIGKILL)
    ended = wait(processes)
    assert ended[victim].code == -signal.SIGKILL
    check_failed(ended, rf"rank {victim}\b.* ended", {0, 1, 2} - {victim})


@pytest.mark.parametrize("victim, reason", [(0, "its store has not answered for 8 s"), (1, "silent for 8 s")])
def test_a_frozen_rank_is_silent(victim, reason):
    processes = start("processes:watched", 3, "exchange_for_ever")
    wait_for_text(processes, "started")
    os.kill(processes[victim].pid, signal.SIGSTOP)
    others = [rank for rank in range(3) if rank != victim]
    ended = wait([processes[rank] for rank in others])
    processes[victim].process.kill()
    check_failed(dict(zip(others, ended, strict=True)), rf"rank {victim}\b.* failed: {reason}$", others)


def test_every_rank_ends_with_the_first_error():
    ended = run("processes:watched", 3, "rank_1_raises")
    check_failed(ended, r"stopped: rank 1 on \S+ failed: ValueError: the loader of adapter 'b' is broken$", range(3))
    assert "in rank_1_raises" in ended[0].output, "rank 0 shows the traceback too"
    assert "in rank_1_raises" in ended[1].output
    assert "Traceback" not in ended[2].output


def test_an_error_on_the_rank_that_holds_the_store_reaches_the_others():
    ended = run("processes:watched", 3, "rank_0_raises")
    check_failed(ended, r"stopped: rank 0 on \S+ failed: ValueError: the plan is empty$", range(3))


def test_a_users_mistake_has_no_traceback():
    ended = run("processes:watched", 3, "rank_1_has_a_user_error")
    check_failed(ended, r"failed: data.jsonl:7, column 'text': not text; write text$", range(3), code=2)
    assert not any("Traceback" in process.output for process in ended)


@pytest.mark.parametrize("work", ["clean", "stall_on_rank_1", "late_end_of_rank_2"])
def test_a_clean_end_says_nothing(work):
    ended = run("processes:watched", 3, work)
    check_all_passed(ended)
    assert [process.output for process in ended] == ["started\n"] * 3


def test_new_interpreters_end_with_the_first_error():
    ended = run_fresh("processes:watched", 2, "rank_1_raises")
    check_failed(ended, r"stopped: rank 1 on \S+ failed: ValueError: the loader of adapter 'b' is broken$", range(2))


def test_a_clean_end_of_new_interpreters_says_nothing():
    ended = run_fresh("processes:watched", 2, "clean")
    check_all_passed(ended)
    assert [process.output for process in ended] == ["started\n"] * 2


def test_a_stuck_main_thread_is_ended():
    ended = run("processes:watched", 3, "stuck_main_thread")
    check_failed(ended, r"rank 1 on \S+ failed: ValueError: rank 1 is broken$", range(3))


def test_a_callback_is_called_once_with_the_reason():
    ended = run("processes:silent_peer_calls_back", 1)
    check_all_passed(ended)
    assert ended[0].output == "rank 1 on elsewhere failed: silent for 0.5 s\n"


def test_the_store_keeps_the_first_failure():
    store = open_store("127.0.0.1", 0, serve=True)
    board = Board(store)
    consequence, first, second = (
        Failure(rank=rank, host="a", reason=str(rank), consequence=rank == 0) for rank in range(3)
    )
    assert board.first_failure() is None
    board.report(consequence)
    assert board.first_failure() == consequence
    board.report(first)
    board.report(second)
    assert board.first_failure() == first


def test_a_store_that_cannot_be_reached_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*choose a free port"):
            open_store("127.0.0.1", port, serve=True)
    with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        open_store("127.0.0.1", port, serve=False, timeout_s=1)
    with pytest.raises(UserError, match=r"no-such-host\.invalid:29500"):
        open_store("no-such-host.invalid", 29500, serve=False, timeout_s=1)


def test_a_full_disk_leaves_torchrun_no_half_a_file(tmp_path, monkeypatch):
    """On half a file torchrun would end with an error of its own as the last thing shown."""
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    with files_up_to(8):
        tell_launcher("rank 1 failed: out of turn")
    assert not list(tmp_path.iterdir())
    tell_launcher("rank 1 failed: out of turn")
    assert json.loads(told.read_text())["message"]["message"] == "rank 1 failed: out of turn"
