"""Adapters that lie in PEFT's form, from a run or from elsewhere, put on a base model to be used."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.checkpoint.peft_files import Matrices, adapter_files, read_adapter, read_note
from mlora.config import REFUSED, AdapterConfig, parse_config
from mlora.engine.output import ADAPTERS
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization, from_note
from mlora.models.spec import ModelSpec, Quantization, linear_shapes, load_spec
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.stage import Batch, Stage
from mlora.types import Microbatch, Note, SampleRef, Segment, UserError, padded

_INERT = {  # what PEFT's file may say and no result depends on
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("ensure_weight_tying", "megatron_core", "qalora_group_size"),
}
BASE = "base"  # the name of the base model without an adapter
BARE_SLOT = 0  # whose rows have the base model alone; adapters have the slots from 1 on


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An adapter that was trained. ``base_model`` is what its files name, "" where they name none.

    ``kept``: how the base's linears were kept in which dtype while it was trained, where its files say so.
    """

    folder: Path
    config: AdapterConfig
    base_model: str
    matrices: Matrices
    kept: tuple[Quantization, torch.dtype] | None = None

    @property
    def name(self) -> str:
        return self.config.name


def read_trained(folder: Path) -> Trained:
    """An adapter in PEFT's form. Raises UserError naming the file that is damaged or asks for what the engine lacks."""
    if (folder / ADAPTERS).is_dir():
        found = " or ".join(map(str, _folders(folder)))
        raise UserError(f"{folder}: is a run's folder, and one adapter is asked for; give {found}")
    fields, matrices = read_adapter(folder)
    base_model = fields.get("base_model_name_or_path")
    return Trained(
        folder=folder,
        config=_adapter_config(fields, folder),
        base_model=base_model if isinstance(base_model, str) else "",
        matrices=matrices,
        kept=_kept(folder),
    )


def find_trained(places: Sequence[str | Path]) -> list[Trained]:
    """The adapters in folders that are an adapter's own, or a run's with all that it has exported.

    Raises UserError where there is none, or where two have the same name.
    """
    found = [read_trained(folder) for place in places for folder in _folders(Path(place))]
    names = [adapter.name for adapter in found]
    for adapter in found:
        if names.count(adapter.name) > 1:
            raise UserError(f"{adapter.folder}: there are two adapters called {adapter.name!r}; rename one's folder")
    return found


def base_of(adapters: Sequence[Trained], named: str | None) -> Path:
    """The folder of the base model that is ``named``, else of the one that the adapters' files name.

    Raises UserError where neither names one, or the adapters name several.
    """
    if named is not None:
        return resolve_base_model(named)
    wanted = {adapter.base_model: adapter for adapter in adapters}
    if "" in wanted:
        file = adapter_files(wanted[""].folder)[0]
        raise UserError(
            f"{file}: base_model_name_or_path is missing; write the base model there, or give --base (base=…)"
        )
    if len(wanted) > 1:
        first, second = list(wanted.values())[:2]
        raise UserError(
            f"{first.name} is made for {first.base_model}, but {second.name} for {second.base_model}; use them one by "
            "one, or give --base (base=…)"
        )
    if not wanted:
        raise UserError(
            "no adapter and no base model: give the folder of an adapter or of a run, or --base MODEL (base=…)"
        )
    return resolve_base_model(next(iter(wanted)))


def check_fits(adapter: Trained, spec: ModelSpec) -> tuple[str, ...]:
    """The adapter's modules. Raises UserError where its matrices are not those of its configuration on this model."""
    try:
        targets = match_targets(adapter.config, spec.num_layers)
    except UserError as error:
        raise UserError(f"{adapter_files(adapter.folder)[0]}: {error}") from None
    shapes = linear_shapes(spec)
    for name in sorted({*targets, *adapter.matrices}):
        found = [list(x.shape) for x in adapter.matrices.get(name, ())]
        out_features, in_features = shapes.get(name.split(".")[-1], (0, 0))
        r = adapter.config.rank(name)
        wanted = [[r, in_features], [r, out_features]] if name in targets else []
        if found != wanted:
            raise UserError(
                f"{adapter.folder}: the adapter was made for another model: {name} has A and B of shapes {found}, "
                f"not {wanted}"
            )
    return targets


def load_stage(
    folder: Path,
    adapters: Sequence[Trained],
    dtype: torch.dtype,
    device: torch.device,
    layers: range | None = None,
    quantization: Quantization | None = None,
) -> Stage:
    """The base model, or some of its layers, with adapter i in slot i + 1. Raises UserError where one does not fit.

    ``quantization``: how its linears are kept, if they are not stored quantised.
    """
    spec = load_spec(folder)
    for adapter in adapters:
        check_fits(adapter, spec)
    checkpoint = Checkpoint(folder, spec)
    quantization = checkpoint.stored or quantization
    check_quantization(quantization, dtype, device)
    layers = range(spec.num_layers) if layers is None else layers
    return stage_of(Decoder(spec, checkpoint, layers, dtype, device, quantization), adapters)


def kept_by_all(adapters: Sequence[Trained]) -> Quantization | None:
    """How the base was kept while they were trained. Raises UserError where that differs, since they share one."""
    ways = {adapter.name: adapter.kept[0] if adapter.kept else None for adapter in adapters}
    if any(way != other for way in ways.values() for other in ways.values()):
        shown = ", ".join(f"{name}: {way.kind if way else 'not quantised'}" for name, way in ways.items())
        raise UserError(f"the adapters were trained on differently kept bases ({shown}); ask one at a time")
    return next(iter(ways.values()), None)


def stage_of(model: Decoder, adapters: Sequence[Trained]) -> Stage:
    """The model with adapter i in slot i + 1."""
    stage = Stage(model)
    for slot, adapter in enumerate(adapters, BARE_SLOT + 1):
        targets, shapes = check_fits(adapter, model.spec), linear_shapes(model.spec)
        state = AdapterState(adapter.config, targets, shapes, model.layers, model.dtype, model.device)
        state.load({name: adapter.matrices[name] for name in state.matrices()})
        stage.join(slot, state)
    return stage


def one_sample(input_ids: torch.Tensor, slot: int) -> Batch:
    """A batch for ``Stage.evaluate`` of one sample under the adapter in ``slot``."""
    sample = (SampleRef(0, 0, len(input_ids)),)
    segment = Segment(adapter=0, slot=slot, step=0, start=0, samples=sample, target_tokens=1, ends_step=True)
    return Batch(Microbatch(0, (segment,), padded(len(input_ids))), input_ids, input_ids)


def _kept(folder: Path) -> tuple[Quantization, torch.dtype] | None:
    note = read_note(folder)
    try:
        return from_note(note) if note else None
    except ValueError as error:
        raise UserError(f"{adapter_files(folder)[1]}: its metadata are damaged: {error}") from None


def _folders(place: Path) -> list[Path]:
    if adapter_files(place)[0].exists():
        return [place]
    folders = sorted(path for path in (place / ADAPTERS).glob("[!.]*") if path.is_dir())
    if not folders:
        raise UserError(
            f"{place}: there is no adapter: neither {adapter_files(place)[0].name} nor a run's {ADAPTERS}/NAME; give "
            "the folder of one of them"
        )
    return folders


def _adapter_config(fields: dict[str, object], folder: Path) -> AdapterConfig:
    """PEFT's fields that the engine knows, checked as if they stood in a configuration file; what it does not do is
    refused, and a field that it has never heard of told, since it might change what the matrices do."""
    names = {field.name for field in dataclasses.fields(AdapterConfig)} | REFUSED.keys()
    known = {key: value for key, value in fields.items() if key in names}
    for key, value in fields.items():
        if value and key not in names | _INERT:
            warnings.warn(f"{adapter_files(folder)[0]}: {key} is not known here and is left aside", Note, stacklevel=2)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip("._-")[:100] or "adapter"
    adapter = {**known, "name": name, "dataset": str(folder)}
    try:
        return parse_config({"base_model": str(folder), "adapters": [adapter]}).adapters[0]
    except UserError as error:
        file = adapter_files(folder)[0]
        raise UserError("\n".join(f"{file}: {line}" for line in str(error).split("\n"))) from None
