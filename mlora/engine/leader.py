"""What only the first rank does: read and check everything before training, write the run folder, gather results."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mlora.config import RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.coordinator import Coordinator, OnStep
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.exporter import Exporter
from mlora.engine.layout import first_layers
from mlora.engine.output import ADAPTERS, METRICS, PICTURE, TRACE, check_output, make_output
from mlora.engine.prepare import prepare
from mlora.engine.recorder import Recorder, print_table
from mlora.engine.results import AdapterResult, Results
from mlora.engine.worker import Job, Worker, model_digest
from mlora.pipeline.executor import Entry
from mlora.pipeline.schedule import Timed, chrome_trace, svg
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control

_PICTURED = 400  # actions of each stage in the picture; the trace holds all that the executors kept


class Leader:
    """Checks configuration, data and model; then leads the stages through the stream.

    Raises UserError in the constructor, before anything is written.
    """

    def __init__(self, config: RunConfig, overwrite: bool, on_step: OnStep | None, world_size: int) -> None:
        self._config, self._on_step = config, on_step
        check_output(config.output_dir, overwrite)
        stages, _ = config.pipeline.shape(world_size)
        self._prepared = prepare(config, stages)
        self._adapters = self._prepared.adapters
        self.job = Job(
            config=config,
            targets=tuple(adapter.targets for adapter in self._adapters),
            first_layers=first_layers(self._prepared.layers),
            in_flight=self._prepared.in_flight,
            dtype=choose_dtype(config.dtype, choose_device(config.device)),
            model_digest=model_digest(self._prepared.folder),
        )

    def run(self, device: torch.device, transport: Transport | None, control: Control | None) -> Results:
        """Train to the end as stage 0; the other stages follow through ``control``."""
        config = self._config
        recorder = Recorder(config.output_dir / METRICS)
        coordinator = Coordinator(config, self._adapters, self.job.in_flight, recorder, self._on_step)

        def collect() -> list[Mapping[str, torch.Tensor]]:
            return [control.receive_tensors(rank) for rank in range(1, control.world)] if control else []

        exporter = Exporter(config.output_dir / ADAPTERS, config.base_model, self._prepared.tokenizer, collect)

        def deliver(entry: Entry, matrices: Mapping[str, torch.Tensor]) -> None:
            exporter.take(self._adapters[entry.adapter], matrices)

        worker = Worker(self.job, device, transport, deliver, coordinator.close_step)
        make_output(config.output_dir)
        recorder.open()
        try:
            worker.run(coordinator.windows(control.publish if control else None))
        finally:
            recorder.close()
        exporter.finish()
        if control:
            self._write_timeline(worker.executor.timeline, control)
        results = Results(
            output_dir=config.output_dir,
            adapters={adapter.config.name: _result(adapter, exporter) for adapter in self._adapters},
        )
        print_table(results)
        return results

    def _write_timeline(self, own: list[Timed], control: Control) -> None:
        """What was measured, as a picture and as a trace for Chrome or Perfetto."""
        parts = control.gather_objects(own)
        assert parts is not None
        names = {adapter.index: adapter.config.name for adapter in self._adapters}
        whole = [timed for part in parts for timed in part]
        (self._config.output_dir / TRACE).write_text(chrome_trace(whole))
        begin = [timed for part in parts for timed in part[:_PICTURED]]
        (self._config.output_dir / PICTURE).write_text(svg(begin, names))


def _result(adapter: AdapterRun, exporter: Exporter) -> AdapterResult:
    return AdapterResult(
        name=adapter.config.name,
        state=adapter.state,
        reason=adapter.reason,
        reports=tuple(adapter.reports),
        folder=exporter.folders.get(adapter.index),
    )
