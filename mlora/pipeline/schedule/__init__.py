"""The schedule of the pipeline: stream, actions, their order, checker, simulator and pictures. Never imports torch."""

from mlora.pipeline.schedule.actions import Action, parse
from mlora.pipeline.schedule.checker import ScheduleError, check
from mlora.pipeline.schedule.deps import deps, edges
from mlora.pipeline.schedule.picture import chrome_trace, colour, svg
from mlora.pipeline.schedule.planner import EvaluationPlan, NextStep, Planner
from mlora.pipeline.schedule.rows import StageRow, drain, in_flight, rows
from mlora.pipeline.schedule.simulator import CostModel, simulate
from mlora.pipeline.schedule.stream import Position, StepRef, Stream
from mlora.pipeline.schedule.timeline import Timed, bubble, bubble_between_ramps, busy_shares, makespan

__all__ = [
    "Action",
    "CostModel",
    "EvaluationPlan",
    "NextStep",
    "Planner",
    "Position",
    "ScheduleError",
    "StageRow",
    "StepRef",
    "Stream",
    "Timed",
    "bubble",
    "bubble_between_ramps",
    "busy_shares",
    "check",
    "chrome_trace",
    "colour",
    "deps",
    "drain",
    "edges",
    "in_flight",
    "makespan",
    "parse",
    "rows",
    "simulate",
    "svg",
]
