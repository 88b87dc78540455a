"""``mlora eval``: loss, perplexity and token accuracy of adapters and of their base model on a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice

from mlora.config import AdapterConfig
from mlora.data import TokenData, open_source, open_tokens
from mlora.engine.adapter_run import in_order
from mlora.engine.batches import packed_inputs
from mlora.engine.device import row_bucket
from mlora.engine.evaluation import for_json, perplexity
from mlora.engine.prepare import cache_folder
from mlora.engine.progress import Progress
from mlora.engine.ranks import run_stages
from mlora.engine.requests import Requests
from mlora.engine.use import Models, Use
from mlora.engine.worker import Seat
from mlora.models.spec import load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.ops.exact import exact_sum
from mlora.pipeline.executor import Decider, Entry, Executor, Window
from mlora.pipeline.schedule import Position
from mlora.tasks import SftTask
from mlora.types import Microbatch, SampleRef, Segment, StepDecision, UserError

_MICROBATCH_ROWS = 2048
_WINDOW = 64  # microbatches that are read and published at once


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an adapter (or the base model, ``BASE``) came to.

    ``loss`` is the mean over all target tokens of the file, as transformers forms it; ``accuracy`` is the share of them
    that the model finds likeliest.
    """

    adapter: str
    rows: int
    target_tokens: int
    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def evaluate(models: Models, config: AdapterConfig) -> list[Evaluation]:
    """Evaluate every adapter on the data set of ``config``, whose ``max_length`` counts too.

    Rows are rendered, labelled and cut as in training, and the same for all. Raises UserError.
    """
    found: list[Evaluation] = run_stages(lambda world: _Lead(models, config, world), _follow)
    return found


class _Lead:
    """Stage 0: reads the data, sends it through the stages forward only, and adds up what comes back."""

    def __init__(self, models: Models, config: AdapterConfig, world: int) -> None:
        self.job = job = models.use(world)
        spec = load_spec(job.folder)
        length = min(config.max_length, spec.max_positions)
        (source,) = config.sources
        task = SftTask(source, load_tokenizer(job.folder, spec.vocab_size), length, spec.vocab_size)
        self._data = open_tokens(open_source(source), task.encode, task.digest, cache_folder() / "tokens")
        print(f"{source.label}: {self._data.stats.summary()}", file=sys.stderr)
        self._scores: dict[int, list[Sequence[float]]] = {slot: [] for slot in job.names}
        self._progress = Progress("evaluating", len(self._data) * len(job.names), "rows")

    def run(self, seat: Seat, requests: Requests, ask: Callable[[str], None]) -> list[Evaluation]:
        self._requests = requests
        _walk(self.job, seat, self._windows(seat), self)
        return [self._evaluation(slot) for slot in self.job.names]

    def evaluated(self, microbatch: Microbatch, scores: Sequence[Sequence[float]]) -> None:
        self._scores[microbatch.segments[0].slot] += scores
        self._progress.advance(len(scores))

    def poisoned(self, microbatch: Microbatch, note: str) -> None:
        raise UserError(f"its rows could not be computed: {note}")

    def halted(self) -> bool:
        self._requests.check()
        return False

    def close_step(self, *_: object) -> StepDecision:
        raise AssertionError("nothing is trained")

    def _windows(self, seat: Seat) -> Iterator[Window]:
        bucket = row_bucket(seat.device, self.job.dtype)
        every = chain.from_iterable(_microbatches(self._data, slot, bucket) for slot in self.job.names)
        numbered = (replace(microbatch, index=index) for index, microbatch in enumerate(every))
        while part := list(islice(numbered, _WINDOW)):
            inputs = {m.index: packed_inputs(m, lambda _: self._data, _raise_unreadable) for m in part}
            positions = tuple(Position(index=m.index, microbatch=m, forward_only=True) for m in part)
            window = Window(entries=(), positions=positions, inputs=inputs)
            if seat.stages is not None:
                seat.stages.publish(window)
            yield window
        if seat.stages is not None:
            seat.stages.publish(None)

    def _evaluation(self, slot: int) -> Evaluation:
        losses, hits = zip(*self._scores[slot], strict=True)
        count = int(self._data.target_tokens.sum())
        return Evaluation(
            adapter=self.job.names[slot],
            rows=len(self._data),
            target_tokens=count,
            loss=exact_sum(losses) / count,
            accuracy=sum(map(int, hits)) / count,
        )


def _follow(job: Use, seat: Seat) -> None:
    assert seat.stages is not None
    _walk(job, seat, iter(seat.stages.next, None))


def _walk(job: Use, seat: Seat, windows: Iterable[Window], decider: Decider | None = None) -> None:
    stage = job.open_stage(seat)
    Executor(stage, seat.transport, job.in_flight, job.first_layers, _meet_nobody, decider).run(windows)


def _meet_nobody(entry: Entry) -> None:
    raise AssertionError(f"{entry}: all adapters are there from the start")


def _microbatches(data: TokenData, slot: int, bucket: Callable[[int], int]) -> Iterator[Microbatch]:
    """All samples, longest first, in microbatches of up to so many rows; a longer one goes alone."""
    waiting: list[SampleRef] = []
    for sample in in_order(data, range(len(data)))[0]:
        if waiting and sum(s.length for s in waiting) + sample.length > _MICROBATCH_ROWS:
            yield _microbatch(waiting, slot, bucket)
            waiting = []
        waiting.append(sample)
    yield _microbatch(waiting, slot, bucket)


def _microbatch(samples: Sequence[SampleRef], slot: int, bucket: Callable[[int], int]) -> Microbatch:
    segment = Segment(
        adapter=slot, slot=slot, step=0, start=0, samples=tuple(samples), target_tokens=1, ends_step=False
    )
    return Microbatch(0, (segment,), bucket(segment.stop))


def _raise_unreadable(adapter: int, error: OSError) -> None:
    raise UserError(f"the token cache cannot be read: {error}; start again")


def evaluation_json(evaluation: Evaluation) -> str:
    """For programs, on one line."""
    entry = asdict(evaluation) | {"perplexity": evaluation.perplexity}
    return json.dumps({key: for_json(value) if isinstance(value, float) else value for key, value in entry.items()})


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """To read on a terminal."""
    width = max(len("adapter"), *(len(e.adapter) for e in evaluations))
    lines = [f"{'adapter':<{width}}  {'rows':>7}  {'tokens':>9}  {'loss':>8}  {'perplexity':>10}  {'accuracy':>8}"]
    for e in evaluations:
        name = f"{e.adapter:<{width}}  {e.rows:>7,}  {e.target_tokens:>9,}"
        lines.append(f"{name}  {e.loss:>8.4f}  {e.perplexity:>10.4g}  {e.accuracy:>8.2%}")
    return "\n".join(lines)
