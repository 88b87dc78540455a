"""Rows of files and hub data sets to tokens in a memory-mapped cache."""

from mlora.data.cache import TokenData, join_tokens, open_tokens
from mlora.data.held_out import hold_out
from mlora.data.reader import read_rows
from mlora.data.sampler import Sampler, shares
from mlora.data.sources import FileSource, HubSource, open_source

__all__ = [
    "FileSource",
    "HubSource",
    "Sampler",
    "TokenData",
    "hold_out",
    "join_tokens",
    "open_source",
    "open_tokens",
    "read_rows",
    "shares",
]
