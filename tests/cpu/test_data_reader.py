import bz2
import codecs
import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlora.data import FileSource, open_tokens, read_rows, reader
from mlora.types import UserError


def write(tmp_path, data, name="rows.json"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    return path


def places(path):
    return [(row.line, row.value) for row in read_rows(path)]


A, B = {"a": "é"}, {"b": [1, {"c": None}]}


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.txt"])
@pytest.mark.parametrize(
    "text, lines",
    [
        ('{"a": "é"}\n{"b": [1, {"c": null}]}\n', [1, 2]),
        ('{"a": "é"}\n{"b": [1, {"c": null}]}', [1, 2]),
        ('\ufeff{"a": "é"}\r\n\r\n  \r\n{"b": [1, {"c": null}]}\r\n', [1, 4]),
        ('[{"a": "é"}, {"b": [1, {"c": null}]}]', [1, 1]),
        ('\ufeff\r\n[\r\n  {\r\n  "a": "é"},\r\n\r\n{"b": [1, {"c": null}]}\r\n]\r\n', [3, 6]),
    ],
)
def test_arrays_and_lines_are_told_apart_by_content(tmp_path, name, text, lines):
    assert places(write(tmp_path, text, name)) == list(zip(lines, [A, B], strict=True))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
objects = st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=4)


@given(rows=objects, indent=st.sampled_from([None, 0, 3]), ascii_=st.booleans(), chunk=st.integers(1, 40))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_array_cut_anywhere_by_the_buffer_gives_the_same_rows(tmp_path, rows, indent, ascii_, chunk):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_)
    path = write(tmp_path, text.encode("utf-8", "surrogatepass") if ascii_ else text.encode("utf-8", "replace"))
    expected = json.loads(path.read_text(encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_CHUNK", chunk)
        found = places(path)
    assert [value for _, value in found] == expected
    if indent is None:
        assert {line for line, _ in found} == {1}
    else:
        lines = path.read_bytes().decode().split("\n")
        assert all(lines[line - 1].lstrip().startswith("{") for line, _ in found)


FAULTS = [
    (b"", "holds no rows"),
    (b"\xef\xbb\xbf \n\n", "holds no rows"),
    (b"[]", "holds no rows"),
    (b'{"a": 1}\n{"a": \n', ":2:7: not valid JSON"),
    (b'{"a": 1}\n{"a": "cut', ":2:7: not valid JSON"),
    (b'{"a": 1}\n7\n', ":2: expected a JSON object"),
    (b'{"a": 1}\n\n["b"]\n', ":3: expected a JSON object"),
    (b'{"a": 1}\r\n{"a": "\xe9"}\r\n', ":2:8: byte 0xe9 is not valid UTF-8"),
    (b"\xff\xfe{\x00", ":1:1: byte 0xff is not valid UTF-8"),
    (b'[{"a": 1},\n {"a": "\xe9"}]', ":2:9: byte 0xe9 is not valid UTF-8"),
    (b'[{"a": 1},\n {"a": \xc3', ":2:8: byte 0xc3 is not valid UTF-8"),
    (b'[{"a": 1},\n  {"a" 2}]', ":2:8: not valid JSON"),
    (b'[{"a": 1},\n 5]', ":2: expected a JSON object"),
    (b'[{"a": 1}\n {"a": 1}]', ":2:2: not valid JSON: expected ']'"),
    (b'[{"a": 1},\n {"a": "cut', ":2:8: not valid JSON: Unterminated string starting at; is the file cut off?"),
    (b'[{"a": 1},\n', ":2:1: not valid JSON: Expecting value; is the file cut off?"),
    (b'[{"a": 1},\n]', ":2:1: not valid JSON: a comma behind the last row; delete it"),
    (b'[{"a": 1},\n {"a": ', ":2:8: not valid JSON: Expecting value; is the file cut off?"),
    (b'[{"a": 1}\n', ":2:1: the file ends where ']' was expected; is it cut off?"),
    (b'[{"a": 1}]\n[{"a": 1}]', ":2:1: text after the array's end"),
    (b"[" * 100_000, ":1:2: cannot be parsed"),
    (b'{"a": ' + b"9" * 5000 + b"}", ":1: cannot be parsed"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
]


@pytest.mark.parametrize("data, message", FAULTS)
def test_a_fault_is_named_with_its_place_on_one_line(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(UserError) as caught:
        places(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    assert message in text


def test_a_fault_far_into_an_array_does_not_read_the_rest(tmp_path):
    path = write(tmp_path, '[{"a": oops},\n' + '{"a": 1},\n' * 100_000 + "{}]")
    with path.open("rb") as file:
        rows = reader._read_array(file, path)
        with pytest.raises(UserError, match=":1:8: not valid JSON"):
            next(rows)
        assert file.tell() < 1 << 18


def test_rows_before_a_fault_are_yielded(tmp_path):
    rows = read_rows(write(tmp_path, '{"a": 1}\n{"a": 2}\noops\n'))
    assert [next(rows).value["a"], next(rows).value["a"]] == [1, 2]
    with pytest.raises(UserError, match=":3:1"):
        next(rows)


def test_missing_file_folder_and_forbidden_file(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json: cannot be read: No such file"):
        places(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="is a folder"):
        places(tmp_path)
    path = write(tmp_path, "{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(UserError, match="cannot be read"):
        places(path)


def refusal_of_the_cache(path, cache_dir):
    with pytest.raises(UserError) as caught:
        open_tokens(FileSource(path=path), lambda rows: [], "", cache_dir)
    return str(caught.value)


def test_pipes_and_devices_are_refused_without_opening_them(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("opening a pipe waits until someone writes to it")

    monkeypatch.setattr(Path, "open", fail)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    reading, writing = os.pipe()
    for path in (pipe, Path("/dev/zero"), Path(f"/dev/fd/{reading}")):
        with pytest.raises(UserError, match=f"{path}: is not a regular file"):
            places(path)
        assert f"{path}: is not a regular file" in refusal_of_the_cache(path, tmp_path)
    os.close(reading)
    os.close(writing)


def test_a_file_in_a_place_that_cannot_be_looked_at(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match="loop: cannot be read: Too many levels"):
        places(loop)
    assert "cannot be read: Too many levels" in refusal_of_the_cache(loop, tmp_path)


@pytest.mark.parametrize("text", ['[{"a": 1},]', '[{"a": 1,}]', '[{"a" 2}]'])
def test_a_whole_file_with_a_fault_at_its_end_is_not_called_cut_off(tmp_path, text):
    with pytest.raises(UserError, match="not valid JSON") as caught:
        places(write(tmp_path, text))
    assert "cut off" not in str(caught.value)


def test_lone_surrogates_and_bom_inside_text_pass_through(tmp_path):
    path = write(tmp_path, codecs.BOM_UTF8 + b'{"a": "\\ud83d", "b": "\xef\xbb\xbf"}')
    assert places(path) == [(1, {"a": "\ud83d", "b": "\ufeff"})]


@pytest.mark.parametrize(
    "pack, kind",
    [(gzip.compress, "packed by gzip"), (bz2.compress, "packed by bzip2"), (lzma.compress, "packed by xz")],
)
def test_a_packed_file_is_called_one(tmp_path, pack, kind):
    path = write(tmp_path, pack(b'{"a": 1}\n'), "rows.jsonl.gz")
    with pytest.raises(UserError, match=f"rows.jsonl.gz: is {kind}, not rows; unpack it"):
        places(path)


def test_a_workbook_is_called_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "rows.xlsx", "w") as book:
        book.writestr("xl/workbook.xml", "<workbook/>")
    with pytest.raises(UserError, match=r"rows.xlsx: is a ZIP archive or a workbook, not rows; .* save its rows as"):
        places(tmp_path / "rows.xlsx")
