"""A model's folder, written tensor by tensor: the weights are never all in memory.

Format of a weights file: https://huggingface.co/docs/safetensors (eight bytes with the length of a JSON header, the
header, the tensors' bytes one after another).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlora.files import whole_folder
from mlora.types import UserError

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's name: safetensors'
_INDEX = "model.safetensors.index.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*", "additional_chat_templates/*")


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """A tensor that is to be written. ``dtype`` is torch's name of its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """In bytes."""
        return getattr(torch, self.dtype).itemsize * torch.Size(self.shape).numel()


def write_weights(path: Path, plans: list[TensorPlan], tensor: Callable[[TensorPlan], torch.Tensor]) -> None:
    """Write a safetensors file. ``tensor`` makes each tensor when its turn has come; it is let go at once."""
    header, place = {"__metadata__": {"format": "pt"}}, 0
    plans = sorted(plans, key=lambda plan: (-getattr(torch, plan.dtype).itemsize, plan.name))  # so that all are aligned
    for plan in plans:
        entry: dict[str, Any] = {"dtype": DTYPES[plan.dtype], "shape": list(plan.shape)}
        header[plan.name] = entry | {"data_offsets": [place, place + plan.size]}
        place += plan.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            made = tensor(plan).contiguous()
            assert tuple(made.shape) == plan.shape and made.dtype == getattr(torch, plan.dtype), plan.name
            file.write(made.reshape(-1).view(torch.uint8).numpy().data)


def write_index(folder: Path, shards: Mapping[str, list[TensorPlan]]) -> None:
    """The list that says which of several weights files holds a tensor."""
    size = sum(plan.size for plans in shards.values() for plan in plans)
    places = {plan.name: shard for shard, plans in shards.items() for plan in plans}
    tree = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def copy_beside(base: Path, folder: Path, dtype: str) -> None:
    """Configuration and tokenizer: everything of a model but its weights, and code, which is never run.

    The weights are floats now, whatever they were in ``base``.
    """
    for path in sorted({path for pattern in _COPIED for path in base.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            target = folder / path.relative_to(base)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    (folder / "config.json").write_text(json.dumps(config | {key: dtype}, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, size: int) -> Iterator[Path]:
    """A hidden folder that gets the name ``folder`` when all is in it and on the disk; else nothing is left of it.

    Raises UserError where there is something already, or with ``size``, the bytes that were needed, where the disk does
    not take them.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give a new folder, or remove it")
    try:
        with whole_folder(folder) as staging:
            yield staging
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot be written, it needs {size:,} bytes: {reason}") from None
