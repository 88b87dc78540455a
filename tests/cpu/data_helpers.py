"""Small tokenizers, templates and files for the tests of data and tasks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlora.config import DatasetConfig
from mlora.tasks import SftTask
from mlora.types import IGNORE, Encoded, Row

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{{ 'Today: ' + strftime_now('%d %b %Y') }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content.strip() + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = CHATML[: CHATML.index("{% if add")]
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Llama-3.1's: tools go before the first user's text, a turn with tool_calls has one call and prints no content.
LLAMA31 = (
    "{{ bos_token }}{% set found = messages[1:] if tools else messages %}"
    "{% if tools %}{{ '<|head|>user<|/head|>\n\n' }}"
    "{% for tool in tools %}{{ tool | tojson(indent=1) + '\n' }}{% endfor %}"
    "{{ messages[0].content + '<|eot|>' }}{% endif %}"
    "{% for m in found %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{ \'<|head|>assistant<|/head|>\n\n{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson + '}<|eot|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|head|>ipython<|/head|>\n\n' + m.content | tojson + '<|eot|>' }}"
    "{% else %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# As Qwen3's: thoughts are printed behind the last question only, and always for the last turn; answers of several tools
# are one user's turn.
QWEN3 = (
    "{% set place = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set place.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{{ '<|im_start|>assistant\n' }}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else m.reasoning_content or '' %}"
    "{% if loop.index0 > place.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like templates of reasoning models: only the last turn has its thoughts printed.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Its generation prompt is no beginning of what it prints for an answer.
THINKING = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")
_SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
_TEXT = [
    "the cat sat on the mat and a dog ran to the cat",
    "translate: cat, dog and house in the answer of the question",
    "system user assistant human question answer instruction response input",
] * 20


@cache
def _backend(kind: str) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind == "sentences"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = _SPECIAL
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = ["▁"]
        special = ["<unk>", *_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    words = _TEXT if kind == "bytes" else [word for text in _TEXT for word in text.split()]
    tokenizer.train_from_iterator(words, trainer)
    if kind == "sentences":
        return _without_byte_marks(tokenizer)
    return tokenizer.to_str()


def _without_byte_marks(tokenizer: Tokenizer) -> str:
    """Bytes are plain entries of the vocabulary, as in Llama-2: their names in a text are not found as tokens."""
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(tree)


def make_tokenizer(template: str | None = None, kind: str = "bytes", bos: bool = True, **options: object):
    """A trained BPE tokenizer. ``kind`` is bytes (as GPT-2, Llama-3) or sentences (as Llama-2)."""
    backend = Tokenizer.from_str(_backend(kind))
    if bos:
        backend.post_processor = processors.Sequence(
            [
                *([processors.ByteLevel(trim_offsets=True)] if kind == "bytes" else []),
                processors.TemplateProcessing(
                    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
                ),
            ]
        )
    elif kind == "bytes":
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    names: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL[2:]})
    tokenizer.chat_template = template
    return tokenizer


def make_task(tokenizer=None, max_length: int = 1000, vocab_size: int = 1000, **config: object) -> SftTask:
    dataset = DatasetConfig(path=Path("rows.jsonl"), **config)
    return SftTask(dataset, tokenizer or make_tokenizer(), max_length, vocab_size)


def make_row(line: int = 7, **columns: object) -> Row:
    return Row(columns, "rows.jsonl", line)


def encode_one(task: SftTask, **columns: object) -> Encoded:
    (encoded,) = task.encode([make_row(**columns)])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def spans(tokenizer, encoded: Encoded) -> list[str]:
    """The texts of the unbroken runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for label in encoded.labels:
        if label == IGNORE:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


def chat(*turns: str, first: str = "user") -> list[dict[str, str]]:
    """Messages whose roles alternate."""
    other = {"user": "assistant", "assistant": "user"}
    roles = [first if i % 2 == 0 else other[first] for i in range(len(turns))]
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
