"""Supervised fine-tuning: a row becomes tokens, and labels on those that the model shall learn to say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from mlora.config import DatasetConfig
from mlora.files import readable
from mlora.tasks.formats import Conversation, Fields, Format, check_columns, guess_format, named_format
from mlora.tasks.labels import Splitter, Tokens, trained_tokens
from mlora.tasks.template import ChatTemplate, Rendered
from mlora.types import IGNORE, Encoded, Row, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 4  # raise it whenever the same row would give other tokens or labels


class SftTask:
    """Encodes the rows of one data file.

    Formats ``text`` and ``prompt_completion`` are plain text: the tokenizer's own leading tokens, the text, the end
    of sequence. The others, and the latter's lists of messages, are conversations in the chat template, if there is
    one. A conversation without any turn, one that starts with the assistant, and (unless all is trained) one without an
    assistant's turn are dropped.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, max_length: int, vocab_size: int
    ) -> None:
        """``max_length`` in tokens; ``vocab_size`` is the embedding's number of rows.

        Raises UserError where tokenizer, template and format do not go together.
        """
        if not tokenizer.is_fast:
            raise UserError("tokenizer: labels need the places of tokens in the text; give a fast one (tokenizer.json)")
        if not isinstance(tokenizer.eos_token_id, int):
            raise UserError("tokenizer: has no end of sequence; set eos_token in tokenizer_config.json")
        self._config, self._tokenizer = config, tokenizer
        self._max_length, self._vocab_size = max_length, vocab_size
        self._eos: int = tokenizer.eos_token_id
        self._template = chat_template(config, tokenizer)
        self._splitter = Splitter(tokenizer)
        self._named = None if config.format == "auto" else named_format(config.format, config.columns)
        self._format: Format | None = None  # set by the first rows that are encoded

    @property
    def digest(self) -> str:
        """A hash of everything beside the file that the result of ``encode`` depends on."""
        backend = json.loads(self._tokenizer.backend_tokenizer.to_str())
        facts = {
            "version": (_VERSION, tokenizers.__version__),
            # A call of the tokenizer may change these two, and they are never used.
            "tokenizer": {key: value for key, value in backend.items() if key not in ("truncation", "padding")},
            "special": (self._eos, self._splitter.leading, self._tokenizer.special_tokens_map),
            "template": self._template.source if self._template else None,
            "dataset": (self._config.format, dict(self._config.columns), self._config.train_on),
            "limits": (self._max_length, self._vocab_size),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def encode(self, rows: Sequence[Row]) -> list[Encoded | str]:
        """Tokens and labels of each row, in order; for a row that is dropped, the reason as text.

        A row longer than ``max_length`` is cut at its end. Raises UserError, with file, line and column, for a row
        that is not of the format, and for a token that the embedding has no row for.
        """
        if self._format is None:
            check_columns(rows, self._config.columns)
            self._format = self._named or guess_format(rows[0], self._config.columns)
        results = [self._render(self._format, row) for row in rows]
        texts = [result for result in results if isinstance(result, Rendered)]
        tokens = self._splitter.split([rendered.text for rendered in texts])
        return [
            result if isinstance(result, str) else self._encode(row, result, next(tokens))
            for row, result in zip(rows, results, strict=True)
        ]

    def _render(self, form: Format, row: Row) -> Rendered | str:
        fields = Fields(row, self._config.columns)
        if self._template and (chat := form.conversation(fields)):
            return self._render_chat(self._template, chat, row)
        prompt, completion = form.plain_text(fields)
        text = prompt + completion
        start = 0 if self._config.train_on == "all" else len(prompt)
        return Rendered(text=text, spans=((start, len(text)),), leading=True, end=True)

    def _render_chat(self, template: ChatTemplate, chat: Conversation, row: Row) -> Rendered | str:
        roles = [turn.role for turn in chat.turns if turn.role != "system"]
        if not roles:
            return "empty conversation"
        if roles[0] == "assistant":
            return "conversation starts with the assistant"
        left_out = [turn.train is False for turn in chat.turns if turn.role == "assistant"]
        if self._config.train_on == "all":
            if any(left_out):
                raise row.error(None, "a turn says that it is not trained, but train_on: all trains every one")
            return template.render_all(chat, row)
        if not left_out:
            return "conversation without an assistant's turn"
        if all(left_out):
            return "conversation whose turns all say that they are not trained"
        return template.render_completions(chat, row)

    def _encode(self, row: Row, rendered: Rendered, tokens: Tokens) -> Encoded | str:
        pair = trained_tokens(self._splitter, rendered, tokens)
        if pair is None:
            raise row.error(
                None,
                "a token spans the border of prompt and completion and cannot be split there; "
                "begin the completion with the blank that ends the prompt, or write train_on: all",
            )
        ids, trained = pair[0].tolist(), pair[1].tolist()
        if rendered.leading:
            ids, trained = self._splitter.leading + ids, [False] * len(self._splitter.leading) + trained
        if rendered.end:
            # As a number: the text of the end token may be tokenized into pieces.
            ids, trained = (ids, trained[:-1]) if ids[-1:] == [self._eos] else ([*ids, self._eos], trained)
            trained = [*trained, True]
        self._check_vocabulary(row, ids)
        labels = [token if use else IGNORE for token, use in zip(ids, trained, strict=True)]
        return self._cut(ids, labels)

    def _cut(self, ids: list[int], labels: list[int]) -> Encoded | str:
        truncated = len(ids) > self._max_length
        whole = Encoded(ids, labels)
        encoded = Encoded(ids[: self._max_length], labels[: self._max_length], truncated) if truncated else whole
        if encoded.target_tokens:
            return encoded
        return "prompt longer than max_length" if whole.target_tokens else "nothing to train"

    def _check_vocabulary(self, row: Row, ids: Sequence[int]) -> None:
        top = max(ids, default=0)
        if top >= self._vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(top)
            raise row.error(
                None,
                f"token {token!r} has the number {top}, but the embedding has {self._vocab_size} rows: vocabulary "
                "larger than the embedding; use the tokenizer that belongs to the base model",
            )


def chat_template(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The template that the configuration names, else the tokenizer's own, else None."""
    if config.chat_template == "none":
        return None
    if config.chat_template is not None:
        return ChatTemplate(_read_template(Path(config.chat_template)), tokenizer)
    source = tokenizer.chat_template
    if isinstance(source, dict):  # several by name; "default" is transformers' own choice for a plain conversation
        source = source.get("default")
    return ChatTemplate(source, tokenizer) if source else None


def _read_template(path: Path) -> str:
    place = f"dataset.chat_template: {path}"
    try:
        with readable(place):
            if not (path.is_file() or path.is_dir()) and path.exists():  # reading a pipe would wait for ever
                raise UserError(f"{place}: is not a regular file; give a file with a Jinja template")
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{place}: is not UTF-8; give a file with a Jinja template") from None
