"""The actions of a stage and their text form, which is torch.distributed.pipelining's: ``2F0``, ``1B3``, ``0SEND_F3``.

STEP is not among torch's: ``1STEP2.5`` is step 5 of adapter 2 on stage 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from mlora.pipeline.schedule.stream import StepRef
from mlora.types import Microbatch

Kind = Literal["F", "B", "E", "STEP", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
_TEXT = re.compile(rf"(\d+)({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What one stage does at one point of its row.

    All but STEP have a ``position`` of the stream, STEP has a ``step``. F, B and E have their ``microbatch`` with them;
    it is no part of an action's identity.
    """

    stage: int
    kind: Kind
    position: int | None = None
    step: StepRef | None = None
    microbatch: Microbatch | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        what = self.position if self.step is None else f"{self.step.adapter}.{self.step.step}"
        return f"{self.stage}{self.kind}{what}"


def parse(text: str) -> Action:
    """The action that ``str`` wrote as ``text`` (its slot and microbatch are not in the text). Raises ValueError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or (match[2] == "STEP") != (match[4] is not None):
        raise ValueError(f"{text!r} is not an action; write stage, kind, microbatch (2F0) or step (1STEP2.5)")
    stage, kind, number = int(match[1]), match[2], int(match[3])
    if kind == "STEP":
        return Action(stage=stage, kind="STEP", step=StepRef(adapter=number, slot=-1, step=int(match[4])))
    return Action(stage=stage, kind=kind, position=number)  # type: ignore[arg-type]
