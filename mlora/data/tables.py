"""Rows of CSV, Parquet and Arrow files. Parquet and Arrow need pyarrow, which is imported when one is read."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from mlora.types import Row, UserError

MARKS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow-stream"}  # how files of a kind begin
_BATCH = 1000  # rows that are held as objects at once
_LONGEST = 1 << 30  # characters of one cell; the csv module's own limit is 131,072


def read_separated(file: BinaryIO, path: Path, delimiter: str) -> Iterator[Row]:
    """The rows of a file whose first line names the columns. A cell may hold line breaks inside double quotes.

    Every value is text, as it stands there; an empty cell is empty text.
    """
    csv.field_size_limit(_LONGEST)
    reader = csv.reader(text_lines(file, path), delimiter=delimiter, strict=True)
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


def text_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """The lines of a text, with their ends and without a byte order mark."""
    for line, raw in enumerate(file, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"{path}:{line}:{error.start + 1}"
            bad = f"byte 0x{raw[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
            raise UserError(f"{place}: {bad}") from None
        yield text.removeprefix("\ufeff") if line == 1 else text


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


def read_columns(file: BinaryIO, path: Path, kind: str) -> Iterator[Row]:
    """The rows of a Parquet file, or of an Arrow file in either format."""
    pyarrow = _pyarrow(path)
    line = 0
    try:
        for batch in _batches(pyarrow, file, kind):
            for first in range(0, batch.num_rows, _BATCH):
                for value in batch.slice(first, _BATCH).to_pylist():
                    line += 1
                    yield Row(value, str(path), line)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        name = kind.split("-")[0].capitalize()
        raise UserError(f"{path}: is no whole {name} file: {reason}; is it cut off?") from None


def _batches(pyarrow: ModuleType, file: BinaryIO, kind: str) -> Iterator[Any]:
    if kind == "parquet":
        yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=_BATCH)
    elif kind == "arrow":  # the file format, also called Feather 2
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:  # the streaming format, which ``save_to_disk`` of datasets writes
        yield from pyarrow.ipc.open_stream(file)


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: needs the package pyarrow: pip install 'mlora-engine[data]'") from None
    return pyarrow
