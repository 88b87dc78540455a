"""Which microbatch runs in which graph: kinds, lanes, layouts. Capture itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mlora.pipeline import graphs
from mlora.pipeline.graphs import Flight, Graphs


@dataclass
class Packed:
    factor: torch.Tensor
    kind: object = "one"

    def clone(self):
        return Packed(self.factor.clone(), self.kind)

    def copy_(self, other):
        self.factor.copy_(other.factor)


def _forward(x, packed):
    return x * packed.factor, (x, packed)


def _backward(kept, dout):
    x, packed = kept
    return dout * packed.factor + x


@pytest.fixture
def captures(monkeypatch):
    """Instead of a capture: the work is done again, into the tensors that it gave first."""
    made = []

    def again(work, pool):
        result = work()
        target = result[0] if isinstance(result, tuple) else result
        made.append(pool)

        def replay():
            fresh = work()
            target.copy_(fresh[0] if isinstance(fresh, tuple) else fresh)

        return replay, result

    monkeypatch.setattr(graphs, "captured", again)
    return made


def _x(value):
    return torch.full((4, 3), float(value))


def _packed(factor, kind="one"):
    return Packed(torch.tensor(float(factor)), kind)


def test_the_first_of_a_kind_runs_without_a_graph_and_the_others_replay(captures):
    replayed = Graphs(_forward, _backward)
    for number in range(1, 5):
        out, kept = replayed.forward(_x(number), _packed(10), "layout")
        assert torch.equal(out, _x(10 * number))
        assert isinstance(kept, Flight) == (number > 1)
        dx = replayed.backward(kept, _x(1)) if number > 1 else _backward(kept, _x(1))
        assert torch.equal(dx, _x(10 + number))
    assert len(captures) == 2  # forward and backward, once


def test_microbatches_in_flight_do_not_share_memory(captures):
    replayed = Graphs(_forward, _backward)
    replayed.forward(_x(0), _packed(1), "layout")
    flights = [replayed.forward(_x(n), _packed(n), "layout") for n in (2, 3, 5)]
    assert [out[0, 0].item() for out, _ in flights] == [4, 9, 25]
    assert [replayed.backward(kept, _x(1))[0, 0].item() for _, kept in flights] == [4, 6, 10]
    assert len(captures) == 6
    replayed.forward(_x(7), _packed(1), "layout")
    assert len(captures) == 6  # an idle lane is used again


def test_kinds_have_graphs_of_their_own_and_the_first_goes_when_there_are_too_many(captures, monkeypatch):
    monkeypatch.setattr(graphs, "_MOST_KINDS", 2)
    replayed = Graphs(_forward, _backward)
    for kind in ("a", "b", "c", "b", "a"):
        for number in (1, 2):
            out, kept = replayed.forward(_x(number), _packed(3, kind), "layout")
            assert torch.equal(out, _x(3 * number))
            if isinstance(kept, Flight):
                replayed.backward(kept, _x(1))
    assert len(captures) == 2 * 4  # a, b, c, and a again


def test_another_layout_begins_anew_also_for_lanes_in_flight(captures):
    replayed = Graphs(_forward, _backward)
    replayed.forward(_x(1), _packed(1), "old")
    _, old = replayed.forward(_x(1), _packed(1), "old")
    _, first = replayed.forward(_x(1), _packed(1), "new")
    assert not isinstance(first, Flight)
    assert torch.equal(replayed.backward(old, _x(1)), _x(2))
    _, second = replayed.forward(_x(1), _packed(1), "new")
    assert second.lane is not old.lane
    assert len(captures) == 4
