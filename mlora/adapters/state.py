"""One adapter on one stage: masters, gradients and compute copy, each in one flat buffer.

A layer's tensors lie together: for each merged linear the A of its targeted modules stacked ([R, D] row by row), then
each B as [r, O]; every layer starts at a multiple of ``BLOCK`` elements. Sums of squares are taken in float64 over
blocks of that size and then added without rounding (``exact_sum``), so a layer's sum depends on nothing but its
gradients: neither on the stage cut nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mlora.adapters.init import initial_matrices
from mlora.config import AdapterConfig
from mlora.ops.batch_lora import LoraGroup, LoraPart
from mlora.ops.devices import has_kernels, kernels
from mlora.ops.exact import exact_sum
from mlora.ops.random import key_for
from mlora.types import MERGED_LINEARS, module_name, padded

BLOCK = 1024

Shapes = Mapping[str, tuple[int, int]]  # last part of a module's name -> (out features, in features)


@dataclass(frozen=True)
class _Place:
    """Where one targeted module's matrices lie in the flat buffers."""

    rank: int
    a_start: int
    b_start: int
    in_features: int
    out_features: int


class AdapterState:
    """Parameters of one adapter for the layers of one stage.

    Args:
        config: the adapter's hyper-parameters.
        targets: global names of all modules that carry it; those outside ``layers`` belong to other stages.
        shapes: (out, in) features of each linear module.
        layers: global indices of the stage's layers.
        dtype: of the frozen model; masters and gradients are float32 (float64 for a float64 model).
    """

    def __init__(
        self,
        config: AdapterConfig,
        targets: Iterable[str],
        shapes: Shapes,
        layers: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.layers = layers
        self._shapes = shapes
        self._targets = frozenset(targets)
        self._places: dict[str, _Place] = {}
        self._layer_starts = [0]
        for layer in layers:
            self._layer_starts.append(padded(self._lay_out(layer, self._layer_starts[-1]), BLOCK))
        size = self._layer_starts[-1]
        state_dtype = torch.promote_types(dtype, torch.float32)
        self.master = torch.zeros(size, dtype=state_dtype, device=device)
        self.grad = torch.zeros_like(self.master)
        self._layer_blocks = torch.tensor(self._layer_starts, device=device) // BLOCK
        self.compute = torch.zeros(size, dtype=dtype, device=device)
        for name, (a_RD, b_RO) in self.matrices().items():
            initial_a, initial_b = initial_matrices(config, name, a_RD.shape[1], b_RO.shape[1])
            a_RD.copy_(initial_a)
            b_RO.copy_(initial_b)
        self.refresh()

    def refresh(self) -> None:
        """Bring the compute copy up to date with the masters."""
        self.compute.copy_(self.master)

    def load(self, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over A [r, D] and B [r, O] by global module name; whoever reads them has checked that they fit."""
        ours = self.matrices()
        assert ours.keys() == matrices.keys(), sorted(ours.keys() ^ matrices.keys())
        for name, pair in matrices.items():
            for target, source in zip(ours[name], pair, strict=True):
                assert target.shape == source.shape, f"{name}: {source.shape}, not {target.shape}"
                target.copy_(source)
        self.refresh()

    def matrices(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Views of the masters by global module name: A [r, D] and B stored [r, O]."""
        return self.named(self.master)

    def named(self, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Views of a buffer that is laid out as the masters are, such as a moment, by global module name."""
        return {name: self._views(flat, place) for name, place in self._places.items()}

    def group(self, layer: int, merged: str) -> LoraGroup | None:
        """What BatchLoRA needs in one merged linear of one layer; None where the adapter has no target there."""
        parts, column, rank = [], 0, 0
        first: _Place | None = None
        for index, path in enumerate(MERGED_LINEARS[merged]):
            name = module_name(layer, path)
            out_features = self._shapes[path.split(".")[-1]][0]
            if name in self._places:
                place = self._places[name]
                first = first or place
                parts.append(self._part(index, name, place, rank, column))
                rank += place.rank
            column += out_features
        if first is None:
            return None
        stacked = slice(first.a_start, first.a_start + rank * first.in_features)
        return LoraGroup(
            a_RD=self.compute[stacked].view(rank, -1),
            grad_a_RD=self.grad[stacked].view(rank, -1),
            parts=tuple(parts),
            dropout=self.config.lora_dropout,
        )

    def sums_of_squares(self) -> torch.Tensor:
        """Σ grad² of each layer, float64 [layers]."""
        if has_kernels(self.grad):
            squares = kernels("squares")
            return squares.range_sums(squares.block_sums(self.grad, BLOCK), self._layer_blocks)
        sums = []
        for start, stop in zip(self._layer_starts, self._layer_starts[1:], strict=False):
            blocks = self.grad[start:stop].view(-1, BLOCK).double().square().sum(1)
            sums.append(exact_sum(blocks.tolist()))
        return torch.tensor(sums, dtype=torch.float64)

    def _lay_out(self, layer: int, start: int) -> int:
        """Give each targeted module of the layer its place; returns the end."""
        for paths in MERGED_LINEARS.values():
            names = [(module_name(layer, p), *self._shapes[p.split(".")[-1]]) for p in paths]
            names = [entry for entry in names if entry[0] in self._targets]
            b_start = start + sum(self.config.rank(name) * in_features for name, _, in_features in names)
            for name, out_features, in_features in names:
                r = self.config.rank(name)
                self._places[name] = _Place(r, start, b_start, in_features, out_features)
                start += r * in_features
                b_start += r * out_features
            start = b_start
        return start

    def _views(self, flat: torch.Tensor, place: _Place) -> tuple[torch.Tensor, torch.Tensor]:
        r = place.rank
        a = flat[place.a_start : place.a_start + r * place.in_features].view(r, place.in_features)
        b = flat[place.b_start : place.b_start + r * place.out_features].view(r, place.out_features)
        return a, b

    def _part(self, index: int, name: str, place: _Place, rank: int, column: int) -> LoraPart:
        return LoraPart(
            index=index,
            ranks=slice(rank, rank + place.rank),
            columns=slice(column, column + place.out_features),
            b_RO=self._views(self.compute, place)[1],
            grad_b_RO=self._views(self.grad, place)[1],
            key=key_for(self.config.seed, name),
            scaling=self.config.scaling(name),
        )
