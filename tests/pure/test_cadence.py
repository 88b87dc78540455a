"""When an adapter is due for a checkpoint, on a clock of the test's own."""

from __future__ import annotations

import pytest

from mlora import parse_config
from mlora.engine.cadence import Cadence


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def cadence(**keys):
    clock = Clock()
    tree = {"base_model": "m", "adapters": [{"name": "a", "dataset": "x"}], **keys}
    made = Cadence(parse_config(tree), clock)
    made.start("a")
    made.start("b")
    return made, clock


def test_a_minute_unless_writing_takes_longer_than_a_twentieth_of_it():
    made, clock = cadence()
    clock.now += 59.9
    assert not made.due("a", 1) and str(made) == "60 s"
    clock.now += 0.1
    assert made.due("a", 2) and made.due("b", 2)
    made.wrote("a", 4.0)
    made.wrote("b", 2.5)
    assert str(made) == "130 s"
    clock.now += 129
    assert not made.due("a", 3)
    clock.now += 1
    assert made.due("a", 4)


def test_none_is_due_while_one_is_being_written():
    made, clock = cadence()
    clock.now += 60
    assert made.due("a", 1)
    clock.now += 600
    assert not made.due("a", 2)
    made.wrote("a", 0.1)
    assert made.due("a", 3)


@pytest.mark.parametrize(
    "keys, text",
    [
        ({"save_steps": 3}, "3 steps"),
        ({"save_seconds": 7}, "7 s"),
        ({"save_steps": 3, "save_seconds": 7}, "3 steps or 7 s"),
    ],
)
def test_chosen_steps_and_seconds(keys, text):
    made, clock = cadence(**keys)
    due = []
    for step in range(1, 13):
        clock.now += 2
        if made.due("a", step):
            due.append(step)
            made.wrote("a", 1000.0)
    wanted = {"3 steps": [3, 6, 9, 12], "7 s": [4, 8, 12], "3 steps or 7 s": [3, 6, 9, 12]}
    assert due == wanted[text] and str(made) == text


def test_chosen_steps_are_saved_though_one_is_still_being_written():
    made, _ = cadence(save_steps=2)
    assert [step for step in range(1, 7) if made.due("a", step)] == [2, 4, 6]
