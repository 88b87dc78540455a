"""Data sets of the hub through the real clients, against a stand-in of the hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.cpu.hub_server import COMMIT, hub

PROGRAM = """
import json, sys
from mlora.config import DatasetConfig
from mlora.data import open_source
from mlora.types import UserError

source = open_source(DatasetConfig(**json.loads(sys.argv[1])))
try:
    print(json.dumps([source.content(), [[row.file, row.line, row.value] for row in source.rows()]]))
except UserError as error:
    print(json.dumps(str(error)))
"""
FILES = {
    "data/train.jsonl": b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(6)),
    "data/test.jsonl": b'{"text": "held out"}\n',
    "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: data/train.jsonl}\n"
    b"  - {split: test, path: data/test.jsonl}\n- config_name: small\n  data_files: data/test.jsonl\n---\n",
}


def read(tmp_path, address, **config):
    """What the program prints: content and rows, or the error's text. The clients read their settings when imported."""
    home = {
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(config)]
    done = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_splits_subsets_and_revisions_of_a_data_set(tmp_path):
    with hub("org/rows", FILES) as (address, asked):
        content, rows = read(tmp_path, address, hub="org/rows", subset="main", revision="v1", max_samples=4)
        assert rows == [["org/rows/main:train", i + 1, {"text": f"row {i}"}] for i in range(4)]
        assert COMMIT in content and any(COMMIT in path for path in asked), "the commit is read, not the tag"
        _, rows = read(tmp_path, address, hub="org/rows", subset="small")
        assert rows == [["org/rows/small:train", 1, {"text": "held out"}]]
        _, rows = read(tmp_path, address, hub="org/rows", subset="main", split="test")
        assert [value for *_, value in rows] == [{"text": "held out"}]


@pytest.mark.timeout(300)
def test_what_the_hub_does_not_have_is_named(tmp_path):
    with hub("org/rows", FILES) as (address, _):
        assert "has no revision 'v9'" in read(tmp_path, address, hub="org/rows", revision="v9")
        assert "hub data set org/other: there is none of that name" in read(tmp_path, address, hub="org/other")
        text = read(tmp_path, address, hub="org/rows", subset="main", split="dev")
        assert text.startswith("hub data set org/rows/main:dev: cannot be read: ") and "dev" in text
    text = read(tmp_path, "http://127.0.0.1:9", hub="org/rows")
    assert text.startswith("hub data set org/rows: the hub cannot be reached: ") and "give them as path" in text
