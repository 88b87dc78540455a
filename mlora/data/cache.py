"""Tokens of one data file on disk, mapped into memory: built once, opened by every later run in moments.

An entry is a folder named by the file's content, by all that determines its tokens, and by the version of this
layout. It appears under that name only when it is complete, and is checked against its hashes before use.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mlora.data.reader import check_file, read_rows
from mlora.types import IGNORE, Encoded, Row, UserError

EncodeRows = Callable[[Sequence[Row]], Sequence[Encoded | str]]  # text: the reason why the row is dropped

_VERSION = 1  # of the layout below
_BATCH = 1000  # rows per call of encode
# Name of each array: its type, little-endian so that a cache can be shared. ``ids`` and ``trained`` are per token.
_ARRAYS = {"ids": "<i4", "trained": "|b1", "starts": "<i8", "lengths": "<i4", "target_tokens": "<i4"}
_STATS, _HASHES = "stats.json", "sha256.json"


@dataclass(frozen=True, kw_only=True)
class DataStats:
    """What became of a file's rows. ``dropped`` counts rows by reason; ``target_tokens`` are those predicted."""

    rows: int
    kept: int
    truncated: int
    dropped: Mapping[str, int]
    tokens: int
    target_tokens: int

    def summary(self) -> str:
        """One line for the log."""
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in sorted(self.dropped.items()))
        return (
            f"{self.rows:,} rows: {self.kept:,} kept, {self.truncated:,} of them truncated{dropped}; "
            f"{self.tokens:,} tokens, {self.target_tokens:,} trained"
        )


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The kept rows of a file as tokens: what is per token is mapped from disk, read-only."""

    lengths: np.ndarray  # int32 [rows]: tokens of each row
    target_tokens: np.ndarray  # int32 [rows]: predicted tokens of each row, labels shifted
    stats: DataStats
    digest: str  # of all arrays
    _starts: np.ndarray  # int64 [rows]: place of each row's first token
    _ids: np.ndarray  # int32 [tokens]
    _trained: np.ndarray  # bool [tokens]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices: np.ndarray) -> TokenData:
        """These rows alone; the tokens stay where they are, ``stats`` and ``digest`` those of the whole."""
        lengths, targets, starts = (x[indices] for x in (self.lengths, self.target_tokens, self._starts))
        return replace(self, lengths=lengths, target_tokens=targets, _starts=starts)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``input_ids`` and ``labels`` of a row, int32 of its length; a label is ``IGNORE`` where not trained.

        Raises OSError where the file has been cut since: reading behind its end would end the process.
        """
        _check_size(self._ids)
        _check_size(self._trained)
        start = int(self._starts[index])
        span = slice(start, start + int(self.lengths[index]))
        ids = self._ids[span]
        return ids, np.where(self._trained[span], ids, np.int32(IGNORE))


def open_tokens(path: Path, encode: EncodeRows, digest: str, cache_dir: Path) -> TokenData:
    """Open the tokens of ``path``, encoding the file first if no sound cache entry exists.

    ``encode`` turns a batch of rows into as many results, in order; ``digest`` names everything beside the file that
    its results depend on. Runs that build the same entry at once do not disturb each other.
    Raises UserError where the file is at fault, when no row is left, and when the cache cannot be written.
    """
    entry = cache_dir / _key(path, digest)
    data = _open(entry)
    if data is not None:
        return data
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _build(path, encode, entry)
    except OSError as error:
        raise UserError(f"{cache_dir}: cannot write the token cache: {error.strerror}") from None


def _key(path: Path, digest: str) -> str:
    check_file(path)
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return hashlib.sha256(f"{_VERSION}\0{content}\0{digest}".encode()).hexdigest()


def _build(path: Path, encode: EncodeRows, entry: Path) -> TokenData:
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
    try:
        before = _identity(path)
        _write(path, encode, folder)
        if _identity(path) != before:
            raise UserError(f"{path}: changed while it was read; start again when it is complete")
        data = _open(folder)
        assert data is not None, "a cache entry just written does not match its own hashes"
        # Opened before it is moved: another run may replace the entry, but not what is already mapped.
        _publish(folder, entry)
        return data
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _identity(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


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
    _sync_folder(entry.parent)


def _write(path: Path, encode: EncodeRows, folder: Path) -> None:
    writer = _Writer(folder)
    try:
        for rows in _batches(read_rows(path)):
            writer.add(encode(rows), len(rows))
        if not writer.kept:
            raise UserError(f"{path}: none of its {writer.rows:,} rows can be trained on: {_reasons(writer.dropped)}")
        writer.finish()
    finally:
        writer.close()


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, _BATCH)):
        yield batch


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in sorted(dropped.items()))


class _Writer:
    """Appends encoded rows to the arrays of an entry and hashes what it writes; nothing stays in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in _ARRAYS}
        self._hashes = {name: hashlib.sha256() for name in _ARRAYS}
        self.rows = self.kept = self._truncated = self._tokens = self._target_tokens = 0
        self.dropped: Counter[str] = Counter()

    def add(self, results: Sequence[Encoded | str], rows: int) -> None:
        """Write the results of one batch of ``rows`` rows."""
        assert len(results) == rows, "encode must return one result for each row"
        self.rows += rows
        self.dropped.update(reason for reason in results if isinstance(reason, str))
        kept = [encoded for encoded in results if isinstance(encoded, Encoded)]
        if kept:
            self._add_kept(kept)

    def _add_kept(self, kept: Sequence[Encoded]) -> None:
        lengths = np.array([len(encoded.input_ids) for encoded in kept])
        starts = np.cumsum(lengths) - lengths
        labels = np.fromiter(itertools.chain.from_iterable(e.labels for e in kept), np.int32)
        predicted = labels != IGNORE
        self._append("trained", predicted)
        predicted = predicted.copy()
        predicted[starts] = False  # nothing predicts a row's first token
        target_tokens = np.add.reduceat(predicted, starts, dtype=np.int64)
        self._append("ids", np.fromiter(itertools.chain.from_iterable(e.input_ids for e in kept), np.int32))
        self._append("starts", starts + self._tokens)
        self._append("lengths", lengths)
        self._append("target_tokens", target_tokens)
        self.kept += len(kept)
        self._truncated += sum(encoded.truncated for encoded in kept)
        self._tokens += int(lengths.sum())
        self._target_tokens += int(target_tokens.sum())

    def _append(self, name: str, values: np.ndarray) -> None:
        data = values.astype(_ARRAYS[name]).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)

    def finish(self) -> None:
        """Write the counts and, last, the hashes, and bring everything to the disk."""
        stats = json.dumps(asdict(self._stats())).encode()
        hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        hashes[_STATS] = hashlib.sha256(stats).hexdigest()
        for file in self._files.values():
            _sync(file)
        for name, data in ((_STATS, stats), (_HASHES, json.dumps(hashes).encode())):
            with (self._folder / name).open("wb") as file:
                file.write(data)
                _sync(file)
        _sync_folder(self._folder)

    def _stats(self) -> DataStats:
        return DataStats(
            rows=self.rows,
            kept=self.kept,
            truncated=self._truncated,
            dropped=dict(self.dropped),
            tokens=self._tokens,
            target_tokens=self._target_tokens,
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(entry: Path) -> TokenData | None:
    """Map an entry's arrays; None where there is no entry or it is damaged in any way."""
    try:
        sums = (entry / _HASHES).read_bytes()
        hashes = json.loads(sums)
        for name in (*_ARRAYS, _STATS):
            _check(entry / name, hashes[name])
        stats = DataStats(**json.loads((entry / _STATS).read_bytes()))
        arrays = {name: np.memmap(entry / name, dtype=kind, mode="r") for name, kind in _ARRAYS.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return TokenData(
        lengths=np.array(arrays["lengths"]),
        target_tokens=np.array(arrays["target_tokens"]),
        stats=stats,
        digest=hashlib.sha256(sums).hexdigest(),
        _starts=np.array(arrays["starts"]),
        _ids=arrays["ids"],
        _trained=arrays["trained"],
    )


def _check_size(array: np.ndarray) -> None:
    mapped = array.base
    if isinstance(mapped, mmap.mmap) and mapped.size() < array.nbytes:
        raise OSError(f"the token cache of its data was cut to {mapped.size():,} of {array.nbytes:,} bytes")


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(f"{path}: does not match its hash")
