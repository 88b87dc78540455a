"""``mlora merge``: an adapter added into the weights of its base model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.checkpoint.model_files import DTYPES, TensorPlan, copy_beside, new_folder, write_index, write_weights
from mlora.engine.device import prepare
from mlora.engine.progress import Progress
from mlora.engine.requests import Requests, stop
from mlora.engine.signals import StopSignals
from mlora.engine.trained import BARE_SLOT, Trained, base_of, check_fits, one_sample, read_trained, stage_of
from mlora.engine.world import is_launched
from mlora.models.decoder import Decoder
from mlora.models.quantised import FrozenLinears, check_quantization
from mlora.models.spec import ModelSpec, Quantization, load_spec
from mlora.models.weights import Checkpoint, Weights
from mlora.types import UserError, linear_names

_ROWS = 48  # tokens of the sample whose logits are compared
_CPU = torch.device("cpu")

Way = tuple[Weights, list[Trained]]  # whose logits are compared


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What came of a merge. ``max_difference`` is the largest of logits between adapter on base and merged model,
    ``scale`` the largest logit, ``changed`` how much the adapter moves the base model's logits.

    ``quantization``: how the base was kept in training, and so in the comparison. Then ``other_difference`` is what the
    other choice of ``dequantised`` would have given, if there is another.
    """

    folder: Path
    dtype: str
    modules: int
    max_difference: float
    scale: float
    changed: float
    dequantised: bool = False
    quantization: Quantization | None = None
    other_difference: float | None = None


class _Source(Weights):
    """The weights of ``base`` and, with ``adapter``, W + scaling·B·A for its modules; made tensor by tensor.

    ``linears`` dequantise those of the layers; None: as they are stored.
    """

    def __init__(
        self,
        base: Checkpoint,
        spec: ModelSpec,
        linears: FrozenLinears | None,
        adapter: Trained | None,
        dtype: str | None,
    ) -> None:
        self._base, self._spec, self._linears = base, spec, linears
        self._adapter, self._dtype, self._names = adapter, dtype, frozenset(linear_names(spec.num_layers))

    def dtype_of(self, name: str) -> str:
        """In which the tensor is made: asked for, or as stored; of a weight stored quantised, the embedding's."""
        kinds = {short: name for name, short in DTYPES.items()}
        return self._dtype or kinds[self._base.dtype_of(name)]

    def shards(self) -> dict[str, list[TensorPlan]]:
        """What each file of the base holds, and so each file that is written."""
        return {
            file: [TensorPlan(name=name, shape=shape, dtype=self.dtype_of(name)) for name, shape in tensors]
            for file, tensors in self._base.files().items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Raises UserError where a sum is not finite."""
        weight, dtype = self._plain(name), getattr(torch, self.dtype_of(name))
        module = name.removesuffix(".weight")
        pair = self._adapter.matrices.get(module) if self._adapter else None
        if pair is not None:
            assert self._adapter is not None
            wide = torch.promote_types(weight.dtype, torch.float32)
            a_RD, b_RO = (x.to(wide) for x in pair)
            weight = weight.to(wide, copy=True).addmm_(b_RO.T, a_RD, alpha=self._adapter.config.scaling(module))
        weight = weight.to(dtype)
        if not bool(weight.isfinite().all()):
            name_of = str(dtype).removeprefix("torch.")
            raise UserError(f"{name}: not finite in {name_of} once merged; choose dtype float32 or bfloat16")
        return weight

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        names = [name for name in self._base.layer(index) if name.endswith((".weight", ".bias"))]
        return {name: self.tensor(f"model.layers.{index}.{name}") for name in names}

    def _plain(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if self._linears is not None and module == "lm_head" and self._base.head_scales():
            return self._linears.head(self._base)
        if self._linears is None or module not in self._names:
            return self._base.tensor(name)
        index, path = module.removeprefix("model.layers.").split(".", 1)
        return self._linears.dequantised(self._base.layer(int(index)), int(index), path)


def merge(
    adapter_folder: str | Path,
    output: str | Path,
    base: str | None = None,
    dtype: str | None = None,
    dequantised: bool = False,
) -> Merged:
    """Write W + scaling·B·A for every module of the adapter, and all else as it is, as a model's folder at ``output``.

    W is the base model's weight; with ``dequantised`` what training on a quantised base has multiplied by. Sums are
    formed in float32 (float64 for a float64 model) and rounded once to ``dtype``, or to the type in which the base
    model stores that tensor. The base's files are kept apart as they are. Memory: about the largest tensor in float32;
    for the comparison of logits behind it, one layer of the model.

    Raises UserError where the adapter does not fit the model, a sum is not finite, ``output`` is taken, or nothing says
    how the base was quantised; Interrupted at SIGINT or SIGTERM. Of what is not complete nothing is left.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    output, adapter = Path(output), read_trained(Path(adapter_folder))
    folder = base_of([adapter], base)
    spec = load_spec(folder)
    targets = check_fits(adapter, spec)
    checkpoint = Checkpoint(folder, spec)
    linears, quantization = _linears(checkpoint, adapter, spec, folder, dequantised)
    source = _Source(checkpoint, spec, linears if dequantised else None, adapter, dtype)
    main = source.dtype_of(f"{targets[0]}.weight")
    shards = source.shards()
    size, requests = sum(plan.size for plans in shards.values() for plan in plans), Requests()
    with StopSignals(lambda number: requests.ask(stop(number)), is_launched()), new_folder(output, size) as staging:
        _write(staging, shards, source, requests)
        copy_beside(folder, staging, main)
        trained = _Source(checkpoint, spec, linears, None, None)
        written = Checkpoint(staging, load_spec(staging))
        ways: list[Way] = [(trained, [adapter]), (trained, []), (written, [])]
        if linears is not None and checkpoint.stored is None:
            ways.append((_Source(checkpoint, spec, None if dequantised else linears, adapter, dtype), []))
        adapted, *others = _logits(spec, ways, main, requests)
        requests.check()
    changed, max_difference, *other = (float((adapted - logits).abs().max()) for logits in others)
    return Merged(
        folder=output,
        dtype=main,
        modules=len(targets),
        max_difference=max_difference,
        scale=float(adapted.abs().max()),
        changed=changed,
        dequantised=dequantised,
        quantization=quantization,
        other_difference=other[0] if other else None,
    )


def _write(folder: Path, shards: Mapping[str, list[TensorPlan]], source: _Source, requests: Requests) -> None:
    progress = Progress("merging", sum(map(len, shards.values())), "tensors")

    def made(plan: TensorPlan) -> torch.Tensor:
        requests.check()
        tensor = source.tensor(plan.name)
        progress.advance()
        return tensor

    for shard, plans in shards.items():
        write_weights(folder / shard, plans, made)
    if len(shards) > 1:
        write_index(folder, shards)


def _linears(
    checkpoint: Checkpoint, adapter: Trained, spec: ModelSpec, folder: Path, dequantised: bool
) -> tuple[FrozenLinears | None, Quantization | None]:
    """What dequantises the base's linears as in training, and how they were kept; None where they were as they are."""
    if checkpoint.stored is not None and not dequantised:
        raise UserError(
            f"{folder}: its weights are stored quantised; give --base (base=…) the model that they were made "
            "from, or --dequantised (dequantised=True) to merge into what they stand for"
        )
    kept, dtype = adapter.kept or (None, torch.float32)
    quantization = checkpoint.stored or kept
    if quantization is None:
        if dequantised:
            raise UserError(
                f"dequantised: neither {folder} nor the files of {adapter.folder} say that its base was quantised; "
                "leave it out"
            )
        return None, None
    if quantization.kind != "fp8":  # whose weights need no product to be dequantised
        check_quantization(quantization, dtype, _CPU)
    return FrozenLinears(spec, quantization, dtype, _CPU), quantization


def _logits(spec: ModelSpec, ways: Sequence[Way], dtype: str, requests: Requests) -> list[torch.Tensor]:
    """Logits of each way's weights with its adapter, in at least float32 on the CPU, layer by layer."""
    prepare(_CPU)
    torch.manual_seed(0)
    wide = torch.promote_types(getattr(torch, dtype), torch.float32)
    input_ids = torch.randint(0, spec.vocab_size, (_ROWS,))
    rows: list[torch.Tensor | None] = [None] * len(ways)
    progress = Progress("comparing logits", spec.num_layers, "layers")
    for layer in range(spec.num_layers):
        for i, (weights, adapters) in enumerate(ways):
            requests.check()
            stage = stage_of(Decoder(spec, weights, range(layer, layer + 1), wide, _CPU), adapters)
            rows[i] = stage.evaluate(one_sample(input_ids, BARE_SLOT + len(adapters)), rows[i])
        progress.advance()
    return [x for x in rows if x is not None]
