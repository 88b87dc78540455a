import pytest
from harness import check_all_passed, run

pytestmark = pytest.mark.timed


@pytest.mark.parametrize("stages", [2, 4])
def test_conformance(stages):
    check_all_passed(run("processes:all_checks", stages))


def test_a_process_may_end_right_after_close():
    check_all_passed(run("processes:end_right_after_close", 2))


def test_two_replicas():
    check_all_passed(run("processes:two_replicas", 4))


def test_control_with_objects_of_100_megabytes():
    check_all_passed(run("processes:control", 3, 100_000_000))


def test_publish_does_not_wait_for_its_readers():
    check_all_passed(run("processes:publish_does_not_wait", 2))


def test_control_abort_wakes_a_waiting_rank():
    ended = run("processes:control_abort", 3)
    check_all_passed(ended)
    assert "woken" in ended[1].output and "woken" in ended[2].output


def test_a_stuck_process_is_ended_at_the_deadline():
    ended = run("processes:sleep", 1, deadline_s=0.5)
    assert ended[0].code is None
