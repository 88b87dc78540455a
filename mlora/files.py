"""Files and folders that are there whole or not at all, and the words for what a disk does not give or take."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlora.types import UserError


@contextmanager
def readable(place: object) -> Iterator[None]:
    """Raises UserError, which begins with ``place``, where what is read in it cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be read: {error.strerror or error}") from None


@contextmanager
def writable(place: object) -> Iterator[None]:
    """Raises UserError, which begins with ``place``, where what is written in it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error.strerror or error}") from None


def _hidden(path: Path) -> Path:
    """Where a file or folder is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing: others may be reading, and what a full disk took of it would only fill it further.

    Raises OSError.
    """
    try:
        _hidden(path).write_bytes(data)
        _hidden(path).rename(path)
    except OSError:
        with suppress(OSError):
            _hidden(path).unlink()
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the name ``folder``, and the place of what is there, when all in it is on the disk.

    Where anything goes wrong meanwhile, nothing is left of it.
    """
    staging, old = _hidden(folder), folder.with_name(f".{folder.name}.old.partial")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.rglob("*"), staging):
            sync_path(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        staging.rename(folder)
        sync_path(folder.parent)
    finally:
        for left in (staging, old):
            shutil.rmtree(left, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The sum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
