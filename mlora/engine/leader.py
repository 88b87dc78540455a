"""What only the first rank does: read and check everything before training, write the run folder, gather results."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mlora.adapters.targets import match_targets
from mlora.config import AdapterConfig, RunConfig
from mlora.data import open_tokens
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.coordinator import Coordinator, OnStep
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.exporter import Exporter
from mlora.engine.layout import first_layers, layer_counts
from mlora.engine.recorder import Recorder, print_table
from mlora.engine.results import AdapterResult, Results
from mlora.engine.warnings import deployment_warnings
from mlora.engine.worker import Job, Worker, model_digest
from mlora.models.spec import ModelSpec, load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.executor import Entry
from mlora.pipeline.schedule import in_flight
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control
from mlora.tasks import SftTask
from mlora.types import UserError


class Leader:
    """Checks configuration, data and model; then leads the stages through the stream.

    Raises UserError in the constructor, before anything is written.
    """

    def __init__(self, config: RunConfig, overwrite: bool, on_step: OnStep | None, world_size: int) -> None:
        self._config, self._on_step = config, on_step
        _check_output(config.output_dir, overwrite)
        stages, _ = config.pipeline.shape(world_size)
        folder = resolve_base_model(config.base_model)
        spec = load_spec(folder)
        self._tokenizer = load_tokenizer(folder, spec.vocab_size)
        Checkpoint(folder, spec)
        counts = layer_counts(spec, stages, config.pipeline.layers)
        self._adapters = [_prepare_adapter(i, a, spec, self._tokenizer) for i, a in enumerate(config.adapters)]
        factor = config.pipeline.in_flight or (2 if len(config.adapters) >= 2 * stages > 2 else 1)
        self.job = Job(
            config=config,
            targets=tuple(adapter.targets for adapter in self._adapters),
            first_layers=first_layers(counts),
            in_flight=in_flight(stages, factor),
            dtype=choose_dtype(config.dtype, choose_device(config.device)),
            model_digest=model_digest(folder),
        )
        if stages > 1:
            print(f"{stages} stages, layers {counts}, microbatches in flight {self.job.in_flight}", flush=True)

    def run(self, device: torch.device, transport: Transport | None, control: Control | None) -> Results:
        """Train to the end as stage 0; the other stages follow through ``control``."""
        config = self._config
        _make_output(config.output_dir)
        recorder = Recorder(config.output_dir / "metrics.jsonl")
        coordinator = Coordinator(config, self._adapters, self.job.in_flight, recorder, self._on_step)

        def collect() -> list[Mapping[str, torch.Tensor]]:
            return [control.receive_tensors(rank) for rank in range(1, control.world)] if control else []

        exporter = Exporter(config.output_dir / "adapters", config.base_model, self._tokenizer, collect)

        def deliver(entry: Entry, matrices: Mapping[str, torch.Tensor]) -> None:
            exporter.take(self._adapters[entry.adapter], matrices)

        worker = Worker(self.job, device, transport, deliver, coordinator.close_step)
        worker.run(coordinator.windows(control.publish if control else None))
        exporter.finish()
        recorder.close()
        results = Results(
            output_dir=config.output_dir,
            adapters={adapter.config.name: _result(adapter, exporter) for adapter in self._adapters},
        )
        print_table(results)
        return results


def _result(adapter: AdapterRun, exporter: Exporter) -> AdapterResult:
    return AdapterResult(
        name=adapter.config.name,
        state=adapter.state,
        reason=adapter.reason,
        reports=tuple(adapter.reports),
        folder=exporter.folders.get(adapter.index),
    )


def _prepare_adapter(
    index: int, config: AdapterConfig, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase
) -> AdapterRun:
    """Targets and tokens of one adapter, with a line on what was found."""
    targets = match_targets(config, spec.num_layers)
    length = min(config.max_length, spec.max_positions)
    if length < config.max_length:
        print(f"{config.name}: max_length {config.max_length} is over the model's {length} positions; {length} is used")
    for warning in deployment_warnings(config):
        print(warning)
    task = SftTask(config.dataset, tokenizer, length, spec.vocab_size)
    data = open_tokens(config.dataset.path, task.encode, task.digest, cache_folder() / "tokens")
    adapter = AdapterRun(index=index, config=config, data=data, targets=targets)
    print(f"{config.name}: {data.stats.summary()}; {adapter.total_steps} steps, {len(targets)} modules", flush=True)
    return adapter


def cache_folder() -> Path:
    """Where tokens are kept between runs: $XDG_CACHE_HOME/mlora, or ~/.cache/mlora."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlora"


_OUR_FILES = ("adapters", "metrics.jsonl")


def _check_output(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"output_dir: {folder} is a file; give a folder")
    found = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in found if name not in _OUR_FILES]
    if foreign:
        raise UserError(f"output_dir: {folder} holds {foreign[0]!r}, which is not from a run; give a folder of its own")
    if found and not overwrite:
        raise UserError(f"output_dir: {folder} holds an earlier run; give another folder, or --overwrite to replace it")


def _make_output(folder: Path) -> None:
    for name in _OUR_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        (folder / "adapters").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written: {error.strerror}") from None
