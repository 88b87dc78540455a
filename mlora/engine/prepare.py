"""Everything that is read and checked before a run: model, tokenizer, data, targets, and how the stages are cut."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlora.adapters.optimizer import learning_rate, warmup_steps
from mlora.adapters.targets import match_targets
from mlora.config import AdapterConfig, DatasetConfig, RunConfig
from mlora.data import TokenData, hold_out, join_tokens, open_source, open_tokens
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.base import Base, open_base
from mlora.engine.device import full_rows
from mlora.engine.layout import layer_counts
from mlora.engine.memory import fitted
from mlora.engine.warnings import deployment_warnings
from mlora.models.quantised import check_quantization
from mlora.pipeline.schedule import in_flight
from mlora.tasks import SftTask
from mlora.types import UserError


class DataError(UserError):
    """An adapter's data cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run starts from. ``layers`` are the layers of each stage, ``in_flight`` the microbatches each holds.

    ``config`` has microbatch_tokens and recompute as numbers. ``parked`` are the adapters that cannot go on now, with
    the reason.
    """

    config: RunConfig
    base: Base
    adapters: list[AdapterRun]
    layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    parked: Mapping[str, str]


def prepare(config: RunConfig, stages: int, resumable: Collection[str] = (), to_train: bool = True) -> Prepared:
    """Read and check all of it, with a line per adapter on what was found. Raises UserError; reads no weights.

    Where the data of a ``resumable`` adapter cannot be read, that one is parked, and the others go on. ``to_train``:
    this machine must be able to quantise.
    """
    base = open_base(config)
    layers = layer_counts(base.spec, stages, config.pipeline.layers)
    if to_train:
        _check_quantization(base)
    adapters, parked = _prepare_adapters(config, base, resumable)
    rows = [adapter.config.rows_per_step * float(adapter.data.lengths.mean()) for adapter in adapters]
    factor = config.pipeline.in_flight or in_flight_factor(config, stages, rows, full_rows(base.device))
    flight = in_flight(stages, factor)
    prepared = Prepared(
        config=fitted(config, base, layers, flight, adapters),
        base=base,
        adapters=adapters,
        layers=layers,
        in_flight=flight,
        parked=parked,
    )
    if stages > 1:
        print(f"{stages} stages of {layers} layers, microbatches in flight {prepared.in_flight}", flush=True)
    return prepared


def _prepare_adapters(
    config: RunConfig, base: Base, resumable: Collection[str]
) -> tuple[list[AdapterRun], dict[str, str]]:
    adapters: list[AdapterRun] = []
    parked: dict[str, str] = {}
    for adapter in config.adapters:
        try:
            adapters.append(prepare_adapter(len(adapters), adapter, base))
        except DataError as error:
            if adapter.name not in resumable:
                raise
            parked[adapter.name] = str(error)
            print(f"{adapter.name}: is parked: {error}", flush=True)
    if not adapters:
        raise UserError(next(iter(parked.values())))
    return adapters, parked


def _check_quantization(base: Base) -> None:
    """Raises UserError where the frozen weights cannot be kept so here; else a line on it."""
    quantization = base.quantization
    check_quantization(quantization, base.dtype, base.device)
    if quantization is not None:
        others = f" and {len(quantization.dense)} skipped linears" if quantization.dense else ""
        name = str(base.dtype).removeprefix("torch.")
        print(f"frozen linears: {quantization}; embedding, norms, biases, head{others} in {name}", flush=True)


def _check_rates(adapter: AdapterRun) -> None:
    """Raises UserError where warm-up leaves every step at learning rate 0, so that B would stay zero."""
    total, config = adapter.total_steps, adapter.config
    last = min(total, warmup_steps(config, total) + 1)
    if config.learning_rate > 0 and all(learning_rate(config, step, total) == 0 for step in range(last)):
        raise UserError(
            f"adapters[{config.name}]: the learning rate is 0 in all of its {total} steps (warmup_steps "
            f"{config.warmup_steps:g} starts at 0), so nothing would be learnt; write warmup_steps: 0 or train longer"
        )


def in_flight_factor(config: RunConfig, stages: int, step_rows: Sequence[float], full: int) -> int:
    """2 microbatches in flight for each of 1F1B's ride out uneven costs, if the other adapters can fill the longer wait
    between an adapter's steps with microbatches of ``full`` rows; else they make it longer, or each row dearer.

    Args:
        step_rows: of a step of each adapter, on average.
        full: rows of a microbatch from which its own cost no longer counts.
    """
    active = sorted(step_rows, reverse=True)[: config.max_active]
    samples = (len(active) - 1) * min(adapter.rows_per_step for adapter in config.adapters)
    others = min(samples, sum(active[1:]) // full)
    return 2 if stages > 1 and others >= 2 * stages - 1 else 1


def cache_folder() -> Path:
    """Where tokens are kept between runs: $XDG_CACHE_HOME/mlora, or ~/.cache/mlora."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlora"


def open_data(name: str, sources: Sequence[DatasetConfig], base: Base, max_length: int) -> TokenData:
    """The tokens of an adapter's data sets, with a line on each if there are several.

    Raises DataError where they cannot be read, UserError where tokenizer, template and format do not go together.
    """
    tasks = [SftTask(source, base.tokenizer, max_length, base.spec.vocab_size) for source in sources]
    try:
        parts = [
            open_tokens(open_source(source), task.encode, task.digest, cache_folder() / "tokens")
            for source, task in zip(sources, tasks, strict=True)
        ]
        weights = [source.weight for source in sources if source.weight is not None]  # of all, or of none
        data = join_tokens(parts, weights or None)
    except UserError as error:
        raise DataError(str(error)) from None
    if len(sources) > 1:
        epoch = sum(share.drawn for share in data.shares)
        for source, part, share in zip(sources, parts, data.shares, strict=True):
            print(f"{name}: {source.label}: {part.stats.summary()}; {share.drawn:,} of an epoch's {epoch:,} rows")
    return data


def prepare_adapter(index: int, config: AdapterConfig, base: Base) -> AdapterRun:
    """Read and check one adapter. Raises UserError."""
    targets = match_targets(config, base.spec.num_layers)
    length = min(config.max_length, base.spec.max_positions)
    if length < config.max_length:
        print(f"{config.name}: max_length {config.max_length} is over the model's {length} positions; {length} is used")
    for warning in deployment_warnings(config):
        print(warning)
    data = _open(config, "dataset", config.sources, base, length)
    summary, held_out = data.stats.summary(), None
    if config.eval_dataset is not None:
        held_out = _open(config, "eval_dataset", (config.eval_dataset,), base, length)
    elif config.val_size:
        data, held_out = _hold_out(config, data)
    adapter = AdapterRun(index=index, config=config, data=data, targets=targets, held_out=held_out)
    _check_rates(adapter)
    print(f"{config.name}: {summary}; {adapter.total_steps} steps, {len(targets)} modules", flush=True)
    if held_out is not None:
        targets_held_out = int(held_out.target_tokens.sum())
        print(f"{config.name}: evaluated on {len(held_out):,} held-out rows, {targets_held_out:,} target tokens")
    return adapter


def _open(config: AdapterConfig, key: str, sources: Sequence[DatasetConfig], *rest: Any) -> TokenData:
    """``open_data``, with the place of a key that is at fault in it."""
    try:
        return open_data(config.name, sources, *rest)
    except UserError as error:
        text = str(error)
        if not text.startswith("dataset"):
            raise
        raise type(error)(f"adapters[{config.name}].{key}{text.removeprefix('dataset')}") from None


def _hold_out(config: AdapterConfig, data: TokenData) -> tuple[TokenData, TokenData]:
    if len(config.sources) > 1:
        raise UserError(
            f"adapters[{config.name}].val_size: holds out rows of one data set; for several give an eval_dataset"
        )
    try:
        return hold_out(data, config.val_size, config.seed)
    except UserError as error:
        raise UserError(f"adapters[{config.name}].{error}") from None
