"""The adapters' side of a run, on the first stage: what enters the stream, how steps are taken, who has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from mlora.config import AdapterConfig, RunConfig
from mlora.data import TokenData
from mlora.engine.adapter_run import OVER, AdapterRun, StepReport
from mlora.engine.batches import packed_inputs
from mlora.engine.cadence import Cadence
from mlora.engine.device import choose_device, choose_dtype, row_bucket
from mlora.engine.evaluation import EvaluationReport
from mlora.engine.memory import rows_of
from mlora.engine.requests import Requests
from mlora.pipeline.executor import Entry, Window
from mlora.pipeline.schedule import Planner
from mlora.types import Microbatch, Segment, StepDecision, UserError

Decision = Literal["end", "cancel"] | None
OnStep = Callable[[StepReport], Decision]
_IDLE_S = 0.5  # between two looks at what was added, when nothing else is to be done


class Records(Protocol):
    """Where an adapter's numbers go."""

    def start(self, adapter: str, earlier: Sequence[StepReport], config: AdapterConfig) -> None: ...
    def step(self, report: StepReport, config: AdapterConfig) -> None: ...
    def evaluation(self, report: EvaluationReport) -> None: ...


class Coordinator:
    """Plans windows ahead and decides each step; a decision is a function of its own adapter's steps alone.

    An adapter that ends early may stand in positions that are planned already: they are run, and their STEPs skipped.
    When a signal stops the run, whatever is planned passes by without work; then all leave as they are.
    """

    def __init__(
        self,
        config: RunConfig,
        adapters: Sequence[AdapterRun],
        in_flight: Sequence[int],
        recorder: Records,
        on_step: OnStep | None,
        requests: Requests,
        cadence: Cadence,
    ) -> None:
        self._adapters = {adapter.index: adapter for adapter in adapters}
        self._recorder, self._on_step = recorder, on_step
        self._requests, self._cadence = requests, cadence
        device = choose_device(config.device)
        bucket = row_bucket(device, choose_dtype(config.dtype, device))
        self._planner = Planner(rows_of(config), in_flight, bucket(1), bucket)
        self._window = 1 if len(in_flight) == 1 else 4 * in_flight[0]
        self._waiting = list(adapters)
        self._free = list(range(config.max_active))
        self._slots: dict[int, AdapterRun] = {}
        self._since: dict[int, int] = {}  # the position from which an adapter's work counts

    def windows(self, publish: Callable[[Window | None], None] | None = None) -> Iterator[Window]:
        """The stream, window by window, until all adapters have ended.

        With ``publish`` each window goes to the other stages while the one before it is under way, and None at the end.
        """
        if publish is None:
            yield from self._planned()
            return
        ready: Window | None = None
        for window in self._planned():
            publish(window)
            if ready is not None:
                yield ready
            ready = window
        publish(None)
        if ready is not None:
            yield ready

    def _planned(self) -> Iterator[Window]:
        while True:
            self._take_arrived()
            self.halted()
            entries = (*self._leaving(), *self._retrying(), *self._joining())
            positions = self._planner.window(self._window)
            idle = not entries and not positions and not self._slots
            if idle and not self._requests.waits_for_more():
                return
            inputs = {
                p.index: packed_inputs(p.microbatch, self._held_out if p.forward_only else self._data, self._unreadable)
                for p in positions
                if p.microbatch
            }
            yield Window(entries=entries, positions=positions, inputs=inputs)
            if idle:
                time.sleep(_IDLE_S)

    def _data(self, index: int) -> TokenData:
        return self._adapters[index].data

    def _held_out(self, index: int) -> TokenData:
        data = self._adapters[index].held_out
        assert data is not None
        return data

    def adapter(self, index: int) -> AdapterRun:
        """The adapter of an entry."""
        return self._adapters[index]

    def close_step(self, position: int, segment: Segment, loss_sum: float, squares: Sequence[float]) -> StepDecision:
        """How the step that ``segment`` ends is taken; what lies beyond an adapter's end or retry is skipped unseen."""
        adapter = self._adapters[segment.adapter]
        if not self._counts(adapter, position):
            return StepDecision(0.0, 0.0, skip=True)
        decision = adapter.close_step(segment, loss_sum, squares)
        report = adapter.reports[-1]
        self._recorder.step(report, adapter.config)
        wish = self._on_step(report) if self._on_step else None
        wish, who = ("end", "mlora stop") if self._requests.ends(report.adapter) else (wish, "on_step")
        if wish not in (None, "end", "cancel"):
            raise UserError(f"on_step returned {wish!r}; return None, 'end' or 'cancel'")
        if wish is not None and adapter.state == "training":
            adapter.state = "ended" if wish == "end" else "cancelled"
            adapter.reason = f"by {who} after step {report.step}"
        self._leave_if_over(adapter, segment.slot)
        save = adapter.state == "training" and self._cadence.due(report.adapter, report.step)
        return replace(decision, save=save)

    def evaluated(self, microbatch: Microbatch, scores: Sequence[Sequence[float]]) -> None:
        """Take the scores of a microbatch's samples, each to its adapter; what is beyond its end is skipped unseen."""
        start = 0
        for segment in microbatch.segments:
            adapter, stop = self._adapters[segment.adapter], start + len(segment.samples)
            report = None
            if self._counts(adapter, microbatch.index):
                report = adapter.take_scores(segment, scores[start:stop])
            start = stop
            if report is not None:
                self._recorder.evaluation(report)
                self._leave_if_over(adapter, segment.slot)

    def _leave_if_over(self, adapter: AdapterRun, slot: int) -> None:
        if adapter.state != "training" and self._slots.get(slot) is adapter:  # the slot may be another's by now
            self._planner.leave(slot)

    def halted(self) -> bool:
        """Whether a signal stops the run. Adapters then keep what their last STEP made; a step under way is dropped."""
        if self._requests.signal is None:
            return False
        for slot, adapter in self._slots.items():
            if adapter.state not in OVER:
                adapter.state = "stopped"
                self._planner.leave(slot)
        return True

    def poisoned(self, microbatch: Microbatch, note: str) -> None:
        """Every adapter of a microbatch that could not be computed repeats its step alone; who is alone has failed."""
        alone = len(microbatch.segments) == 1
        for segment in microbatch.segments:
            adapter = self._adapters[segment.adapter]
            if self._counts(adapter, microbatch.index):
                adapter.state = "failed" if alone else "retrying"
                adapter.reason = f"its microbatch could not be computed: {note}"
                adapter.rewind()
                self._planner.leave(segment.slot)

    def _unreadable(self, index: int, error: OSError) -> None:
        adapter = self._adapters[index]
        if adapter.state not in OVER:
            adapter.state, adapter.reason = "failed", f"its data cannot be read any more: {error}"
            for slot, other in self._slots.items():
                if other is adapter:
                    self._planner.leave(slot)

    def _take_arrived(self) -> None:
        for adapter in self._requests.arrived():
            self._adapters[adapter.index] = adapter
            self._waiting.append(adapter)

    def _counts(self, adapter: AdapterRun, position: int) -> bool:
        """Whether what stands at ``position`` is still meant: not beyond the adapter's end, not before its retry."""
        return adapter.state == "training" and position >= self._since[adapter.index]

    def _leaving(self) -> list[Entry]:
        over = [slot for slot, adapter in self._slots.items() if adapter.state in OVER]
        left = [slot for slot in over if self._planner.free(slot)]
        self._free = sorted(self._free + left)
        return [Entry(kind="leave", slot=slot, adapter=self._slots.pop(slot).index) for slot in left]

    def _retrying(self) -> list[Entry]:
        entries = []
        for slot, adapter in self._slots.items():
            if adapter.state == "retrying" and self._planner.free(slot):
                self._enter(slot, adapter, alone=True)
                entries.append(Entry(kind="reset", slot=slot, adapter=adapter.index))
        return entries

    def _joining(self) -> list[Entry]:
        entries = []
        while self._free and self._waiting and self._requests.signal is None:
            slot, adapter = self._free.pop(0), self._waiting.pop(0)
            self._slots[slot] = adapter
            self._recorder.start(adapter.config.name, adapter.reports, adapter.config)
            self._cadence.start(adapter.config.name)
            self._enter(slot, adapter)
            restored = adapter.restored is not None
            entry = Entry(kind="join", slot=slot, adapter=adapter.index, config=adapter.config)
            entries.append(replace(entry, targets=adapter.targets, restored=restored))
        return entries

    def _enter(self, slot: int, adapter: AdapterRun, alone: bool = False) -> None:
        adapter.state, adapter.reason = "training", ""  # of the try before
        self._since[adapter.index] = self._planner.position
        self._planner.join(slot, adapter.next_step, alone)
