"""Text and the parts of it that are trained, from a conversation and a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from mlora.tasks.formats import Conversation, Turn
from mlora.types import Row, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates that print today's date would give the same row other tokens tomorrow. This is Llama's own default date.
_DATE = "26 Jul 2024"
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}" + _DATE + "{%- endmacro -%}"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
        self._marked = _GENERATION.search(source) is not None

    def render_all(self, chat: Conversation, row: Row) -> Rendered:
        """The conversation with every character trained.

        Raises UserError where the template refuses the conversation or leaves something of it out.
        """
        text = self._render(chat, row)
        answers = _answers(chat)
        closed = not answers or bool(self._around(chat, answers[-1], row)[1].strip())
        self._check_printed(chat, text, row)
        end = chat.turns[-1].role == "assistant" and not closed
        return Rendered(text=text, spans=((0, len(text)),), leading=False, end=end)

    def render_completions(self, chat: Conversation, row: Row) -> Rendered:
        """The conversation with the assistant's turns trained, but for those that say that they are not.

        Where the template marks what the assistant says (``{% generation %}``), that is trained. Else a turn's span
        begins where the template asks for the answer, in the rendering of the messages before it with a generation
        prompt, and ends with its end mark: what the template writes behind an answer before any other turn, but for the
        blanks at its end, which no model is ever asked to produce.
        Raises UserError where the template refuses the conversation, leaves something of it out, renders the messages
        before an answer differently when it follows, or marks no end of an answer that others follow.
        """
        text = self._render(chat, row)
        found = self._render_marks(chat, text, row) if self._marked else self._render_spans(chat, text, row)
        self._check_printed(chat, text, row)
        return found

    def render_prompt(self, chat: Conversation, row: Row) -> str:
        """The conversation up to where the assistant's next answer begins. Raises UserError where it is refused, or
        something of it left out."""
        self._check_printed(chat, self._render(chat, row), row)
        return self._render(chat, row, add_generation_prompt=True)

    def _render_spans(self, chat: Conversation, text: str, row: Row) -> Rendered:
        spans, closed = [], True
        for i in _trained(chat):
            last = i + 1 == len(chat.turns)
            start, stop, closed = self._span(text, chat, i, row)
            if not (closed or last):
                raise row.error(None, _NO_END)
            spans.append((start, stop))
        return Rendered(text=text, spans=tuple(spans), leading=False, end=not closed)

    def _render_marks(self, chat: Conversation, text: str, row: Row) -> Rendered:
        """The spans between the template's own marks. A turn that is not to be trained needs a mark for each answer."""
        spans = self._marks(chat, row)
        answers, trained = _answers(chat), _trained(chat)
        if len(spans) == len(answers):
            spans = [span for i, span in zip(answers, spans, strict=True) if i in trained]
        elif trained != answers or not spans:
            raise row.error(
                None,
                f"this chat template marks {len(spans)} passages of the assistant's {len(answers)} turns, so it does "
                "not show which to train; mend it, or take its {% generation %} marks out",
            )
        last = len(chat.turns) - 1
        end = last in trained and not self._around(chat, last, row)[1].strip()
        return Rendered(text=text, spans=tuple(spans), leading=False, end=end)

    def _marks(self, chat: Conversation, row: Row) -> list[tuple[int, int]]:
        try:
            printed: dict[str, Any] = {**self._tokenizer.special_tokens_map, "date_string": _DATE}
            found: Any = render_jinja_template(
                conversations=[_messages(chat)],
                tools=_tools(chat),
                chat_template=self._text,
                return_assistant_tokens_mask=True,
                **printed,
            )
        except Exception as error:
            raise self._refusal(error, row) from None
        return [(start, stop) for start, stop in found[1][0]]

    def _span(self, text: str, chat: Conversation, place: int, row: Row) -> tuple[int, int, bool]:
        """The span of the answer ``place`` in the whole ``text``, and whether it ends with an end mark.

        The turns behind an answer may change how it is printed itself (Qwen3 prints the thoughts of the last turn
        only), so the span is what the template prints between what must stand before it and behind it.
        """
        past = chat.first(place)
        before = self._render(past, row, add_generation_prompt=True)
        head, tail = self._around(chat, place, row)
        mark = tail if place + 1 == len(chat.turns) else self._around(chat.first(place + 1), place, row)[1]
        if not (text.startswith(before) and text.endswith(tail) and tail.startswith(mark.rstrip())):
            raise row.error(None, _NO_SPANS)
        start = len(before)
        if not self._prompts(past, before, row):
            if not text.startswith(head):
                raise row.error(None, _NO_SPANS)
            # A blank before the content stays with it: in most vocabularies it is part of the first word's token.
            start = max(start, len(head.rstrip(" ")))
        stop = len(text) - len(tail)
        if stop < start:
            raise row.error(None, _NO_SPANS)
        closed = bool(mark.strip())
        return start, stop + len(mark.rstrip() if closed else mark), closed

    def _prompts(self, chat: Conversation, prompted: str, row: Row) -> bool:
        """Whether the template wrote a generation prompt at the end of ``prompted``."""
        return "add_generation_prompt" in self.source and prompted != self._render(chat, row)

    def _around(self, chat: Conversation, place: int, row: Row) -> tuple[str, str]:
        """What the template writes before and behind the content of the answer ``place``.

        The content may be a part of what stands around it, empty, or altered by the template, so it is not searched
        for: a stand-in is rendered in its place.
        """
        stand_in = Turn(role="assistant", content=_STAND_IN)
        parts = self._render(chat.put(place, stand_in), row).split(_STAND_IN)
        if len(parts) != 2:
            raise row.error(
                None,
                f"this chat template prints an answer {len(parts) - 1} times and not once, so it cannot be trained; "
                "does it know the role 'assistant'? Mend it, or give another chat_template",
            )
        return parts[0], parts[1]

    def _check_printed(self, chat: Conversation, text: str, row: Row) -> None:
        """Raises UserError where the template leaves out a text, a call of a tool, or the tools."""
        for i, turn in enumerate(chat.turns):
            if "tool_calls" in turn.extra:
                without = {key: value for key, value in turn.extra.items() if key != "tool_calls"}
                if self._render(chat.put(i, replace(turn, extra=without)), row) == text:
                    raise row.error(None, _LEFT_OUT.format("tool_calls"))
                break
        if chat.tools and self._render(replace(chat, tools=()), row) == text:
            raise row.error(None, _LEFT_OUT.format("the tools that the row lists"))
        for what, stand_in in _texts(chat, text):
            if _STAND_IN not in self._render(stand_in, row):
                raise row.error(None, _LEFT_OUT.format(what))

    def _render(self, chat: Conversation, row: Row, add_generation_prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                _messages(chat),
                tools=_tools(chat),
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                date_string=_DATE,
            )
        except Exception as error:  # a template is a program of the user's: it can raise anything
            raise self._refusal(error, row) from None
        assert isinstance(text, str)
        return text

    def _refusal(self, error: Exception, row: Row) -> UserError:
        if isinstance(error, jinja2.TemplateSyntaxError):
            return UserError(f"chat template, line {error.lineno}: {error.message}; mend the template")
        reason = " ".join(str(error).split()) or type(error).__name__
        return row.error(None, f"the chat template refuses this conversation: {reason}")


def _tools(chat: Conversation) -> Any:
    return list(chat.tools) or None


def _messages(chat: Conversation) -> Any:
    return [{"role": turn.role, "content": turn.content, **turn.extra} for turn in chat.turns]


def _answers(chat: Conversation) -> list[int]:
    """The places of the assistant's turns."""
    return [i for i, turn in enumerate(chat.turns) if turn.role == "assistant"]


def _trained(chat: Conversation) -> list[int]:
    """The places of those that are trained."""
    return [i for i in _answers(chat) if chat.turns[i].train is not False]


def _texts(chat: Conversation, printed: str) -> Iterator[tuple[str, Conversation]]:
    """What a template might leave out, and the conversation with a stand-in in its place.

    An answer is not among it, since its span tells. Of thoughts only the last ones are, with nothing behind them: those
    of earlier turns some templates leave out on purpose.
    """
    roles = [turn.role for turn in chat.turns]
    for i, turn in enumerate(chat.turns):
        said = chat.put(i, replace(turn, content=_STAND_IN))
        if turn.role != "assistant" and (i == roles.index(turn.role) or turn.content.strip() not in printed):
            yield f"the turns of role '{turn.role}'", said
        if "tool_calls" in turn.extra and turn.content.strip():
            yield "what the assistant says beside its tool_calls", said
    thoughts = [i for i, turn in enumerate(chat.turns) if turn.extra.get("reasoning_content")]
    for i in thoughts[-1:]:
        turn = chat.turns[i]
        thought = replace(turn, extra={**turn.extra, "reasoning_content": _STAND_IN})
        yield "reasoning_content", chat.first(i + 1).put(i, thought)


_LEFT_OUT = (
    "this chat template does not print {}, so that would be lost; give a chat_template that does, or take it out of "
    "the row"
)
_NO_SPANS = (
    "this chat template renders earlier messages differently when an answer follows, or does not begin an answer with "
    "its own generation prompt, so the assistant's turns cannot be labelled; write train_on: all, or give another "
    "chat_template"
)
_NO_END = (
    "this chat template marks no end of earlier turns, so the end of an answer that others follow cannot be trained; "
    "write train_on: all, or give conversations of a single answer"
)
