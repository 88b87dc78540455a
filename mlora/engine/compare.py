"""The adapters of one run or several side by side, in a table and in a picture: ``mlora compare``, ``mlora report``."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mlora.checkpoint.versions import newest_manifest
from mlora.config import DatasetConfig
from mlora.engine.output import CHECKPOINTS, METRICS
from mlora.engine.status import read_status
from mlora.files import readable
from mlora.pipeline.schedule import colour
from mlora.types import UserError

_UNTOLD = ("name",)  # keys of an adapter that differ always
_NO_DATA = {key.name: {} if key.default is MISSING else key.default for key in fields(DatasetConfig)}
_INCH, _DPI = (9.0, 8.0), 120
_FAR = 50  # times the lowest loss: a highest one so far away would flatten all curves
_NAMED = 30  # curves that can be told apart, by ten colours and three styles


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a run has logged of an adapter. ``steps`` and the lists behind it are of its logging steps, ``eval_losses``
    behind ``eval_steps``; ``step`` is the last one of all, ``keys`` its configuration, empty where the run has no
    checkpoint of it."""

    run: str
    adapter: str
    state: str
    step: int
    keys: Mapping[str, Any]
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    speeds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.run}/{self.adapter}" if self.run else self.adapter

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest logged loss and its step."""
        return _lowest(self.losses, self.steps)

    @property
    def best_eval(self) -> tuple[float, int] | None:
        """The lowest loss of its evaluations and the step that it is behind."""
        return _lowest(self.eval_losses, self.eval_steps)


def _lowest(losses: Sequence[float], steps: Sequence[int]) -> tuple[float, int] | None:
    return min((pair for pair in zip(losses, steps, strict=True) if math.isfinite(pair[0])), default=None)


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
    curves = {
        adapter: Curve(
            run=name,
            adapter=adapter,
            state=entry["state"],
            step=entry["step"] or 0,  # none of what could not begin
            keys=_keys(run / CHECKPOINTS / adapter),
        )
        for adapter, entry in status["adapters"].items()
    }
    with readable(run / METRICS):
        lines = (run / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    tokens = dict.fromkeys(curves, 0)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # a line that a crash has cut, or of another kind
            entry = json.loads(line)
            curve, step = curves[entry["adapter"]], int(entry["step"])
            if "eval_loss" in entry:
                curve.eval_losses.append(float(entry["eval_loss"]))
                curve.eval_steps.append(step)
                continue
            loss, rate, speed = (float(entry[key]) for key in ("loss", "learning_rate", "tokens_per_second"))
            tokens[curve.adapter] = int(entry["num_tokens"])
            curve.steps.append(step)
            curve.losses.append(loss)
            curve.rates.append(rate)
            curve.speeds.append(speed)
    return [replace(curve, tokens=tokens[curve.adapter]) for curve in curves.values()]


def _keys(checkpoints: Path) -> dict[str, Any]:
    """The adapter's keys, from its newest checkpoint."""
    newest = newest_manifest(checkpoints)
    config = newest[1].config if newest else {}
    return {key: value for block in config for key, value in _flat(block, config[block]).items()}


def _flat(key: str, value: Any) -> dict[str, Any]:
    """A key with its value; a data set's keys by themselves, as in ``dataset.path``, of several with all values."""
    if key not in ("dataset", "eval_dataset"):
        return {key: value}
    blocks = value if isinstance(value, list) else [value or {}]
    return {f"{key}.{name}": _one_or_all([block.get(name, no) for block in blocks]) for name, no in _NO_DATA.items()}


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else list(values)


def comparison_table(curves: Sequence[Curve]) -> str:
    """A line for each adapter, lowest loss first: of the best evaluation if all have one, else of the last step; then
    what is configured differently."""
    order = sorted(curves, key=lambda curve: (not curve.losses or math.isnan(curve.losses[-1]), curve.losses[-1:]))
    evaluated = any(curve.best_eval for curve in curves)
    if all(curve.best_eval for curve in curves):
        order.sort(key=lambda curve: curve.best_eval or (0.0, 0))
    width = max(len("run/adapter"), *(len(curve.name) for curve in curves))
    titles = (
        f"{'state':<11}  {'step':>6}  {'first loss':>10}  {'last loss':>9}  {'best loss':>15}  {'tokens':>10}  tokens/s"
    )
    lines = [f"{'run/adapter':<{width}}  {'eval loss  ' * evaluated}{titles}"]
    for curve in order:
        loss = f"{curve.best_eval[0]:.4f}" if curve.best_eval else "-"
        lines.append(f"{curve.name:<{width}}  {f'{loss:>9}  ' * evaluated}{_row(curve)}")
    differing = [f"  {key}: {', '.join(values)}" for key, values in differences(order).items()]
    return "\n".join([*lines, *(["differs, in the same order:", *differing] if differing else [])])


def _row(curve: Curve) -> str:
    first, last = (f"{curve.losses[i]:.4f}" if curve.losses else "-" for i in (0, -1))
    best = f"{curve.best[0]:.4f} @{curve.best[1]}" if curve.best else "-"
    speed = sum(curve.speeds) / len(curve.speeds) if curve.speeds else 0.0
    return (
        f"{curve.state:<11}  {curve.step:>6}  {first:>10}  {last:>9}  {best:>15}  {curve.tokens:>10,}  {speed:>8.1f}"
    ).rstrip()


def differences(curves: Sequence[Curve]) -> dict[str, list[str]]:
    """The configuration's keys in which the adapters differ, with each one's value; "?" where none is known."""
    keys = dict.fromkeys(key for curve in curves for key in curve.keys if key not in _UNTOLD)
    found = {key: [str(curve.keys.get(key)) if curve.keys else "?" for curve in curves] for key in keys}
    return {key: values for key, values in found.items() if len(set(values) - {"?"}) > 1}


def draw(curves: Sequence[Curve]) -> bytes:
    """Loss, learning rate and speed over the steps as PNG, the held-out loss dotted."""
    from matplotlib.figure import Figure  # takes half a second, which other commands need not wait
    from matplotlib.ticker import MaxNLocator

    columns = max(1, 110 // (6 + max(len(curve.name) for curve in curves)))
    lines = math.ceil(len(curves) / columns) if len(curves) <= _NAMED else 0
    figure = Figure(figsize=(_INCH[0], _INCH[1] + 0.2 * lines), layout="constrained")
    loss, rate, speed = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    for i, curve in enumerate(curves):
        style = ("-", "--", "-.")[i // 10 % 3]  # of so many, hues come close to each other
        look = {"color": colour(i, 0.45), "marker": "." if sum(map(math.isfinite, curve.losses)) == 1 else ""}
        loss.plot(curve.steps, curve.losses, style, label=curve.name, **look)
        loss.plot(curve.eval_steps, curve.eval_losses, ":", color=look["color"], marker="o", markersize=3)
        rate.plot(curve.steps, curve.rates, style, **look)
        speed.plot(curve.steps, curve.speeds, style, **look)
    dotted = "   (dotted: held out)" if any(curve.eval_steps for curve in curves) else ""
    for axes, label in ((loss, f"loss{dotted}"), (rate, "learning rate"), (speed, "tokens/s")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    if _far_apart(curves):
        loss.set_yscale("log")
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.set_ylim(bottom=0)
    if lines:
        figure.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=_DPI, format="png")
    return picture.getvalue()


def _far_apart(curves: Sequence[Curve]) -> bool:
    """Whether the highest loss would flatten all curves."""
    losses = [loss for curve in curves for loss in curve.losses if math.isfinite(loss)]
    return bool(losses) and max(losses) > _FAR * min(losses) > 0
