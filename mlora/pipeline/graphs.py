"""Small microbatches as CUDA graphs: below about 2,000 rows the host needs longer to launch kernels than they take.

A graph replays the same kernels on the same memory, so results are the same bits. What may differ between microbatches
of one kind (rows' owners, positions, parameters) is read from tables in that memory.

A lane is memory for one microbatch between F and B. All graphs of a lane use the same memory, since only one of them is
under way; with w microbatches in flight there are w lanes, which together take what the microbatches would take anyhow.

Letters: T packed rows, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

MOST_ROWS = 2048  # above, the host keeps ahead of the device
_MOST_KINDS = 64  # of one lane; the graph that was made first goes first

Forward = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
Backward = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Flight:
    """What stands for a slice's kept tensors while a lane holds them."""

    lane: _Lane
    graph: _Graph


class Graphs:
    """Forward and backward of a slice, replayed where a microbatch of the same kind was seen before.

    Args:
        forward: of x [T, D] and a packed microbatch; gives out [T, D] and what backward needs.
        backward: of that and dout [T, D]; gives dx [T, D].
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward
        self._layout: Hashable = None
        self._seen: set[Hashable] = set()
        self._idle: list[_Lane] = []

    def forward(self, x_TD: torch.Tensor, packed: Any, layout: Hashable) -> tuple[torch.Tensor, Any]:
        """As the slice's own; the first microbatch of its kind runs without a graph, which compiles its kernels.

        ``packed`` has ``kind``, ``clone()`` and ``copy_()``. ``layout``: of the adapters' matrices; when it changes,
        the graphs are made anew.
        """
        if layout != self._layout:
            self._layout = layout
            self._seen.clear()
            self._idle.clear()
        kind = (x_TD.shape, packed.kind)
        if kind not in self._seen:
            self._seen.add(kind)
            return self._forward(x_TD, packed)
        lane = self._idle.pop() if self._idle else _Lane(layout)
        if kind not in lane.graphs:
            if len(lane.graphs) == _MOST_KINDS:
                del lane.graphs[next(iter(lane.graphs))]
            lane.graphs[kind] = _Graph(self._forward, self._backward, x_TD, packed, lane.pool)
        graph = lane.graphs[kind]
        return graph.forward(x_TD, packed), Flight(lane, graph)

    def backward(self, flight: Flight, dout_TD: torch.Tensor) -> torch.Tensor:
        """As the slice's own; the lane is then free for another microbatch."""
        dx_TD = flight.graph.backward(dout_TD)
        self.forget(flight)
        return dx_TD

    def forget(self, flight: Flight) -> None:
        """The microbatch will not come back."""
        if flight.lane.layout == self._layout:
            self._idle.append(flight.lane)


class _Lane:
    def __init__(self, layout: Hashable) -> None:
        self.layout = layout
        self.pool: Any = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.graphs: dict[Hashable, _Graph] = {}


class _Graph:
    """Forward and backward of one kind of microbatch, with its inputs and outputs at fixed places."""

    def __init__(self, forward: Forward, backward: Backward, x_TD: torch.Tensor, packed: Any, pool: Any) -> None:
        self._x_TD, self._packed = x_TD.clone(), packed.clone()
        self._replay_forward, (self._out_TD, kept) = captured(lambda: forward(self._x_TD, self._packed), pool)
        self._dout_TD = torch.empty_like(self._out_TD)
        self._replay_backward, self._dx_TD = captured(lambda: backward(kept, self._dout_TD), pool)

    def forward(self, x_TD: torch.Tensor, packed: Any) -> torch.Tensor:
        self._x_TD.copy_(x_TD)
        self._packed.copy_(packed)
        self._replay_forward()
        return self._out_TD.clone()  # it may still be on its way to the next stage when the lane is used again

    def backward(self, dout_TD: torch.Tensor) -> torch.Tensor:
        self._dout_TD.copy_(dout_TD)
        self._replay_backward()
        return self._dx_TD.clone()


def captured(work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """A function that does ``work`` again on the same memory, and what the work gives."""
    graph = torch.cuda.CUDAGraph()
    # "thread_local": threads that save and export may go on with their own work
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result
