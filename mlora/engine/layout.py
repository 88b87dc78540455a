"""Which layers each stage holds: cut by cost, so that no stage is much slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mlora.models.spec import ModelSpec, linear_shapes
from mlora.types import UserError


def layer_counts(spec: ModelSpec, stages: int, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers per stage. ``given`` is the user's own cut; else the dearest stage is made as cheap as it can be.

    The cost of a layer is its weights, that of the head is V·D more on the last stage: for Llama-3.1-8B as much as 2.4
    layers. Embedding is a look-up and costs nothing. Raises UserError where there are more stages than layers.
    """
    if stages > spec.num_layers:
        raise UserError(f"pipeline.stages: {stages} stages for a model of {spec.num_layers} layers; use fewer stages")
    if given is not None:
        if len(given) != stages or sum(given) != spec.num_layers or min(given) < 1:
            raise UserError(
                f"pipeline.layers: {list(given)} must be {stages} positive numbers that add up to {spec.num_layers}"
            )
        return tuple(given)
    layer = sum(out * inner for out, inner in linear_shapes(spec).values())
    return _balanced(spec.num_layers, stages, spec.vocab_size * spec.hidden_size / layer)


def first_layers(counts: Sequence[int]) -> tuple[int, ...]:
    """The first layer of every stage, and behind them the number of layers."""
    return (0, *accumulate(counts))


def _balanced(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """The last stage gets the count that makes the dearest stage cheapest; the others share the rest evenly."""
    if stages == 1:
        return (layers,)

    def dearest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // (stages - 1)), last + head), last

    last = min(range(1, layers - stages + 2), key=dearest)
    rest, longer = divmod(layers - last, stages - 1)
    return (*(rest + (stage < longer) for stage in range(stages - 1)), last)
