import json
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from mlora.data import FileSource, cache, open_tokens
from mlora.types import IGNORE, Encoded, UserError


def encode(rows):
    """Tokens 1 … n with the last two trained; rows with n = 0 are dropped, n > 9 is cut."""
    results = []
    for row in rows:
        n = row.value["n"]
        ids = list(range(1, min(n, 9) + 1))
        results.append(Encoded(ids, [IGNORE] * (len(ids) - 2) + ids[-2:], n > 9) if n else "too short")
    return results


def refuse(rows):
    raise AssertionError("encoded again although the cache holds it")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, [3, 0, 12, 2, 0, 5])


def write(tmp_path, sizes):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in sizes))
    return path


def samples(data):
    return [tuple(array.tolist() for array in data.sample(i)) for i in range(len(data))]


def test_samples_counts_and_types(tmp_path, path):
    data = open_tokens(FileSource(path=path), encode, "d", tmp_path / "cache")
    assert len(data) == 4
    assert samples(data)[0] == ([1, 2, 3], [IGNORE, 2, 3])
    assert samples(data)[2] == ([1, 2], [1, 2])
    assert [array.dtype for array in data.sample(0)] == [np.int32, np.int32]
    assert data.lengths.tolist() == [3, 9, 2, 5]
    assert data.target_tokens.tolist() == [2, 2, 1, 2]  # a row's first label is predicted by nothing
    assert data.lengths.dtype == data.target_tokens.dtype == np.int32
    assert isinstance(data.sample(0)[0], np.memmap), "what is per token is not held in memory"


def test_a_cache_that_is_cut_under_a_run_is_an_error_and_no_crash(tmp_path, path):
    data = open_tokens(FileSource(path=path), encode, "d", tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    with (entry / "ids").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(OSError, match=r"token cache of its data was cut to 8 of 76 bytes"):
        data.sample(1)


def test_stats_and_their_line(tmp_path, path):
    stats = open_tokens(FileSource(path=path), encode, "d", tmp_path / "cache").stats
    assert (stats.rows, stats.kept, stats.truncated, stats.dropped) == (6, 4, 1, {"too short": 2})
    assert (stats.tokens, stats.target_tokens) == (19, 7)
    assert stats.summary() == "6 rows: 4 kept, 1 of them truncated, 2 dropped (too short); 19 tokens, 7 trained"


def test_many_batches_give_what_one_batch_gives(tmp_path, monkeypatch):
    path = write(tmp_path, [i % 12 for i in range(50)])
    whole = samples(open_tokens(FileSource(path=path), encode, "d", tmp_path / "one"))
    monkeypatch.setattr(cache, "_BATCH", 7)
    assert samples(open_tokens(FileSource(path=path), encode, "d", tmp_path / "many")) == whole
    assert len(whole) == 45


def test_second_run_opens_what_the_first_wrote(tmp_path, path):
    first = open_tokens(FileSource(path=path), encode, "d", tmp_path / "cache")
    second = open_tokens(FileSource(path=path), refuse, "d", tmp_path / "cache")
    assert samples(second) == samples(first) and second.stats == first.stats


def test_other_content_digest_or_layout_is_another_entry(tmp_path, path, monkeypatch):
    calls = []

    def counted(rows):
        calls.append(len(rows))
        return encode(rows)

    open_tokens(FileSource(path=path), counted, "d", tmp_path / "cache")
    open_tokens(FileSource(path=path), counted, "other", tmp_path / "cache")
    write(tmp_path, [3, 0, 12, 2, 0, 6])
    open_tokens(FileSource(path=path), counted, "d", tmp_path / "cache")
    monkeypatch.setattr(cache, "_VERSION", 1000)
    open_tokens(FileSource(path=path), counted, "d", tmp_path / "cache")
    assert calls == [6, 6, 6, 6]


def names():
    return [*cache._ARRAYS, cache._STATS, cache._HASHES]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_entry_is_built_again(tmp_path, path, name, damage):
    folder = tmp_path / "cache"
    expected = samples(open_tokens(FileSource(path=path), encode, "d", folder))
    (entry,) = folder.iterdir()
    file = entry / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes({"flip": bytes(data), "cut": bytes(data[: len(data) // 2]), "empty": b""}[damage])
    again = open_tokens(FileSource(path=path), encode, "d", folder)
    assert samples(again) == expected and again.stats.rows == 6
    assert samples(open_tokens(FileSource(path=path), refuse, "d", folder)) == expected, "the entry was not mended"
    assert list(folder.iterdir()) == [entry], "temporary folders were left behind"


def test_two_runs_at_once(tmp_path, path):
    """Both have found no entry and are encoding before either is published."""
    barrier = threading.Barrier(2, timeout=20)
    results = []

    def run():
        def together(rows):
            barrier.wait()
            return encode(rows)

        results.append(samples(open_tokens(FileSource(path=path), together, "d", tmp_path / "cache")))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_failed_build_leaves_nothing(tmp_path, path):
    def fail(rows):
        raise rows[1].error("n", "bad")

    with pytest.raises(UserError, match=r"rows.jsonl:2, column 'n': bad"):
        open_tokens(FileSource(path=path), fail, "d", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_row_left_is_an_error_with_counts(tmp_path):
    path = write(tmp_path, [0, 0, 0])
    with pytest.raises(UserError, match=r"rows.jsonl: none of its 3 rows can be trained on: too short \(3\)"):
        open_tokens(FileSource(path=path), encode, "d", tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, path):
    def changing(rows):
        with path.open("a") as file:
            file.write('{"n": 4}\n')
        return encode(rows)

    with pytest.raises(UserError, match="changed while it was read"):
        open_tokens(FileSource(path=path), changing, "d", tmp_path / "cache")


def test_missing_data_and_unwritable_cache(tmp_path, path):
    with pytest.raises(UserError, match=r"no\.jsonl: cannot be read: No such file"):
        open_tokens(FileSource(path=tmp_path / "no.jsonl"), encode, "d", tmp_path / "cache")
    with pytest.raises(UserError, match="is a folder"):
        open_tokens(FileSource(path=tmp_path), encode, "d", tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the token cache"):
        open_tokens(FileSource(path=path), encode, "d", tmp_path / "file")


PROGRAM = """
import re, sys
from pathlib import Path
from mlora.data import FileSource, open_tokens
from mlora.types import Encoded

def encode(rows):
    return [Encoded([len(row.value["text"])] * 40, [7] * 40) for row in rows]

data = open_tokens(FileSource(path=Path(sys.argv[1])), encode, "d", Path(sys.argv[2]))
# Not getrusage: its figure is at least the peak of the process that started this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(len(data), int(data.lengths.sum()), peak)
"""


def peak_memory(tmp_path, rows, array):
    """Peak resident bytes of a process that builds the cache of a file of ``rows`` short rows."""
    path = tmp_path / f"{rows}.json"
    between, ends = (",\n", "[]") if array else ("\n", ["", ""])
    with path.open("w") as file:
        file.write(ends[0])
        for i in range(rows):
            file.write((between if i else "") + json.dumps({"text": f"row {i} " + "word " * 20}))
        file.write(ends[1])
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path), str(tmp_path / "cache")]
    found, tokens, peak = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert (found, tokens) == (rows, rows * 40)
    path.unlink()
    shutil.rmtree(tmp_path / "cache")
    return peak


@pytest.mark.parametrize("array", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path, array):
    few, many = (peak_memory(tmp_path, rows, array) for rows in (2_000, 40_000))
    assert many - few < 8 * 2**20, f"{(many - few) / 2**20:.0f} MiB more for a file twenty times as long"


@pytest.mark.slow
@pytest.mark.parametrize("array", [False, True])
def test_a_million_rows_need_less_than_a_gibibyte(tmp_path, array):
    assert peak_memory(tmp_path, 1_000_000, array) < 2**30
