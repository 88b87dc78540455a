"""Microbatches from lengths alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mlora.ops.routing import Routing, route
from mlora.types import Microbatch, SampleRef, Segment, padded


def packed(lengths: Mapping[int, Sequence[int]], step: int = 5, first_ordinal: int = 0) -> Microbatch:
    """Samples of these lengths, by slot."""
    segments, start = [], 0
    for slot, sizes in lengths.items():
        samples = tuple(SampleRef(i, first_ordinal + i, size) for i, size in enumerate(sizes))
        segments.append(
            Segment(adapter=slot, slot=slot, step=step, start=start, samples=samples, target_tokens=1, ends_step=False)
        )
        start = segments[-1].stop
    return Microbatch(0, tuple(segments), padded(start))


def routed(lengths: Mapping[int, Sequence[int]], first_ordinal: int = 0, dropout: bool = True) -> Routing:
    return route(packed(lengths, first_ordinal=first_ordinal), torch.device("cpu"), dropout)
