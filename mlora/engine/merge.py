"""``mlora merge``: an adapter added into the weights of its base model, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.checkpoint.model_files import DTYPES, TensorPlan, copy_beside, new_folder, write_index, write_weights
from mlora.engine.device import prepare
from mlora.engine.trained import BARE_SLOT, Trained, base_of, check_fits, load_stage, read_trained
from mlora.models.spec import load_spec
from mlora.models.weights import Checkpoint
from mlora.pipeline.stage import Batch
from mlora.types import Microbatch, SampleRef, Segment, UserError, padded

_ROWS = 48  # tokens of the sample whose logits are compared


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What came of a merge. ``max_difference`` is the largest of logits between adapter on base and merged model,
    ``scale`` the largest logit, ``changed`` how much the adapter moves the base model's logits."""

    folder: Path
    dtype: str
    modules: int
    max_difference: float
    scale: float
    changed: float


def merge(adapter_folder: Path, output: Path, base: str | None = None, dtype: str | None = None) -> Merged:
    """Write W + scaling·B·A for every module of the adapter, and all else as it is, as a model's folder at ``output``.

    Sums are formed in float32 (float64 for a float64 model) and rounded once to ``dtype``, or to the type in which the
    base model stores that tensor. The base's files are kept apart as they are. Memory: about the largest tensor in
    float32; for the comparison of logits behind it, one layer of the model.

    Raises UserError where the adapter does not fit the model, a sum is not finite, or ``output`` is taken.
    """
    adapter = read_trained(adapter_folder)
    folder = base_of([adapter], base)
    spec = load_spec(folder)
    targets = check_fits(adapter, spec)
    checkpoint = Checkpoint(folder, spec)
    if checkpoint.stored is not None:
        raise UserError(f"{folder}: its weights are stored quantised; give --base the model that they were made from")
    shards = {
        shard: [TensorPlan(name=name, shape=shape, dtype=dtype or _stored(kind)) for name, shape, kind in tensors]
        for shard, tensors in checkpoint.files().items()
    }
    size = sum(plan.size for plans in shards.values() for plan in plans)
    with new_folder(output, size) as staging:
        for shard, plans in shards.items():
            write_weights(staging / shard, plans, lambda plan: _merged(checkpoint, adapter, plan))
        if len(shards) > 1:
            write_index(staging, shards)
        main = dtype or _stored(checkpoint.dtype_of(f"{targets[0]}.weight"))
        copy_beside(folder, staging, main)
        check = _compare(folder, adapter, staging, main)
    return Merged(folder=output, dtype=main, modules=len(targets), **check)


def _stored(kind: str) -> str:
    return next(name for name, short in DTYPES.items() if short == kind)


def _merged(checkpoint: Checkpoint, adapter: Trained, plan: TensorPlan) -> torch.Tensor:
    """The tensor as it is to be written; those without an adapter are the base's."""
    weight, dtype = checkpoint.tensor(plan.name), getattr(torch, plan.dtype)
    name = plan.name.removesuffix(".weight")
    pair = adapter.matrices.get(name)
    if pair is not None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        a_RD, b_RO = (x.to(wide) for x in pair)
        weight = weight.to(wide, copy=True).addmm_(b_RO.T, a_RD, alpha=adapter.config.scaling(name))
    weight = weight.to(dtype)
    if not bool(weight.isfinite().all()):
        raise UserError(f"{plan.name}: not finite in {plan.dtype} once merged; give --dtype float32 or bfloat16")
    return weight


def _compare(base: Path, adapter: Trained, merged: Path, dtype: str) -> dict[str, float]:
    """Adapter on base against the merged model, both computed in at least float32 on the CPU, layer by layer."""
    device = torch.device("cpu")
    prepare(device)
    torch.manual_seed(0)
    spec, wide = load_spec(base), torch.promote_types(getattr(torch, dtype), torch.float32)
    input_ids = torch.randint(0, spec.vocab_size, (_ROWS,))
    ways: tuple[tuple[Path, list[Trained], int], ...] = (
        (base, [adapter], BARE_SLOT + 1),
        (merged, [], BARE_SLOT),
        (base, [], BARE_SLOT),
    )
    rows: list[torch.Tensor | None] = [None] * len(ways)
    for layer in range(spec.num_layers):
        for i, (folder, adapters, slot) in enumerate(ways):
            stage = load_stage(folder, adapters, wide, device, range(layer, layer + 1))
            rows[i] = stage.evaluate(_batch(input_ids, slot), rows[i])
    adapted, whole, bare = (x for x in rows if x is not None)
    return {
        "max_difference": float((adapted - whole).abs().max()),
        "scale": float(adapted.abs().max()),
        "changed": float((adapted - bare).abs().max()),
    }


def _batch(input_ids: torch.Tensor, slot: int) -> Batch:
    sample = (SampleRef(0, 0, len(input_ids)),)
    segment = Segment(adapter=0, slot=slot, step=0, start=0, samples=sample, target_tokens=1, ends_step=True)
    return Batch(Microbatch(0, (segment,), padded(len(input_ids))), input_ids, input_ids)
