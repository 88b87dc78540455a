"""There is no flush: measured on stages in threads, with joins, leaves, evaluations, STEPs and window seams."""

from __future__ import annotations

import pytest

from tests.multiproc.stub_stages import FlushingExecutor, SeamFlushingExecutor, assert_no_flush, run_threads

pytestmark = pytest.mark.timed
A_FEW_STEPS = (4, 4, 5, 4, 4)  # of each adapter: 72 microbatches


def last_trained(run, ends):
    """The last position up to each end that has a B: an evaluation has none."""
    trained = [position.index for position in run.positions if position.trains]
    return [max(index for index in trained if index <= end) for end in ends]


def test_threads_take_the_planned_time_and_are_never_empty():
    assert_no_flush(run_threads(deadline_s=120))


def test_a_flush_would_be_seen_in_flight_and_in_the_time():
    run = run_threads(30, A_FEW_STEPS, FlushingExecutor)
    assert run.empty_at() == last_trained(run, range(7, 80, FlushingExecutor.every))
    assert run.slowdown() > 1.2


def test_a_flush_at_window_seams_would_be_seen_in_flight():
    run = run_threads(30, A_FEW_STEPS, SeamFlushingExecutor)
    seams = [window.positions[0].index for window in run.windows if window.positions]
    assert run.empty_at() == last_trained(run, [seam - 1 for seam in seams[1:]])
