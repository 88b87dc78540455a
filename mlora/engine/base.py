"""The frozen model of a run: read and checked, but for its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from mlora.config import RunConfig
from mlora.engine.device import choose_device, choose_dtype
from mlora.models.quantised import choose_quantization
from mlora.models.spec import ModelSpec, Quantization, load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.models.weights import Checkpoint, resolve_base_model

_PIECES, _PIECE_BYTES = 256, 256  # of each weights file, for its digest


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the adapters of a run stand on. ``quantization``: how its linears are kept; None: in ``dtype``, as all else.

    ``name`` is the configuration's.
    """

    name: str
    folder: Path
    spec: ModelSpec
    tokenizer: PreTrainedTokenizerFast
    quantization: Quantization | None
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def digest(self) -> str:
        return model_digest(self.folder)


def open_base(config: RunConfig) -> Base:
    """Raises UserError where model, tokenizer and configuration do not go together."""
    folder, device = resolve_base_model(config.base_model), choose_device(config.device)
    spec = load_spec(folder)
    return Base(
        name=config.base_model,
        folder=folder,
        spec=spec,
        tokenizer=load_tokenizer(folder, spec.vocab_size),
        quantization=choose_quantization(config, spec, Checkpoint(folder, spec)),
        device=device,
        dtype=choose_dtype(config.dtype, device),
    )


def model_digest(folder: Path) -> str:
    """Of the model's configuration and of every weights file's name, size, header, and pieces all over it.

    Reading all of it would take minutes; weights that were trained further differ nearly everywhere.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(8)
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode() + file.read(int.from_bytes(header, "little")))
            for piece in range(_PIECES):
                file.seek(size * piece // _PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
