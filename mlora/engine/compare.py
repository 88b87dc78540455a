"""``mlora compare``: the adapters of several runs side by side, in a table and in a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlora.checkpoint.versions import read_manifest, versions
from mlora.engine.output import CHECKPOINTS, METRICS
from mlora.engine.status import read_status
from mlora.types import UserError

_UNTOLD = ("name",)  # keys of an adapter that differ always
_INCH, _DPI = (9.0, 5.0), 120


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a run has logged of an adapter. ``steps`` and ``losses`` are of its logging steps; ``keys`` its
    configuration, empty where the run has no checkpoint of it."""

    run: str
    adapter: str
    state: str
    keys: Mapping[str, Any]
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    speeds: list[float] = field(default_factory=list)
    eval_loss: float | None = None  # of its best evaluation

    @property
    def name(self) -> str:
        return f"{self.run}/{self.adapter}"

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest logged loss and its step."""
        finite = [pair for pair in zip(self.losses, self.steps, strict=True) if math.isfinite(pair[0])]
        return min(finite, default=None)


def read_curves(runs: Sequence[str | Path]) -> list[Curve]:
    """All adapters of all runs, live or dead, in the runs' order. Raises UserError where a folder holds no run."""
    names = _short_names([Path(run).resolve() for run in runs])
    return [curve for run, name in zip(runs, names, strict=True) for curve in _read_run(Path(run), name)]


def _short_names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many folders before them as tell them apart."""
    if len(set(runs)) < len(runs):
        raise UserError(f"{max(runs, key=runs.count)}: is given twice; give each run once")
    for depth in range(1, max(len(run.parts) for run in runs) + 1):
        names = ["/".join(run.parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run) for run in runs]


def _read_run(run: Path, name: str) -> list[Curve]:
    status = read_status(run)
    curves = {adapter: _curve(run, name, adapter, entry) for adapter, entry in status["adapters"].items()}
    try:
        lines = (run / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{run / METRICS}: cannot be read: {error.strerror}") from None
    tokens = dict.fromkeys(curves, 0)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # a line that a crash has cut, or of another kind
            entry = json.loads(line)
            step, loss, speed = int(entry["step"]), float(entry["loss"]), float(entry["tokens_per_second"])
            curve = curves[entry["adapter"]]
            tokens[curve.adapter] = int(entry["num_tokens"])
            curve.steps.append(step)
            curve.losses.append(loss)
            curve.speeds.append(speed)
    return [replace(curve, tokens=tokens[curve.adapter]) for curve in curves.values()]


def _curve(run: Path, name: str, adapter: str, entry: Mapping[str, Any]) -> Curve:
    """What the run's status says of the adapter."""
    best, keys = entry.get("best_eval_loss"), _keys(run / CHECKPOINTS / adapter)
    return Curve(run=name, adapter=adapter, state=entry["state"], keys=keys, eval_loss=float(best) if best else None)


def _keys(checkpoints: Path) -> dict[str, Any]:
    """The adapter's keys, from its newest checkpoint with a sound manifest."""
    for folder in reversed(versions(checkpoints)):
        with suppress(UserError):
            return _flat(read_manifest(folder).config)
    return {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{prefix}{key}": value}
    return found


def comparison_table(curves: Sequence[Curve]) -> str:
    """A line for each adapter, lowest loss first: of the best evaluation if all have one, else of the last step; then
    what is configured differently."""
    order = sorted(curves, key=lambda curve: (not curve.losses or math.isnan(curve.losses[-1]), curve.losses[-1:]))
    evaluated = any(curve.eval_loss is not None for curve in curves)
    if all(curve.eval_loss is not None for curve in curves):
        order.sort(key=lambda curve: curve.eval_loss or 0.0)
    width = max(len("run/adapter"), *(len(curve.name) for curve in curves))
    titles = (
        f"{'state':<11}  {'step':>6}  {'first loss':>10}  {'last loss':>9}  {'best loss':>15}  {'tokens':>10}  tokens/s"
    )
    lines = [f"{'run/adapter':<{width}}  {'eval loss  ' * evaluated}{titles}"]
    for curve in order:
        loss = "-" if curve.eval_loss is None else f"{curve.eval_loss:.4f}"
        lines.append(f"{curve.name:<{width}}  {f'{loss:>9}  ' * evaluated}{_row(curve)}")
    differing = [f"  {key}: {', '.join(values)}" for key, values in differences(order).items()]
    return "\n".join([*lines, *(["differs, in the same order:", *differing] if differing else [])])


def _row(curve: Curve) -> str:
    first, last = (f"{curve.losses[i]:.4f}" if curve.losses else "-" for i in (0, -1))
    best = f"{curve.best[0]:.4f} @{curve.best[1]}" if curve.best else "-"
    step = curve.steps[-1] if curve.steps else 0
    speed = sum(curve.speeds) / len(curve.speeds) if curve.speeds else 0.0
    return (
        f"{curve.state:<11}  {step:>6}  {first:>10}  {last:>9}  {best:>15}  {curve.tokens:>10,}  {speed:>8.1f}"
    ).rstrip()


def differences(curves: Sequence[Curve]) -> dict[str, list[str]]:
    """The configuration's keys in which the adapters differ, with each one's value; "?" where it is not known."""
    keys = dict.fromkeys(key for curve in curves for key in curve.keys if key not in _UNTOLD)
    found = {key: [str(curve.keys[key]) if key in curve.keys else "?" for curve in curves] for key in keys}
    return {key: values for key, values in found.items() if len(set(values) - {"?"}) > 1}


def draw(curves: Sequence[Curve], file: Path) -> None:
    """The losses over the steps as PNG. Raises UserError where matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install 'mlora-engine[plots]'") from None
    figure = Figure(figsize=_INCH, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for i, curve in enumerate(curves):
        style = ("-", "--", ":", "-.")[i // 10 % 4]  # matplotlib's colours repeat after ten
        axes.plot(curve.steps, curve.losses, style, label=curve.name, marker="." if len(curve.steps) == 1 else "")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(curves) <= 20:
        axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=_DPI, format="png")
    except OSError as error:
        raise UserError(f"--picture {file}: cannot be written: {error.strerror}") from None
