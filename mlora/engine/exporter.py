"""What rank 0 writes of the adapters, in a thread of its own, so that no stage waits for a disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mlora.checkpoint.peft_files import ExportError, write_adapter
from mlora.checkpoint.versions import WriteError, versions
from mlora.config import RunConfig
from mlora.engine.adapter_run import AdapterRun, Record
from mlora.engine.base import Base
from mlora.engine.cadence import Cadence
from mlora.engine.card import model_card
from mlora.engine.checkpoints import best_matrices, write_checkpoint
from mlora.engine.output import ADAPTERS, CHECKPOINTS
from mlora.engine.recorder import Recorder
from mlora.engine.status import Status
from mlora.models.quantised import to_note
from mlora.pipeline.executor import Entry
from mlora.pipeline.transport.control import Control

Tensors = Mapping[str, torch.Tensor]
Tag = tuple[str, int, int]


def tag(entry: Entry) -> Tag:
    """Which snapshot a stage sends. Stages may send in different orders: a STEP is a tick later on those behind."""
    return entry.kind, entry.adapter, entry.step


class Collector:
    """Brings together an adapter's snapshots of all stages. Used by one thread."""

    def __init__(self, stages: Control | None) -> None:
        self._stages = stages
        self._early: dict[tuple[int, Tag], Tensors] = {}

    def collect(self, wanted: Tag, first: Tensors) -> dict[str, torch.Tensor]:
        """The first stage's snapshot and those of the stages behind it. Raises TransportError."""
        whole = dict(first)
        for rank in range(1, self._stages.world if self._stages else 1):
            while (rank, wanted) not in self._early:
                assert self._stages is not None
                found = self._stages.receive(rank)
                self._early[rank, found] = self._stages.receive_tensors(rank)
            whole.update(self._early.pop((rank, wanted)))
        return whole


class InOrder:
    """A thread that does one job after another, so that no stage waits for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """From any thread. Raises what went wrong before: a run that saves no more must not go on for days."""
        self._raise_failed()
        self._thread.submit(self._run, job)

    def finish(self) -> None:
        """Wait until all is done. Raises what went wrong."""
        self._thread.shutdown()
        self._raise_failed()

    def abandon(self, wait: bool) -> None:
        """Do what is at hand, waiting for it only where nothing can be missing from another stage, and end."""
        self._thread.shutdown(wait=wait, cancel_futures=not wait)

    def _run(self, job: Callable[[], None]) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:
                self._error = error

    def _raise_failed(self) -> None:
        if self._error is not None:
            raise self._error


class Exporter:
    """Writes checkpoints and exports one after another, in the order in which the stream brings them."""

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        collector: Collector,
        cadence: Cadence,
        recorder: Recorder,
        status: Status,
    ) -> None:
        self._output_dir, self._keep, self._base = config.output_dir, config.save_total_limit, base
        self._collector, self._cadence, self._recorder, self._status = collector, cadence, recorder, status
        self._jobs = InOrder("export")
        self.written = 0

    def take(self, adapter: AdapterRun, record: Record, entry: Entry, tensors: Tensors) -> None:
        """A snapshot of the first stage for an entry "save", "keep" or "leave"; the other stages' are collected."""
        self._jobs.submit(
            lambda: self._write(adapter, record, entry.kind, self._collector.collect(tag(entry), tensors))
        )

    def write(self, adapter: AdapterRun, record: Record, kind: str, whole: Tensors) -> None:
        """The same for a snapshot that is all here."""
        self._jobs.submit(lambda: self._write(adapter, record, kind, whole))

    def export(self, adapter: AdapterRun, whole: Tensors) -> None:
        """Export what had ended in an earlier run already."""
        self._jobs.submit(lambda: self._export(adapter, adapter.record(), whole))

    def finish(self) -> None:
        """Wait until all is written. Raises what went wrong beyond a single adapter."""
        self._jobs.finish()

    def abandon(self, wait: bool) -> None:
        """Write what is at hand, see ``InOrder.abandon``, and end."""
        self._jobs.abandon(wait)

    def _write(self, adapter: AdapterRun, record: Record, kind: str, whole: Tensors) -> None:
        if kind == "keep":
            assert record.best_step is not None
            adapter.kept = record.best_step, whole
            return
        start = time.monotonic()
        self._checkpoint(adapter, record, whole)
        self._cadence.wrote(adapter.config.name, time.monotonic() - start)
        if kind == "leave":
            if record.state == "ended":
                self._export(adapter, record, whole)
            if adapter.state == "failed":
                self._recorder.failed(adapter.config.name, record.step, adapter.reason)
            if adapter.state != "ended" or adapter.reason:
                print(f"{adapter.config.name}  {adapter.state}: {adapter.reason or 'by a signal'}", flush=True)
        self._status.write(at_once=True)

    def _checkpoint(self, adapter: AdapterRun, record: Record, whole: Tensors) -> None:
        """A checkpoint that the disk does not take costs nothing but itself."""
        start, name = time.monotonic(), adapter.config.name
        try:
            write_checkpoint(self._output_dir / CHECKPOINTS, adapter, record, whole, self._base, self._keep)
        except WriteError as error:
            before = versions(self._output_dir / CHECKPOINTS / name)
            stands = f"{before[-1].name} stands" if before else "there is none before it"
            print(f"{name}  checkpoint of step {record.step} not written, {stands}: {error}", flush=True)
            return
        self.written += 1
        size = sum(tensor.nbytes for tensor in whole.values())
        cost = "" if record.state != "training" else f"; a crash costs up to {self._cadence} of its work and a step"
        took = f"{size:,} bytes in {time.monotonic() - start:.2f} s"
        print(f"{name}  checkpoint of step {record.step}: {took}{cost}", flush=True)

    def _export(self, adapter: AdapterRun, record: Record, whole: Tensors) -> None:
        whole = best_matrices(adapter, record) or whole
        folder, base = self._output_dir / ADAPTERS / adapter.config.name, self._base

        def extras(place: Path) -> None:
            base.tokenizer.save_pretrained(place)
            (place / "README.md").write_text(model_card(adapter, base), encoding="utf-8")

        matrices = {name: (whole[f"{name}.A"], whole[f"{name}.B"]) for name in adapter.targets}
        note = to_note(base.quantization, base.dtype) if base.quantization else None
        try:
            write_adapter(folder, adapter.config, base.name, adapter.targets, matrices, extras, note)
        except ExportError as error:
            adapter.state, adapter.reason = "failed", f"not exported: {error}"
        else:
            self._status.exported[adapter.index] = folder
