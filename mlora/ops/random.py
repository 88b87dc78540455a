"""Counter-based random numbers: a draw is a function of its coordinates, never of what was drawn before.

The generators are Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Initial values and
orders of rows come from Philox 4x64 with 10 rounds as NumPy carries it: key = (adapter seed, hash of the global module
name), or (seed, epoch) for rows; counter = (block, ordinal, step, purpose). Dropout is drawn where it is needed, on a
GPU inside the kernels, so it takes the cheaper Philox 4x32 with 7 rounds (the fewest that pass all of that paper's
tests), 16 bits for an element: key = hash of the above, counter = (column // 8, position, ordinal, step). So a mask
needs no storage, and stages, slots, neighbours and order of joining cannot change it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

INIT_A, INIT_B = 1, 2  # purposes: the last word of the counter of Philox 4x64
ROUNDS = 7  # of Philox 4x32
_WORD_ORDER = (0, 2, 1, 3)  # in which a counter's four words serve its eight columns, two each, the low half first
_ROWS_AT_ONCE = 64  # keeps the arrays of a mask in the processor's cache

Key = tuple[int, int]
Words = NDArray[np.uint64]


def key_for(seed: int, name: str) -> Key:
    """The generator's key for one module of one adapter."""
    return seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def philox(key: Key, purpose: int, step: int = 0, ordinal: int = 0) -> np.random.Philox:
    """The generator at the start of the stream with these coordinates."""
    return np.random.Philox(
        key=np.array(key, dtype=np.uint64), counter=np.array([0, ordinal, step, purpose], dtype=np.uint64)
    )


def shuffled(key: Key, purpose: int, rows: int) -> np.ndarray:
    """Numbers below ``rows`` in an order that key and purpose decide.

    Sorting raw words keeps it independent of numpy's version, which ``Generator.permutation`` is not.
    """
    return np.argsort(philox(key, purpose).random_raw(rows), kind="stable")


def dropout_key(key: Key) -> int:
    """The 64-bit key of one module's masks."""
    seed, name = key
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def dropout_threshold(dropout: float) -> int:
    """An element is removed where its 16 bits are below this."""
    return round(dropout * 2**16)


def keep_mask(key: Key, step: int, ordinal: int, rows: int, columns: int, dropout: float) -> torch.Tensor:
    """Bool [rows, columns]: False where dropout removes the element, each with probability ``dropout`` (to 2^-17).

    Rows are positions in the sample.
    """
    blocks = np.arange(-(-columns // 8), dtype=np.uint64)[None]
    keep = np.empty((rows, columns), dtype=bool)
    for first in range(0, rows, _ROWS_AT_ONCE):
        positions = np.arange(first, min(first + _ROWS_AT_ONCE, rows), dtype=np.uint64)[:, None]
        words = _philox_4x32(dropout_key(key), blocks, positions, ordinal, step)
        halves = np.stack([words[i] for i in _WORD_ORDER], axis=-1).astype("<u4").view("<u2")
        draws = halves.reshape(len(positions), -1)[:, :columns]
        keep[first : first + len(positions)] = draws >= dropout_threshold(dropout)
    return torch.from_numpy(keep)


def _philox_4x32(key: int, c0: Words, c1: Words, c2: int, c3: int) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each counter; all words are held as uint64, whose products do not overflow."""
    low = np.uint64(0xFFFFFFFF)
    zero = np.zeros(np.broadcast_shapes(c0.shape, c1.shape), dtype=np.uint64)
    x0, x1, x2, x3 = c0 + zero, c1 + zero, zero + np.uint64(c2), zero + np.uint64(c3)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        first, second = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1 = (second >> np.uint64(32)) ^ x1 ^ np.uint64(k0), second & low
        x2, x3 = (first >> np.uint64(32)) ^ x3 ^ np.uint64(k1), first & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3


def uniform(key: Key, purpose: int, shape: tuple[int, int], bound: float) -> torch.Tensor:
    """float64 of ``shape``, uniform in [-bound, bound)."""
    draws = np.random.Generator(philox(key, purpose)).random(shape)
    return torch.from_numpy(draws).mul_(2 * bound).sub_(bound)


def normal(key: Key, purpose: int, shape: tuple[int, int], std: float) -> torch.Tensor:
    """float64 of ``shape``, normal with mean 0 and deviation ``std``."""
    return torch.from_numpy(np.random.Generator(philox(key, purpose)).standard_normal(shape)).mul_(std)
