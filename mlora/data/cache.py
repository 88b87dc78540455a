"""Tokens of a source on disk, mapped into memory: built once, opened by every later run in moments.

An entry is a folder named by the source's content, by all that determines its tokens, and by the version of this
layout. It appears under that name only when it is complete, and is checked against its hashes before use.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mlora.data.sampler import Share, shares
from mlora.data.sources import Source
from mlora.files import sha256_of, sync_path
from mlora.types import IGNORE, Encoded, Row, UserError

EncodeRows = Callable[[Sequence[Row]], Sequence[Encoded | str]]  # text: the reason why the row is dropped

_VERSION = 2  # of the layout below, and of how files become rows
_BATCH = 1000  # rows per call of encode
# Name of each array: its type, little-endian so that a cache can be shared. ``ids`` and ``trained`` are per token.
_ARRAYS = {"ids": "<i4", "trained": "|b1", "starts": "<i8", "lengths": "<i4", "target_tokens": "<i4"}
_STATS, _HASHES = "stats.json", "sha256.json"


@dataclass(frozen=True, kw_only=True)
class DataStats:
    """What became of a data set's rows. ``dropped`` counts rows by reason; ``target_tokens`` are those predicted."""

    rows: int
    kept: int
    truncated: int
    dropped: Mapping[str, int]
    tokens: int
    target_tokens: int

    def __add__(self, other: DataStats) -> DataStats:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "dropped"}
        return DataStats(dropped=dict(Counter(self.dropped) + Counter(other.dropped)), **sums)

    def summary(self) -> str:
        """One line for the log."""
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in sorted(self.dropped.items()))
        return (
            f"{self.rows:,} rows: {self.kept:,} kept, {self.truncated:,} of them truncated{dropped}; "
            f"{self.tokens:,} tokens, {self.target_tokens:,} trained"
        )


@dataclass(frozen=True, kw_only=True)
class _Store:
    """What is per token of one source, mapped from disk, read-only, and where each row's tokens are in it."""

    starts: np.ndarray  # int64 [rows]: place of each row's first token
    ids: np.ndarray  # int32 [tokens]
    trained: np.ndarray  # bool [tokens]


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The kept rows of a data set as tokens. The rows of several sources follow each other."""

    lengths: np.ndarray  # int32 [rows]: tokens of each row
    target_tokens: np.ndarray  # int32 [rows]: predicted tokens of each row, labels shifted
    stats: DataStats
    digest: str  # of all arrays, and of the shares
    shares: tuple[Share, ...]  # of each source: its rows, and how many of an epoch's rows it gives
    _stores: tuple[_Store, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices: np.ndarray) -> TokenData:
        """These rows of one source; the tokens stay where they are, ``stats`` and ``digest`` those of the whole."""
        (store,) = self._stores
        return replace(
            self,
            lengths=self.lengths[indices],
            target_tokens=self.target_tokens[indices],
            shares=shares([len(indices)], None),
            _stores=(replace(store, starts=store.starts[indices]),),
        )

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``input_ids`` and ``labels`` of a row, int32 of its length; a label is ``IGNORE`` where not trained.

        Raises OSError where the file has been cut since: reading behind its end would end the process.
        """
        store, place = self._find(index)
        _check_size(store.ids)
        _check_size(store.trained)
        start = int(store.starts[place])
        span = slice(start, start + int(self.lengths[index]))
        ids = store.ids[span]
        return ids, np.where(store.trained[span], ids, np.int32(IGNORE))

    def _find(self, index: int) -> tuple[_Store, int]:
        for share, store in zip(self.shares, self._stores, strict=True):
            if index < share.rows:
                return store, index
            index -= share.rows
        raise IndexError(f"there are only {len(self)} rows")

    def in_memory(self) -> TokenData:
        """The same tokens as plain arrays, which travel between processes; mapped files do not."""
        stores = tuple(_Store(**{key: np.array(value) for key, value in vars(store).items()}) for store in self._stores)
        return replace(self, _stores=stores)


def join_tokens(parts: Sequence[TokenData], weights: Sequence[float] | None) -> TokenData:
    """The rows of several sources as one data set. ``weights``: each source's share of an epoch, see ``shares``.

    Raises UserError where the weights make an epoch endless.
    """
    if len(parts) == 1:
        return parts[0]
    drawn = shares([len(part) for part in parts], weights)
    facts = json.dumps([[part.digest for part in parts], drawn])
    return TokenData(
        lengths=np.concatenate([part.lengths for part in parts]),
        target_tokens=np.concatenate([part.target_tokens for part in parts]),
        stats=reduce(add, (part.stats for part in parts)),
        digest=hashlib.sha256(facts.encode()).hexdigest(),
        shares=drawn,
        _stores=tuple(store for part in parts for store in part._stores),
    )


def open_tokens(source: Source, encode: EncodeRows, digest: str, cache_dir: Path) -> TokenData:
    """Open the tokens of ``source``, encoding its rows first if no sound cache entry exists.

    ``encode`` turns a batch of rows into as many results, in order; ``digest`` names everything beside the source that
    its results depend on. Runs that build the same entry at once do not disturb each other.
    Raises UserError where the data are at fault, when no row is left, and when the cache cannot be written.
    """
    entry = cache_dir / hashlib.sha256(f"{_VERSION}\0{source.content()}\0{digest}".encode()).hexdigest()
    data = _open(entry)
    if data is not None:
        return data
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _build(source, encode, entry)
    except OSError as error:
        raise UserError(
            f"{cache_dir}: cannot write the token cache: {error.strerror}; name another folder in XDG_CACHE_HOME"
        ) from None


def _build(source: Source, encode: EncodeRows, entry: Path) -> TokenData:
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
    try:
        before = source.stamp()
        _write(source, encode, folder)
        if source.stamp() != before:
            raise UserError(f"{source.name}: changed while it was read; start again when it is complete")
        data = _open(folder)
        assert data is not None, "a cache entry just written does not match its own hashes"
        # Opened before it is moved: another run may replace the entry, but not what is already mapped.
        _publish(folder, entry)
        return data
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Path) -> None:
    """Move a complete folder to its name, unless another run has put a sound one there."""
    try:
        folder.rename(entry)
    except OSError:
        if not entry.is_dir() or _open(entry) is not None:
            return  # the next run builds it again, or finds the other run's
        damaged = folder.with_name(folder.name + ".damaged")
        with suppress(OSError):  # another run may be replacing the damaged entry too
            entry.rename(damaged)
            folder.rename(entry)
        shutil.rmtree(damaged, ignore_errors=True)
    sync_path(entry.parent)


def _write(source: Source, encode: EncodeRows, folder: Path) -> None:
    writer = _Writer(folder)
    try:
        for rows in _batches(source.rows()):
            writer.add(encode(rows), len(rows))
        if not writer.stats.kept:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(writer.stats.dropped.items()))
            raise UserError(f"{source.name}: none of its {writer.stats.rows:,} rows can be trained on: {reasons}")
        writer.finish()
    finally:
        writer.close()


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, _BATCH)):
        yield batch


class _Writer:
    """Appends encoded rows to the arrays of an entry and hashes what it writes; nothing stays in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in _ARRAYS}
        self._hashes = {name: hashlib.sha256() for name in _ARRAYS}
        self.stats = DataStats(rows=0, kept=0, truncated=0, dropped={}, tokens=0, target_tokens=0)

    def add(self, results: Sequence[Encoded | str], rows: int) -> None:
        """Write the results of one batch of ``rows`` rows."""
        assert len(results) == rows, "encode must return one result for each row"
        kept = [encoded for encoded in results if isinstance(encoded, Encoded)]
        tokens, target_tokens = self._add_kept(kept) if kept else (0, 0)
        self.stats += DataStats(
            rows=rows,
            kept=len(kept),
            truncated=sum(encoded.truncated for encoded in kept),
            dropped=Counter(reason for reason in results if isinstance(reason, str)),
            tokens=tokens,
            target_tokens=target_tokens,
        )

    def _add_kept(self, kept: Sequence[Encoded]) -> tuple[int, int]:
        """Returns how many tokens, and how many that are predicted."""
        lengths = np.array([len(encoded.input_ids) for encoded in kept])
        starts = np.cumsum(lengths) - lengths
        labels = np.fromiter(itertools.chain.from_iterable(e.labels for e in kept), np.int32)
        predicted = labels != IGNORE
        self._append("trained", predicted)
        predicted = predicted.copy()
        predicted[starts] = False  # nothing predicts a row's first token
        target_tokens = np.add.reduceat(predicted, starts, dtype=np.int64)
        self._append("ids", np.fromiter(itertools.chain.from_iterable(e.input_ids for e in kept), np.int32))
        self._append("starts", starts + self.stats.tokens)
        self._append("lengths", lengths)
        self._append("target_tokens", target_tokens)
        return int(lengths.sum()), int(target_tokens.sum())

    def _append(self, name: str, values: np.ndarray) -> None:
        data = values.astype(_ARRAYS[name]).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)

    def finish(self) -> None:
        """Write the counts and, last, the hashes, and bring everything to the disk."""
        stats = json.dumps(asdict(self.stats)).encode()
        hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        hashes[_STATS] = hashlib.sha256(stats).hexdigest()
        self.close()
        (self._folder / _STATS).write_bytes(stats)
        (self._folder / _HASHES).write_bytes(json.dumps(hashes).encode())
        for path in (*self._folder.iterdir(), self._folder):
            sync_path(path)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _open(entry: Path) -> TokenData | None:
    """Map an entry's arrays; None where there is no entry or it is damaged in any way."""
    try:
        sums = (entry / _HASHES).read_bytes()
        hashes = json.loads(sums)
        for name in (*_ARRAYS, _STATS):
            if sha256_of(entry / name) != hashes[name]:
                return None
        stats = DataStats(**json.loads((entry / _STATS).read_bytes()))
        arrays = {name: np.memmap(entry / name, dtype=kind, mode="r") for name, kind in _ARRAYS.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    rows = len(arrays["lengths"])
    return TokenData(
        lengths=np.array(arrays["lengths"]),
        target_tokens=np.array(arrays["target_tokens"]),
        stats=stats,
        digest=hashlib.sha256(sums).hexdigest(),
        shares=(Share(rows, rows),),
        _stores=(_Store(starts=np.array(arrays["starts"]), ids=arrays["ids"], trained=arrays["trained"]),),
    )


def _check_size(array: np.ndarray) -> None:
    mapped = array.base
    if isinstance(mapped, mmap.mmap) and mapped.size() < array.nbytes:
        raise OSError(f"the token cache of its data was cut to {mapped.size():,} of {array.nbytes:,} bytes")
