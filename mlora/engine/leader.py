"""What only the first rank does: read and check everything before training, write the run folder, gather results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from mlora.config import AdapterConfig, RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.cadence import Cadence
from mlora.engine.checkpoints import Resume, base_facts
from mlora.engine.coordinator import OnStep
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.exporter import Collector, Exporter
from mlora.engine.inbox import Inbox, added_adapters
from mlora.engine.init_from import load_initial
from mlora.engine.layout import first_layers
from mlora.engine.live import LiveView, terminal
from mlora.engine.loggers import Loggers, check_loggers
from mlora.engine.memory import rows_of
from mlora.engine.output import (
    CHECKPOINTS,
    METRICS,
    PICTURE,
    TRACE,
    check_free,
    check_output,
    leave_output,
    take_output,
)
from mlora.engine.prepare import prepare, prepare_adapter
from mlora.engine.ranking import ranking
from mlora.engine.recorder import Recorder, print_table
from mlora.engine.replicas import deal, first_stage, hand_over, receive_all
from mlora.engine.report import write_facts, write_report
from mlora.engine.requests import Requests, stop
from mlora.engine.results import AdapterResult, Results
from mlora.engine.start import Start, saved_adapters
from mlora.engine.status import Status
from mlora.engine.worker import Job, Worker, model_digest
from mlora.pipeline.executor import Window
from mlora.pipeline.schedule import Timed, chrome_trace, svg
from mlora.pipeline.transport.base import Transport
from mlora.pipeline.transport.control import Control
from mlora.types import UserError

_PICTURED = 400  # actions of each stage in the picture; the trace holds all that the executors kept


class Leader:
    """Checks configuration, data and model; then leads the stages through the stream.

    Raises UserError in the constructor, before anything is written.
    """

    def __init__(self, config: RunConfig, start: Start, on_step: OnStep | None, world_size: int) -> None:
        self._source = start.source(config.output_dir)
        self._goes_on = self._source == config.output_dir  # in its own folder
        given = config.adapters
        if self._goes_on:
            config = _with_added(config)
        self._on_step = on_step
        self._overwrite = start.overwrite
        check_free(config.output_dir)
        check_output(config, start.overwrite, self._goes_on)
        check_loggers(config.report_to)
        if config.pipeline.transport == "nccl" and choose_device(config.device).type == "cpu":
            raise UserError("pipeline.transport: nccl needs CUDA devices, and there are none here; write auto or gloo")
        stages, replicas = config.pipeline.shape(world_size)
        saved = saved_adapters(self._source / CHECKPOINTS) if self._source is not None else []
        added = [adapter.name for adapter in config.adapters[len(given) :]]  # no file of the user's names them
        self._prepared = prepare(config, stages, saved + added)
        self._config = config = self._prepared.config
        self._adapters = self._prepared.adapters
        self.job = Job(
            config=config,
            first_layers=first_layers(self._prepared.layers),
            in_flight=self._prepared.in_flight,
            replicas=replicas,
            dtype=choose_dtype(config.dtype, choose_device(config.device)),
            model_digest=model_digest(self._prepared.folder),
        )
        spec = self._prepared.spec
        self._base = base_facts(
            spec, self.job.model_digest, self.job.dtype, choose_device(config.device), self._prepared.quantization
        )
        if self._source is not None:
            Resume(self._source / CHECKPOINTS, start.allow_changed).apply(
                self._adapters, self._prepared.parked, spec, self._base
            )

        for adapter in self._adapters:
            load_initial(adapter, spec, config.base_model)

    def run(
        self,
        device: torch.device,
        transport: Transport | None,
        stages: Control | None,
        requests: Requests,
        ask: Callable[[str], None],
        world: Control | None = None,
    ) -> Results:
        """Train to the end as stage 0 of the first replica.

        The other stages follow through ``stages``; other replicas, if there are any, report through ``world``.
        ``requests`` is what has been asked of this rank, ``ask`` puts a wish before all.
        """
        config, cadence = self._config, Cadence(self._config)
        own, *others = deal([adapter for adapter in self._adapters if adapter.state == "waiting"], self.job.replicas)
        status = Status(config.output_dir, self._adapters, self._prepared.parked)
        loggers, console = Loggers(config.report_to, config.output_dir), terminal()
        recorder = Recorder(config.output_dir / METRICS, status.write, loggers, lines=console is None)
        exporter = self._exporter(Collector(stages), cadence, recorder, status)
        worker, windows = first_stage(
            self.job, own, device, transport, stages, recorder, exporter, self._on_step, requests, cadence
        )
        lock = take_output(config, self._overwrite, self._goes_on)
        start = time.monotonic()
        view = LiveView(console, self._adapters, worker.microbatches, rows_of(config), device) if console else None
        try:
            self._open(recorder)
            write_facts(config, self._adapters, self._engine)
            status.write(at_once=True)
            costs = "at an adapter's end; a crash costs up to that and a step"
            print(f"checkpoints: every {cadence} and {costs}", flush=True)
            self._export_ended(exporter)
            with view.shown() if view else nullcontext():
                with Inbox(config.output_dir, self._adapters, self._prepare, requests.add, ask):
                    self._walk(worker, windows, others, world, recorder, exporter, requests)
                for adapter in requests.arrived():
                    print(f"{adapter.config.name}: was added too late; --resume auto goes on with it", flush=True)
                exporter.finish()
        except BaseException:
            exporter.abandon(wait=stages is None)
            lock.close()  # a caller that handles the error keeps its traceback, and with it this frame
            raise
        finally:
            recorder.close({adapter.config.name: adapter.state for adapter in self._adapters})
        share_waited = worker.waited_s / max(time.monotonic() - start, 1e-9)
        print(f"checkpoints: {exporter.written} written; training waited {worker.waited_s:.3f} s ({share_waited:.2%})")
        if stages:
            self._write_timeline(worker.executor.timeline, stages)
        results = Results(
            output_dir=config.output_dir,
            adapters={adapter.config.name: _result(adapter, status) for adapter in self._adapters}
            | {name: _parked(name, reason) for name, reason in self._prepared.parked.items()},
            signal=requests.signal,
        )
        print_table(results)
        print(ranking(self._adapters), end="", flush=True)
        status.write(at_once=True)
        _report(config.output_dir)
        leave_output(config.output_dir, lock, complete=not results.failed and requests.signal is None)
        return results

    def _walk(
        self,
        worker: Worker,
        windows: Iterator[Window],
        others: Sequence[Sequence[AdapterRun]],
        world: Control | None,
        recorder: Recorder,
        exporter: Exporter,
        requests: Requests,
    ) -> None:
        """The stream of the first replica, while a thread for each other one writes what that reports."""
        threads = ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="replica")
        reports: list[Future[int | None]] = []
        try:
            for replica, share in enumerate(others, 1):
                assert world is not None
                rank = replica * len(self.job.in_flight)
                hand_over(world, rank, share)
                reports.append(threads.submit(receive_all, world, rank, self._adapters, recorder, exporter))
            worker.run(_while_sound(windows, reports))
            wait(reports, return_when=FIRST_EXCEPTION)
            _raise_failed(reports)
            for report in reports:
                if (number := report.result()) is not None:
                    requests.ask(stop(number))
        finally:
            threads.shutdown(wait=False)  # after a failure the other replicas go on until they hear of it

    def _exporter(self, collector: Collector, cadence: Cadence, recorder: Recorder, status: Status) -> Exporter:
        return Exporter(
            self._config.output_dir,
            self._base,
            self._config.base_model,
            self._prepared.tokenizer,
            collector,
            cadence,
            self._config.save_total_limit,
            recorder,
            status,
            self._prepared.quantization,
            self.job.dtype,
        )

    def _open(self, recorder: Recorder) -> None:
        try:
            if self._source is None:
                recorder.open()
            else:
                steps = {a.config.name: len(a.reports) for a in self._adapters}
                evaluated = {a.config.name: a.evaluations[-1].step if a.evaluations else 0 for a in self._adapters}
                recorder.open(self._source / METRICS, steps, evaluated)
        except OSError as error:
            raise UserError(f"output_dir: {METRICS} cannot be written: {error.strerror}; nothing was changed") from None

    def _export_ended(self, exporter: Exporter) -> None:
        """What had ended in the run before may have lacked its export, and is not trained any more."""
        for adapter in self._adapters:
            if adapter.state == "ended":
                assert adapter.restored is not None
                exporter.export(adapter, adapter.restored)
            if adapter.state != "waiting":
                adapter.restored = None

    def _prepare(self, index: int, config: AdapterConfig) -> AdapterRun:
        adapter = prepare_adapter(index, config, self._prepared.spec, self._prepared.tokenizer)
        load_initial(adapter, self._prepared.spec, self._config.base_model)
        write_facts(self._config, [*self._adapters, adapter], self._engine)
        return adapter

    @property
    def _engine(self) -> dict[str, str]:
        """How the work is done, for the report."""
        job = self.job
        layers = [stop - start for start, stop in itertools.pairwise(job.first_layers)]
        return {
            "device": choose_device(self._config.device).type,
            "dtype": str(job.dtype).removeprefix("torch."),
            "stages of layers": ", ".join(map(str, layers)),
            "replicas": str(job.replicas),
            "microbatch_tokens": str(self._config.microbatch_tokens),
        }

    def _write_timeline(self, own: list[Timed], control: Control) -> None:
        """What was measured, as a picture and as a trace for Chrome or Perfetto."""
        parts = control.gather_objects(own)
        assert parts is not None
        names = {adapter.index: adapter.config.name for adapter in self._adapters}
        whole = [timed for part in parts for timed in part]
        if not whole:
            return  # all adapters had ended before
        begin = [timed for part in parts for timed in part[:_PICTURED]]
        try:
            (self._config.output_dir / TRACE).write_text(chrome_trace(whole), encoding="utf-8")
            (self._config.output_dir / PICTURE).write_text(svg(begin, names), encoding="utf-8")
        except OSError as error:
            print(f"the timeline cannot be written: {error.strerror}", flush=True)


def _while_sound(windows: Iterator[Window], reports: Sequence[Future[int | None]]) -> Iterator[Window]:
    """The windows, until no more can be written of another replica."""
    for window in windows:
        _raise_failed(reports)
        yield window


def _raise_failed(jobs: Sequence[Future[int | None]]) -> None:
    for job in jobs:
        if job.done():
            job.result()


def _report(output_dir: Path) -> None:
    """What cannot be drawn or written costs the report, not the run."""
    try:
        print(f"report: {write_report(output_dir)}", flush=True)
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        print(f"no report: {kind}{error}", flush=True)


def _with_added(config: RunConfig) -> RunConfig:
    """With the adapters that were added to the run in the folder while it ran, unless the file names them by now."""
    names = {adapter.name.lower() for adapter in config.adapters}
    added = tuple(adapter for adapter in added_adapters(config.output_dir) if adapter.name.lower() not in names)
    return replace(config, adapters=config.adapters + added)


def _parked(name: str, reason: str) -> AdapterResult:
    return AdapterResult(name=name, state="failed", reason=reason, reports=(), folder=None)


def _result(adapter: AdapterRun, status: Status) -> AdapterResult:
    return AdapterResult(
        name=adapter.config.name,
        state=adapter.state,
        reason=adapter.reason,
        reports=tuple(adapter.reports),
        folder=status.exported.get(adapter.index),
        evaluations=tuple(adapter.evaluations),
    )
