"""Small microbatches as CUDA graphs: below about 2,000 rows the host needs longer to launch kernels than they take.

A graph replays the same kernels on the same memory, so results are the same bits. What may differ between microbatches
of one graph (rows' owners, positions, parameters) is read from tables in that memory; all else is in the graph's key.

Letters: T packed rows, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

MOST_ROWS = 2048  # above, the host keeps ahead of the device, and a graph would hold its activations for nothing

Forward = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
Backward = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Flight:
    """What stands for a slice's kept tensors while a graph holds them."""

    graph: _Graph


class Graphs:
    """Forward and backward of a slice, replayed where a microbatch's key was seen before.

    Args:
        forward: of x [T, D] and a packed microbatch; gives out [T, D] and what backward needs.
        backward: of that and dout [T, D]; gives dx [T, D].
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward
        self._layout: Hashable = None
        self._seen: set[Hashable] = set()
        self._idle: dict[Hashable, list[_Graph]] = {}

    def forward(self, x_TD: torch.Tensor, packed: Any, layout: Hashable) -> tuple[torch.Tensor, Any]:
        """As the slice's own; the first microbatch of its kind runs without a graph, which compiles its kernels.

        ``layout``: of the adapters' matrices. When it changes, graphs of an earlier one are dropped.
        """
        if layout != self._layout:
            self._layout = layout
            self._seen.clear()
            self._idle.clear()
        key = (layout, x_TD.shape, packed.kind)
        if key not in self._seen:
            self._seen.add(key)
            return self._forward(x_TD, packed)
        idle = self._idle.setdefault(key, [])
        graph = idle.pop() if idle else _Graph(self._forward, self._backward, x_TD, packed, key)
        return graph.run_forward(x_TD, packed), Flight(graph)

    def backward(self, flight: Flight, dout_TD: torch.Tensor) -> torch.Tensor:
        """As the slice's own; the graph is then free for another microbatch."""
        dx_TD = flight.graph.run_backward(dout_TD)
        self.forget(flight)
        return dx_TD

    def forget(self, flight: Flight) -> None:
        """The microbatch will not come back."""
        if flight.graph.key in self._seen:
            self._idle[flight.graph.key].append(flight.graph)


class _Graph:
    """One microbatch's memory with the two graphs that work on it."""

    def __init__(self, forward: Forward, backward: Backward, x_TD: torch.Tensor, packed: Any, key: Hashable) -> None:
        self.key = key
        self._x_TD, self._packed = x_TD.clone(), packed.clone()
        self._forward_graph, self._backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # "thread_local": other stages may be threads of this process and go on with their own work
        with torch.cuda.graph(self._forward_graph, capture_error_mode="thread_local"):
            self._out_TD, kept = forward(self._x_TD, self._packed)
        self._dout_TD = torch.empty_like(self._out_TD)
        pool = self._forward_graph.pool()
        with torch.cuda.graph(self._backward_graph, pool=pool, capture_error_mode="thread_local"):
            self._dx_TD = backward(kept, self._dout_TD)

    def run_forward(self, x_TD: torch.Tensor, packed: Any) -> torch.Tensor:
        self._x_TD.copy_(x_TD)
        self._packed.copy_(packed)
        self._forward_graph.replay()
        return self._out_TD.clone()  # it may still be on its way to the next stage when the graph runs again

    def run_backward(self, dout_TD: torch.Tensor) -> torch.Tensor:
        self._dout_TD.copy_(dout_TD)
        self._backward_graph.replay()
        return self._dx_TD.clone()
