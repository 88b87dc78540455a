"""What an adapter's evaluations say: when they are due, which step is the best, and when patience is at an end.

All of it is a function of the adapter's own evaluations, so a run that goes on needs nothing but their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mlora.config import AdapterConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """How an adapter does on its held-out rows behind ``step``. ``loss`` is the mean over all their target tokens."""

    adapter: str
    step: int  # how many are done
    total_steps: int
    loss: float
    correct_tokens: int  # targets that have the largest logit
    target_tokens: int
    best: bool  # no evaluation before had a loss as low

    @property
    def accuracy(self) -> float:
        """Share of the target tokens that the model would have chosen."""
        return self.correct_tokens / self.target_tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def for_json(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are written as text."""
    return value if math.isfinite(value) else str(value)


def is_due(config: AdapterConfig, done: int, total: int) -> bool:
    """Whether to evaluate behind ``done`` of ``total`` steps; always behind the last."""
    if done < 1 or done > total:
        return False
    if isinstance(config.eval_steps, tuple):
        return done == total or done in {_share(share, total) for share in config.eval_steps}
    every = int(config.eval_steps) if config.eval_steps >= 1 else _share(config.eval_steps, total)
    return done == total or done % every == 0


def _share(share: float, total: int) -> int:
    """A share of all steps, rounded up as in transformers; the share counts as it is written, so 0.1 is a tenth."""
    return math.ceil(Fraction(str(share)) * total)


def best_of(evaluations: Sequence[EvaluationReport]) -> EvaluationReport | None:
    """The one with the lowest loss, the earliest of several; None where none has a finite loss."""
    return next((report for report in reversed(evaluations) if report.best), None)


def is_lower(loss: float, evaluations: Sequence[EvaluationReport], threshold: float = 0.0) -> bool:
    """Whether ``loss`` is finite and lower than in all ``evaluations``, by more than ``threshold``."""
    best = best_of(evaluations)
    return math.isfinite(loss) and (best is None or loss < best.loss - threshold)


def fruitless(evaluations: Sequence[EvaluationReport], threshold: float) -> int:
    """How many evaluations there were since the last that was lower than all before by more than ``threshold``."""
    for back, report in enumerate(reversed(evaluations)):
        if is_lower(report.loss, evaluations[: len(evaluations) - 1 - back], threshold):
            return back
    return len(evaluations)
