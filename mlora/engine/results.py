"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlora.engine.adapter_run import State, StepReport
from mlora.engine.evaluation import EvaluationReport, best_of


@dataclass(frozen=True, kw_only=True)
class AdapterResult:
    """How one adapter ended. ``folder`` is where it was exported, None where it failed or was cancelled."""

    name: str
    state: State
    reason: str
    reports: tuple[StepReport, ...]
    folder: Path | None
    evaluations: tuple[EvaluationReport, ...] = ()

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None before the first."""
        return self.reports[-1].loss if self.reports else None

    @property
    def best_step(self) -> int | None:
        """The step behind which the held-out loss was lowest; None where there was no evaluation."""
        best = best_of(self.evaluations)
        return best.step if best else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All adapters by name, in the order of the configuration."""

    output_dir: Path
    adapters: Mapping[str, AdapterResult]
    signal: int | None = None  # that stopped the run

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the adapters that failed."""
        return tuple(name for name, result in self.adapters.items() if result.state == "failed")
