"""``mlora init``: a commented configuration to begin with, for data files that are there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mlora.config import load_config
from mlora.data import FileSource
from mlora.files import writable, write_whole
from mlora.tasks.formats import FORMATS, guess_format
from mlora.types import UserError

_HEAD = """\
# Paths count from this file's folder. `mlora check {file}` shows what would be trained on, `mlora train {file}` trains.
# All keys: `mlora schema`.
base_model: {base_model}  # a local folder with safetensors, or a hub id
output_dir: runs/{run}

defaults:                          # for every adapter below; an adapter's own keys come first
  r: 16                            # more: more to learn with, larger files
  lora_alpha: 32
  target_modules: all-linear
  learning_rate: 2e-4
  num_train_epochs: 3              # or max_steps: 200
  per_device_train_batch_size: 8   # rows of a step, whatever the number of processes
  max_length: 1024                 # tokens; longer rows are cut at their end
  # lora_dropout: 0.05
  # val_size: 0.1                  # a share of the rows is held out and evaluated on
  # eval_steps: 0.1                # every tenth of the steps
  # load_best_model_at_end: true   # export the step with the lowest eval_loss
  # early_stopping_patience: 3

adapters:
"""
_ADAPTER = """\
  - name: {name}
    dataset: {path}  # {format}: {columns}
"""


def write_starter(files: Sequence[Path], config: Path, base_model: str) -> list[str]:
    """Write ``config`` with an adapter for each file and return their names.

    Raises UserError where ``config`` exists, or a file cannot be read or is of no known format.
    """
    names: list[str] = []
    blocks = []
    for file in files:
        names.append(_name(file, names))
        blocks.append(_block(file, names[-1], config))
    local = Path(base_model)
    model = _from_folder(local, config) if local.is_dir() and not local.is_absolute() else base_model
    head = _HEAD.format(file=config.name, base_model=_quoted(model), run=config.stem)
    if os.path.lexists(config):
        raise UserError(f"{config}: exists already; give another --output")
    with writable(config):
        config.parent.mkdir(parents=True, exist_ok=True)
        write_whole(config, (head + "".join(blocks)).encode())
    load_config(config)
    return names


def _block(file: Path, name: str, config: Path) -> str:
    row = next(FileSource(path=file).rows())
    form = guess_format(row, {})
    label = next(label for label, candidate in FORMATS.items() if candidate is form)
    columns = [*form.required, *(name for name in form.optional if name in row.value)]
    return _ADAPTER.format(
        name=_quoted(name), path=_quoted(_from_folder(file, config)), format=label, columns=", ".join(columns)
    )


def _from_folder(path: Path, config: Path) -> str:
    """As paths count in the configuration file."""
    return os.path.relpath(path.resolve(), config.resolve().parent)


def _name(file: Path, taken: Sequence[str]) -> str:
    """The file's name as an adapter's, with a number where there is one of that name."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._")[:90] or "adapter"
    lower = [name.lower() for name in taken]
    numbered = (f"{stem}-{number}" for number in range(2, len(taken) + 3))
    return stem if stem.lower() not in lower else next(name for name in numbered if name.lower() not in lower)


def _quoted(text: str) -> str:
    """As YAML; what could be read as anything but this text is put in quotes."""
    return (
        text if re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in _WORDS else json.dumps(text)
    )


_WORDS = ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
