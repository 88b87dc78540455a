"""``mlora eval``: loss, perplexity and token accuracy of adapters and of their base model on a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlora.config import AdapterConfig
from mlora.data import TokenData, open_source, open_tokens
from mlora.engine.batches import packed_inputs
from mlora.engine.device import choose_device, choose_dtype, prepare, row_bucket
from mlora.engine.prepare import cache_folder
from mlora.engine.trained import BARE_SLOT, BASE, base_of, find_trained, load_stage
from mlora.models.spec import load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.ops.exact import exact_sum
from mlora.pipeline.stage import Batch, Stage
from mlora.tasks import SftTask
from mlora.types import Microbatch, SampleRef, Segment, UserError

_MICROBATCH_ROWS = 2048


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
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    places: Sequence[str | Path],
    config: AdapterConfig,
    base: str | None = None,
    with_base: bool = False,
    dtype: str = "auto",
    device: str = "auto",
) -> list[Evaluation]:
    """Evaluate every adapter on the data set of ``config``, whose ``max_length`` counts too.

    ``places`` are folders of adapters, or of runs, whose adapters are all taken; none: the base model alone. Rows are
    rendered, labelled and cut as in training, and the same for all. Raises UserError.
    """
    adapters = find_trained(places)
    folder = base_of(adapters, base)
    chosen = choose_device(device)
    prepare(chosen)
    spec = load_spec(folder)
    length = min(config.max_length, spec.max_positions)
    (source,) = config.sources
    task = SftTask(source, load_tokenizer(folder, spec.vocab_size), length, spec.vocab_size)
    data = open_tokens(open_source(source), task.encode, task.digest, cache_folder() / "tokens")
    print(f"{source.label}: {data.stats.summary()}", file=sys.stderr)
    stage = load_stage(folder, adapters, choose_dtype(dtype, chosen), chosen)
    slots = {slot: adapter.name for slot, adapter in enumerate(adapters, BARE_SLOT + 1)}
    if with_base or not adapters:
        slots = {BARE_SLOT: BASE} | slots
    return [_evaluate(stage, data, slot, name) for slot, name in slots.items()]


def _evaluate(stage: Stage, data: TokenData, slot: int, name: str) -> Evaluation:
    model, losses, correct = stage.model, [], 0
    for microbatch in _microbatches(data, slot, row_bucket(model.device, model.dtype)):
        input_ids_T, targets_T = packed_inputs(microbatch, lambda _: data, _raise_unreadable)
        for loss, hits in stage.score(Batch(microbatch, input_ids_T.to(model.device), targets_T)).tolist():
            losses.append(loss)
            correct += int(hits)
    count = int(data.target_tokens.sum())
    return Evaluation(
        adapter=name,
        rows=len(data),
        target_tokens=count,
        loss=exact_sum(losses) / count,
        accuracy=correct / count,
    )


def _microbatches(data: TokenData, slot: int, bucket: Callable[[int], int]) -> Iterator[Microbatch]:
    """All samples, longest first, in microbatches of up to so many rows; a longer one goes alone."""
    waiting: list[SampleRef] = []
    order = sorted(range(len(data)), key=lambda i: (-int(data.lengths[i]), i))
    for ordinal, i in enumerate(order):
        sample = SampleRef(i, ordinal, int(data.lengths[i]))
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


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """To read on a terminal."""
    width = max(len("adapter"), *(len(e.adapter) for e in evaluations))
    lines = [f"{'adapter':<{width}}  {'rows':>7}  {'tokens':>9}  {'loss':>8}  {'perplexity':>10}  {'accuracy':>8}"]
    for e in evaluations:
        name = f"{e.adapter:<{width}}  {e.rows:>7,}  {e.target_tokens:>9,}"
        lines.append(f"{name}  {e.loss:>8.4f}  {e.perplexity:>10.4g}  {e.accuracy:>8.2%}")
    return "\n".join(lines)
