"""From a planned microbatch and the adapters' tokens to the tensors that enter the stages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mlora.data import TokenData
from mlora.types import IGNORE, Microbatch


def packed_inputs(
    microbatch: Microbatch,
    data_of: Callable[[int], TokenData],
    unreadable: Callable[[int, OSError], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids_T`` and ``targets_T``, int64 [T]. A row's target is the next token's label in the same sample.

    ``unreadable`` hears of an adapter whose data cannot be read; its rows then hold anything, the others' their own.
    """
    input_ids_T = torch.zeros(microbatch.rows, dtype=torch.long)
    targets_T = torch.full((microbatch.rows,), IGNORE, dtype=torch.long)
    for segment in microbatch.segments:
        data = data_of(segment.adapter)
        try:
            for sample, first, last in segment.sample_rows():
                input_ids, labels = data.sample(sample.index)
                input_ids_T[first:last] = torch.tensor(input_ids)
                targets_T[first : last - 1] = torch.tensor(labels[1:])
        except OSError as error:
            unreadable(segment.adapter, error)
    return input_ids_T, targets_T
