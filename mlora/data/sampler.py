"""Which rows make up a step: a function of seed and step, so that a resumed run needs no saved state."""

from __future__ import annotations

import numpy as np


class Sampler:
    """Shuffled epochs over ``rows`` rows, cut into steps of ``rows_per_step``; the last step of an epoch may be short.

    The order of an epoch comes from the counter-based generator Philox (Salmon et al., 2011) keyed by seed and epoch.
    Sorting its raw words keeps the order independent of numpy's version, which ``Generator.permutation`` is not.
    """

    def __init__(self, rows: int, seed: int, rows_per_step: int) -> None:
        assert rows > 0 and rows_per_step > 0 and seed >= 0, (rows, rows_per_step, seed)
        self._rows, self._seed, self._rows_per_step = rows, seed, rows_per_step
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
            words = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)).random_raw(self._rows)
            self._order = epoch, np.argsort(words, kind="stable")
        return self._order[1]
