"""What a model is: read from ``config.json``, or refused by name with the reason.

Dense decoders of the Llama family are read: Llama 2 to 3.2, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mlora.files import readable
from mlora.types import UserError

USE_ORIGINAL = "use the original weights, with quantization: nf4 in the run's configuration"  # an error's advice
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SCALED_ROPES = ("linear", "llama3", "yarn")  # the others change with the length of the sequence
_LFS_MAGIC = b"version https://git-lfs"
_BLOCK, _NESTED_BLOCK = 64, 256  # weights of one scale, and scales of one scale of theirs: bitsandbytes' defaults


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the weights of the layers' linears are kept. Embedding, norms, biases and head stay in the compute dtype.

    ``fp8`` weights are kept twice, see mlora.ops.fp8. ``double``: the scales of a 4-bit weight are quantised too.
    ``dense`` are the global names of linears that stay in the compute dtype.
    """

    kind: Literal["nf4", "fp4", "int8", "fp8"]
    double: bool = False
    dense: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.kind + (" with double quantisation" if self.double else "")

    def weight_bytes(self, rows: int, columns: int) -> int:
        """Of one quantised weight with its scales."""
        elements = rows * columns
        if self.kind in ("int8", "fp8"):
            return (2 if self.kind == "fp8" else 1) * elements + 4 * rows
        blocks = -(-elements // _BLOCK)
        scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 if self.double else 4 * blocks
        return -(-elements // 2) + scales


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes and switches of one dense decoder, with every default filled in.

    ``windows`` has one entry per layer: None for full causal attention, else how many tokens a query sees, itself
    counted. ``inv_freq`` holds ``head_dim / 2`` float32 values in radians per position; ``rope_scaling`` multiplies
    the cosines and sines. ``stored`` is what config.json says of weights that are stored quantised.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each query and key head before the rotation (Qwen3)
    max_positions: int
    windows: tuple[int | None, ...]
    inv_freq: tuple[float, ...]
    rope_scaling: float
    stored: Quantization | None = None


def load_spec(folder: Path) -> ModelSpec:
    """Read ``folder/config.json``. Code that a configuration points to (``auto_map``) is never run.

    Raises UserError naming the file where it is missing, no JSON, a Git-LFS pointer, inconsistent, or describes a
    model that the engine does not train.
    """
    path = folder / "config.json"
    raw = read_json(path)
    _refuse_unsupported(raw, path)
    stored = _stored(raw.get("quantization_config"), path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises here is about this one file
        raise UserError(f"{path}: transformers cannot read it: {_one_line(error)}") from None
    _check_sizes(config, path)
    inv_freq, rope_scaling = _rope(config, path)
    attention_bias = config.model_type in ("llama", "qwen3") and config.attention_bias
    return ModelSpec(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=attention_bias or config.model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=config.model_type == "llama" and config.mlp_bias,
        qk_norm=config.model_type == "qwen3",
        max_positions=config.max_position_embeddings,
        windows=_windows(config, path),
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        stored=stored,
    )


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` of the seven linear modules of a layer, in the order of their use."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "q_proj": (q_size, spec.hidden_size),
        "k_proj": (kv_size, spec.hidden_size),
        "v_proj": (kv_size, spec.hidden_size),
        "o_proj": (spec.hidden_size, q_size),
        "gate_proj": (spec.intermediate_size, spec.hidden_size),
        "up_proj": (spec.intermediate_size, spec.hidden_size),
        "down_proj": (spec.hidden_size, spec.intermediate_size),
    }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError naming the file where there is none."""
    refuse_lfs_pointer(path)
    try:
        with readable(path):
            tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}; fetch the file again") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; fetch the file again") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree


def refuse_lfs_pointer(path: Path) -> None:
    """Raise UserError where ``path`` is the text that Git leaves in place of a large file, or is not there."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_MAGIC))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; give the folder of a model") from None
    if start == _LFS_MAGIC:
        raise UserError(f"{path}: a Git-LFS pointer, not the file itself; run `git lfs pull` in {path.parent}")


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    experts = [key for key in _EXPERT_KEYS if raw.get(key) not in (None, 0, 1)]
    if experts or "moe" in str(model_type) or model_type == "mixtral":
        raise UserError(f"{path}: {model_type} is a mixture-of-experts model; only dense models are trained")
    if model_type not in _MODEL_TYPES:
        raise UserError(f"{path}: model_type {model_type!r} is not one of {', '.join(_MODEL_TYPES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only silu is")


def _stored(quantised: Any, path: Path) -> Quantization | None:
    """What transformers writes beside weights that bitsandbytes has quantised; other methods are refused by name."""
    if not quantised:
        return None
    if not isinstance(quantised, dict):
        raise UserError(f"{path}: quantization_config: expected an object, found {type(quantised).__name__}")
    four, eight = (bool(quantised.get(f"load_in_{bits}bit")) for bits in (4, 8))
    method = quantised.get("quant_method", "bitsandbytes" if four or eight else None)
    if method != "bitsandbytes":
        raise UserError(
            f"{path}: quantization_config: the weights are stored in the form of {method!r}, and only that of "
            f"bitsandbytes is supported; {USE_ORIGINAL}"
        )
    kind: Any = "int8" if eight else quantised.get("bnb_4bit_quant_type", "fp4")
    if four == eight or kind not in ("nf4", "fp4", "int8"):
        raise UserError(f"{path}: quantization_config says neither 4 bits of nf4 or fp4 nor 8 bits; use other weights")
    return Quantization(kind=kind, double=four and bool(quantised.get("bnb_4bit_use_double_quant")))


def _check_sizes(config: PretrainedConfig, path: Path) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for key in (*sizes, "vocab_size", "max_position_embeddings"):
        if getattr(config, key) < 1:
            raise UserError(f"{path}: {key} is {getattr(config, key)}; it must be at least 1")
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, _head_dim(config)
    if heads % kv_heads:
        raise UserError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim < 2 or head_dim % 2:
        raise UserError(f"{path}: head_dim {head_dim} cannot be rotated in pairs; it must be even")


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(config: PretrainedConfig, path: Path) -> tuple[int | None, ...]:
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    window = config.sliding_window
    if window is not None and window < 1:
        raise UserError(f"{path}: sliding_window is {window}; it must be at least 1, or null")
    if config.model_type == "mistral":
        return (window,) * config.num_hidden_layers
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    unknown = sorted(set(config.layer_types) - known)
    if unknown:
        raise UserError(
            f"{path}: layer_types holds {unknown[0]}, but sliding_window is {window}; known here: {sorted(known)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope(config: PretrainedConfig, path: Path) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor of cosines and sines, from transformers wherever they are scaled.

    transformers has by now gathered ``rope_theta`` and ``rope_scaling`` of older files in ``rope_parameters``.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if kind != "default" and kind not in _SCALED_ROPES:
        raise UserError(f"{path}: rope type {kind!r} is not one of default, {', '.join(_SCALED_ROPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; only 1 is")
    try:
        inv_freq, scaling = _default_rope(config) if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: rope parameters {rope} cannot be used: {_one_line(error)}") from None
    return tuple(inv_freq.tolist()), float(scaling)


def _default_rope(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """theta^(-2i/d), in float32 and in transformers' order of operations, so that the bits are equal."""
    head_dim = _head_dim(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
