import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from mlora.config import DatasetConfig
from mlora.data import FileSource, HubSource, join_tokens, open_source, open_tokens, tables
from mlora.types import IGNORE, Encoded, UserError


def write(tmp_path, data, name="rows.csv"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows(path, **options):
    return [(row.line, row.value) for row in FileSource(path=path, **options).rows()]


def test_csv_with_quotes_line_breaks_blank_lines_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path, '\ufeffprompt,completion\r\n"a, ""b""","x\r\ny"\r\n\r\né,\r\n')
    assert rows(path) == [(2, {"prompt": 'a, "b"', "completion": "x\r\ny"}), (5, {"prompt": "é", "completion": ""})]


def test_tsv_and_a_cell_longer_than_the_csv_modules_limit(tmp_path):
    path = write(tmp_path, "text\tother\n" + "a, " * 100_000 + "\tb\n", "rows.TSV")
    assert rows(path) == [(2, {"text": "a, " * 100_000, "other": "b"})]


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "holds no rows; give a line of column names"),
        (b"a,b\n", "holds no rows"),
        (b"a;b\n1;2\n", ":1: one column 'a;b': separated by ';'? Save it with ','"),
        (b"a,b\n1,2\n1\n", ":3: 1 cells for 2 columns (a, b)"),
        (b"a,b\n1,2,3\n", ":2: 3 cells for 2 columns"),
        (b"a,a\n1,2\n", ":1: two columns are called 'a'"),
        (b"a,\n1,2\n", ":1: a column has no name"),
        (b'a,b\n"x" y,2\n', ":2: not valid CSV"),
        (b'a,b\n1,2\n"x,2\n3,4\n', ":3: not valid CSV: unexpected end of data"),
        (b"a,b\n1,\xff\n", ":2:3: byte 0xff is not valid UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_faults_of_csv_are_named_with_their_line(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(UserError) as caught:
        rows(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value) and "\n" not in str(caught.value)


CHATS = [{"messages": [{"role": "user", "content": f"é{i}"}, {"role": "assistant", "content": "a"}]} for i in range(25)]


def write_table(path, table, kind):
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return
    form = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as file, form(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow-stream"])
def test_tables_are_known_by_content_and_streamed(tmp_path, monkeypatch, kind):
    path = tmp_path / "rows.data"
    write_table(path, pyarrow.Table.from_pylist(CHATS), kind)
    for batch in (1000, 4):
        monkeypatch.setattr(tables, "_BATCH", batch)
        assert rows(path) == list(enumerate(CHATS, 1))
    assert rows(path, max_samples=9) == list(enumerate(CHATS[:9], 1))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow-stream"])
def test_a_table_that_is_cut_off_is_an_error_that_names_the_file(tmp_path, kind):
    path = tmp_path / "rows.data"
    write_table(path, pyarrow.Table.from_pylist(CHATS), kind)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UserError, match=r"rows.data: (is no whole|cannot be read: Expected)") as caught:
        rows(path)
    assert "\n" not in str(caught.value)


def test_a_table_without_rows_or_with_another_files_content(tmp_path):
    write_table(tmp_path / "rows.parquet", pyarrow.Table.from_pylist(CHATS).slice(0, 0), "parquet")
    with pytest.raises(UserError, match=r"rows.parquet: holds no rows"):
        rows(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="does not begin as a Parquet file does"):
        rows(write(tmp_path, b'{"text": "a"}\n', "rows.parquet"))


def test_without_pyarrow_the_package_to_install_is_named(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write_table(path, pyarrow.Table.from_pylist(CHATS), "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"rows.parquet: needs the package pyarrow: pip install 'mlora-engine\[data\]'"):
        rows(path)


def hub(**keys):
    return HubSource(**{"hub": "a/b", "subset": None, "split": "train", "revision": None, "max_samples": None} | keys)


def test_without_datasets_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"hub data set a/b: needs the package datasets: pip install"):
        list(hub(revision="0" * 40).rows())


def test_a_path_that_looks_like_a_hub_id_gets_a_hint(tmp_path):
    with pytest.raises(UserError, match=r"No such file or directory; a data set on the hub is written hub: org/name"):
        FileSource(path=tmp_path / "org/name").content()
    with pytest.raises(UserError, match=r"No such file or directory$"):
        FileSource(path=tmp_path / "org/name.jsonl").content()


def test_what_decides_the_rows_decides_the_content(tmp_path):
    text = 'text\n"a"\n'
    contents = [
        FileSource(path=write(tmp_path, text, "a.csv")).content(),
        FileSource(path=write(tmp_path, text, "a.tsv")).content(),
        FileSource(path=write(tmp_path, text, "a.jsonl")).content(),
        FileSource(path=tmp_path / "a.csv", max_samples=1).content(),
        FileSource(path=write(tmp_path, text + "\n", "b.csv")).content(),
        *(hub(revision=commit * 40).content() for commit in "01"),
        hub(revision="0" * 40, subset="c").content(),
        hub(revision="0" * 40, split="test").content(),
        hub(revision="0" * 40, max_samples=1).content(),
    ]
    assert len(set(contents)) == len(contents)
    assert FileSource(path=write(tmp_path, text, "c.csv")).content() == contents[0]


def test_a_configuration_opens_what_it_names():
    assert open_source(DatasetConfig(path=Path("x"), max_samples=3)) == FileSource(path=Path("x"), max_samples=3)
    assert open_source(DatasetConfig(hub="a/b")) == hub()
    full = {"hub": "a/b", "subset": "c", "split": "test", "revision": "v1", "max_samples": 3}
    assert open_source(DatasetConfig(**full)) == hub(**full)


def encode(found):
    return [Encoded([int(row.value["n"])] * 3, [IGNORE, 1, 1]) for row in found]


def test_joined_tokens_are_the_sources_rows_one_after_another(tmp_path):
    sizes = {"a.csv": [1, 2, 3], "b.csv": [4, 5]}
    parts = [
        open_tokens(FileSource(path=write(tmp_path, "n\n" + "\n".join(map(str, n)), name)), encode, "d", tmp_path / "c")
        for name, n in sizes.items()
    ]
    joined = join_tokens(parts, None)
    assert [joined.sample(i)[0][0] for i in range(5)] == [1, 2, 3, 4, 5]
    assert joined.lengths.tolist() == [3] * 5 and joined.target_tokens.tolist() == [2] * 5
    assert (joined.stats.rows, joined.stats.kept, joined.stats.tokens, joined.stats.target_tokens) == (5, 5, 15, 10)
    with pytest.raises(IndexError):
        joined.sample(5)
    assert [joined.in_memory().sample(i)[0][0] for i in range(5)] == [1, 2, 3, 4, 5]
    assert join_tokens(parts[:1], None) is parts[0]
    digests = {parts[0].digest, joined.digest, join_tokens(parts[::-1], None).digest}
    assert len(digests | {join_tokens(parts, [1, 1]).digest, join_tokens(parts, [1, 3]).digest}) == 5
    assert join_tokens(parts, [1, 1]).shares == ((3, 3), (2, 3))
