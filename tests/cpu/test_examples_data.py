"""The examples of data forms: each is read in its form, and just what should be trained is trained."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from mlora.cli import main
from tests.cpu.tiny import save_tiny

FORMS = Path(__file__).parents[2] / "examples" / "forms.yaml"
ROWS = {"alpaca": 6, "messages": 4, "sharegpt": 4, "prompt_completion": 6, "text": 4, "question_answer": 4}
END = "<|im_end|>"
TRAINED = {  # of the first row, but for end tokens
    "alpaca": ["The derailleur."],
    "messages": [
        '<call>{"name": "count", "arguments": {"part": "inner tube"}}</call>',
        "Fourteen inner tubes are left.",
    ],
    "sharegpt": ["Clean the rim and turn the pads in a little at the front."],
    "prompt_completion": [" 40"],
    "text": [
        # nothing predicts the first token, which here is the letter A
        json.loads((FORMS.parent / "data/forms/text.jsonl").read_text().splitlines()[0])["text"].removeprefix("A")
    ],
    "question_answer": ["Yes, from nine to one."],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def shown(model):
    """What mlora check says of each form."""
    with redirect_stdout(StringIO()) as out:
        settings = [f"base_model={model}", "defaults.max_length=1024"]
        assert main(["check", str(FORMS), *(word for setting in settings for word in ("--set", setting))]) == 0
    text = out.getvalue()
    return {name: text.split(f"\n\n{name}\n")[1] for name in ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_kept_and_the_right_text_trained(name, shown):
    assert f"{ROWS[name]} read, {ROWS[name]} kept" in shown[name]
    first = re.search(r"sample 1:.*?\n((?:  \|.*\n)+)", shown[name])[1].replace("\n  | ", "\n")
    assert [text.removesuffix(END) for text in re.findall(r"\[\[(.*?)\]\]", first, re.DOTALL)] == TRAINED[name]


def test_a_message_that_says_so_is_not_trained(shown, model, capsys, tmp_path):
    rows = (FORMS.parent / "data/forms/messages.jsonl").read_text().splitlines()
    (tmp_path / "one.jsonl").write_text(rows[1])
    entry = {
        "name": "one",
        "dataset": {"path": "one.jsonl", "chat_template": str(FORMS.parent / "data/forms/tools.jinja")},
    }
    (tmp_path / "run.yaml").write_text(
        json.dumps({"base_model": str(model), "adapters": [entry | {"warmup_steps": 0}]})
    )
    assert main(["check", str(tmp_path / "run.yaml")]) == 0
    text = capsys.readouterr().out
    assert (
        f"No.{END}" in text and f"[[You are right: two brass bells, top shelf.{END}]]" in text and "[[No." not in text
    )


def test_chosen_and_rejected_are_no_form_but_the_chosen_can_be_read(model, capsys, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "A colour:", "chosen": " red", "rejected": " seven"}\n')
    dataset = {"path": "pairs.jsonl"}
    for columns, code, said in (({}, 2, "cannot be guessed"), ({"completion": "chosen"}, 0, f"A colour:[[ red{END}]]")):
        entry = {"name": "one", "dataset": dataset | {"columns": columns}, "warmup_steps": 0}
        (tmp_path / "run.yaml").write_text(json.dumps({"base_model": str(model), "adapters": [entry]}))
        assert main(["check", str(tmp_path / "run.yaml")]) == code
        assert said in "".join(capsys.readouterr())


def test_all_forms_train_together(model, tmp_path):
    settings = [
        f"base_model={model}",
        f"output_dir={tmp_path / 'run'}",
        "defaults.max_steps=1",
        "defaults.max_length=1024",
    ]
    assert main(["train", str(FORMS), *(word for setting in settings for word in ("--set", setting))]) == 0
    assert {path.name for path in (tmp_path / "run/adapters").iterdir()} == set(ROWS)
