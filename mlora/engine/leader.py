"""What only the first rank does: read and check everything before training, write the run folder, gather results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mlora.config import AdapterConfig, RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.cadence import Cadence
from mlora.engine.checkpoints import Resume
from mlora.engine.coordinator import OnStep
from mlora.engine.device import choose_device
from mlora.engine.exporter import Collector, Exporter
from mlora.engine.inbox import Inbox, added_adapters, carry_added
from mlora.engine.init_from import load_initial
from mlora.engine.layout import first_layers
from mlora.engine.live import LiveView, terminal
from mlora.engine.loggers import Loggers, check_loggers
from mlora.engine.memory import rows_of
from mlora.engine.output import (
    ADDED,
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
from mlora.engine.worker import Job, Seat, Worker
from mlora.files import write_whole
from mlora.pipeline.executor import Window
from mlora.pipeline.schedule import Timed, chrome_trace, svg
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
        if self._source is not None:
            config = _with_added(config, self._source)
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
        self._adapters, self._base = self._prepared.adapters, self._prepared.base
        self.job = Job(
            config=config,
            first_layers=first_layers(self._prepared.layers),
            in_flight=self._prepared.in_flight,
            replicas=replicas,
            dtype=self._base.dtype,
            model_digest=self._base.digest,
        )
        if self._source is not None:
            resume = Resume(self._source / CHECKPOINTS, start.allow_changed)
            resume.apply(self._adapters, self._prepared.parked, self._base)
        for adapter in self._adapters:
            self._load_initial(adapter, added)
        parked = {*self._prepared.parked, *(one.config.name for one in self._adapters if one.state == "failed")}
        for name in sorted(parked.intersection(added)):
            file = config.output_dir / ADDED / f"{name}.json"
            print(f"{name}: was added to the run while it ran; to leave it out from now on delete {file}", flush=True)

    def run(self, seat: Seat, requests: Requests, ask: Callable[[str], None]) -> Results:
        """Train to the end as stage 0 of the first replica, see ``Lead``."""
        config, cadence = self._config, Cadence(self._config)
        own, *others = deal([adapter for adapter in self._adapters if adapter.state == "waiting"], self.job.replicas)
        status = Status(config.output_dir, self._adapters, self._prepared.parked)
        loggers, console = Loggers(config.report_to, config.output_dir), terminal()
        recorder = Recorder(config.output_dir / METRICS, status.write, loggers, lines=console is None)
        exporter = Exporter(config, self._base, Collector(seat.stages), cadence, recorder, status)
        worker, windows = first_stage(self.job, seat, own, recorder, exporter, self._on_step, requests, cadence)
        lock = take_output(config, self._overwrite, self._goes_on)
        start = time.monotonic()
        view = LiveView(console, self._adapters, worker.microbatches, rows_of(config), seat.device) if console else None
        try:
            self._begin(recorder, status)
            costs = "at an adapter's end; a crash costs up to that and a step"
            print(f"checkpoints: every {cadence} and {costs}", flush=True)
            self._export_ended(exporter)
            with view.shown() if view else nullcontext():
                with Inbox(config.output_dir, self._adapters, self._prepare, requests.add, ask):
                    self._walk(worker, windows, others, seat.world, recorder, exporter, requests)
                for adapter in requests.arrived():
                    print(
                        f"{adapter.config.name}: was added too late; --resume auto (resume='auto') goes on with it",
                        flush=True,
                    )
                exporter.finish()
        except BaseException:
            exporter.abandon(wait=seat.stages is None)
            lock.close()  # a caller that handles the error keeps its traceback, and with it this frame
            raise
        finally:
            recorder.close({adapter.config.name: adapter.state for adapter in self._adapters})
        share_waited = worker.waited_s / max(time.monotonic() - start, 1e-9)
        print(f"checkpoints: {exporter.written} written; training waited {worker.waited_s:.3f} s ({share_waited:.2%})")
        if seat.stages:
            self._write_timeline(worker.executor.timeline, seat.stages)
        results = self._results(status, requests.signal)
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
            requests.waits_for_more = lambda: not all(report.done() for report in reports)
            worker.executor.run(_while_sound(windows, reports))
            wait(reports, return_when=FIRST_EXCEPTION)
            _raise_failed(reports)
            for report in reports:
                if (number := report.result()) is not None:
                    requests.ask(stop(number))
        finally:
            threads.shutdown(wait=False)  # after a failure the other replicas go on until they hear of it

    def _begin(self, recorder: Recorder, status: Status) -> None:
        """Write what belongs into the folder before the first step. Raises UserError where it cannot be written."""
        if self._source is not None and not self._goes_on:
            carry_added(self._source, self._config.output_dir)
        done = {a.config.name: (len(a.reports), a.evaluated) for a in self._adapters}
        try:
            recorder.open(self._source / METRICS if self._source else None, done)
        except OSError as error:
            raise UserError(f"output_dir: {METRICS} cannot be written: {error.strerror}; nothing was changed") from None
        write_facts(self._config, self._adapters, self._engine)
        status.write(at_once=True)

    def _results(self, status: Status, signal: int | None) -> Results:
        adapters = {adapter.config.name: _result(adapter, status) for adapter in self._adapters}
        parked = {
            name: AdapterResult(name=name, state="failed", reason=reason, reports=(), folder=None)
            for name, reason in self._prepared.parked.items()
        }
        return Results(output_dir=self._config.output_dir, adapters=adapters | parked, signal=signal)

    def _export_ended(self, exporter: Exporter) -> None:
        """What had ended in the run before may have lacked its export, and is not trained any more."""
        for adapter in self._adapters:
            if adapter.state == "ended":
                assert adapter.restored is not None
                exporter.export(adapter, adapter.restored)
            if adapter.state != "waiting":
                adapter.restored = None

    def _load_initial(self, adapter: AdapterRun, added: Collection[str]) -> None:
        """Raises UserError; but where no file of the user's names the adapter, it is parked, and the others go on."""
        try:
            load_initial(adapter, self._base)
        except UserError as error:
            if adapter.config.name not in added:
                raise
            adapter.state, adapter.reason = "failed", str(error)
            print(f"{adapter.config.name}: is parked: {error}", flush=True)

    def _prepare(self, index: int, config: AdapterConfig) -> AdapterRun:
        adapter = prepare_adapter(index, config, self._base)
        load_initial(adapter, self._base)
        write_facts(self._config, [*self._adapters, adapter], self._engine)
        return adapter

    @property
    def _engine(self) -> dict[str, str]:
        """How the work is done, for the report."""
        job = self.job
        layers = [stop - start for start, stop in itertools.pairwise(job.first_layers)]
        return {
            "device": self._base.device.type,
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
            write_whole(self._config.output_dir / TRACE, chrome_trace(whole).encode())
            write_whole(self._config.output_dir / PICTURE, svg(begin, names).encode())
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


def _with_added(config: RunConfig, source: Path) -> RunConfig:
    """With the adapters that were added to the run in ``source`` while it ran, unless the file names them by now."""
    names = {adapter.name.lower() for adapter in config.adapters}
    added = tuple(adapter for adapter in added_adapters(source) if adapter.name.lower() not in names)
    return replace(config, adapters=config.adapters + added)


def _result(adapter: AdapterRun, status: Status) -> AdapterResult:
    return AdapterResult(
        name=adapter.config.name,
        state=adapter.state,
        reason=adapter.reason,
        reports=tuple(adapter.reports),
        folder=status.exported.get(adapter.index),
        evaluations=tuple(adapter.evaluations),
    )
