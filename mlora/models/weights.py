"""The frozen weights of a model: safetensors files, checked from their headers and read tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from mlora.models.spec import USE_ORIGINAL, ModelSpec, Quantization, linear_shapes, read_json, refuse_lfs_pointer
from mlora.types import UserError, linear_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_ITEMSIZE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # in which packed weights are stored
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_DOWNLOADS = ("model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


class Weights(Protocol):
    """What a decoder is made of; see Checkpoint."""

    _spec: ModelSpec

    def tensor(self, name: str) -> torch.Tensor: ...
    def layer(self, index: int) -> Mapping[str, torch.Tensor]: ...

    def embedding(self) -> torch.Tensor:
        """``[V, D]``, one row per token id."""
        return self.tensor(_EMBEDDING)

    def head(self) -> torch.Tensor:
        """``[V, D]``; the embedding where the two are tied."""
        return self.tensor(_EMBEDDING if self._spec.tied else _HEAD)

    def head_scales(self) -> Mapping[str, torch.Tensor]:
        """What is stored besides a head that is stored quantised, named as in the file."""
        return {}

    def final_norm(self) -> torch.Tensor:
        """``[D]``, the weight of the norm before the head."""
        return self.tensor(_NORM)


class Checkpoint(Weights):
    """The weights in a model's folder, checked by their headers; tensors are read when they are asked for.

    Raises UserError naming the file where a tensor that ``spec`` needs is missing, of another shape or not a float (nor
    what bitsandbytes stores, where config.json says so), where one is left over, where a tied model has a head of its
    own (transformers would use that one after all), or where a file is missing, cut off, unknown to the index or a
    Git-LFS pointer.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._spec = spec
        self._entries = _read_entries(folder)
        shapes = _tensor_shapes(spec)
        self._scales = _scales(self._entries, spec) if spec.stored else {}
        _check_complete(self._entries, shapes, self._scales, folder)
        for name in self._scales:
            _check_quantised(name, self._entries, shapes[f"{name}.weight"], spec.stored)
        _check_nothing_left_out(self._entries, shapes, self._scales)
        if spec.stored and not self._scales:
            raise UserError(
                f"{folder / 'config.json'}: quantization_config says {spec.stored}, but the weights are floats; take "
                "it out there, and write quantization in the run's configuration"
            )
        if spec.tied and _HEAD in self._entries and not torch.equal(self.tensor(_HEAD), self.embedding()):
            raise UserError(
                f"{folder / 'config.json'}: ties head and embedding, which differ in {self._entries[_HEAD].file.name}; "
                "write tie_word_embeddings: false there"
            )

    @property
    def stored(self) -> Quantization | None:
        """How the weights are stored; ``dense`` are the linears stored as floats."""
        if self._spec.stored is None:
            return None
        return replace(self._spec.stored, dense=frozenset(linear_names(self._spec.num_layers)) - self._scales.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name (as in transformers) on the CPU, in the dtype in which it is stored.

        Its memory is the mapped file, so it follows whoever overwrites that file in place.
        """
        with safe_open(self._entries[name].file, framework="pt") as file:
            return file.get_tensor(name)

    def head_scales(self) -> Mapping[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self._scales.get(_HEAD.removesuffix(".weight"), ())}

    def dtype_of(self, name: str) -> str:
        """The type in which the tensor is stored, by safetensors' name; of a quantised weight, the embedding's."""
        return self._entries[_EMBEDDING if name.removesuffix(".weight") in self._scales else name].dtype

    def files(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Name and shape of each tensor that the model needs, by the name of the file that holds it.

        The shape is that of the weight also where it is stored packed.
        """
        found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in _tensor_shapes(self._spec).items():
            found.setdefault(self._entries[name].file.name, []).append((name, shape))
        return found

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """All tensors of one decoder layer by short name, such as ``self_attn.q_proj.weight`` ``[O, D]``.

        With a weight that is stored quantised come its scales, named as in the file.
        """
        prefix = f"model.layers.{index}."
        names = [f"{prefix}{name}" for name in _layer_shapes(self._spec)]
        names += [scale for name, found in self._scales.items() if name.startswith(prefix) for scale in found]
        return {name.removeprefix(prefix): self.tensor(name) for name in names}


def resolve_base_model(name: str) -> Path:
    """The folder of a model: ``name`` itself, else the snapshot of that hub id, downloaded where it is not yet here.

    Raises UserError saying what was tried.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"base_model: {name} is a file; give the folder that holds config.json and the weights")
    tried = f"base_model: {name!r} is not a folder here"
    try:
        return Path(snapshot_download(name, allow_patterns=list(_DOWNLOADS)))
    except HFValidationError:
        raise UserError(
            f"{tried}, and cannot be a hub id; check the path, which counts from the configuration's folder if it "
            "stands in one"
        ) from None
    except GatedRepoError:
        raise UserError(f"{tried}, and on the hub it is gated; ask for access there and run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(f"{tried}, and the hub has no model of that name that you may see; check the name") from None
    except LocalEntryNotFoundError:
        raise UserError(f"{tried}, not in the hub's cache, and the hub is out of reach; give a local folder") from None
    except Exception as error:  # the client of the hub stands on several libraries, each with errors of its own
        raise UserError(f"{tried}, and fetching it from the hub failed: {' '.join(str(error).split())}") from None


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where a tensor is and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _read_entries(folder: Path) -> dict[str, _Entry]:
    """Every tensor of the checkpoint by name. Where a single file and an index are both there the single file counts,
    as in transformers."""
    if (folder / _SINGLE).exists():
        return _read_header(folder / _SINGLE)
    if (folder / _INDEX).exists():
        return _read_index(folder / _INDEX)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise UserError(f"{folder / _INDEX}: missing, but {shards[0].name} is there; fetch the index as well")
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles:
        raise UserError(
            f"{pickles[0]}: pickled weights can run code and are never opened; convert them where you trust them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise UserError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}; give the folder of a model with its weights")


def _read_index(path: Path) -> dict[str, _Entry]:
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(f"{path}: weight_map, the shard of each tensor, is missing or damaged; fetch the file again")
    shards = sorted(set(places.values()))
    for shard in shards:
        if not (path.parent / shard).is_file():
            raise UserError(f"{path.parent / shard}: missing, but {path.name} names it; fetch this shard")
    for file in sorted(path.parent.glob("model-*-of-*.safetensors")):
        if file.name not in shards:
            raise UserError(f"{file}: {path.name} does not name this shard; remove it, or fetch the index that does")
    headers = {shard: _read_header(path.parent / shard) for shard in shards}
    for name, shard in places.items():
        if name not in headers[shard]:
            raise UserError(f"{path.parent / shard}: {name} is not in it, but {path.name} says so; fetch both again")
    return {name: headers[shard][name] for name, shard in places.items()}


def _read_header(path: Path) -> dict[str, _Entry]:
    refuse_lfs_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {
                name: _Entry(file=path, shape=tuple(slice_.get_shape()), dtype=slice_.get_dtype())
                for name, slice_ in slices.items()
            }
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UserError(f"{path}: cut off or damaged ({size} bytes; {error}); fetch it again") from None


def _tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the model needs, by transformers' name."""
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    shapes[_NORM] = (spec.hidden_size,)
    if not spec.tied:
        shapes[_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of one decoder layer, by short name."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (spec.hidden_size,),
        "post_attention_layernorm.weight": (spec.hidden_size,),
    }
    for module, (rows, columns) in linear_shapes(spec).items():
        prefix, bias = ("mlp", spec.mlp_bias)
        if module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            prefix, bias = ("self_attn", spec.o_bias if module == "o_proj" else spec.qkv_bias)
        shapes[f"{prefix}.{module}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}.{module}.bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {f"self_attn.{norm}.weight": (spec.head_dim,) for norm in ("q_norm", "k_norm")}
    return shapes


def _scales(entries: dict[str, _Entry], spec: ModelSpec) -> dict[str, list[str]]:
    """What is stored of each quantised linear, and of a quantised head, besides its weight."""
    linears = {*linear_names(spec.num_layers), *([] if spec.tied else [_HEAD.removesuffix(".weight")])}
    found: dict[str, list[str]] = {}
    for name in entries:
        linear, is_four_bit, _ = name.partition(".weight.")
        if not is_four_bit:
            linear, dot, last = name.rpartition(".")
            if not dot or last not in ("SCB", "weight_format"):
                continue
        if linear in linears:
            found.setdefault(linear, []).append(name)
    return found


def _check_quantised(
    name: str, entries: dict[str, _Entry], shape: tuple[int, ...], stored: Quantization | None
) -> None:
    """A linear's weight and scales have the sizes that bitsandbytes gives them."""
    weight = entries[f"{name}.weight"]
    assert stored is not None
    if stored.kind == "int8":
        scale = entries.get(f"{name}.SCB")
        good = scale is not None and (scale.dtype, scale.shape) == ("F32", shape[:1])
        good = good and (weight.dtype, weight.shape) == ("I8", shape)
    else:
        size = math.prod(weight.shape) * _ITEMSIZE.get(weight.dtype, 0)
        needed = (f"{name}.weight.absmax", f"{name}.weight.quant_state.bitsandbytes__{stored.kind}")
        good = all(key in entries for key in needed) and size == -(-math.prod(shape) // 2)
    if not good:
        raise UserError(
            f"{weight.file}: {name}.weight, {weight.dtype} {list(weight.shape)}, is not what bitsandbytes stores as "
            f"{stored.kind} for {list(shape)}; do the file and config.json belong together?"
        )


def _check_complete(
    entries: dict[str, _Entry], shapes: dict[str, tuple[int, ...]], quantised: Collection[str], folder: Path
) -> None:
    missing = [name for name in shapes if name not in entries]
    if missing:
        source = folder / (_SINGLE if (folder / _SINGLE).exists() else _INDEX)
        _refuse_packed(missing, entries)
        more = f" and {len(missing) - 1} more are" if missing[1:] else " is"
        raise UserError(
            f"{source}: {missing[0]}{more} missing, but config.json asks for it; do the two belong together?"
        )
    for name, shape in shapes.items():
        entry = entries[name]
        if name.removesuffix(".weight") in quantised:
            continue
        if entry.dtype not in _FLOATS:
            raise UserError(
                f"{entry.file}: {name} is stored as {entry.dtype}, which is no float, and not as bitsandbytes would "
                f"store it with a quantization_config in config.json; {USE_ORIGINAL}"
            )
        if entry.shape != shape:
            raise UserError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, but config.json asks for {list(shape)}; "
                "do the two belong together?"
            )


def _refuse_packed(missing: Sequence[str], entries: dict[str, _Entry]) -> None:
    """Refuse what GPTQ, AWQ and others have in a weight's place, where config.json does not tell of it."""
    for weight in (name for name in missing if name.endswith(".weight")):
        module = weight.removesuffix("weight")
        others = sorted(name for name in entries if name.startswith(module) and name != f"{module}bias")
        if others:
            raise UserError(
                f"{entries[others[0]].file}: {others[0]} stands in the place of {weight}: the weights are quantised in "
                f"a form that is not bitsandbytes'; {USE_ORIGINAL}"
            )


def _check_nothing_left_out(
    entries: dict[str, _Entry], shapes: dict[str, tuple[int, ...]], scales: Mapping[str, Sequence[str]]
) -> None:
    """Refuse tensors that transformers would warn of: a bias or a layer left out is another model, silently."""
    places = shapes.keys() | {scale for found in scales.values() for scale in found}
    for name, entry in entries.items():
        harmless = name == _HEAD or name.endswith(".rotary_emb.inv_freq") or not name.startswith(("model.", "lm_head."))
        if name not in places and not harmless:
            raise UserError(f"{entry.file}: {name} has no place in config.json's model; do the two belong together?")
