"""An adapter on disk in PEFT's form, written whole or not at all, and read back strictly.

Format: ``adapter_model.safetensors`` with keys ``base_model.model.<module>.lora_{A,B}.weight`` (A [r, in], B [out, r])
and ``adapter_config.json`` with the fields of ``peft.LoraConfig``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from mlora.config import AdapterConfig
from mlora.files import whole_folder
from mlora.types import LINEAR_MODULES, UserError

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_NOTE = "base_quantization"  # a key of the weights' metadata, which PEFT passes over

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # module name -> A [r, in], B stored [r, out]


class ExportError(RuntimeError):
    """The adapter must not be written: what PEFT or vLLM would load from it does nothing or is broken."""


def write_adapter(
    folder: Path,
    config: AdapterConfig,
    base_model: str,
    targets: tuple[str, ...],
    matrices: Matrices,
    extras: Callable[[Path], object] = lambda folder: None,
    quantised: str | None = None,
) -> None:
    """Write the adapter's two files into ``folder``, which appears only when both read back bit for bit.

    What a run before has left there is replaced at that moment.

    ``extras`` writes what else shall lie there, such as the tokenizer, before the folder appears. ``quantised`` is a
    note on how the base was kept, for the weights' file (mlora.models.quantised).

    Raises ExportError where a targeted module is missing, a value is not finite as float32, every B is zero, or the
    disk does not take the files; nothing is left behind then.
    """
    tensors = _peft_tensors(matrices)
    _refuse_empty(targets, matrices, tensors)
    text = json.dumps(_peft_config(config, base_model, targets), indent=2, sort_keys=True, ensure_ascii=False)
    try:
        with whole_folder(folder) as staging:
            (staging / _WEIGHTS).write_bytes(_serialized(tensors, quantised))
            (staging / _CONFIG).write_text(text + "\n", encoding="utf-8")
            _compare(tensors, _read_tensors(staging / _WEIGHTS), staging / _WEIGHTS)
            extras(staging)
    except Exception as error:  # a full disk is an OSError, a SafetensorError or, from tokenizers, a bare Exception
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise ExportError(f"{folder} cannot be written, it needs {size:,} bytes: {error}") from error


def read_adapter(folder: Path) -> tuple[dict[str, object], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The configuration and the matrices by module name, A [r, in] and B stored [r, out].

    Raises UserError naming the file where one is missing, cut off, or holds keys that are not a LoRA's.
    """
    config = _read_config(folder / _CONFIG)
    tensors = _read_tensors(folder / _WEIGHTS)
    matrices = {}
    for key in sorted(tensors):
        name, kind = _split_key(key, folder / _WEIGHTS)
        if kind == "lora_A":
            other = key.replace(".lora_A.", ".lora_B.")
            if other not in tensors:
                raise UserError(f"{folder / _WEIGHTS}: {key} has no {other}")
            matrices[name] = (tensors[key], tensors[other].T.contiguous())
    if 2 * len(matrices) != len(tensors):
        raise UserError(f"{folder / _WEIGHTS}: a lora_B without its lora_A")
    return config, matrices


def read_note(folder: Path) -> str | None:
    """What was noted on a quantised base, in a folder that ``read_adapter`` reads."""
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        return (file.metadata() or {}).get(_NOTE)


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Where an adapter's configuration and its weights lie in its folder."""
    return folder / _CONFIG, folder / _WEIGHTS


def _refuse_empty(targets: tuple[str, ...], matrices: Matrices, tensors: Mapping[str, torch.Tensor]) -> None:
    missing = sorted(set(targets) ^ set(matrices))
    if missing:
        raise ExportError(f"{missing[0]} is targeted but not in the export, or the reverse")
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ExportError(f"{key} holds values that are not finite")
    if not any(bool(tensor.any()) for key, tensor in tensors.items() if ".lora_B." in key):
        raise ExportError("every B is zero, so the adapter would change nothing; did it train at a rate above 0?")


def _peft_tensors(matrices: Matrices) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.detach().to("cpu", torch.float32).contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.detach().T.to("cpu", torch.float32).contiguous()
    return tensors


def _serialized(tensors: Mapping[str, torch.Tensor], note: str | None) -> bytes:
    """The weights' file. safetensors writes several entries of metadata in an order that changes from call to call, so
    the note is put behind its only one: the same adapter is the same bytes."""
    data = save(dict(tensors), {"format": "pt"})
    if note is None:
        return data
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    header["__metadata__"][_NOTE] = note
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[stop:]


def _peft_config(config: AdapterConfig, base_model: str, targets: tuple[str, ...]) -> dict[str, object]:
    """What was configured; "all-linear" becomes the list of modules, as PEFT itself writes it."""
    listed = [module for module in LINEAR_MODULES if any(name.endswith("." + module) for name in targets)]
    wanted = config.target_modules
    fields: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": _whole(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "target_modules": listed if wanted == "all-linear" else (wanted if isinstance(wanted, str) else list(wanted)),
        "use_rslora": config.use_rslora,
        "init_lora_weights": config.init_lora_weights,
        "layers_to_transform": _listed(config.layers_to_transform),
        "layers_pattern": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {pattern: _whole(alpha) for pattern, alpha in config.alpha_pattern.items()},
        "use_dora": False,
    }
    if config.exclude_modules:
        fields["exclude_modules"] = _listed(config.exclude_modules)
    return fields


def _whole(alpha: float) -> float:
    """Some loaders expect a whole number."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "give the folder of an adapter, such as RUN/adapters/NAME"
        raise UserError(f"{path}: cannot be read: {error.strerror}; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as an adapter's configuration: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{path}: not the configuration of a LoRA (peft_type must be LORA)")
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - a safetensors file is no dict
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged: {error}") from None


def _split_key(key: str, path: Path) -> tuple[str, str]:
    name, _, kind = key.removesuffix(".weight").rpartition(".")
    if not key.startswith(_PREFIX) or kind not in ("lora_A", "lora_B"):
        raise UserError(f"{path}: {key} is not a key of a LoRA adapter in PEFT's form")
    return name.removeprefix(_PREFIX), kind


def _compare(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor], path: Path) -> None:
    same = written.keys() == read.keys() and all(
        read[key].dtype == tensor.dtype and torch.equal(read[key].view(torch.int32), tensor.view(torch.int32))
        for key, tensor in written.items()
    )
    if not same:
        raise ExportError(f"{path} does not read back as it was written; is the disk sound?")
