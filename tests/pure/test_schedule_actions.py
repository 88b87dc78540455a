import subprocess
import sys

import pytest

from mlora.pipeline.schedule import Action, StepRef, parse


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(stage=2, kind="F", position=0)),
        ("1B3", Action(stage=1, kind="B", position=3)),
        ("10E12", Action(stage=10, kind="E", position=12)),
        ("0SEND_F3", Action(stage=0, kind="SEND_F", position=3)),
        ("1RECV_F3", Action(stage=1, kind="RECV_F", position=3)),
        ("1SEND_B7", Action(stage=1, kind="SEND_B", position=7)),
        ("0RECV_B7", Action(stage=0, kind="RECV_B", position=7)),
        ("1STEP2.5", Action(stage=1, kind="STEP", step=StepRef(adapter=2, slot=9, step=5))),
    ],
)
def test_text_form_round_trips(text, action):
    assert str(action) == text
    assert parse(text) == action
    assert hash(parse(text)) == hash(action)


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0F1.2", "0STEP3", "0SEND3", "0F1 1F1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
        parse(text)


def test_schedule_never_imports_torch():
    code = "import sys, mlora.pipeline.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
