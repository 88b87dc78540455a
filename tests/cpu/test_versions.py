"""Checkpoint files: never half a version, never one that was cut or edited, never one lost before the next stands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mlora.checkpoint import versions as module
from mlora.checkpoint.versions import (
    MANIFEST,
    STATE,
    Manifest,
    WriteError,
    newest_sound,
    read_manifest,
    read_version,
    versions,
    write_version,
)
from mlora.types import UserError

PLAIN = Manifest(
    adapter="a",
    step=3,
    total_steps=9,
    state="training",
    reason="",
    nonfinite_in_a_row=0,
    config={"r": 4, "dataset": {"path": "x"}},
    base={"layers": 2},
    data="d",
    saved=1.5,
)
TENSORS = {"model.layers.0.x.A": torch.arange(12.0).view(3, 4), "optimizer.step": torch.tensor(3.0)}


def write(folder, step=3, keep=2, **tensors):
    return write_version(folder / "a", replace(PLAIN, step=step), TENSORS | tensors, keep)


def test_a_version_is_read_as_it_was_written(tmp_path):
    version = read_version(write(tmp_path))
    assert version.manifest == PLAIN and version.folder == tmp_path / "a/000001-step3"
    assert version.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(version.tensors[key], TENSORS[key]) for key in TENSORS)


def test_numbers_rise_and_only_the_last_are_kept(tmp_path):
    for step in (3, 5, 5, 4):
        write(tmp_path, step)
    assert [path.name for path in versions(tmp_path / "a")] == ["000003-step5", "000004-step4"]
    write(tmp_path, 6, keep=1)
    assert [path.name for path in versions(tmp_path / "a")] == ["000005-step6"]


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_file_cut_anywhere_is_refused_by_name_and_the_one_before_is_used(tmp_path, name, share):
    write(tmp_path)
    path = write(tmp_path, 4) / name
    data = path.read_bytes()
    path.write_bytes(data[: min(int(len(data) * share), len(data) - 2)])  # the last byte of a text is a newline
    with pytest.raises(UserError, match=rf"000002-step4/{name}: "):
        read_version(path.parent)
    told = []
    version = newest_sound(tmp_path / "a", told.append)
    assert version.manifest.step == 3
    assert len(told) == 1 and str(path) in told[0] and "the one before it is used" in told[0]


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_byte_changed_anywhere_is_refused_by_name(tmp_path, name):
    path = write(tmp_path) / name
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :])
        with pytest.raises(UserError, match=f"000001-step3/({STATE}|{MANIFEST}): "):
            read_version(path.parent)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_missing_file_is_named(tmp_path, name):
    path = write(tmp_path) / name
    path.unlink()
    with pytest.raises(UserError, match=f"{name}: cannot be read: No such file"):
        read_version(path.parent)


def test_an_edited_key_a_newer_format_and_what_is_no_object_are_named(tmp_path):
    path = write(tmp_path) / MANIFEST
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"step": 4}))
    with pytest.raises(UserError, match="is not as it was written: its sha256 differs"):
        read_manifest(path.parent)
    del body["sha256"]
    newer = body | {"format": 2}
    path.write_text(json.dumps(newer | {"sha256": module._sum(newer)}))
    with pytest.raises(UserError, match="has format 2, and this version of mLoRA reads 1"):
        read_manifest(path.parent)
    path.write_text("[1]")
    with pytest.raises(UserError, match="is not as it was written"):
        read_manifest(path.parent)


def test_no_pickle_is_ever_opened(tmp_path, monkeypatch):
    """Not even under the right name and with the right sum."""
    monkeypatch.setattr(module.safetensors.torch, "save_file", torch.save)
    folder = write(tmp_path)
    with pytest.raises(UserError, match=f"{STATE}: cannot be read as safetensors"):
        read_version(folder)


@pytest.mark.parametrize(
    "moment", ["safetensors.torch.save_file", "mlora.checkpoint.versions._sealed", "mlora.files.sync_path"]
)
def test_a_crash_while_writing_leaves_only_whole_versions(tmp_path, monkeypatch, moment):
    write(tmp_path)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(moment, dies)
        write(tmp_path, 4)
    assert [path.name for path in versions(tmp_path / "a")] == ["000001-step3"]
    write(tmp_path, 5)
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["000001-step3", "000002-step5"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_version_before_and_says_what_was_needed(small_disk):
    write(small_disk, x=torch.ones(4000))
    with pytest.raises(WriteError, match=r"000002-step4 cannot be written, it needs 80,052 bytes: .*(space|quota)"):
        write(small_disk, 4, x=torch.ones(20_000))
    assert [path.name for path in (small_disk / "a").iterdir()] == ["000001-step3"]
    assert read_version(small_disk / "a/000001-step3").manifest.step == 3


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "a").write_text("in the way")
    with pytest.raises(WriteError, match="cannot be written, it needs 52 bytes"):
        write(tmp_path)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
MANIFESTS = st.builds(
    Manifest,
    adapter=st.just("a"),
    step=st.integers(0, 10**12),
    total_steps=st.integers(1, 10**12),
    state=TEXT,
    reason=TEXT,
    nonfinite_in_a_row=st.integers(0, 10**9),
    config=st.dictionaries(TEXT, JSON, max_size=4),
    base=st.dictionaries(TEXT, JSON, max_size=4),
    data=TEXT,
    saved=st.floats(0, 1e12),
)


@given(MANIFESTS)
@settings(max_examples=60, deadline=None)
def test_any_manifest_comes_back_the_same(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("any")
    assert read_manifest(write_version(folder, manifest, TENSORS, 1)) == manifest
    shutil.rmtree(folder)


@given(MANIFESTS, st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_no_manifest_survives_a_changed_byte(tmp_path_factory, manifest, place, flip):
    """Unless it says the same, as with a changed blank."""
    folder = tmp_path_factory.mktemp("any")
    path = write_version(folder, manifest, TENSORS, 1) / MANIFEST
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= flip
    path.write_bytes(data)
    try:
        assert read_manifest(path.parent) == manifest
    except UserError as error:
        assert str(path) in str(error)
    shutil.rmtree(folder)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3), st.sampled_from(["", "state", "crash"])), max_size=8))
@settings(max_examples=30, deadline=None)
def test_whatever_happens_the_newest_sound_version_is_the_last_whole_one(tmp_path_factory, events):
    """Writes, some of them cut afterwards, some crashed in the middle: at least one sound version is never lost."""
    folder = tmp_path_factory.mktemp("events")
    sound = {}
    for step, keep, fate in events:
        if fate == "crash":
            (folder / "a/.000009-step1.partial").mkdir(parents=True, exist_ok=True)
            continue
        path = write(folder, step, keep)
        sound[path] = step
        if fate == "state":
            (path / STATE).write_bytes((path / STATE).read_bytes()[:-3])
            del sound[path]
        sound = {path: step for path, step in sound.items() if path.exists()}
    if not versions(folder / "a"):
        assert newest_sound(folder / "a", lambda text: None) is None
    elif sound:
        assert newest_sound(folder / "a", lambda text: None).manifest.step == sound[max(sound)]
    else:
        with pytest.raises(UserError, match="is sound"):
            newest_sound(folder / "a", lambda text: None)
    shutil.rmtree(folder)
