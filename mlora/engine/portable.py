"""``mlora export --portable``: an adapter in the form that loaders understand which do not know rsLoRA."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from mlora.checkpoint.model_files import new_folder
from mlora.checkpoint.peft_files import adapter_files
from mlora.engine.trained import read_trained
from mlora.types import UserError

_NOTE = """
Portable form: rsLoRA's scaling, lora_alpha {alpha:g} / √r, is written as `use_rslora: false` with lora_alpha
{folded:.6g}, which scales alike; the weights are the same.
"""


def export_portable(adapter_folder: Path, output: Path) -> float | None:
    """Copy an adapter to ``output`` with ``use_rslora: false`` and ``lora_alpha`` = alpha·√r, so that alpha / r is what
    alpha / √r was; weights and all other files are the same bytes.

    Returns the new lora_alpha; None where the adapter was no rsLoRA, so that its files are copied as they are. Raises
    UserError where it is damaged, has patterns that others do not read, or ``output`` is taken.
    """
    config = read_trained(adapter_folder).config
    if config.rank_pattern or config.alpha_pattern:
        raise UserError(
            f"{adapter_files(adapter_folder)[0]}: rank_pattern and alpha_pattern are read by PEFT alone; mlora merge "
            "makes a model of it that every loader reads"
        )
    files = sorted(path for path in adapter_folder.iterdir() if path.is_file() and not path.name.startswith("."))
    folded = config.lora_alpha * math.sqrt(config.r) if config.use_rslora else None
    with new_folder(output, sum(path.stat().st_size for path in files)) as staging:
        for path in files:
            shutil.copyfile(path, staging / path.name)
        if folded is not None:
            _fold(staging, config.lora_alpha, folded)
    return folded


def _fold(folder: Path, alpha: float, folded: float) -> None:
    file, card = adapter_files(folder)[0], folder / "README.md"
    whole = int(folded) if folded.is_integer() else folded  # some loaders expect a whole number
    fields = json.loads(file.read_text(encoding="utf-8")) | {"use_rslora": False, "lora_alpha": whole}
    file.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    if card.exists():
        with card.open("a", encoding="utf-8") as text:
            text.write(_NOTE.format(alpha=alpha, folded=folded))
