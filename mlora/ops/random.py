"""Counter-based random numbers: a draw is a function of its coordinates, never of what was drawn before.

The generator is Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as
NumPy carries it. Key = (adapter seed, hash of the global module name); counter = (block, ordinal, step, purpose). So
a mask needs no storage, and stages, slots, neighbours and order of joining cannot change it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

DROPOUT, INIT_A, INIT_B, PERMUTATION = range(4)  # purposes: the last word of the counter

Key = tuple[int, int]


def key_for(seed: int, name: str) -> Key:
    """The generator's key for one module of one adapter."""
    return seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def philox(key: Key, purpose: int, step: int = 0, ordinal: int = 0) -> np.random.Philox:
    """The generator at the start of the stream with these coordinates."""
    return np.random.Philox(
        key=np.array(key, dtype=np.uint64), counter=np.array([0, ordinal, step, purpose], dtype=np.uint64)
    )


def keep_mask(key: Key, step: int, ordinal: int, rows: int, columns: int, dropout: float) -> torch.Tensor:
    """Bool [rows, columns]: False where dropout removes the element, each with probability ``dropout``.

    Element (position, column) takes the 32-bit half number ``position · columns + column`` of the sample's stream.
    """
    count = rows * columns
    words = philox(key, DROPOUT, step, ordinal).random_raw((count + 1) // 2)
    halves = words.astype("<u8", copy=False).view("<u4")[:count]
    return torch.from_numpy(halves >= np.uint32(round(dropout * 2**32))).view(rows, columns)


def uniform(key: Key, purpose: int, shape: tuple[int, int], bound: float) -> torch.Tensor:
    """float64 of ``shape``, uniform in [-bound, bound)."""
    draws = np.random.Generator(philox(key, purpose)).random(shape)
    return torch.from_numpy(draws).mul_(2 * bound).sub_(bound)


def normal(key: Key, purpose: int, shape: tuple[int, int], std: float) -> torch.Tensor:
    """float64 of ``shape``, normal with mean 0 and deviation ``std``."""
    return torch.from_numpy(np.random.Generator(philox(key, purpose)).standard_normal(shape)).mul_(std)
