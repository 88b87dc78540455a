"""A run: everything is read and checked before training, then one loop of microbatches until all have ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.checkpoint.peft_files import ExportError, write_adapter
from mlora.config import AdapterConfig, RunConfig, load_config, parse_config
from mlora.data import TokenData, open_tokens
from mlora.engine.adapter_run import AdapterRun, StepReport
from mlora.engine.batches import make_batch
from mlora.engine.card import model_card
from mlora.engine.device import choose_device, choose_dtype, prepare
from mlora.engine.planner import Planner
from mlora.engine.recorder import Recorder, print_table
from mlora.engine.results import AdapterResult, Results
from mlora.models.decoder import Decoder
from mlora.models.spec import ModelSpec, linear_shapes, load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.stage import Stage
from mlora.tasks import SftTask
from mlora.types import Microbatch, Segment, UserError

Decision = Literal["end", "cancel"] | None
OnStep = Callable[[StepReport], Decision]


def train(
    config: RunConfig | Mapping[str, Any] | str | Path, *, overwrite: bool = False, on_step: OnStep | None = None
) -> Results:
    """Train all adapters of ``config`` together and write each as a PEFT adapter under ``output_dir``/adapters.

    Args:
        config: a RunConfig, its plain form as in the YAML file, or the file's path.
        overwrite: replace an earlier run in ``output_dir``; without it that is an error.
        on_step: called after every optimizer step. "end" ends that adapter as if its last step were done,
            "cancel" ends it without an export; the others go on, and not a bit of theirs changes.

    Raises:
        UserError: a mistake in configuration, data or model, before anything is written.
    """
    return _Run(_as_config(config), overwrite, on_step).run()


def _as_config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return parse_config(config) if isinstance(config, Mapping) else load_config(config)


class _Run:
    def __init__(self, config: RunConfig, overwrite: bool, on_step: OnStep | None) -> None:
        self._config, self._on_step = config, on_step
        _check_output(config.output_dir, overwrite)
        self._device = choose_device(config.device)
        self._dtype = choose_dtype(config.dtype, self._device)
        folder = resolve_base_model(config.base_model)
        self._spec = load_spec(folder)
        self._tokenizer = load_tokenizer(folder, self._spec.vocab_size)
        checkpoint = Checkpoint(folder, self._spec)
        self._adapters = [
            _prepare_adapter(i, adapter, self._spec, self._tokenizer) for i, adapter in enumerate(config.adapters)
        ]
        prepare(self._device)
        model = Decoder(self._spec, checkpoint, range(self._spec.num_layers), self._dtype, self._device)
        self._stage = Stage(model, config.recompute)
        self._planner = Planner(config.microbatch_tokens)
        self._states: dict[int, AdapterState] = {}
        self._waiting = list(self._adapters)
        self._folders: dict[int, Path] = {}

    def run(self) -> Results:
        _make_output(self._config.output_dir)
        self._recorder = Recorder(self._config.output_dir / "metrics.jsonl")
        try:
            for slot in range(min(self._config.max_active, len(self._adapters))):
                self._join(slot)
            while (microbatch := self._planner.next()) is not None:
                self._train(microbatch)
        finally:
            self._recorder.close()
        results = Results(
            output_dir=self._config.output_dir,
            adapters={adapter.config.name: self._result(adapter) for adapter in self._adapters},
        )
        print_table(results)
        return results

    def _train(self, microbatch: Microbatch) -> None:
        batch = make_batch(microbatch, self._data_of, self._device)
        self._stage.forward(batch)
        self._stage.backward(microbatch.index)
        for segment in microbatch.segments:
            adapter = self._adapters[segment.adapter]
            adapter.saw(segment)
            if segment.ends_step:
                self._close_step(adapter, segment)

    def _close_step(self, adapter: AdapterRun, segment: Segment) -> None:
        sums = self._stage.close_step(segment.slot)
        self._stage.step(segment.slot, adapter.close_step(segment, sums.loss, sums.squares))
        report = adapter.reports[-1]
        self._recorder.step(report, adapter.config)
        decision = self._on_step(report) if self._on_step else None
        if decision is not None and adapter.state == "training":
            adapter.state = "ended" if decision == "end" else "cancelled"
            adapter.reason = f"by on_step after step {report.step}"
        if adapter.state != "training":
            self._leave(adapter, segment.slot)

    def _join(self, slot: int) -> None:
        """Give the slot to the first adapter that waits, if any does."""
        if not self._waiting:
            return
        adapter = self._waiting.pop(0)
        shapes, layers = linear_shapes(self._spec), range(self._spec.num_layers)
        state = AdapterState(adapter.config, adapter.targets, shapes, layers, self._dtype, self._device)
        self._states[slot] = state
        self._stage.join(slot, state)
        adapter.state = "training"
        self._recorder.start(adapter.config.name)
        self._planner.join(slot, adapter.next_step)

    def _leave(self, adapter: AdapterRun, slot: int) -> None:
        self._planner.leave(slot)
        self._stage.leave(slot)
        state = self._states.pop(slot)
        if adapter.state == "ended":
            self._export(adapter, state)
        if adapter.state != "ended":
            print(f"{adapter.config.name}  {adapter.state}: {adapter.reason}", flush=True)
        self._join(slot)

    def _export(self, adapter: AdapterRun, state: AdapterState) -> None:
        folder = self._config.output_dir / "adapters" / adapter.config.name
        try:
            write_adapter(folder, adapter.config, self._config.base_model, adapter.targets, state.matrices())
        except (ExportError, OSError) as error:
            adapter.state, adapter.reason = "failed", f"not exported: {error}"
            return
        self._tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(model_card(adapter, self._config.base_model), encoding="utf-8")
        self._folders[adapter.index] = folder

    def _data_of(self, adapter: int) -> TokenData:
        return self._adapters[adapter].data

    def _result(self, adapter: AdapterRun) -> AdapterResult:
        return AdapterResult(
            name=adapter.config.name,
            state=adapter.state,
            reason=adapter.reason,
            reports=tuple(adapter.reports),
            folder=self._folders.get(adapter.index),
        )


def _prepare_adapter(
    index: int, config: AdapterConfig, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase
) -> AdapterRun:
    """Targets and tokens of one adapter, with a line on what was found."""
    targets = match_targets(config, spec.num_layers)
    length = min(config.max_length, spec.max_positions)
    if length < config.max_length:
        print(f"{config.name}: max_length {config.max_length} is over the model's {length} positions; {length} is used")
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
