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
    NO_END,
    NO_GENERATION_PROMPT,
    THINKING,
    chat,
    encode_one,
    make_row,
    make_task,
    make_tokenizer,
    spans,
)

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
        (FORGETFUL, chat("q", "a", "r", "b"), "rows.jsonl:7: this chat template renders earlier messages differently"),
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
    tokenizer = make_tokenizer(FORGETFUL)
    encoded = encode_one(make_task(tokenizer, train_on="all"), messages=chat("q", "a", "r", "b"))
    assert encoded.labels == encoded.input_ids
    single = encode_one(make_task(tokenizer), messages=chat("q", "a"))
    assert spans(tokenizer, single) == ["<think></think>a<|im_end|>"]


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
