"""One adapter's way through a run: its steps, its clock, its end. Nothing here looks at another adapter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mlora.adapters.optimizer import clip_coefficient, learning_rate
from mlora.config import AdapterConfig
from mlora.data import Sampler, TokenData
from mlora.pipeline.stage import Stage
from mlora.types import SampleRef, Segment, StepPlan

State = Literal["waiting", "training", "ended", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step of one adapter came to. ``loss`` is the mean over the step's target tokens."""

    adapter: str
    step: int  # from 1
    total_steps: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int  # all tokens that the adapter has trained on so far
    skipped: bool  # loss or gradient was not finite, so the weights were left as they are


@dataclass(kw_only=True)
class AdapterRun:
    """The run's record of one adapter, from waiting to its end."""

    index: int
    config: AdapterConfig
    data: TokenData
    targets: tuple[str, ...]
    state: State = "waiting"
    reason: str = ""
    reports: list[StepReport] = field(default_factory=list)
    _planned: int = 0
    _nonfinite_in_a_row: int = 0
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.sampler = Sampler(len(self.data), self.config.seed, self.config.rows_per_step)

    @property
    def total_steps(self) -> int:
        """``max_steps`` where it is set, else the epochs' steps, rounded up as in transformers."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return math.ceil(self.config.num_train_epochs * self.sampler.steps_per_epoch)

    def next_step(self) -> StepPlan | None:
        """The samples of the next unplanned step in canonical order: longest first, then index."""
        if self._planned == self.total_steps or self.state != "training":
            return None
        indices = self.sampler.indices(self._planned)
        indices.sort(key=lambda i: (-int(self.data.lengths[i]), i))
        samples = tuple(SampleRef(i, ordinal, int(self.data.lengths[i])) for ordinal, i in enumerate(indices))
        targets = sum(int(self.data.target_tokens[i]) for i in indices)
        self._planned += 1
        return StepPlan(self.index, self._planned - 1, samples, targets)

    def saw(self, segment: Segment) -> None:
        """Count a segment's tokens when its backward is done."""
        self._tokens += segment.stop - segment.start

    def close_step(self, stage: Stage, segment: Segment) -> StepReport:
        """STEP: update the weights, or skip where loss or gradient is not finite; count, and end where it is time.

        A skipped step has used its data and its tick of the learning rate; weights and moments stay.
        """
        slot, step = segment.slot, segment.step
        sums = stage.close_step(slot)
        loss = _exact_sum(x for part in sums.losses for x in part.double().tolist()) / segment.target_tokens
        grad_norm = math.sqrt(_exact_sum(sums.squares))
        rate = learning_rate(self.config, step, self.total_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            stage.apply_step(slot, rate, clip_coefficient(grad_norm, self.config.max_grad_norm))
        else:
            stage.discard_step(slot)
        self._count(finite, step)
        report = StepReport(
            adapter=self.config.name,
            step=step + 1,
            total_steps=self.total_steps,
            epoch=self.sampler.epoch(step),
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=self._tokens,
            skipped=not finite,
        )
        self.reports.append(report)
        return report

    def _count(self, finite: bool, step: int) -> None:
        self._nonfinite_in_a_row = 0 if finite else self._nonfinite_in_a_row + 1
        if self._nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            self.state = "failed"
            self.reason = (
                f"loss or gradient was not finite in {self._nonfinite_in_a_row} steps in a row, the last one step "
                f"{step + 1}; lower learning_rate or look at its data"
            )
        elif step + 1 == self.total_steps:
            self.state = "ended"


def _exact_sum(values: Iterable[float]) -> float:
    """The sum rounded once, so that it does not depend on the order; not finite where a value is not."""
    values = list(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
