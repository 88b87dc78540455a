"""torch's own pipelining simulator takes the rows' forward, backward and communication actions."""

import pytest

from mlora.pipeline.schedule import Planner, Position, in_flight, rows
from tests.pure.schedule_helpers import plans, stream

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def for_torch(row, messages, scored):
    """The row in torch's terms: it knows no STEP, takes E for an F, and wants one before an empty carrier is sent; and
    a B before the scores of an evaluation are."""
    names = []
    for action in row:
        if action.kind == "STEP":
            continue
        if action.kind == "SEND_F" and action.position in messages:
            names.append(f"{action.stage}F{action.position}")
        if action.kind == "SEND_B" and action.position in scored:
            names.append(f"{action.stage}B{action.position}")
        names.append(str(action).replace("E", "F") if action.kind == "E" else str(action))
    return [schedules._Action.from_str(name) for name in names]


def simulated(positions, flight, edit=lambda row: row):
    messages = {position.index for position in positions if position.microbatch is None and position.steps}
    scored = {position.index for position in positions if position.forward_only}
    order = {stage: edit(for_torch(row, messages, scored)) for stage, row in enumerate(rows(positions, flight))}
    return order, schedules._simulate_comms_compute(order, lambda stage: stage, len(flight))


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_torch_finishes_our_rows(stages, factor):
    planned = [plans(a, [[60, 60], [60], [30, 30, 30]], evaluate_after=[1]) for a in range(3)]
    positions = stream(Planner(64, in_flight(stages, factor)), planned)
    order, ticks = simulated(positions, in_flight(stages, factor))
    for stage, row in order.items():
        assert [action for action in ticks[stage] if action is not None] == row


def test_torch_refuses_rows_without_a_send():
    positions = stream(Planner(64, in_flight(3)), [plans(a, [[60], [60]]) for a in range(3)])
    with pytest.raises(ValueError, match="not progressing"):
        simulated(positions, in_flight(3), edit=lambda row: [action for action in row if str(action) != "0SEND_F2"])


def test_torch_prints_and_reads_the_same_text():
    positions = [*stream(Planner(64, in_flight(2)), [plans(0, [[60]])]), Position(index=99)]
    for row in rows(positions[:-1], in_flight(2)):
        for action in row:
            if action.kind != "STEP":
                assert str(schedules._Action.from_str(str(action))) == str(action)
