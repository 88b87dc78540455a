"""What an action comes after. This is the whole meaning of a schedule; there is no flush among the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlora.pipeline.schedule.actions import Action, Kind
from mlora.pipeline.schedule.stream import StepRef, Stream

Deps = Callable[[Action, Stream], list[Action]]


def deps(action: Action, stream: Stream) -> list[Action]:
    """The actions that must be done before ``action``. Steps from before the stream's first position count as done."""
    return [other for _, other in edges(action, stream)]


def edges(action: Action, stream: Stream) -> Iterator[tuple[str, Action]]:
    """The edges behind ``deps``, each with its name. All are within a row or from a send to its receive, but for
    "STEP after B(0)" on stages behind the first, which the carrier of the coefficient brings about. It also sees to it
    that a STEP there comes after every E at the version before, since stage 0 has had their scores.
    """
    kind, stage, index = action.kind, action.stage, action.position
    if action.step is not None:
        yield from _edges_of_step(action.step, stage, stream)
        return
    assert index is not None
    position = stream.positions[index]
    segments = position.microbatch.segments if position.microbatch else ()
    if kind in ("F", "E"):
        if stage > 0:
            yield f"{kind} after RECV_F", _at("RECV_F", stage, index)
        for segment in segments:
            version = segment.step - (kind == "F")
            if (segment.adapter, version) in stream.ended:
                yield f"{kind} after STEP", _step(stage, segment.adapter, segment.slot, version)
    elif kind == "B":
        yield "B after F", _at("F", stage, index)
        if stage < stream.stages - 1:
            yield "B after RECV_B", _at("RECV_B", stage, index)
        for segment in segments:  # gradients are summed in the adapter's own order of samples
            earlier = [other for other in stream.trained[segment.adapter, segment.step] if other < index]
            if earlier:
                yield "B after B", _at("B", stage, earlier[-1])
    elif kind == "SEND_F":
        if segments:
            computed: Kind = "E" if position.forward_only else "F"
            yield f"SEND_F after {computed}", _at(computed, stage, index)
        if stage > 0:
            yield "SEND_F after RECV_F", _at("RECV_F", stage, index)
        for ref in position.steps if stage == 0 else ():
            if (ref.adapter, ref.step) in stream.ended:
                yield "SEND_F after STEP", _step(0, ref.adapter, ref.slot, ref.step)
    elif kind == "RECV_F":
        yield "RECV_F after SEND_F", _at("SEND_F", stage - 1, index)
    elif kind == "SEND_B":
        if position.trains:
            yield "SEND_B after B", _at("B", stage, index)
        elif stage < stream.stages - 1:
            yield "SEND_B after RECV_B", _at("RECV_B", stage, index)
        else:
            yield "SEND_B after E", _at("E", stage, index)
    elif kind == "RECV_B":
        yield "RECV_B after SEND_B", _at("SEND_B", stage + 1, index)


def _edges_of_step(ref: StepRef, stage: int, stream: Stream) -> Iterator[tuple[str, Action]]:
    for other in stream.trained.get((ref.adapter, ref.step), ()):  # stage 0 knows the norm only then
        yield "STEP after B(0)", _at("B", 0, other)
    if stage > 0:
        yield "STEP after RECV_F", _at("RECV_F", stage, stream.carriers[ref.adapter, ref.step])
    for other in stream.evaluated.get((ref.adapter, ref.step - 1), ()) if stage == 0 else ():
        scores: Kind = "RECV_B" if stream.stages > 1 else "E"  # what the decision counts on
        yield f"STEP after {scores}", _at(scores, 0, other)


def _at(kind: Kind, stage: int, index: int) -> Action:
    return Action(stage=stage, kind=kind, position=index)


def _step(stage: int, adapter: int, slot: int, step: int) -> Action:
    return Action(stage=stage, kind="STEP", step=StepRef(adapter=adapter, slot=slot, step=step))
