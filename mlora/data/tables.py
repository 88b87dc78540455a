"""Rows of CSV, Parquet and Arrow files. Parquet and Arrow need pyarrow, which is imported when one is read."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from mlora.types import Row, UserError

MARKS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow-stream"}  # how files of a kind begin
_BATCH = 1000  # rows that are held as objects at once
_LONGEST = 1 << 30  # characters of one cell; the csv module's own limit is 131,072


def bad_utf8(path: Path, line: int, raw: bytes) -> UserError:
    """The error for a line that is no UTF-8, with the place of its first bad byte."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"{path}:{line}:{error.start + 1}"
        return UserError(f"{place}: byte 0x{raw[error.start]:02x} is not valid UTF-8; save the file as UTF-8")
    raise AssertionError("called for a line that is valid UTF-8")


def read_csv(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The rows of a file whose first line names the columns. A cell may hold line breaks inside double quotes.

    Every value is text, as it stands there; an empty cell is empty text.
    """
    return _read_separated(file, path, ",")


def read_tsv(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The same with tabs between the columns."""
    return _read_separated(file, path, "\t")


def _read_separated(file: BinaryIO, path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST)
    reader = csv.reader(_text_lines(file, path), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            hint = 'a cell with a quote in it is written "He said ""no"""'
            raise UserError(f"{path}:{line}: not valid CSV: {error}; {hint}") from None
        if cells is None:
            return
        if not cells:
            continue  # a blank line
        if names is None:
            names = cells
            _check_names(names, delimiter, path, line)
        elif len(cells) != len(names):
            hint = 'a cell that holds the separator or a line break stands in double quotes: "a, b"'
            raise UserError(f"{path}:{line}: {len(cells)} cells for {len(names)} columns ({', '.join(names)}); {hint}")
        else:
            yield Row(dict(zip(names, cells, strict=True)), str(path), line)


def _text_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for line, raw in enumerate(file, 1):
        try:
            yield raw.removeprefix(codecs.BOM_UTF8 if line == 1 else b"").decode("utf-8")
        except UnicodeDecodeError:
            raise bad_utf8(path, line, raw) from None


def _check_names(names: Sequence[str], delimiter: str, path: Path, line: int) -> None:
    place = f"{path}:{line}"
    others = [other for other in (";", "\t", "|", ",") if other != delimiter and other in names[0]]
    if len(names) == 1 and others:
        raise UserError(f"{place}: one column {names[0]!r}: separated by {others[0]!r}? Save it with {delimiter!r}")
    for name in names:
        if not name.strip():
            hint = "the first line names all columns (of pandas' index: to_csv(…, index=False) leaves it out)"
            raise UserError(f"{place}: a column has no name; {hint}")
        if names.count(name) > 1:
            raise UserError(f"{place}: two columns are called {name!r}; give each its own name")


def read_parquet(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The rows of a Parquet file."""
    pyarrow = _pyarrow(path)
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        yield from _rows(parquet.iter_batches(batch_size=_BATCH), path)
    except pyarrow.ArrowException as error:
        raise _damaged(path, "Parquet", error) from None


def read_arrow_file(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The rows of an Arrow file in the file format, also called Feather 2."""
    pyarrow = _pyarrow(path)
    try:
        reader = pyarrow.ipc.open_file(file)
        yield from _rows((reader.get_batch(i) for i in range(reader.num_record_batches)), path)
    except pyarrow.ArrowException as error:
        raise _damaged(path, "Arrow", error) from None


def read_arrow_stream(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The rows of an Arrow file in the streaming format, which ``save_to_disk`` of datasets writes."""
    pyarrow = _pyarrow(path)
    try:
        yield from _rows(pyarrow.ipc.open_stream(file), path)
    except pyarrow.ArrowException as error:
        raise _damaged(path, "Arrow", error) from None


def _rows(batches: Any, path: Path) -> Iterator[Row]:
    line = 0
    for batch in batches:
        for first in range(0, batch.num_rows, _BATCH):
            for value in batch.slice(first, _BATCH).to_pylist():
                line += 1
                yield Row(value, str(path), line)


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: needs the package pyarrow: pip install 'mlora-engine[data]'") from None
    return pyarrow


def _damaged(path: Path, kind: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{path}: is no whole {kind} file: {reason}; is it cut off?")
