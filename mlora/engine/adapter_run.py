"""One adapter's way through a run: its steps, its clock, its end. Nothing here looks at another adapter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mlora.adapters.optimizer import clip_coefficient, learning_rate
from mlora.config import AdapterConfig
from mlora.data import Sampler, TokenData
from mlora.engine.evaluation import EvaluationReport, best_of, fruitless, is_due, is_lower
from mlora.ops.exact import exact_sum
from mlora.pipeline.schedule import EvaluationPlan
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
    evaluations: tuple[EvaluationReport, ...] = ()

    @property
    def best_step(self) -> int | None:
        """The step behind which the held-out loss was lowest."""
        best = best_of(self.evaluations)
        return best.step if best else None


@dataclass(kw_only=True)
class AdapterRun:
    """The run's record of one adapter, from waiting to its end. ``held_out`` are the rows it is evaluated on."""

    index: int
    config: AdapterConfig
    data: TokenData
    targets: tuple[str, ...]
    held_out: TokenData | None = None
    state: State = "waiting"
    reason: str = ""
    reports: list[StepReport] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    restored: Mapping[str, Tensor] | None = None  # of a checkpoint, until the adapter joins
    kept: tuple[int, Mapping[str, Tensor]] | None = None  # on rank 0: the best step that is not the last, its matrices
    _planned: int = 0
    _evaluation_planned: int = 0  # behind which step
    _scores: list[Sequence[float]] = field(default_factory=list)  # of an evaluation's samples so far
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
    def evaluated(self) -> int:
        """Behind which step it was evaluated last."""
        return self.evaluations[-1].step if self.evaluations else 0

    @property
    def cost(self) -> float:
        """Tokens of the training that is left, on average: what the adapter costs a pipeline."""
        return (self.total_steps - len(self.reports)) * self.config.rows_per_step * float(self.data.lengths.mean())

    def next_step(self) -> StepPlan | None:
        """The samples of the next unplanned step in canonical order, or of the evaluation that comes before it."""
        if self.state != "training":
            return None
        if self._evaluation_planned < self._planned and self._evaluates(self._planned):
            assert self.held_out is not None
            self._evaluation_planned = self._planned
            samples, targets = in_order(self.held_out, range(len(self.held_out)))
            return EvaluationPlan(self.index, self._planned - 1, samples, targets)
        if self._planned == self.total_steps:
            return None
        samples, targets = in_order(self.data, self.sampler.indices(self._planned))
        self._tokens_of_step[self._planned] = sum(sample.length for sample in samples)
        self._planned += 1
        return StepPlan(self.index, self._planned - 1, samples, targets)

    def rewind(self) -> None:
        """Plan again what comes behind the last step and the last evaluation that are done."""
        self._planned = len(self.reports)
        self._evaluation_planned = self.evaluated
        self._scores = []

    def record(self) -> Record:
        """What there is to save now."""
        return Record(
            step=len(self.reports),
            total_steps=self.total_steps,
            state=self.state,
            reason=self.reason,
            nonfinite_in_a_row=self._nonfinite_in_a_row,
            reports=tuple(self.reports),
            evaluations=tuple(self.evaluations),
        )

    def resume(self, record: Record, tensors: Mapping[str, Tensor]) -> None:
        """Go on behind ``record``. What had failed is tried again from its last good step; what was over stays so."""
        self.reports, self.evaluations, self.restored = list(record.reports), list(record.evaluations), tensors
        self.rewind()
        self._tokens = self.reports[-1].num_tokens if self.reports else 0
        to_evaluate = self._evaluation_planned < record.step and self._evaluates(record.step)
        done, parked = record.step >= self.total_steps and not to_evaluate, record.state == "failed"
        if record.state == "cancelled" or (record.state == "ended" and record.reason) or (parked and done):
            self.state, self.reason = record.state, record.reason
        elif done:
            self.state = "ended"
        else:
            self._nonfinite_in_a_row = 0 if parked else record.nonfinite_in_a_row

    def step_report(
        self, step: int, loss: float, grad_norm: float, rate: float, tokens: int, skipped: bool
    ) -> StepReport:
        """What ``step`` (from 0) came to."""
        return StepReport(
            adapter=self.config.name,
            step=step + 1,
            total_steps=self.total_steps,
            epoch=self.sampler.epoch(step),
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=tokens,
            skipped=skipped,
        )

    def evaluation_report(
        self, done: int, loss: float, correct: int, targets: int, before: Sequence[EvaluationReport]
    ) -> EvaluationReport:
        """What an evaluation behind ``done`` steps came to; ``before`` are those before it."""
        return EvaluationReport(
            adapter=self.config.name,
            step=done,
            total_steps=self.total_steps,
            loss=loss,
            correct_tokens=correct,
            target_tokens=targets,
            best=is_lower(loss, before),
        )

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
        self.reports.append(self.step_report(step, loss, grad_norm, rate, self._tokens, not finite))
        coefficient = clip_coefficient(grad_norm, self.config.max_grad_norm) if finite else 0.0
        best = best_of(self.evaluations)
        keep = self.config.load_best_model_at_end and best is not None and best.step == step
        return StepDecision(rate, coefficient, not finite, keep=keep)

    def take_scores(self, segment: Segment, scores: Sequence[Sequence[float]]) -> EvaluationReport | None:
        """Take (Σ loss, correct tokens) of a segment's samples; with the last of an evaluation give its report.

        It ends the adapter behind its last step, or where the loss has not become lower for as long as patience lasts.
        """
        self._scores += scores
        if not segment.ends_step:
            return None
        losses, correct = zip(*self._scores, strict=True)
        self._scores = []
        loss, count = exact_sum(losses) / segment.target_tokens, segment.target_tokens
        report = self.evaluation_report(segment.step + 1, loss, int(sum(correct)), count, self.evaluations)
        self.evaluations.append(report)
        self._count_evaluation(report)
        return report

    def _evaluates(self, done: int) -> bool:
        return self.held_out is not None and is_due(self.config, done, self.total_steps)

    def _count_evaluation(self, report: EvaluationReport) -> None:
        patience, threshold = self.config.early_stopping_patience, self.config.early_stopping_threshold
        since = fruitless(self.evaluations, threshold)
        if report.step == self.total_steps:
            self.state = "ended"
        elif patience is not None and since >= patience:
            best = best_of(self.evaluations)
            self.state = "ended"
            self.reason = f"early stopping: no lower eval_loss in {since} evaluations" + (
                f"; the lowest was {best.loss:.4f} behind step {best.step}" if best else ""
            )

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
        elif step + 1 == self.total_steps and not self._evaluates(step + 1):
            self.state = "ended"


def in_order(data: TokenData, indices: Iterable[int]) -> tuple[tuple[SampleRef, ...], int]:
    """The rows in canonical order, longest first, then index; and how many target tokens they have."""
    ordered = sorted(indices, key=lambda i: (-int(data.lengths[i]), i))
    samples = tuple(SampleRef(i, ordinal, int(data.lengths[i])) for ordinal, i in enumerate(ordered))
    return samples, sum(int(data.target_tokens[i]) for i in ordered)
