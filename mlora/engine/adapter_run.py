"""One adapter's way through a run: its steps, its clock, its end. Nothing here looks at another adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mlora.adapters.optimizer import clip_coefficient, learning_rate
from mlora.config import AdapterConfig
from mlora.data import Sampler, TokenData
from mlora.ops.exact import exact_sum
from mlora.types import SampleRef, Segment, StepDecision, StepPlan

State = Literal["waiting", "training", "retrying", "ended", "failed", "cancelled", "stopped"]
OVER = ("ended", "failed", "cancelled", "stopped")  # what an adapter does not come back from in this run


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


@dataclass(frozen=True, kw_only=True)
class Record:
    """What there is to save of an adapter beside its tensors, as it was behind one of its steps."""

    step: int  # how many are done
    total_steps: int
    state: State
    reason: str
    nonfinite_in_a_row: int
    reports: tuple[StepReport, ...]


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
    restored: Mapping[str, Tensor] | None = None  # of a checkpoint, until the adapter joins
    _planned: int = 0
    _nonfinite_in_a_row: int = 0
    _tokens: int = 0
    _tokens_of_step: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sampler = Sampler(len(self.data), self.config.seed, self.config.rows_per_step, self.data.shares)

    @property
    def total_steps(self) -> int:
        """``max_steps`` where it is set, else the epochs' steps, rounded up as in transformers."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return math.ceil(self.config.num_train_epochs * self.sampler.steps_per_epoch)

    @property
    def cost(self) -> float:
        """Tokens of the training that is left, on average: what the adapter costs a pipeline."""
        return (self.total_steps - len(self.reports)) * self.config.rows_per_step * float(self.data.lengths.mean())

    def next_step(self) -> StepPlan | None:
        """The samples of the next unplanned step in canonical order: longest first, then index."""
        if self._planned == self.total_steps or self.state != "training":
            return None
        indices = self.sampler.indices(self._planned)
        indices.sort(key=lambda i: (-int(self.data.lengths[i]), i))
        samples = tuple(SampleRef(i, ordinal, int(self.data.lengths[i])) for ordinal, i in enumerate(indices))
        targets = sum(int(self.data.target_tokens[i]) for i in indices)
        self._tokens_of_step[self._planned] = sum(sample.length for sample in samples)
        self._planned += 1
        return StepPlan(self.index, self._planned - 1, samples, targets)

    def rewind(self, step: int) -> None:
        """Plan again from ``step`` on."""
        self._planned = step

    def record(self) -> Record:
        """What there is to save now."""
        return Record(
            step=len(self.reports),
            total_steps=self.total_steps,
            state=self.state,
            reason=self.reason,
            nonfinite_in_a_row=self._nonfinite_in_a_row,
            reports=tuple(self.reports),
        )

    def resume(self, record: Record, tensors: Mapping[str, Tensor]) -> None:
        """Go on behind ``record``. What had failed is tried again from its last good step; what was over stays so."""
        self.reports, self._planned, self.restored = list(record.reports), record.step, tensors
        self._tokens = self.reports[-1].num_tokens if self.reports else 0
        done, parked = record.step >= self.total_steps, record.state == "failed"
        if record.state == "cancelled" or (record.state == "ended" and record.reason) or (parked and done):
            self.state, self.reason = record.state, record.reason
        elif done:
            self.state = "ended"
        else:
            self._nonfinite_in_a_row = 0 if parked else record.nonfinite_in_a_row

    def close_step(self, segment: Segment, loss_sum: float, squares: Sequence[float]) -> StepDecision:
        """Decide how the step that ``segment`` ends is taken, report it, and end the adapter where it is time.

        ``loss_sum`` is Σ loss over the step's target tokens, ``squares`` Σ grad² of every layer of the model. A step
        whose loss or gradient is not finite is skipped: it has used its data and its tick of the learning rate.
        """
        step = segment.step
        self._tokens += self._tokens_of_step.pop(step)
        loss = loss_sum / segment.target_tokens
        grad_norm = math.sqrt(exact_sum(squares))
        rate = learning_rate(self.config, step, self.total_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
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
        return StepDecision(rate, clip_coefficient(grad_norm, self.config.max_grad_norm) if finite else 0.0, not finite)

    def _count(self, finite: bool, step: int) -> None:
        self._nonfinite_in_a_row = 0 if finite else self._nonfinite_in_a_row + 1
        if self._nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            self.state = "failed"
            self.reason = (
                f"loss or gradient was not finite in {self._nonfinite_in_a_row} steps in a row, the last one step "
                f"{step + 1}; lower learning_rate or look at its data"
            )
        elif step + 1 == self.total_steps and not finite:
            self.state, self.reason = "failed", "loss or gradient of the last step was not finite; lower learning_rate"
        elif step + 1 == self.total_steps:
            self.state = "ended"
