import re
from pathlib import Path

import pytest

from mlora.config import DatasetConfig
from mlora.tasks.formats import FORMATS
from mlora.tasks.prompts import Prompter
from mlora.types import UserError
from tests.cpu.data_helpers import CHATML, chat, encode_one, make_row, make_task, make_tokenizer, spans

ROWS = {
    "text": {"text": "the cat"},
    "prompt_completion": {"prompt": "the cat", "completion": " sat"},
    "question_answer": {"question": "the cat?", "answer": "sat"},
    "alpaca": {"instruction": "the cat?", "output": "sat"},
    "dolly": {"instruction": "the cat?", "response": "sat"},
    "messages": {"messages": chat("the cat?", "sat")},
    "sharegpt": {"conversations": [{"from": "human", "value": "the cat?"}, {"from": "gpt", "value": "sat"}]},
}


def whole_text(template, **columns):
    """The decoded tokens of a row."""
    tokenizer = make_tokenizer(template)
    return tokenizer.decode(encode_one(make_task(tokenizer), **columns).input_ids)


def test_there_is_a_row_for_every_format():
    assert ROWS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", list(ROWS))
def test_auto_guesses_what_the_format_says(name):
    tokenizer = make_tokenizer(CHATML)
    named = encode_one(make_task(tokenizer, format=name), **ROWS[name])
    assert encode_one(make_task(tokenizer), **ROWS[name], extra=1) == named


@pytest.mark.parametrize(
    "columns, text",
    [
        ({"text": "the cat"}, "<s>the cat</s>"),
        ({"prompt": "the cat", "completion": " sat"}, "<s>the cat sat</s>"),
        ({"question": "the cat?", "answer": "sat"}, "<s>Question: the cat?\nAnswer: sat</s>"),
        ({"instruction": "a", "output": "b"}, "<s>### Instruction:\na\n\n### Response:\nb</s>"),
        ({"instruction": "a", "input": "c", "output": "b"},
         "<s>### Instruction:\na\n\n### Input:\nc\n\n### Response:\nb</s>"),
        ({"instruction": "a", "context": "c", "response": "b"},
         "<s>### Instruction:\na\n\n### Input:\nc\n\n### Response:\nb</s>"),
        ({"instruction": "a", "system": "s", "history": [["x", "y"]], "output": "b"},
         "<s>s\n\n### Instruction:\nx\n\n### Response:\ny\n\n### Instruction:\na\n\n### Response:\nb</s>"),
    ],
)  # fmt: skip
def test_plain_texts(columns, text):
    assert whole_text(None, **columns) == text


def chatml(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


@pytest.mark.parametrize(
    "columns, turns",
    [
        ({"question": "q", "answer": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "x", "output": "a"}, [("user", "q\nx"), ("assistant", "a")]),
        ({"instruction": "q", "context": "x", "response": "a"}, [("user", "q\nx"), ("assistant", "a")]),
        ({"instruction": "q", "system": "s", "history": [["u", "v"]], "output": "a"},
         [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "q"), ("assistant", "a")]),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                            {"from": "gpt", "value": "a"}]},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
        ({"messages": [{"role": "human", "content": "q"}, {"role": "model", "content": "a"},
                       {"role": "user", "content": "r"}, {"role": "bot", "content": "b"}]},
         [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]),
        ({"system": "s", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
        ({"messages": [{"role": "developer", "content": "s"}, *chat("q", "a")]},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
        ({"messages": chat([{"type": "text", "text": "q"}, {"type": "text", "text": "r"}], [])},
         [("user", "qr"), ("assistant", "")]),
        ({"prompt": chat("q", "a", "r"), "completion": chat("b", first="assistant")},
         [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]),
        ({"system": "t", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                                      {"role": "assistant", "content": "a"}]},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
    ],
)  # fmt: skip
def test_conversations_in_a_template(columns, turns):
    assert whole_text(CHATML, **columns) == chatml(*turns)


def test_of_lists_of_messages_only_the_completion_is_trained():
    tokenizer = make_tokenizer(CHATML)
    row = {"prompt": chat("the cat", "sat", "the dog"), "completion": chat("ran", first="assistant")}
    for form in ("auto", "prompt_completion"):
        encoded = encode_one(make_task(tokenizer, format=form), **row)
        assert spans(tokenizer, encoded) == ["ran<|im_end|>"]
    asked = Prompter(DatasetConfig(path=Path("p")), tokenizer)
    expected = asked.encode(make_row(messages=row["prompt"]))
    assert asked.encode(make_row(**row)) == asked.encode(make_row(prompt=row["prompt"])) == expected


@pytest.mark.parametrize("name", ["text", "prompt_completion"])
def test_plain_formats_never_use_the_template(name):
    assert whole_text(CHATML, **ROWS[name]) == whole_text(None, **ROWS[name])


def test_the_setting_none_switches_the_template_off():
    tokenizer = make_tokenizer(CHATML)
    encoded = encode_one(make_task(tokenizer, chat_template="none"), **ROWS["alpaca"])
    assert "### Response" in tokenizer.decode(encoded.input_ids)


@pytest.mark.parametrize("name, column", [("alpaca", "input"), ("alpaca", "system"), ("dolly", "context")])
def test_optional_columns_may_be_null_missing_or_empty(name, column):
    for template in (None, CHATML):
        missing = whole_text(template, **ROWS[name])
        assert whole_text(template, **ROWS[name], **{column: None}) == missing
        assert whole_text(template, **ROWS[name], **{column: ""}) == missing


def test_columns_rename_and_decide_the_format():
    tokenizer = make_tokenizer(CHATML)
    columns = {"prompt": "input", "completion": "output"}
    for form in ("auto", "prompt_completion"):
        encoded = encode_one(make_task(tokenizer, format=form, columns=columns), input="the cat", output=" sat", ID=0)
        assert tokenizer.decode(encoded.input_ids) == "<s>the cat sat</s>"
        assert spans(tokenizer, encoded) == [" sat</s>"]
    # The row is an alpaca row too, but the names in columns are not of that format.
    renamed = make_task(tokenizer, columns={"text": "output"})
    assert tokenizer.decode(encode_one(renamed, instruction="a", output="the cat").input_ids) == "<s>the cat</s>"


def fault(row, template=CHATML, **config):
    with pytest.raises(UserError) as caught:
        make_task(make_tokenizer(template), **config).encode([make_row(**row)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def turn(**keys):
    return {"messages": [{"role": "user", "content": "q"}, keys]}


@pytest.mark.parametrize(
    "form, columns, message",
    [
        ("alpaca", {"instruction": "q"}, "column 'output': missing; the row has instruction"),
        ("alpaca", {"instruction": "q", "output": None}, "column 'output': expected text, found null"),
        ("alpaca", {"instruction": "q", "output": {"a": 1}}, "column 'output': expected text, found an object"),
        ("alpaca", {"instruction": "q", "output": ["a"]}, "column 'output': expected text, found a list"),
        ("alpaca", {"instruction": 3, "output": "a"}, "column 'instruction': expected text, found a number"),
        ("alpaca", {"instruction": "q", "output": True}, "column 'output': expected text, found true or false"),
        ("alpaca", {"instruction": "q", "input": 1.5, "output": "a"}, "column 'input': expected text, found a number"),
        ("alpaca", {"instruction": "q", "output": "x\ud83d"}, r"column 'output': holds half a character, \ud83d"),
        ("alpaca", {"instruction": "q", "output": "a", "history": ["x"]}, "'history[0]': expected a list, found text"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["x"]]}, "'history[0]': expected a pair"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["x", 1]]}, "'history[0][1]': expected text"),
        ("text", {"text": None}, "column 'text': expected text, found null"),
        ("messages", {"messages": "hi"}, "column 'messages': expected a list, found text"),
        ("messages", {"messages": None}, "column 'messages': expected a list, found null"),
        ("messages", {"messages": ["hi"]}, "'messages[0]': expected an object with role and content, found text"),
        ("messages", turn(role="assistant"), "'messages[1]': 'content' is missing; it has role"),
        ("messages", turn(role="assistant", content=None), "'messages[1].content': expected text, found null"),
        (
            "messages",
            turn(role="judge", content="a"),
            "'messages[1].role': unknown role 'judge'; known are system, user",
        ),
        ("messages", turn(role="tool", content="a", train=True), "'messages[1].train': only an assistant's turn is"),
        ("messages", turn(role="assistant", content="a", train="no"), "'messages[1].train': expected one of true and"),
        ("messages", turn(role="assistant", content="a", weight=0.5), "'messages[1].weight': expected one of true and"),
        ("messages", turn(role="assistant", content="a", train=True, weight=0), "'messages[1].train': expected one"),
        ("messages", turn(role="assistant", tool_calls=[{"name": "f"}]), "tool_calls[0]': expected an object with fun"),
        (
            "messages",
            turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "tool_calls[0].function.arguments': expected JSON: ",
        ),
        (
            "messages",
            turn(role="tool", content="a", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            "'messages[1].tool_calls': only an assistant calls tools",
        ),
        ("messages", {"messages": [], "tools": "{"}, "column 'tools': expected JSON"),
        (
            "messages",
            {"messages": [], "tools": [1]},
            "column 'tools[0]': expected the schema of a tool, found a number",
        ),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "sum"}]}, "expected JSON"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "[]"}]}, "expected a call as JSON"),
        ("messages", turn(role=1, content="a"), "'messages[1].role': expected text, found a number"),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "'conversations[0].from': unknown role"),
        (
            "sharegpt",
            {"conversations": [{"role": "user", "content": "a"}]},
            "it has role, content; turns of role and content are read with columns: {messages: conversations}",
        ),
        (
            "messages",
            {"messages": [{"from": "human", "value": "a"}]},
            "it has from, value; turns of from and value are read with columns: {conversations: messages}",
        ),
        (
            "messages",
            turn(role="assistant", content=[{"type": "image_url"}]),
            "content[0]': expected a part with type: text",
        ),
        ("messages", turn(role="assistant", content=["a"]), "content[0]': expected a part with type: text, found text"),
        ("messages", turn(role="assistant", content=[{"type": "text"}]), "content[0].text': expected text, found null"),
        ("prompt_completion", {"prompt": chat("q"), "completion": "a"}, "'completion': expected a list, found text"),
        ("text", {"text": b"a"}, "column 'text': expected text, found bytes"),
    ],
)
def test_faults_name_file_line_and_column(form, columns, message):
    text = fault(columns, format=form)
    assert text.startswith("rows.jsonl:7, column ") and message in text


def test_what_the_error_for_the_other_kind_of_turns_says_works():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    task = make_task(make_tokenizer(CHATML), columns={"messages": "conversations"})
    expected = encode_one(make_task(make_tokenizer(CHATML)), messages=turns)
    assert encode_one(task, conversations=turns) == expected


def test_faults_name_the_column_of_the_file():
    task = make_task(format="prompt_completion", columns={"prompt": "in", "completion": "out"})
    rows = [make_row(**{"in": "a", "out": "b"}), make_row(8, **{"in": "a"})]
    with pytest.raises(UserError, match=re.escape("rows.jsonl:8, column 'out': missing; the row has in")):
        task.encode(rows)


@pytest.mark.parametrize("form", ["auto", "prompt_completion"])
def test_a_column_that_the_file_does_not_have(form):
    text = fault({"question": "a", "sql": "b"}, format=form, columns={"prompt": "q", "completion": "sql"})
    assert "rows.jsonl: its rows have no column 'q' (looked at from line 7 to 7), they have question, sql; " in text
    assert "mend dataset.columns.prompt" in text


def test_a_renamed_column_may_be_missing_in_some_rows_but_not_in_all():
    columns = {"instruction": "q", "output": "a", "input": "extra"}
    rows = [make_row(q="the", a="cat"), make_row(q="the", a="cat", extra="dog")]
    assert len(make_task(columns=columns).encode(rows)) == 2
    with pytest.raises(UserError, match="no column 'extra'"):
        make_task(columns=columns).encode(rows[:1])


def test_an_empty_row_is_called_empty():
    text = fault({})
    assert "rows.jsonl:7: the row is empty" in text and "no columns" not in text


def test_a_format_that_cannot_be_guessed_lists_what_was_seen():
    text = fault({"ID": 0, "input": "a", "output": "b"})
    assert "rows.jsonl:7: the format cannot be guessed from the columns ID, input, output" in text
    assert "give columns or format inside dataset, such as columns: {prompt: ID, completion: input} (" in text
    assert "prompt_completion: prompt, completion" in text
    assert "setting columns names prompt" in fault({"a": "b"}, columns={"prompt": "a"})


def test_a_column_that_the_format_does_not_have():
    with pytest.raises(UserError, match=re.escape("dataset.columns.answer: the format alpaca has no such column")):
        make_task(format="alpaca", columns={"answer": "x"})


@pytest.mark.parametrize("name", ["messages", "sharegpt"])
def test_conversations_without_any_template(name):
    assert "give dataset.chat_template a file" in fault(ROWS[name], template=None)
    assert "give dataset.chat_template a file" in fault(ROWS[name], chat_template="none")
