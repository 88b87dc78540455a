"""Adapters that were trained at work on their base model, over stages as in training: threads or processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlora.config import PipelineConfig, parse_config
from mlora.engine.base import model_digest
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.layout import first_layers, layer_counts
from mlora.engine.trained import BARE_SLOT, BASE, Trained, base_of, find_trained, kept_by_all, load_stage
from mlora.engine.worker import Job, Seat, check_model
from mlora.models.spec import Quantization, load_spec
from mlora.pipeline.schedule import in_flight
from mlora.pipeline.stage import Stage
from mlora.types import UserError


@dataclass(frozen=True, kw_only=True)
class Use(Job):
    """What every stage must know: ``names`` are those of the slots that are asked; adapter i sits in slot i + 1.

    ``quantization``: how the base's linears were kept while the adapters were trained.
    """

    adapters: tuple[Trained, ...]
    quantization: Quantization | None
    names: Mapping[int, str]

    @property
    def folder(self) -> Path:
        """Of the base model."""
        return Path(self.config.base_model)

    def open_stage(self, seat: Seat) -> Stage:
        """This stage's layers with all adapters."""
        if seat.stage:
            check_model(self)
        layers = range(*self.first_layers[seat.stage : seat.stage + 2])
        return load_stage(self.folder, self.adapters, self.dtype, seat.device, layers, self.quantization)


@dataclass(frozen=True)
class Models:
    """What is to be used, and where.

    Args:
        places: folders of adapters, or of runs, whose adapters are all taken; none: the base model alone.
        base: the base model where it is not what the adapters name.
        with_base: whether the base model is asked too.
        dtype, device: as in a configuration.
        stages: into which the model is cut, in this process; under torchrun there are as many as processes.
    """

    places: Sequence[str | Path]
    base: str | None = None
    with_base: bool = False
    dtype: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stages: int | None = None

    def use(self, world: int) -> Use:
        """Read the adapters, not the model's weights. Raises UserError."""
        if isinstance(self.places, str | Path):
            raise UserError(f"places: give a list of folders, such as [{str(self.places)!r}]")
        adapters = find_trained(self.places)
        folder = base_of(adapters, self.base)
        keys = {"base_model": str(folder), "device": self.device, "dtype": self.dtype}
        config = parse_config(keys | {"adapters": [{"name": "none", "dataset": "."}]})
        spec, device = load_spec(folder), choose_device(config.device)
        pipeline = PipelineConfig(stages=self.stages, replicas=1, transport="local" if world == 1 else "auto")
        counts = layer_counts(spec, pipeline.shape(world)[0])
        names = {slot: adapter.name for slot, adapter in enumerate(adapters, BARE_SLOT + 1)}
        return Use(
            config=dataclasses.replace(config, pipeline=pipeline),
            first_layers=first_layers(counts),
            in_flight=in_flight(len(counts), 1),
            replicas=1,
            dtype=choose_dtype(config.dtype, device),
            model_digest=model_digest(folder),
            adapters=tuple(adapters),
            quantization=kept_by_all(adapters),
            names=names if names and not self.with_base else {BARE_SLOT: BASE} | names,
        )
