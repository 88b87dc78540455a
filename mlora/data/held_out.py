"""Rows that are held out of training: a function of the data's length, the size asked for and the seed."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from mlora.data.cache import TokenData
from mlora.ops.random import shuffled
from mlora.types import UserError

_EPOCH = 2**64 - 1  # of the order from which rows are held out; no training reaches it


def hold_out(data: TokenData, size: float, seed: int) -> tuple[TokenData, TokenData]:
    """(rows to train on, rows held out), each in the order of the file.

    ``size`` is a number of rows, or below 1 a share of them, rounded up. Raises UserError where none is left to train.
    """
    rows = int(size) if size >= 1 else math.ceil(Fraction(str(size)) * len(data))
    if rows >= len(data):
        raise UserError(f"val_size: {size:g} holds out {rows:,} of its {len(data):,} rows, so none is left to train on")
    order = shuffled((seed, _EPOCH), 0, len(data))
    return data.rows(np.sort(order[rows:])), data.rows(np.sort(order[:rows]))
