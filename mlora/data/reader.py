"""A file's rows as a stream: a file larger than memory is read without being held.

JSON and JSONL are read here, CSV, Parquet and Arrow in ``tables``. What a file is shows in its content; only CSV, which
has no mark of its own, is known by its name.
"""

from __future__ import annotations

import codecs
import json
import re
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mlora.data import tables
from mlora.files import readable
from mlora.types import Row, UserError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PACKED = {  # how files begin that hold rows in a wrapping of another program
    b"\x1f\x8b": "packed by gzip",
    b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"PK\x03\x04": "a ZIP archive or a workbook",
    b"SQLite format 3": "a database",
}
_BLANKS = re.compile(r"[ \t\r\n]*")
_CHUNK = 1 << 16  # bytes
# A fault of the text reads the same as a value cut by the buffer's end only this near to that end.
_CUT_REACH = 16  # characters


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file: a JSON array's objects, JSONL's, CSV's, Parquet's or Arrow's.

    ``Row.line`` is the line on which the row starts; in Parquet and Arrow, which have no lines, its number from 1.
    A byte order mark, CRLF and blank lines are fine.
    Raises UserError, with file, line and column as far as they exist, for a file that cannot be read, is empty, is no
    UTF-8, is not what it seems to be, or holds a row that is no object.
    """
    kind = file_kind(path)
    found = False
    with readable(path), path.open("rb") as file:
        for row in _READERS[kind](file, path):
            found = True
            yield row
    if not found:
        raise UserError(f"{path}: holds no rows; {_EMPTY.get(kind, 'give a file with some')}")


def file_kind(path: Path) -> str:
    """What a file is: array, lines, csv, tsv, parquet, arrow or arrow-stream. Raises UserError as ``read_rows``."""
    check_file(path)
    with readable(path), path.open("rb") as file:
        head = file.read(_CHUNK)
    if head.startswith(_LFS_POINTER):
        raise UserError(f"{path}: is a Git-LFS pointer and not the data; run `git lfs pull` to fetch it")
    for mark, kind in _PACKED.items():
        if head.startswith(mark):
            raise UserError(f"{path}: is {kind}, not rows; unpack it, or save its rows as JSONL, CSV or Parquet")
    for mark, kind in tables.MARKS.items():
        if head.startswith(mark):
            return kind
    if path.suffix.lower() in (".csv", ".tsv"):
        return path.suffix.lower().removeprefix(".")
    if path.suffix.lower() in (".parquet", ".arrow"):
        name = path.suffix.removeprefix(".").capitalize()
        raise UserError(f"{path}: does not begin as a {name} file does; is it cut off, or named wrongly?")
    return "array" if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "lines"


def check_file(path: Path) -> None:
    """Raises UserError where there is no regular file: opening a pipe would wait for ever."""
    with readable(path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a folder; give its files, as a list under dataset")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is not a regular file; write the rows to a file first")


def _read_lines(file: BinaryIO, path: Path) -> Iterator[Row]:
    for line, text in enumerate(tables.text_lines(file, path), 1):
        if text.strip(" \t\r\n"):
            yield _row(_parse_line(text.rstrip("\r\n"), path, line), path, line)


def _parse_line(text: str, path: Path, line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = 'each line must hold one whole JSON object; plain text goes into lines of {"text": "…"}'
        raise UserError(f"{path}:{line}:{error.pos + 1}: not valid JSON: {error.msg}; {hint}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of nested brackets
        raise UserError(f"{path}:{line}: cannot be parsed: {error}") from None


def _row(value: object, path: Path, line: int) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{path}:{line}: expected a JSON object with named columns, found {json.dumps(value)[:40]}")
    return Row(value, str(path), line)


def _read_array(file: BinaryIO, path: Path) -> Iterator[Row]:
    buffer = _Buffer(file, path)
    buffer.skip("[")
    if buffer.peek() != "]":
        while True:
            buffer.peek()
            line = buffer.line
            yield _row(buffer.value(), path, line)
            if buffer.peek() != ",":
                break
            buffer.skip(",")
            if buffer.peek() == "]":
                raise buffer.error(0, "not valid JSON: a comma behind the last row; delete it")
    buffer.skip("]")
    if buffer.peek():
        raise buffer.error(0, "text after the array's end; keep one array of objects per file")


_EMPTY = {
    "array": "give a JSON array of objects or one JSON object per line",
    "lines": "give a JSON array of objects or one JSON object per line",
    "csv": "give a line of column names and a line for each row",
    "tsv": "give a line of column names and a line for each row",
}
_READERS: dict[str, Callable[[BinaryIO, Path], Iterator[Row]]] = {
    "array": _read_array,
    "lines": _read_lines,
    "csv": partial(tables.read_separated, delimiter=","),
    "tsv": partial(tables.read_separated, delimiter="\t"),
    **{kind: partial(tables.read_columns, kind=kind) for kind in tables.MARKS.values()},
}


class _Buffer:
    """The unread part of a text file, with the place of its first character."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False
        self.line, self._column = 1, 1

    def peek(self) -> str:
        """The next character that is not blank; "" at the file's end."""
        while True:
            match = _BLANKS.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._grow(_CHUNK)

    def skip(self, character: str) -> None:
        found = self.peek()
        if not found:
            raise self.error(0, f"the file ends where {character!r} was expected; is it cut off?")
        if found != character:
            raise self.error(0, f"not valid JSON: expected {character!r}")
        self._advance(self._at + 1)

    def value(self) -> object:
        """Parse the value that starts here, reading on as long as the value may have been cut by the buffer."""
        size = _CHUNK
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    cut = "" if self._text.rstrip().endswith("]") else "; is the file cut off?"
                    cut = cut if self._ended and self._may_be_cut(error) else ""
                    raise self.error(error.pos - self._at, f"not valid JSON: {error.msg}{cut}") from None
                self._grow(size)
                size *= 2  # doubling keeps the repeated parsing of one long row linear in its length
            except (ValueError, RecursionError) as error:
                raise self.error(0, f"cannot be parsed: {error}") from None
            else:
                self._advance(end)
                return value

    def error(self, ahead: int, message: str) -> UserError:
        """A UserError for the character ``ahead`` of the present place."""
        self._advance(self._at + ahead)
        return UserError(f"{self._path}:{self.line}:{self._column}: {message}")

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _CUT_REACH

    def _advance(self, to: int) -> None:
        newlines = self._text.count("\n", self._at, to)
        if newlines:
            self.line += newlines
            self._column = to - self._text.rfind("\n", self._at, to)
        else:
            self._column += to - self._at
        self._at = to

    def _grow(self, size: int) -> None:
        data = self._file.read(size)
        self._ended = not data
        try:
            self._text = self._text[self._at :] + self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError:
            self._file.seek(0)
            for _ in tables.text_lines(self._file, self._path):  # names the byte
                pass
            raise
        self._at = 0
