"""What only the first rank does: read and check everything before training, write the run folder, gather results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from mlora.config import RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.coordinator import OnStep
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.exporter import Exporter
from mlora.engine.layout import first_layers
from mlora.engine.output import ADAPTERS, METRICS, PICTURE, TRACE, check_output, leave_output, take_output
from mlora.engine.prepare import prepare
from mlora.engine.recorder import Recorder, print_table
from mlora.engine.replicas import collector, deal, first_stage, hand_over, receive_all
from mlora.engine.results import AdapterResult, Results
from mlora.engine.worker import Job, model_digest
from mlora.pipeline.schedule import Timed, chrome_trace, svg
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control
from mlora.types import UserError

_PICTURED = 400  # actions of each stage in the picture; the trace holds all that the executors kept


class Leader:
    """Checks configuration, data and model; then leads the stages through the stream.

    Raises UserError in the constructor, before anything is written.
    """

    def __init__(self, config: RunConfig, overwrite: bool, on_step: OnStep | None, world_size: int) -> None:
        self._config, self._on_step = config, on_step
        self._overwrite = overwrite
        check_output(config, overwrite)
        if config.pipeline.transport == "nccl" and choose_device(config.device).type == "cpu":
            raise UserError("pipeline.transport: nccl needs CUDA devices, and there are none here; write auto or gloo")
        stages, replicas = config.pipeline.shape(world_size)
        self._prepared = prepare(config, stages)
        self._adapters = self._prepared.adapters
        self.job = Job(
            config=config,
            targets=tuple(adapter.targets for adapter in self._adapters),
            first_layers=first_layers(self._prepared.layers),
            in_flight=self._prepared.in_flight,
            replicas=replicas,
            dtype=choose_dtype(config.dtype, choose_device(config.device)),
            model_digest=model_digest(self._prepared.folder),
        )

    def run(
        self, device: torch.device, transport: Transport | None, stages: Control | None, world: Control | None = None
    ) -> Results:
        """Train to the end as stage 0 of the first replica.

        The other stages follow through ``stages``; other replicas, if there are any, report through ``world``.
        """
        config, (own, *others) = self._config, deal(self._adapters, self.job.replicas)
        recorder = Recorder(config.output_dir / METRICS)
        exporter = Exporter(
            config.output_dir / ADAPTERS, config.base_model, self._prepared.tokenizer, collector(stages)
        )
        worker, windows = first_stage(self.job, own, device, transport, stages, recorder, exporter, self._on_step)
        lock = take_output(config, self._overwrite)
        recorder.open()
        try:
            with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="replica") as threads:
                reports = []
                for replica, share in enumerate(others, 1):
                    assert world is not None
                    rank = replica * len(self.job.in_flight)
                    hand_over(world, rank, share)
                    reports.append(threads.submit(receive_all, world, rank, self._adapters, recorder, exporter))
                worker.run(windows)
                for report in reports:
                    report.result()
        finally:
            recorder.close()
        exporter.finish()
        if stages:
            self._write_timeline(worker.executor.timeline, stages)
        results = Results(
            output_dir=config.output_dir,
            adapters={adapter.config.name: _result(adapter, exporter) for adapter in self._adapters},
        )
        print_table(results)
        leave_output(config.output_dir, lock, complete=not results.failed)
        return results

    def _write_timeline(self, own: list[Timed], control: Control) -> None:
        """What was measured, as a picture and as a trace for Chrome or Perfetto."""
        parts = control.gather_objects(own)
        assert parts is not None
        names = {adapter.index: adapter.config.name for adapter in self._adapters}
        whole = [timed for part in parts for timed in part]
        begin = [timed for part in parts for timed in part[:_PICTURED]]
        try:
            (self._config.output_dir / TRACE).write_text(chrome_trace(whole))
            (self._config.output_dir / PICTURE).write_text(svg(begin, names))
        except OSError as error:
            print(f"the timeline cannot be written: {error.strerror}", flush=True)


def _result(adapter: AdapterRun, exporter: Exporter) -> AdapterResult:
    return AdapterResult(
        name=adapter.config.name,
        state=adapter.state,
        reason=adapter.reason,
        reports=tuple(adapter.reports),
        folder=exporter.folders.get(adapter.index),
    )
