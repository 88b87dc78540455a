"""Adapters that lie in PEFT's form, from a run or from elsewhere, put on a base model to be used."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.checkpoint.peft_files import Matrices, adapter_files, read_adapter
from mlora.config import REFUSED_KEYS, AdapterConfig, parse_config
from mlora.engine.output import ADAPTERS
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization
from mlora.models.spec import ModelSpec, linear_shapes, load_spec
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.stage import Stage
from mlora.types import UserError

BASE = "base"  # the name of the base model without an adapter
BARE_SLOT = 0  # whose rows have the base model alone; adapters have the slots from 1 on


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An adapter that was trained. ``base_model`` is what its files name, "" where they name none."""

    folder: Path
    config: AdapterConfig
    base_model: str
    matrices: Matrices

    @property
    def name(self) -> str:
        return self.config.name


def read_trained(folder: Path) -> Trained:
    """An adapter in PEFT's form. Raises UserError naming the file that is damaged or asks for what the engine lacks."""
    fields, matrices = read_adapter(folder)
    base_model = fields.get("base_model_name_or_path")
    return Trained(
        folder=folder,
        config=_adapter_config(fields, folder),
        base_model=base_model if isinstance(base_model, str) else "",
        matrices=matrices,
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
        raise UserError(f"{file}: base_model_name_or_path is missing; write the base model there, or give --base")
    if len(wanted) > 1:
        first, second = list(wanted.values())[:2]
        raise UserError(
            f"{first.name} is made for {first.base_model}, but {second.name} for {second.base_model}; use them one by "
            "one, or give --base"
        )
    if not wanted:
        raise UserError("no adapter and no base model: give the folder of an adapter or of a run, or --base MODEL")
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
    folder: Path, adapters: Sequence[Trained], dtype: torch.dtype, device: torch.device, layers: range | None = None
) -> Stage:
    """The base model, or some of its layers, with adapter i in slot i + 1. Raises UserError where one does not fit."""
    spec = load_spec(folder)
    layers = range(spec.num_layers) if layers is None else layers
    targets = [check_fits(adapter, spec) for adapter in adapters]
    checkpoint = Checkpoint(folder, spec)
    check_quantization(checkpoint.stored, dtype, device)
    stage = Stage(Decoder(spec, checkpoint, layers, dtype, device, checkpoint.stored))
    for slot, (adapter, modules) in enumerate(zip(adapters, targets, strict=True), BARE_SLOT + 1):
        state = AdapterState(adapter.config, modules, linear_shapes(spec), layers, dtype, device)
        state.load({name: adapter.matrices[name] for name in state.matrices()})
        stage.join(slot, state)
    return stage


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
    refused."""
    names = {field.name for field in dataclasses.fields(AdapterConfig)} | REFUSED_KEYS
    known = {key: value for key, value in fields.items() if key in names}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip("._-")[:100] or "adapter"
    adapter = {**known, "name": name, "dataset": str(folder)}
    try:
        return parse_config({"base_model": str(folder), "adapters": [adapter]}).adapters[0]
    except UserError as error:
        raise UserError(f"{adapter_files(folder)[0]}: {error}") from None
