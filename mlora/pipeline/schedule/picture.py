"""Pictures of a timeline: a Gantt chart as SVG, and a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Mapping, Sequence
from html import escape

from mlora.pipeline.schedule.timeline import Timed, bubble, makespan
from mlora.types import Microbatch

_LEFT, _TOP, _LANE, _GAP = 76, 52, 34, 16  # px: labels at the left, title on top, a stage's lane, below it STEP marks
_CHAR = 6.2  # px that a character of a label takes
_LIGHTNESS = {"F": 0.80, "E": 0.92, "B": 0.58}


def svg(timeline: Sequence[Timed], names: Mapping[int, str] | None = None, unit: str = "s") -> str:
    """A Gantt chart: a lane per stage, a colour per adapter, F light, B dark, E outlined, a triangle per STEP.

    A microbatch of several adapters is striped by their rows. ``names`` are the adapters' names for the legend,
    ``unit`` is what the timeline's times are in.
    """
    stages = 1 + max(timed.action.stage for timed in timeline)
    begin, span = min(timed.start for timed in timeline), makespan(timeline) or 1.0
    shown = [timed for timed in timeline if timed.action.kind in ("F", "B", "E", "STEP")]
    scale = _width(shown, stages) / span
    body = [_lane(stage, span * scale) for stage in range(stages)]
    for timed in shown:
        x = _LEFT + (timed.start - begin) * scale
        draw = _step_mark if timed.action.kind == "STEP" else _box
        body.append(draw(timed, x, max(0.5, (timed.stop - timed.start) * scale)))
    bottom = _TOP + stages * (_LANE + _GAP)
    body += _axis(span, scale, bottom, unit)
    width = _LEFT + span * scale + 24
    legend, height = _legend(_adapters(timeline), names or {}, width, bottom + 44)
    title = f"{stages} stages, {span:.4g} {unit}, bubble {bubble(timeline):.1%}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11" fill="#222">'
        f'<rect width="100%" height="100%" fill="#fff"/>{_text(_LEFT, 22, title, size=15)}'
        f"{_text(_LEFT, 40, 'F light, B dark, E outlined, triangle: STEP; white: the stage waits')}"
    )
    return "\n".join([head, *body, *legend, "</svg>\n"])


def chrome_trace(timeline: Sequence[Timed]) -> str:
    """The timeline as JSON in Chrome's trace format, a thread per stage; communication is a category of its own."""
    stages = range(1 + max(timed.action.stage for timed in timeline))
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in stages
    ]
    for action, start, stop in timeline:
        events.append(
            {
                "name": str(action),
                "cat": "communication" if action.kind[:4] in ("SEND", "RECV") else "compute",
                "ph": "X",
                "pid": 0,
                "tid": action.stage,
                "ts": start * 1e6,
                "dur": (stop - start) * 1e6,
                "args": _details(action.microbatch),
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _details(microbatch: Microbatch | None) -> dict[str, object]:
    if microbatch is None:
        return {}
    steps = [f"{segment.adapter}.{segment.step}" for segment in microbatch.segments]
    return {"rows": microbatch.rows, "steps": ", ".join(steps)}


def _width(shown: Sequence[Timed], stages: int) -> float:
    """Wide enough for most labels, within what a browser shows well."""
    return min(12000.0, max(640.0, len(shown) / stages * 28))


def _adapters(timeline: Sequence[Timed]) -> list[int]:
    microbatches = [timed.action.microbatch for timed in timeline if timed.action.microbatch is not None]
    return sorted({segment.adapter for microbatch in microbatches for segment in microbatch.segments})


def colour(adapter: int, lightness: float) -> str:
    """Of an adapter in every picture: hues a golden angle apart, so that any first few look different."""
    rgb = colorsys.hls_to_rgb((0.58 + adapter * 0.618034) % 1, lightness, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _y(stage: int) -> int:
    return _TOP + stage * (_LANE + _GAP)


def _lane(stage: int, width: float) -> str:
    y = _y(stage)
    lane = f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_LANE}" fill="#fff" stroke="#ccc"/>'
    return lane + _text(_LEFT - 8, y + _LANE / 2 + 4, f"stage {stage}", anchor="end", size=12)


def _box(timed: Timed, x: float, width: float) -> str:
    action, y = timed.action, _y(timed.action.stage)
    microbatch = action.microbatch
    assert microbatch is not None
    lightness = _LIGHTNESS[action.kind]
    parts = [f"<g><title>{action}: {timed.start:.6g} … {timed.stop:.6g} s</title>"]
    for segment in microbatch.segments:
        height = _LANE * (segment.stop - segment.start) / microbatch.tokens
        top = y + _LANE * segment.start / microbatch.tokens
        fill, edge = colour(segment.adapter, lightness), colour(segment.adapter, 0.4)
        stroke = f' stroke="{edge}" stroke-dasharray="3 2"' if action.kind == "E" else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{stroke}/>'
        )
    parts.append(f'<path d="M{x:.1f} {y}v{_LANE}" stroke="#fff" stroke-width="0.7"/>')
    label = f"{action.kind}{action.position}"
    if width > _CHAR * len(label) + 3:
        parts.append(_text(x + width / 2, y + _LANE / 2 + 4, label, anchor="middle"))
    return "".join(parts) + "</g>"


def _step_mark(timed: Timed, x: float, width: float) -> str:
    step = timed.action.step
    assert step is not None
    y = _y(timed.action.stage) + _LANE + 2
    title = f"<title>{timed.action}: {timed.start:.6g} s</title>"
    return f'<path d="M{x:.1f} {y}l4 8h-8z" fill="{colour(step.adapter, 0.4)}">{title}</path>'


def _axis(span: float, scale: float, y: int, unit: str) -> list[str]:
    tick = _round_tick(span / max(4.0, span * scale / 120))
    parts = [f'<path d="M{_LEFT} {y}h{span * scale:.1f}" stroke="#888"/>']
    for i in range(int(span / tick) + 1):
        x = _LEFT + i * tick * scale
        parts.append(f'<path d="M{x:.1f} {y}v5" stroke="#888"/>')
        parts.append(_text(x, y + 17, f"{i * tick:.6g} {unit}", anchor="middle"))
    return parts


def _round_tick(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** int(f"{least:e}".split("e")[1])
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(adapters: Sequence[int], names: Mapping[int, str], width: float, y: int) -> tuple[list[str], int]:
    """The legend's parts from height ``y`` down, and where it ends."""
    parts, x = [], float(_LEFT)
    for adapter in adapters:
        name = names.get(adapter, f"adapter {adapter}")
        needed = 22 + _CHAR * len(name) + 14
        if x + needed > width and x > _LEFT:
            x, y = float(_LEFT), y + 18
        for shift, kind in enumerate("FB"):
            fill = colour(adapter, _LIGHTNESS[kind])
            parts.append(f'<rect x="{x + 8 * shift:.1f}" y="{y - 10}" width="8" height="11" fill="{fill}"/>')
        parts.append(_text(x + 21, y, name))
        x += needed
    return parts, y + 14


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
