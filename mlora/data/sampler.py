"""Which rows make up a step: a function of seed and step, so that a resumed run needs no saved state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlora.ops.random import shuffled
from mlora.types import UserError

_MOST = 1 << 26  # rows of an epoch: its order takes some 32 bytes for each


class Share(NamedTuple):
    """A source's ``rows``, and how many rows of an epoch are ``drawn`` from it: at least each of its rows once."""

    rows: int
    drawn: int


def shares(rows: Sequence[int], weights: Sequence[float] | None) -> tuple[Share, ...]:
    """How an epoch is made up of sources with so many ``rows``.

    Without weights each row is in it once. With weights, source i gives weights[i] / Σ weights of the epoch's rows, and
    the epoch is the shortest in which every row of every source is at least once, as ``all_exhausted`` of datasets'
    ``interleave_datasets``; but the shares are exact, up to half a row, and not only expected.
    Raises UserError where an epoch would have more than 2²⁶ rows.
    """
    if weights is None:
        return tuple(Share(n, n) for n in rows)
    passes = max(n / weight for n, weight in zip(rows, weights, strict=True))
    drawn = [max(n, round(passes * weight)) for n, weight in zip(rows, weights, strict=True)]
    if sum(drawn) > _MOST:
        raise UserError(
            f"dataset: with these weights an epoch has {sum(drawn):,} rows until each of the {sum(rows):,} was there "
            "once; choose weights nearer to the numbers of rows, or cut the larger data set with max_samples"
        )
    return tuple(Share(n, count) for n, count in zip(rows, drawn, strict=True))


class Sampler:
    """Shuffled epochs over ``rows`` rows, cut into steps of ``rows_per_step``; the last step of an epoch may be short.

    With ``sources``, whose rows follow each other, a source of which an epoch takes more than its rows is in it whole
    as often as it fits, and for the rest with rows that are drawn anew for each epoch.

    The order of an epoch is a function of seed and epoch (mlora.ops.random).
    """

    def __init__(self, rows: int, seed: int, rows_per_step: int, sources: Sequence[Share] = ()) -> None:
        assert rows > 0 and rows_per_step > 0 and seed >= 0, (rows, rows_per_step, seed)
        self._sources, self._seed, self._rows_per_step = sources or (Share(rows, rows),), seed, rows_per_step
        assert sum(source.rows for source in self._sources) == rows, (rows, sources)
        self._rows = sum(source.drawn for source in self._sources)  # of an epoch
        self._order: tuple[int, np.ndarray] | None = None  # of the epoch asked for last

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._rows // self._rows_per_step)

    def epoch(self, step: int) -> float:
        """How many epochs have been seen when ``step`` (from 0) is done."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch + min((within + 1) * self._rows_per_step, self._rows) / self._rows

    def indices(self, step: int) -> list[int]:
        """The rows of ``step`` (from 0) in the order drawn. A step never reaches into the next epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self._rows_per_step
        return [int(i) for i in self._epoch_order(epoch)[first : first + self._rows_per_step]]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            drawn, first = [], 0
            for place, source in enumerate(self._sources):
                drawn.append(first + self._draw(epoch, place, source))
                first += source.rows
            self._order = epoch, np.concatenate(drawn)[shuffled((self._seed, epoch), 0, self._rows)]
        return self._order[1]

    def _draw(self, epoch: int, place: int, source: Share) -> np.ndarray:
        """The rows of one source that an epoch takes."""
        whole, rest = divmod(source.drawn, source.rows)
        some = shuffled((self._seed, epoch), 1 + place, source.rows)[:rest] if rest else np.arange(0)
        return np.concatenate([np.tile(np.arange(source.rows), whole), some])
