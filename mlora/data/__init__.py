"""Rows of files to tokens in a memory-mapped cache."""

from mlora.data.cache import DataStats, TokenData, open_tokens
from mlora.data.held_out import hold_out
from mlora.data.reader import read_rows
from mlora.data.sampler import Sampler

__all__ = ["DataStats", "Sampler", "TokenData", "hold_out", "open_tokens", "read_rows"]
