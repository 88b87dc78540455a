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

_STAND_IN = "\U0010f5c3\U0010f1a7"  # for private use, so neither in texts nor changed by a template's filters


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

    def render_all(self, turns: Sequence[Turn], row: Row) -> Rendered:
        """The conversation with every character trained.

        Raises UserError where the template refuses the conversation or leaves its last answer out.
        """
        text = self._render(turns, row)
        answers = _answers(turns)
        closed = not answers or bool(self._around(turns, answers[-1], row)[1].strip())
        end = turns[-1].role == "assistant" and not closed
        return Rendered(text=text, spans=((0, len(text)),), leading=False, end=end)

    def render_completions(self, turns: Sequence[Turn], row: Row) -> Rendered:
        """The conversation, which has an assistant's turn, with the assistant's turns trained.

        A turn's span is what its message adds to the rendering of the messages before it, up to its end mark: what the
        template writes behind an answer, but for the blanks at its end, which no model is ever asked to produce.
        Raises UserError where the template refuses the conversation, leaves an answer out, renders earlier messages
        differently when later ones follow, or marks no end of an answer that others follow.
        """
        text = self._render(turns, row)
        spans, closed = [], True
        for i in _answers(turns):
            last = i + 1 == len(turns)
            start, stop, closed = self._span(text, turns[: i + 1], last, row)
            if not (closed or last):
                raise row.error(None, _NO_END)
            spans.append((start, stop))
        return Rendered(text=text, spans=tuple(spans), leading=False, end=not closed)

    def render_prompt(self, turns: Sequence[Turn], row: Row) -> str:
        """The conversation up to where the assistant's next answer begins. Raises UserError where it is refused."""
        return self._render(turns, row, add_generation_prompt=True)

    def _span(self, text: str, turns: Sequence[Turn], last: bool, row: Row) -> tuple[int, int, bool]:
        """The span of the last of ``turns`` in the whole ``text``, and whether it ends with an end mark."""
        before = self._render(turns[:-1], row, add_generation_prompt=True)
        after = text if last else self._render(turns, row)
        head, tail = self._around(turns, len(turns) - 1, row)
        if not (after.startswith(before) and after.endswith(tail) and text.startswith(after)):
            raise row.error(None, _NO_SPANS)
        start = len(before)
        if not self._prompts(turns[:-1], before, row):
            if not after.startswith(head):
                raise row.error(None, _NO_SPANS)
            # A blank before the content stays with it: in most vocabularies it is part of the first word's token.
            start = max(start, len(head.rstrip(" ")))
        closed = bool(tail.strip())
        return start, len(after.rstrip()) if closed else len(after), closed

    def _prompts(self, turns: Sequence[Turn], prompted: str, row: Row) -> bool:
        """Whether the template wrote a generation prompt at the end of ``prompted``."""
        return "add_generation_prompt" in self.source and prompted != self._render(turns, row)

    def _around(self, turns: Sequence[Turn], place: int, row: Row) -> tuple[str, str]:
        """What the template writes before and behind the content of the answer ``turns[place]``.

        The content may be a part of what stands around it, empty, or altered by the template, so it is not searched
        for: a stand-in is rendered in its place.
        """
        stand_in = Turn(role="assistant", content=_STAND_IN)
        parts = self._render([*turns[:place], stand_in, *turns[place + 1 :]], row).split(_STAND_IN)
        if len(parts) != 2:
            raise row.error(
                None,
                f"this chat template prints an answer {len(parts) - 1} times and not once, so it cannot be trained; "
                "does it know the role 'assistant'? Mend it, or give another chat_template",
            )
        return parts[0], parts[1]

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
        except Exception as error:  # a template is a program of the user's: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise row.error(None, f"the chat template refuses this conversation: {reason}") from None
        assert isinstance(text, str)
        return text


def _answers(turns: Sequence[Turn]) -> list[int]:
    """The places of the assistant's turns."""
    return [i for i, turn in enumerate(turns) if turn.role == "assistant"]


_NO_SPANS = (
    "this chat template renders earlier messages differently when later ones follow, or does not begin an answer with "
    "its own generation prompt, so the assistant's turns cannot be labelled; write train_on: all, or give another "
    "chat_template"
)
_NO_END = (
    "this chat template marks no end of earlier turns, so the end of an answer that others follow cannot be trained; "
    "write train_on: all, or give conversations of a single answer"
)
