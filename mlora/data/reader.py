"""JSON and JSONL files as a stream of rows: a file larger than memory is read without being held."""

from __future__ import annotations

import codecs
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mlora.types import Row, UserError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BLANKS = re.compile(r"[ \t\r\n]*")
_CHUNK = 1 << 16  # bytes
# A fault of the text reads the same as a value cut by the buffer's end only this near to that end.
_CUT_REACH = 16  # characters


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON array or of a JSONL file, told apart by content and not by the file's name.

    ``Row.line`` is the line on which the object starts. A byte order mark, CRLF and blank lines are fine.
    Raises UserError, with file, line and column as far as they exist, for a file that cannot be read, is empty, is no
    UTF-8, is no JSON or holds a row that is no object.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(_CHUNK)
            if head.startswith(_LFS_POINTER):
                raise UserError(f"{path}: is a Git-LFS pointer and not the data; run `git lfs pull` to fetch it")
            file.seek(0)
            found = False
            for row in _read_array(file, path) if _is_array(head) else _read_lines(file, path):
                found = True
                yield row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not found:
        raise UserError(f"{path}: holds no rows; give a JSON array of objects or one JSON object per line")


def check_file(path: Path) -> None:
    """Raises UserError where there is no regular file: opening a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a folder; give a .json or .jsonl file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is not a regular file; write the rows to a .json or .jsonl file first")


def _is_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_lines(file: BinaryIO, path: Path) -> Iterator[Row]:
    for line, raw in enumerate(file, 1):
        bom = codecs.BOM_UTF8 if line == 1 else b""
        try:
            text = raw.removeprefix(bom).decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise _bad_utf8(path, line, raw) from None
        if text.strip(" \t\r"):
            yield _row(_parse_line(text, path, line), path, line)


def _parse_line(text: str, path: Path, line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "each line must hold one whole JSON object"
        raise UserError(f"{path}:{line}:{error.pos + 1}: not valid JSON: {error.msg}; {hint}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of nested brackets
        raise UserError(f"{path}:{line}: cannot be parsed: {error}") from None


def _row(value: object, path: Path, line: int) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{path}:{line}: expected a JSON object with named columns, found {json.dumps(value)[:40]}")
    return Row(value, str(path), line)


def _bad_utf8(path: Path, line: int, raw: bytes) -> UserError:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"{path}:{line}:{error.start + 1}"
        return UserError(f"{place}: byte 0x{raw[error.start]:02x} is not valid UTF-8; save the file as UTF-8")
    raise AssertionError("called for a line that is valid UTF-8")


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
            raise self._find_bad_utf8() from None
        self._at = 0

    def _find_bad_utf8(self) -> UserError:
        self._file.seek(0)
        for line, raw in enumerate(self._file, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError:
                return _bad_utf8(self._path, line, raw)
        raise AssertionError("called for a file that is valid UTF-8")
