"""``mlora plan``: the stages, the stream and its bubble, predicted without a GPU or a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlora.config import RunConfig
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.memory import rows_of
from mlora.engine.prepare import Prepared, prepare
from mlora.engine.replicas import deal
from mlora.models.spec import ModelSpec, linear_shapes
from mlora.pipeline.schedule import (
    CostModel,
    Planner,
    Position,
    Stream,
    Timed,
    bubble_between_ramps,
    busy_shares,
    chrome_trace,
    rows,
    simulate,
    svg,
)

_POSITIONS = 400  # of the stream are simulated: past the ramps nothing new happens
_PICTURED = 24
_SHOWN = 14  # actions of each row in the text


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predicted run of the first replica. ``timeline`` is in units of one layer's forward over one row."""

    prepared: Prepared
    shares: list[list[str]]  # the adapters of each replica
    rows: list[list[str]]
    timeline: list[Timed]
    bubble: float
    busy: list[float]

    def text(self) -> str:
        """Stage cut, in flight, the beginning of each row, the bubble."""
        dealt = f"the first of {len(self.shares)} replicas, with {', '.join(self.shares[0])}"
        lines = [dealt] if len(self.shares) > 1 else []
        lines += [f"{'stage':<6} {'layers':<10} {'in flight':<9} {'busy':>5}  order"]
        start = 0
        for stage, count in enumerate(self.prepared.layers):
            layers = f"{start} - {start + count - 1}"
            order = " ".join(self.rows[stage][:_SHOWN])
            lines.append(
                f"{stage:<6} {layers:<10} {self.prepared.in_flight[stage]:<9} {self.busy[stage]:>5.0%}  {order} ..."
            )
            start += count
        lines.append(f"predicted bubble between the ramps: {self.bubble:.1%}")
        return "\n".join(lines)

    def write(self, picture: Path) -> None:
        """The picture's beginning as SVG, and beside it the whole as a trace for Chrome or Perfetto."""
        names = {adapter.index: adapter.config.name for adapter in self.prepared.adapters}
        begin = [t for t in self.timeline if (t.action.position or 0) < _PICTURED and t.action.step is None]
        picture.write_text(svg(begin, names, "layer·rows"), encoding="utf-8")
        picture.with_suffix(".trace.json").write_text(chrome_trace(self.timeline), encoding="utf-8")


def plan(config: RunConfig, stages: int | None = None) -> Plan:
    """Predict the run of ``config`` over so many stages, or those that it names. Raises UserError as a run would."""
    cut = config.pipeline
    stages = stages if stages is not None else cut.stages or len(cut.layers or [0])
    prepared = prepare(replace(config, pipeline=replace(cut, stages=stages)), stages, to_train=False)
    shares = deal(prepared.adapters, config.pipeline.replicas or 1)
    positions = _positions(prepared.config, prepared.in_flight, shares[0])
    stage_rows = rows(positions, prepared.in_flight)
    timeline = simulate(stage_rows, Stream(positions, stages), cost_model(prepared.base.spec, prepared.layers))
    compute = [[str(a) for a in row if a.kind in ("F", "B", "E", "STEP")] for row in stage_rows]
    bubble = bubble_between_ramps(timeline)
    return Plan(
        prepared=prepared,
        shares=[[adapter.config.name for adapter in share] for share in shares],
        rows=compute,
        timeline=timeline,
        bubble=bubble,
        busy=busy_shares(timeline),
    )


def cost_model(spec: ModelSpec, layers: tuple[int, ...]) -> CostModel:
    """Costs in units of one layer's forward over one row. The last stage's F holds forward and backward of the head."""
    layer = sum(out * inner for out, inner in linear_shapes(spec).values())
    head = spec.vocab_size * spec.hidden_size / layer
    last = len(layers) - 1
    return CostModel(
        forward=lambda stage, count: count * (layers[stage] + (2 * head if stage == last else 0)),
        backward=lambda stage, count: count * layers[stage],
    )


def _positions(config: RunConfig, in_flight: Sequence[int], adapters: Sequence[AdapterRun]) -> list[Position]:
    planner = Planner(rows_of(config), in_flight)
    waiting = list(adapters)
    slots = range(min(config.max_active, len(waiting)))
    positions: list[Position] = []
    while len(positions) < _POSITIONS:
        for slot in slots:
            if waiting and planner.free(slot):
                adapter = waiting.pop(0)
                adapter.state = "training"
                planner.join(slot, adapter.next_step)
        found = planner.window(4 * in_flight[0])
        if not found:
            break
        positions += found
    return positions[:_POSITIONS]
