"""Text and the parts of it that are trained, from a conversation and a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from mlora.tasks.formats import Turn
from mlora.types import Row, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates that print today's date would give the same row other tokens tomorrow. This is Llama's own default date.
_DATE = "26 Jul 2024"
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}" + _DATE + "{%- endmacro -%}"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text with the spans ``[start, stop)``, in characters, that are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]
    leading: bool  # the tokenizer's leading tokens go before the text; a template prints its own
    end: bool  # an end of sequence goes after the text and is trained


class ChatTemplate:
    """A chat template with the tokenizer whose special tokens it prints."""

    def __init__(self, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._text = _FIXED_CLOCK + source if "strftime_now" in source else source
        marks = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._marks = tuple(sorted(marks | set(tokenizer.all_special_tokens)))

    def render_all(self, turns: Sequence[Turn], row: Row) -> Rendered:
        """The conversation with every character trained. Raises UserError where the template refuses it."""
        text = self._render(turns, row)
        end = turns[-1].role == "assistant" and self._closed(text) is None
        return Rendered(text=text, spans=((0, len(text)),), leading=False, end=end)

    def render_completions(self, turns: Sequence[Turn], row: Row) -> Rendered:
        """The conversation with its assistant turns trained.

        A turn's span is what its message adds to the rendering of the messages before it, up to its end token.
        Raises UserError where the template refuses the conversation, or renders earlier messages differently when
        later ones follow.
        """
        text = self._render(turns, row)
        spans, end = [], False
        for i, turn in enumerate(turns):
            if turn.role == "assistant":
                start, stop = self._span(text, turns[: i + 1], i + 1 == len(turns), row)
                closed = self._closed(text[start:stop])
                spans.append((start, stop if closed is None else start + closed))
                end = i + 1 == len(turns) and closed is None
        return Rendered(text=text, spans=tuple(spans), leading=False, end=end)

    def _span(self, text: str, turns: Sequence[Turn], last: bool, row: Row) -> tuple[int, int]:
        """The span of the last of ``turns`` in the whole ``text``."""
        before = self._render(turns[:-1], row, add_generation_prompt=True)
        after = text if last else self._render(turns, row)
        if not (after.startswith(before) and text.startswith(after)):
            raise row.error(None, _NO_SPANS)
        return len(before) + self._header(after[len(before) :], turns[-1]), len(after)

    def _closed(self, text: str) -> int | None:
        """Length of the text up to its closing special token; None where its last word is no special token.

        Templates print a newline after the end token that no model is ever asked to produce.
        """
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._marks) else None

    def _header(self, text: str, turn: Turn) -> int:
        """Length of the header that a template without generation prompt puts before the content.

        A blank before the content stays with it: in most vocabularies it is part of the first word's token.
        """
        if "add_generation_prompt" in self.source:
            return 0
        return len(text[: max(0, text.find(turn.content.strip()))].rstrip(" "))

    def _render(self, turns: Sequence[Turn], row: Row, add_generation_prompt: bool = False) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                date_string=_DATE,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}; mend the template") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise row.error(None, f"the chat template refuses this conversation: {reason}") from None
        assert isinstance(text, str)
        return text


_NO_SPANS = (
    "this chat template renders earlier messages differently when later ones follow, or does not begin an answer with "
    "its own generation prompt, so the assistant's turns cannot be labelled; write train_on: all, or give another "
    "chat_template"
)
