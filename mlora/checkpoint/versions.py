"""Checkpoints of an adapter: each a version folder that appears whole, and is checked before it is believed.

``ADAPTER/000007-step120/`` holds ``state.safetensors`` (named by global modules, so that any number of stages can read
it) and ``manifest.json``: everything that is no tensor, the state's size and sha256, and the manifest's own sha256.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from mlora.files import readable, sha256_of, whole_folder
from mlora.types import UserError

STATE, MANIFEST = "state.safetensors", "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"(\d{6,})-step(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a version says beside its tensors. ``step`` counts the steps that are done; plain data throughout.

    ``config`` are the adapter's keys, ``base`` is what identifies the frozen model and how it is computed, ``data``
    the digest of the tokens. The cursor of the data is ``step``: which rows follow is a function of seed and step.
    """

    adapter: str
    step: int
    total_steps: int
    state: str
    reason: str
    nonfinite_in_a_row: int
    config: dict[str, Any]
    base: dict[str, Any]
    data: str
    saved: float  # seconds since 1970


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version that was read and found sound."""

    folder: Path
    manifest: Manifest
    tensors: dict[str, torch.Tensor]


class WriteError(RuntimeError):
    """The disk did not take a version; those before it stand."""


def versions(folder: Path) -> list[Path]:
    """The version folders of an adapter, oldest first."""
    return sorted(filter(is_version, folder.iterdir()), key=_number) if folder.is_dir() else []


def is_version(path: Path) -> bool:
    """Whether the path has a version's name."""
    return _NAME.fullmatch(path.name) is not None


def write_version(folder: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], keep: int) -> Path:
    """Write the next version into ``folder`` and delete all but the last ``keep``.

    A crash at any moment leaves either the whole version or none. Raises WriteError with the bytes that were needed.
    """
    before = versions(folder)
    target = folder / f"{_number(before[-1]) + 1 if before else 1:06d}-step{manifest.step}"
    try:
        for left in folder.glob(".*.partial"):
            shutil.rmtree(left)
        with whole_folder(target) as staging:
            safetensors.torch.save_file(dict(tensors), staging / STATE)
            (staging / MANIFEST).write_text(_sealed(manifest, staging / STATE), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        reason = getattr(error, "strerror", None) or error
        raise WriteError(f"{target} cannot be written, it needs {size:,} bytes: {reason}") from error
    for path in versions(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def read_manifest(folder: Path) -> Manifest:
    """A version's manifest. Raises UserError naming the file where it is missing, cut off or edited."""
    return _opened(folder)[0]


def read_version(folder: Path) -> Version:
    """A version, checked against its sums. Raises UserError naming the file that is missing, cut off or edited."""
    manifest, size, sha256 = _opened(folder)
    path = folder / STATE
    with readable(path):
        data = path.read_bytes()
    if len(data) != size:
        raise UserError(f"{path}: has {len(data):,} bytes, and {size:,} were written")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: is not as it was written: its sha256 differs")
    try:
        return Version(folder=folder, manifest=manifest, tensors=safetensors.torch.load(data))
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None


def newest_manifest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest version of an adapter whose manifest is sound; its tensors are not read."""
    for path in reversed(versions(folder)):
        with suppress(UserError):
            return path, read_manifest(path)
    return None


def newest_sound(folder: Path, tell: Callable[[str], object]) -> Version | None:
    """The newest version of an adapter that is sound; ``tell`` hears of each that is not.

    None where there is no version. Raises UserError where there are some and none is sound.
    """
    found = versions(folder)
    for path in reversed(found):
        try:
            return read_version(path)
        except UserError as error:
            tell(f"{error}; this checkpoint is left out" + (", the one before it is used" if path != found[0] else ""))
    if found:
        raise UserError(f"{folder}: none of its {len(found)} checkpoints is sound; delete the folder to start anew")
    return None


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _sealed(manifest: Manifest, state: Path) -> str:
    """The manifest's text, with the sums of the state and of itself."""
    sums = {"bytes": state.stat().st_size, "sha256": sha256_of(state)}
    body = {"format": _FORMAT, **asdict(manifest), "files": {STATE: sums}}
    return json.dumps(body | {"sha256": _sum(body)}, indent=2, sort_keys=True) + "\n"


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _opened(folder: Path) -> tuple[Manifest, int, str]:
    """The manifest, and the size and sha256 of the state."""
    path = folder / MANIFEST
    with readable(path):
        data = path.read_bytes()
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a checkpoint's manifest: {error}") from None
    own = body.pop("sha256", None) if isinstance(body, dict) else None
    if own is None or own != _sum(body):
        raise UserError(f"{path}: is not as it was written: its sha256 differs")
    if body["format"] != _FORMAT:
        raise UserError(f"{path}: has format {body['format']}, and this version of mLoRA reads {_FORMAT}")
    state = body["files"][STATE]
    return Manifest(**{field.name: body[field.name] for field in fields(Manifest)}), state["bytes"], state["sha256"]
