"""Writes adapters that have ended, in a thread of its own, so that no stage waits for a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mlora.checkpoint.peft_files import ExportError, write_adapter
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.card import model_card

Collect = Callable[[], list[Mapping[str, torch.Tensor]]]


def collected(first: Mapping[str, torch.Tensor], collect: Collect) -> dict[str, torch.Tensor]:
    """The matrices of all stages: the first one's and what ``collect`` brings."""
    whole = dict(first)
    for part in collect():
        whole.update(part)
    return whole


class Exporter:
    """Takes adapters one after another, in the order in which they leave the stream."""

    def __init__(self, folder: Path, base_model: str, tokenizer: PreTrainedTokenizerBase, collect: Collect) -> None:
        self._folder, self._base_model, self._tokenizer, self._collect = folder, base_model, tokenizer, collect
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        self._jobs: list[Future[None]] = []
        self.folders: dict[int, Path] = {}

    def take(self, adapter: AdapterRun, matrices: Mapping[str, torch.Tensor]) -> None:
        """Export ``adapter`` if it has ended. ``matrices`` are the first stage's; ``collect`` brings the others'."""
        self._jobs.append(self._thread.submit(self._export, adapter, matrices))

    def write(self, adapter: AdapterRun, matrices: Mapping[str, torch.Tensor]) -> None:
        """The same for an adapter whose matrices are all here."""
        self._jobs.append(self._thread.submit(self._export_whole, adapter, matrices))

    def finish(self) -> None:
        """Wait until all is written. Raises what went wrong beyond a single adapter."""
        for job in self._jobs:
            job.result()
        self._thread.shutdown()

    def _export(self, adapter: AdapterRun, matrices: Mapping[str, torch.Tensor]) -> None:
        self._export_whole(adapter, collected(matrices, self._collect))

    def _export_whole(self, adapter: AdapterRun, whole: Mapping[str, torch.Tensor]) -> None:
        if adapter.state == "ended":
            self._write(adapter, {name: (whole[f"{name}.A"], whole[f"{name}.B"]) for name in adapter.targets})
        if adapter.state != "ended":
            print(f"{adapter.config.name}  {adapter.state}: {adapter.reason}", flush=True)

    def _write(self, adapter: AdapterRun, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        folder = self._folder / adapter.config.name

        def extras(place: Path) -> None:
            self._tokenizer.save_pretrained(place)
            (place / "README.md").write_text(model_card(adapter, self._base_model), encoding="utf-8")

        try:
            write_adapter(folder, adapter.config, self._base_model, adapter.targets, matrices, extras)
        except ExportError as error:
            adapter.state, adapter.reason = "failed", f"not exported: {error}"
        else:
            self.folders[adapter.index] = folder
