"""An adapter that begins where another one ended: its matrices come from files in PEFT's form."""

from __future__ import annotations

from collections.abc import Iterator

from mlora.checkpoint.peft_files import adapter_files
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.base import Base
from mlora.engine.trained import Trained, check_fits, read_trained
from mlora.models.spec import ModelSpec
from mlora.types import UserError

_TOLD = ("lora_alpha", "lora_dropout")  # may differ, and change what the matrices do


def load_initial(adapter: AdapterRun, base: Base) -> None:
    """Give an adapter with ``init_from`` its matrices, unless a checkpoint has given it later ones.

    Says which settings differ from those with which the other was trained. Raises UserError where the files are
    damaged, made for another model, or have another r or other modules than are configured.
    """
    config = adapter.config
    if config.init_from is None or adapter.restored is not None or adapter.state != "waiting":
        return
    place = f"adapters[{config.name}].init_from"
    try:
        source = read_trained(config.init_from)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    _check_same_shape(source, adapter, base.spec, place)
    told = "; ".join(_differences(source, adapter, base)) or "with the same settings"
    print(f"{config.name}: begins with {config.init_from}; {told}", flush=True)
    adapter.restored = {
        f"{name}.{kind}": matrix.contiguous()
        for name, pair in source.matrices.items()
        for kind, matrix in zip("AB", pair, strict=True)
    }


def _differences(source: Trained, adapter: AdapterRun, base: Base) -> Iterator[str]:
    """What changes the meaning of the matrices."""
    here, there = adapter.config, source.config
    for key in _TOLD:
        if getattr(here, key) != getattr(there, key):
            yield f"{key} is {float(getattr(here, key)):g} here and was {float(getattr(there, key)):g} there"
    if there.use_rslora != here.use_rslora:
        yield f"use_rslora is {here.use_rslora} here and was {there.use_rslora} there".lower()
    if source.base_model and source.base_model != base.name:
        yield f"base_model is {base.name} here and was {source.base_model} there"
    counts = [here.scaling(name) / there.scaling(name) for name in adapter.targets]
    if {*counts} != {1}:
        shown = " to ".join(f"{x:.4g}" for x in sorted({min(counts), max(counts)}))
        yield f"its update counts {shown} times as much as there"


def _check_same_shape(source: Trained, adapter: AdapterRun, spec: ModelSpec, place: str) -> None:
    config = adapter.config
    for key in ("r", "rank_pattern"):
        there, here = (getattr(one, key) for one in (source.config, config))
        if there != here:
            raise UserError(f"{place}: {config.init_from} has {key} {there}, not {here}; write {key}: {there}")
    try:
        modules = check_fits(source, spec)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    differing = sorted({*modules} ^ {*adapter.targets})
    if differing:
        targets = source.config.target_modules
        targets = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
        side = "not there" if differing[0] in adapter.targets else "not configured here"
        raise UserError(
            f"{place}: {differing[0]} is {side} ({len(differing)} modules differ); write the modules as in "
            f"{adapter_files(source.folder)[0]}: target_modules: {targets}"
        )
