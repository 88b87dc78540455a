import json
import os
import re

import pytest
from tokenizers import Regex, normalizers

from mlora.tasks import labels
from mlora.types import IGNORE, Encoded, UserError
from tests.cpu.data_helpers import (
    CHATML,
    FORGETFUL,
    LLAMA2,
    LLAMA3,
    LLAMA31,
    MARKED,
    NO_END,
    NO_GENERATION_PROMPT,
    QWEN3,
    THINKING,
    chat,
    encode_one,
    make_row,
    make_task,
    make_tokenizer,
    spans,
)

# A question that waits for its answer looks otherwise than one that has it.
UNSTEADY = CHATML.replace("m.content +", "m.content + ('?' if loop.last and m.role == 'user' else '') +")
KINDS = ["bytes", "sentences"]
TURNS = ["the cat?", "A dog ran.", "é 🙂 mat", "to the 🙂 cat", "q", "last"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "template, before, after",
    [
        (CHATML, "", "<|im_end|>"),
        (NO_GENERATION_PROMPT, "", "<|im_end|>"),
        (LLAMA2, " ", " </s>"),
        (LLAMA3, "", "<|eot|>"),
    ],
)
def test_labelled_spans_are_the_assistants_texts_with_their_end_tokens(kind, template, before, after):
    tokenizer = make_tokenizer(template, kind)
    encoded = encode_one(make_task(tokenizer), messages=chat(*TURNS))
    found = spans(tokenizer, encoded)
    if kind == "sentences":  # its decoder takes a leading blank off
        before = ""
    assert found == [before + text + after for text in TURNS[1::2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, LLAMA2, LLAMA3, NO_GENERATION_PROMPT])
def test_tokens_of_a_conversation_are_transformers_own(kind, template):
    tokenizer = make_tokenizer(template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'"), kind)
    expected = tokenizer.apply_chat_template(chat(*TURNS), tokenize=True)["input_ids"]
    encoded = encode_one(make_task(make_tokenizer(template, kind)), messages=chat(*TURNS))
    assert encoded.input_ids == expected
    assert expected.count(tokenizer.bos_token_id) == (1 if "bos_token" in template else 0)


def test_a_template_without_end_token_gets_the_end_of_sequence():
    tokenizer = make_tokenizer(NO_END)
    encoded = encode_one(make_task(tokenizer), messages=chat("q", "a dog"))
    assert spans(tokenizer, encoded) == ["a dog\n</s>"]
    assert encoded.labels[-1] == encoded.input_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("turns", [("q", "the cat", "r"), ("q", "the cat", "r", "a dog")])
def test_an_answer_that_is_not_the_last_turn_must_have_an_end(turns):
    tokenizer = make_tokenizer(NO_END)
    with pytest.raises(UserError, match=r"rows.jsonl:7: this chat template marks no end of earlier turns"):
        make_task(tokenizer).encode([make_row(messages=chat(*turns))])
    encoded = encode_one(make_task(tokenizer, train_on="all"), messages=chat(*turns))
    assert encoded.labels == encoded.input_ids
    assert (tokenizer.eos_token_id in encoded.input_ids) == (len(turns) == 4)


@pytest.mark.parametrize("end", ["<|END|>", "</s>", " ###"])
def test_the_end_mark_need_not_be_a_special_token(end):
    template = CHATML.replace("<|im_end|>", end)
    tokenizer = make_tokenizer(template)
    for config in ({}, {"train_on": "all"}):
        encoded = encode_one(make_task(tokenizer, **config), messages=chat("q", "the cat", "r", "a dog"))
        expected = tokenizer.apply_chat_template(chat("q", "the cat", "r", "a dog"), tokenize=False)
        assert tokenizer.decode(encoded.input_ids) == expected
        if not config:
            assert spans(tokenizer, encoded) == ["the cat" + end, "a dog" + end]


VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% else %}{{ ' ASSISTANT: ' + m.content.lower().strip() + '</s>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("mention", ["", "{# add_generation_prompt #}"])
@pytest.mark.parametrize(
    "answer, label", [("A", " a</s>"), ("S", " s</s>"), ("", " </s>"), ("THE cat ", " the cat</s>")]
)
def test_an_answer_is_told_from_the_header_that_holds_its_text(mention, answer, label):
    tokenizer = make_tokenizer(VICUNA + mention)
    encoded = encode_one(make_task(tokenizer), messages=chat("A", answer, "S", answer))
    assert spans(tokenizer, encoded) == [label, label]
    whole = tokenizer.decode(encoded.input_ids)
    assert whole == f"USER: A ASSISTANT:{label}USER: S ASSISTANT:{label}"


def test_a_header_that_depends_on_the_answer_cannot_be_labelled():
    template = VICUNA.replace("' ASSISTANT: '", "(' SHORT: ' if m.content == 'A' else ' ASSISTANT: ')")
    with pytest.raises(UserError, match=r"rows.jsonl:7: .*cannot be labelled; write train_on: all"):
        make_task(make_tokenizer(template)).encode([make_row(messages=chat("q", "A"))])


@pytest.mark.parametrize("train_on", ["completions", "all"])
@pytest.mark.parametrize(
    "template, times",
    [
        ("{% for m in messages %}{% if m.role in ('user', 'model') %}{{ m.content }}</s>{% endif %}{% endfor %}", 0),
        ("hello", 0),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", 0),
        (CHATML.replace("m.content", "m.content + m.content"), 2),
    ],
)
def test_a_template_that_does_not_print_the_answer_once(template, times, train_on):
    with pytest.raises(UserError, match=f"rows.jsonl:7: this chat template prints an answer {times} times"):
        make_task(make_tokenizer(template), train_on=train_on).encode([make_row(messages=chat("q", "a"))])


def test_a_special_token_inside_an_answer_is_not_its_end():
    tokenizer = make_tokenizer(CHATML)
    encoded = encode_one(make_task(tokenizer), messages=chat("q", "the <|head|> cat\n"))
    assert spans(tokenizer, encoded) == ["the <|head|> cat\n<|im_end|>"]
    plain = make_tokenizer(NO_END)
    encoded = encode_one(make_task(plain), messages=chat("q", "the <|head|> cat"))
    assert spans(plain, encoded) == ["the <|head|> cat\n</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_sequence_is_one_trained_number_although_it_pads_too(kind):
    tokenizer = make_tokenizer(kind=kind)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoded = encode_one(make_task(tokenizer), prompt="the cat", completion=" sat")
    eos = tokenizer.eos_token_id
    assert encoded.labels[-1] == encoded.input_ids[-1] == eos
    assert encoded.input_ids.count(eos) == 1
    assert encoded.input_ids[0] == tokenizer.bos_token_id and encoded.labels[0] == IGNORE


def test_a_text_that_ends_with_the_end_token_gets_no_second_one():
    tokenizer = make_tokenizer()
    encoded = encode_one(make_task(tokenizer), prompt="a", completion=" dog</s>")
    assert encoded.input_ids.count(tokenizer.eos_token_id) == 1
    assert spans(tokenizer, encoded) == [" dog</s>"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt, completion", [("translate: ", "cat"), ("ca", "t"), ("the\n", "\ncat"), ("é", "🙂")])
def test_a_token_across_the_border_is_split_there(kind, prompt, completion):
    tokenizer = make_tokenizer(kind=kind)
    encoded = encode_one(make_task(tokenizer), prompt=prompt, completion=completion)
    assert spans(tokenizer, encoded) == [completion + "</s>"]
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == (prompt + completion)
    first = next(i for i, label in enumerate(encoded.labels) if label != IGNORE)
    assert encoded.input_ids[:first] == tokenizer(prompt).input_ids


def test_the_border_tests_do_meet_such_tokens():
    for kind in KINDS:
        tokenizer = make_tokenizer(kind=kind)
        assert len(tokenizer("translate: cat").input_ids) < len(
            encode_one(make_task(tokenizer), prompt="translate: ", completion="cat").input_ids[:-1]
        )


def test_a_border_that_cannot_be_split_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("^ca$"), "dog")  # so pieces spell "dogt"
    with pytest.raises(UserError, match=r"rows.jsonl:7: a token spans the border"):
        make_task(tokenizer).encode([make_row(prompt="ca", completion="t")])


@pytest.mark.parametrize("kind", KINDS)
def test_blanks_belong_to_the_token_after_them(kind):
    """Byte-level tokenizers leave them out of the offsets."""
    tokenizer = make_tokenizer(kind=kind)
    encoded = encode_one(make_task(tokenizer), prompt="the cat", completion="  sat ")
    assert "".join(spans(tokenizer, encoded)).strip() == "sat </s>"
    assert (
        tokenizer.decode([i for i, n in zip(encoded.input_ids, encoded.labels, strict=True) if n == IGNORE][1:])
        == "the cat"
    )


def test_training_on_all():
    tokenizer = make_tokenizer(CHATML)
    encoded = encode_one(make_task(tokenizer, train_on="all"), messages=chat("q", "a", "r"))
    assert encoded.labels == encoded.input_ids
    encoded = encode_one(make_task(tokenizer, train_on="all"), prompt="the cat", completion=" sat")
    assert encoded.labels[1:] == encoded.input_ids[1:] and encoded.labels[-1] == tokenizer.eos_token_id
    plain = make_tokenizer(NO_END)
    encoded = encode_one(make_task(plain, train_on="all"), messages=chat("q", "a"))
    assert encoded.labels == encoded.input_ids and encoded.input_ids[-1] == plain.eos_token_id
    llama = make_tokenizer(LLAMA2)
    encoded = encode_one(make_task(llama, train_on="all"), messages=chat("q", "a"))
    assert encoded.input_ids.count(llama.eos_token_id) == 1


def test_text_is_trained_whole():
    tokenizer = make_tokenizer()
    encoded = encode_one(make_task(tokenizer), text="the cat sat")
    assert spans(tokenizer, encoded) == ["the cat sat</s>"]


def test_cut_in_mid_answer():
    tokenizer = make_tokenizer(CHATML)
    whole = encode_one(make_task(tokenizer), messages=chat("the cat?", "a dog ran to the cat"))
    cut = encode_one(
        make_task(tokenizer, max_length=len(whole.input_ids) - 4), messages=chat("the cat?", "a dog ran to the cat")
    )
    assert cut.truncated and not whole.truncated
    assert cut.input_ids == whole.input_ids[:-4] and cut.labels == whole.labels[:-4]
    assert cut.target_tokens > 0
    exact = make_task(tokenizer, max_length=len(whole.input_ids))
    assert not encode_one(exact, messages=chat("the cat?", "a dog ran to the cat")).truncated


def test_rows_without_anything_to_train_are_dropped_with_the_reason():
    tokenizer = make_tokenizer(CHATML)
    task = make_task(tokenizer, max_length=12)
    long = make_row(messages=chat("the cat " * 9, "a"))
    rows = [make_row(messages=chat("q", "a")), long, make_row(messages=[]), make_row(messages=chat("q"))]
    rows += [make_row(messages=chat("hello", "q", "a", first="assistant"))]
    first, *reasons = task.encode(rows)
    assert isinstance(first, Encoded)
    assert reasons == [
        "prompt longer than max_length",
        "empty conversation",
        "conversation without an assistant's turn",
        "conversation starts with the assistant",
    ]
    assert make_task(make_tokenizer(bos=False)).encode([make_row(text="")]) == ["nothing to train"]


def test_a_batch_gives_what_single_rows_give(monkeypatch):
    monkeypatch.setattr(labels, "_CALL", 60)  # several calls of the tokenizer, some of one long row
    task = make_task(make_tokenizer(CHATML), max_length=20)
    rows = [make_row(messages=chat("the cat " * n, "a dog")[: 1 + n % 3]) for n in range(6)]
    assert task.encode(rows) == [task.encode([row])[0] for row in rows]


@pytest.mark.parametrize(
    "template, messages, message",
    [
        (
            LLAMA2,
            chat("q", "a")[:1] * 2 + chat("q", "a")[1:],
            "rows.jsonl:7: the chat template refuses this conversation: roles must alternate",
        ),
        (UNSTEADY, chat("q", "a"), "rows.jsonl:7: this chat template renders earlier messages differently"),
        (THINKING, chat("q", "a"), "rows.jsonl:7: this chat template renders earlier messages differently"),
        ("{{ messages[5].content.strip() }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{{ 1 + messages[0].content }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{{ raise_exception('two\nlines') }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses this"),
        ("{{ messages[0].content.index('z') }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{{ 1 // 0 }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses this conversation: integer division"),
        ("{{ 2.0 ** 9999 }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{{ messages.pop(9) }}", chat("q", "a"), "rows.jsonl:7: the chat template refuses"),
        ("{% if x %}\n{% bad %}", chat("q", "a"), "chat template, line 2: "),
    ],
)
def test_templates_that_fail(template, messages, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        make_task(make_tokenizer(template)).encode([make_row(messages=messages)])
    assert "\n" not in str(caught.value)


def test_a_template_that_cannot_be_labelled_can_be_trained_whole():
    tokenizer = make_tokenizer(UNSTEADY)
    encoded = encode_one(make_task(tokenizer, train_on="all"), messages=chat("q", "a", "r", "b"))
    assert encoded.labels == encoded.input_ids


def test_an_answer_is_trained_as_it_is_printed_in_the_whole_conversation():
    tokenizer = make_tokenizer(FORGETFUL)
    encoded = encode_one(make_task(tokenizer), messages=chat("q", "a", "r", "b"))
    assert spans(tokenizer, encoded) == ["a<|im_end|>", "<think></think>b<|im_end|>"]


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML)
    expected = encode_one(make_task(make_tokenizer(CHATML)), messages=chat("q", "a"))
    assert encode_one(make_task(make_tokenizer(LLAMA2), chat_template=str(path)), messages=chat("q", "a")) == expected
    with pytest.raises(UserError, match=r"dataset.chat_template: .*none.jinja: cannot be read: No such file"):
        make_task(chat_template=str(tmp_path / "none.jinja"))
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        make_task(chat_template=str(path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe: is not a regular file"):
        make_task(chat_template=str(pipe))


def test_named_templates():
    tokenizer = make_tokenizer({"tool_use": LLAMA2, "default": CHATML})
    assert encode_one(make_task(tokenizer), messages=chat("q", "a")) == encode_one(
        make_task(make_tokenizer(CHATML)), messages=chat("q", "a")
    )


def test_tokenizers_that_cannot_be_used():
    with pytest.raises(UserError, match="no end of sequence"):
        make_task(make_tokenizer(eos_token=None))

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="give a fast one"):
        make_task(Slow())


def test_a_token_beyond_the_embedding():
    tokenizer = make_tokenizer()
    top = max(tokenizer("the cat").input_ids)
    encode_one(make_task(tokenizer, vocab_size=top + 1), text="the cat")
    with pytest.raises(UserError, match=r"rows.jsonl:7: token .* vocabulary larger than the embedding") as caught:
        make_task(tokenizer, vocab_size=top).encode([make_row(text="the cat")])
    assert repr(tokenizer.convert_ids_to_tokens(top)) in str(caught.value)


def test_the_digest_changes_with_everything_that_changes_tokens(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(LLAMA3)
    tasks = [
        make_task(make_tokenizer(CHATML)),
        make_task(make_tokenizer(LLAMA2)),
        make_task(make_tokenizer()),
        make_task(make_tokenizer(CHATML), chat_template=str(path)),
        make_task(make_tokenizer(CHATML), chat_template="none", format="text"),
        make_task(make_tokenizer(CHATML, kind="sentences")),
        make_task(make_tokenizer(CHATML, bos=False)),
        make_task(make_tokenizer(CHATML, eos_token="<|eot|>")),
        make_task(make_tokenizer(CHATML), max_length=999),
        make_task(make_tokenizer(CHATML), vocab_size=999),
        make_task(make_tokenizer(CHATML), format="alpaca"),
        make_task(make_tokenizer(CHATML), columns={"prompt": "q"}),
        make_task(make_tokenizer(CHATML), train_on="all"),
    ]
    assert len({task.digest for task in tasks}) == len(tasks)


def test_the_digest_stays_the_same():
    tokenizer = make_tokenizer(CHATML)
    task = make_task(tokenizer)
    digest = task.digest
    encode_one(task, messages=chat("q", "a"))
    tokenizer("the cat", truncation=True, max_length=2, padding="max_length")
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"]
    assert task.digest == digest == make_task(make_tokenizer(CHATML)).digest


def test_a_tokenizer_file_that_truncates_does_not_truncate_rows():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"]
    assert len(encode_one(make_task(tokenizer), text="the cat sat on the mat").input_ids) > 6


def test_a_date_in_the_template_is_the_same_every_day():
    tokenizer = make_tokenizer(LLAMA3)
    encoded = encode_one(make_task(tokenizer), messages=chat("q", "a"))
    assert tokenizer.decode(encoded.input_ids).startswith("<s>Today: 26 Jul 2024<|head|>")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "strict": None, "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "it is 3", "tool_calls": None},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "a dog"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "template, trained",
    [
        (LLAMA31, ['{"name": "add", "parameters": {"x": 1}}<|eot|>', "it is 3<|eot|>", "a dog<|eot|>"]),
        (
            QWEN3,
            [
                '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
                "it is 3<|im_end|>",
                "<think>\n\n</think>\n\na dog<|im_end|>",
            ],
        ),
    ],
)
def test_calls_of_tools_are_trained_and_what_tools_say_is_not(kind, template, trained):
    tokenizer = make_tokenizer(template, kind)
    encoded = encode_one(make_task(tokenizer), messages=TOOL_CHAT, tools=TOOLS)
    assert spans(tokenizer, encoded) == trained
    named = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    calls = [CALL | {"function": {"name": "add", "arguments": {"x": 1}}}]
    plain = [m if not m.get("tool_calls") else m | {"content": "", "tool_calls": calls} for m in TOOL_CHAT]
    plain[3] = {"role": "assistant", "content": "it is 3"}
    assert encoded.input_ids == tokenizer.apply_chat_template(plain, tools=named, tokenize=True)["input_ids"]
    assert encode_one(make_task(tokenizer), messages=TOOL_CHAT, tools=json.dumps(TOOLS)) == encoded


def test_sharegpts_calls_and_observations_are_openais_calls_and_tool_turns():
    task = make_task(make_tokenizer(QWEN3))
    turns = [
        {"from": "human", "value": "the cat"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "it is 3"},
    ]
    assert encode_one(task, conversations=turns, tools=json.dumps(TOOLS)) == encode_one(
        make_task(make_tokenizer(QWEN3)), messages=TOOL_CHAT[:4], tools=TOOLS
    )
    system = [{"from": "system", "value": "be kind"}, *turns]
    assert encode_one(task, conversations=turns, system="be kind") == encode_one(task, conversations=system)
    assert encode_one(task, conversations=system, system="be brief") == encode_one(task, conversations=system)


SYSTEM = {"role": "system", "content": "be kind"}
ONLY_TWO = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
ONLY_FIRST = ONLY_TWO.replace("{% if m.role", "{% if loop.first or m.role")


@pytest.mark.parametrize(
    "template, columns, left_out",
    [
        (CHATML, {"messages": TOOL_CHAT[:2]}, "tool_calls"),
        (CHATML, {"messages": TOOL_CHAT[4:], "tools": TOOLS}, "the tools that the row lists"),
        (CHATML.replace("{{ '<|im_start|>'", "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ '<|im_start|>'", 1),
         {"messages": [TOOL_CHAT[0], TOOL_CHAT[3], TOOL_CHAT[2], TOOL_CHAT[5]]}, "the turns of role 'tool'"),
        (ONLY_TWO, {"messages": [SYSTEM, *chat("q", "a")]}, "the turns of role 'system'"),
        (ONLY_TWO.replace("'user'", "'human'"), {"messages": chat("the cat", "a")}, "the turns of role 'user'"),
        (ONLY_FIRST, {"messages": [SYSTEM, *chat("q", "a"), SYSTEM | {"content": "be brief"}, *chat("r", "b")]},
         "the turns of role 'system'"),
        (LLAMA31, {"messages": [TOOL_CHAT[0], TOOL_CHAT[1] | {"content": "let me see"}]},
         "what the assistant says beside its tool_calls"),
        (CHATML, {"messages": [TOOL_CHAT[0], {"role": "assistant", "content": "3", "reasoning_content": "hm"}]},
         "reasoning_content"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_what_a_template_would_leave_out_is_an_error(template, columns, left_out, train_on):
    with pytest.raises(UserError, match=f"rows.jsonl:7: this chat template does not print {left_out}"):
        make_task(make_tokenizer(template), train_on=train_on).encode([make_row(**columns)])


@pytest.mark.parametrize("behind", [[], [{"role": "user", "content": "the dog"}]])
def test_thoughts_of_earlier_turns_may_be_left_out(behind):
    messages = chat("q", "a cat", "r", "a dog")
    for message, thought in zip(messages[1::2], ("hm", "so"), strict=True):
        message["reasoning_content"] = thought
    tokenizer = make_tokenizer(QWEN3)
    trained = spans(tokenizer, encode_one(make_task(tokenizer), messages=[*messages, *behind]))
    assert trained == ["a cat<|im_end|>", "a dog<|im_end|>" if behind else "<think>\nso\n</think>\n\na dog<|im_end|>"]


def flagged(key, *values):
    messages = chat("q", "the cat", "r", "a dog", "s", "last")
    for message, value in zip(messages[1::2], values, strict=True):
        message[key] = value
    return messages


@pytest.mark.parametrize("template", [CHATML, MARKED, QWEN3])
@pytest.mark.parametrize("key", ["train", "training", "weight"])
def test_a_turn_may_say_that_it_is_not_trained(template, key):
    tokenizer = make_tokenizer(template)
    encoded = encode_one(make_task(tokenizer), messages=flagged(key, True, False, None))
    trained = spans(tokenizer, encoded)
    assert trained[0] == "the cat<|im_end|>" and trained[1].endswith("last<|im_end|>") and len(trained) == 2
    assert encoded.input_ids == encode_one(make_task(tokenizer), messages=flagged(key, 1, 1, 1)).input_ids
    assert len(spans(tokenizer, encode_one(make_task(tokenizer), messages=flagged(key, 1, 1, 1)))) == 3


def test_a_last_turn_that_is_not_trained_gets_no_end_of_sequence():
    tokenizer = make_tokenizer(NO_END)
    with pytest.raises(UserError, match="marks no end of earlier turns"):
        make_task(tokenizer).encode([make_row(messages=flagged("train", True, True, False))])
    end = make_tokenizer(MARKED.replace("+ '<|im_end|>' }}{% endg", "}}{% endg"))
    encoded = encode_one(make_task(end), messages=flagged("train", True, True, False))
    assert spans(end, encoded) == ["the cat", "a dog"] and end.eos_token_id not in encoded.input_ids
    encoded = encode_one(make_task(end), messages=flagged("train", 0, 1, 1))
    assert spans(end, encoded) == ["a dog", "last", "</s>"]


def test_flags_that_leave_nothing_or_contradict_the_setting():
    task = make_task(make_tokenizer(CHATML))
    row = make_row(messages=flagged("train", False, False, False))
    assert task.encode([row]) == ["conversation whose turns all say that they are not trained"]
    with pytest.raises(UserError, match=r"rows.jsonl:7: a turn says that it is not trained, but train_on: all"):
        make_task(make_tokenizer(CHATML), train_on="all").encode([row])


@pytest.mark.parametrize("kind", KINDS)
def test_the_marks_of_a_template_say_what_is_trained(kind):
    tokenizer = make_tokenizer(MARKED, kind)
    marked = encode_one(make_task(tokenizer), messages=chat(*TURNS))
    mask = tokenizer.apply_chat_template(
        chat(*TURNS), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    assert [label != IGNORE for label in marked.labels] == [bool(bit) for bit in mask]
    assert marked == encode_one(make_task(make_tokenizer(CHATML, kind)), messages=chat(*TURNS))


def test_marks_that_do_not_show_the_turns_are_an_error_where_it_matters():
    twice = MARKED.replace("m.content + '<|im_end|>' }}{% endg", "m.content }}{% endgeneration %}"
                           "{% generation %}{{ '<|im_end|>' }}{% endg")  # fmt: skip
    tokenizer = make_tokenizer(twice)
    assert spans(tokenizer, encode_one(make_task(tokenizer), messages=chat("q", "a"))) == ["a<|im_end|>"]
    with pytest.raises(UserError, match=r"marks 6 passages of the assistant's 3 turns"):
        make_task(tokenizer).encode([make_row(messages=flagged("train", True, True, False))])
