"""What the columns of a row mean: each format turns a row into a conversation, or into a prompt and its completion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlora.types import Row, UserError

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",  # its text is the call, as JSON
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "developer": "system",  # OpenAI's later word for it
}
_TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}  # the keys of a turn, by our column
_CALL_ROLE = "function_call"
_FLAGS = ("train", "training", "weight")  # ours, Axolotl's, OpenAI's: whether a message is trained
_PASSED = ("name", "tool_call_id", "reasoning_content")  # texts of a message that a template may print
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS: dict[type, str] = {
    **{type(None): "null", bool: "true or false", int: "a number", float: "a number"},
    **{str: "text", list: "a list", dict: "an object"},
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of a conversation. ``role`` is system, user, assistant or tool (what a tool has answered)."""

    role: str
    content: str
    extra: Mapping[str, object] = field(default_factory=dict)  # what else a template may print, such as tool_calls
    train: bool | None = None  # as the row says; an assistant's turn is trained where it says nothing


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns, and the schemas of the tools that the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, object], ...] = ()

    def first(self, count: int) -> Conversation:
        """Its beginning."""
        return replace(self, turns=self.turns[:count])

    def put(self, place: int, turn: Turn) -> Conversation:
        """The same with another turn in one place."""
        return replace(self, turns=(*self.turns[:place], turn, *self.turns[place + 1 :]))


@dataclass(frozen=True)
class Fields:
    """A row's columns under our names. ``columns`` maps our name to the file's where they differ."""

    row: Row
    columns: Mapping[str, str]

    def value(self, name: str) -> object:
        """What a column holds that must be there."""
        return self._value(self.columns.get(name, name))

    def text(self, name: str) -> str:
        """The text of a column that must be there."""
        column = self.columns.get(name, name)
        return _text(self._value(column), self.row, column)

    def optional_text(self, name: str) -> str:
        """The text of a column that may be missing or null: then empty."""
        column = self.columns.get(name, name)
        value = self.row.value.get(column)
        return "" if value is None else _text(value, self.row, column)

    def turns(self, name: str, role_key: str, content_key: str) -> list[Turn]:
        """The conversation that a column holds as a list of objects."""
        column = self.columns.get(name, name)
        turns = []
        for i, item in enumerate(_list(self._value(column), self.row, column)):
            place = f"{column}[{i}]"
            if not isinstance(item, dict):
                raise self.row.error(
                    place, f"expected an object with {role_key} and {content_key}, found {_kind(item)}"
                )
            turns.append(self._turn(item, place, role_key, content_key))
        return turns

    def _turn(self, item: Mapping[str, object], place: str, role_key: str, content_key: str) -> Turn:
        calls = _tool_calls(item.get("tool_calls"), self.row, f"{place}.tool_calls")
        for key in (role_key,) if calls else (role_key, content_key):
            if key not in item:
                hint = _other_turns(item, place.split("[")[0])
                raise self.row.error(place, f"{key!r} is missing; it has {_names(item)}{hint}")
        name = _text(item[role_key], self.row, f"{place}.{role_key}")
        if name not in _ROLES:
            raise self.row.error(f"{place}.{role_key}", f"unknown role {name!r}; known are {', '.join(_ROLES)}")
        role, where = _ROLES[name], f"{place}.{content_key}"
        empty = bool(calls) and item.get(content_key) is None
        content = "" if empty else _content(item[content_key], self.row, where)
        if calls and role != "assistant":
            raise self.row.error(f"{place}.tool_calls", f"only an assistant calls tools, and this is a {name}'s turn")
        if name == _CALL_ROLE:
            calls, content = _calls_in_text(content, self.row, where), ""
        extra: dict[str, object] = {"tool_calls": calls} if calls else {}
        for key in _PASSED:
            if item.get(key) is not None:
                extra[key] = _text(item[key], self.row, f"{place}.{key}")
        return Turn(role=role, content=content, extra=extra, train=_flag(item, role, self.row, place))

    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The schemas in the column tools, a list or its JSON text; none where it is missing, null or empty."""
        column = self.columns.get("tools", "tools")
        value = self.row.value.get(column)
        if isinstance(value, str):
            value = _json(value, self.row, column) if value.strip() else None
        items = _list([] if value is None else value, self.row, column)
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise self.row.error(f"{column}[{i}]", f"expected the schema of a tool, found {_kind(item)}")
        return tuple(_without_nulls(item) for item in items)

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """The pairs of texts that a column holds; none where it is missing or null."""
        column = self.columns.get(name, name)
        value = self.row.value.get(column)
        pairs = []
        for i, pair in enumerate(_list([] if value is None else value, self.row, column)):
            place = f"{column}[{i}]"
            if len(_list(pair, self.row, place)) != 2:
                raise self.row.error(place, f"expected a pair [instruction, response], found {len(pair)} items")
            first, second = (_text(text, self.row, f"{place}[{j}]") for j, text in enumerate(pair))
            pairs.append((first, second))
        return pairs

    def _value(self, column: str) -> object:
        if column not in self.row.value:
            raise self.row.error(column, f"missing; the row has {_names(self.row.value)}")
        return self.row.value[column]


def _content(value: object, row: Row, column: str) -> str:
    """A message's text, which OpenAI's form may give in parts."""
    if not isinstance(value, list):
        return _text(value, row, column)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise row.error(f"{column}[{i}]", f"expected a part with type: text, found {kind or _kind(part)}")
        texts.append(_text(part.get("text"), row, f"{column}[{i}].text"))
    return "".join(texts)


def _other_turns(item: Mapping[str, object], column: str) -> str:
    """What to write for a column of turns in the other form than was read."""
    for name, keys in _TURNS.items():
        if item.keys() >= {*keys}:
            return f"; turns of {' and '.join(keys)} are read with columns: {{{name}: {column}}}"
    return ""


def _flag(item: Mapping[str, object], role: str, row: Row, place: str) -> bool | None:
    """Whether a message says that it is trained (true) or not (false)."""
    given = [key for key in _FLAGS if item.get(key) is not None]
    if not given:
        return None
    key, value = given[0], item[given[0]]
    if len({bool(item[other]) for other in given}) > 1 or value not in (0, 1):
        raise row.error(f"{place}.{key}", f"expected one of true and false, or 0 and 1, found {value!r}")
    if value and role != "assistant":
        raise row.error(f"{place}.{key}", f"only an assistant's turn is trained, and this is a {role}'s; leave it out")
    return bool(value)


def _tool_calls(value: object, row: Row, column: str) -> list[dict[str, object]]:
    """OpenAI's form: objects with ``function``, which has ``name`` and ``arguments``, an object or its JSON text."""
    calls = []
    for i, call in enumerate(_list([] if value is None else value, row, column)):
        place = f"{column}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise row.error(place, "expected an object with function: {name, arguments}")
        calls.append(_without_nulls(call) | {"type": "function", "function": _call(function, row, f"{place}.function")})
    return calls


def _calls_in_text(text: str, row: Row, column: str) -> list[dict[str, object]]:
    """LLaMA-Factory's form: ``{"name": …, "arguments": …}``, or a list of them, as JSON text."""
    value = _json(text, row, column)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise row.error(column, "expected a call as JSON, {name, arguments}, or a list of calls")
    return [{"type": "function", "function": _call(call, row, column)} for call in calls]


def _call(function: Mapping[str, object], row: Row, column: str) -> dict[str, object]:
    """Arguments as an object: most templates print them as JSON themselves, and would print a text in quotes."""
    name = _text(function.get("name"), row, f"{column}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, row, f"{column}.arguments")
    if not isinstance(arguments, dict):
        raise row.error(f"{column}.arguments", f"expected an object, found {_kind(arguments)}")
    return {"name": name, "arguments": _without_nulls(arguments)}


def _json(text: str, row: Row, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise row.error(column, f"expected JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Parquet and Arrow give every object all keys that any has; those that it did not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _list(value: object, row: Row, column: str) -> list:
    if not isinstance(value, list):
        raise row.error(column, f"expected a list, found {_kind(value)}")
    return value


def _text(value: object, row: Row, column: str) -> str:
    if not isinstance(value, str):
        raise row.error(column, f"expected text, found {_kind(value)}")
    if not value.isascii() and (found := _SURROGATE.search(value)):
        raise row.error(column, f"holds half a character, \\u{ord(found[0]):04x}, without its other half (a surrogate)")
    return value


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)  # Parquet and Arrow have more: bytes, dates, decimals


def _names(value: Mapping[str, object]) -> str:
    return ", ".join(str(key) for key in value) or "no columns"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format's columns and readings. ``turns`` gives None for a row that is plain text. A format without it never
    uses a chat template, one without ``plain`` cannot do without. ``plain`` gives prompt and completion."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    turns: Callable[[Fields], list[Turn] | None] | None = None
    plain: Callable[[Fields], tuple[str, str]] | None = None

    def conversation(self, fields: Fields) -> Conversation | None:
        """None where the row is plain text."""
        turns = self.turns(fields) if self.turns else None
        if turns is None:
            return None
        return Conversation(turns=tuple(turns), tools=fields.tools() if "tools" in self.optional else ())

    def plain_text(self, fields: Fields) -> tuple[str, str]:
        """Prompt and completion. Raises UserError where the format needs a chat template."""
        if self.plain is None:
            raise UserError(
                f"{fields.row.file}: conversations need a chat template and there is none; give dataset.chat_template "
                "a file"
            )
        return self.plain(fields)

    def fits(self, row: Row, columns: Mapping[str, str]) -> bool:
        """Whether the row has all required columns and the format knows every name in ``columns``."""
        known = {*self.required, *self.optional}
        return known >= set(columns) and all(columns.get(name, name) in row.value for name in self.required)


def _pair_turns(system: str, history: list[tuple[str, str]], user: str, assistant: str) -> list[Turn]:
    turns = [Turn(role="system", content=system)] if system else []
    for pair in [*history, (user, assistant)]:
        turns += [Turn(role=role, content=text) for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


def _chat_turns(fields: Fields, name: str) -> list[Turn]:
    """A column system goes before a conversation that has no such turn of its own."""
    system, turns = fields.optional_text("system"), fields.turns(name, *_TURNS[name])
    has_one = any(turn.role == "system" for turn in turns)
    return turns if has_one or not system else [Turn(role="system", content=system), *turns]


def _alpaca_turns(fields: Fields) -> list[Turn]:
    query = "\n".join(filter(None, (fields.text("instruction"), fields.optional_text("input"))))
    return _pair_turns(fields.optional_text("system"), fields.pairs("history"), query, fields.text("output"))


def _prompt_turns(fields: Fields) -> list[Turn] | None:
    """TRL's conversational form, where both columns are lists of messages. What the prompt says is not trained."""
    if not isinstance(fields.value("prompt"), list):
        return None
    prompt = [
        replace(turn, train=False) if turn.role == "assistant" else turn
        for turn in fields.turns("prompt", *_TURNS["messages"])
    ]
    return prompt + ([] if fields.value("completion") == "" else fields.turns("completion", *_TURNS["messages"]))


def _dolly_turns(fields: Fields) -> list[Turn]:
    query = "\n".join(filter(None, (fields.text("instruction"), fields.optional_text("context"))))
    return _pair_turns("", [], query, fields.text("response"))


def _instruction(instruction: str, extra: str) -> str:
    middle = f"### Input:\n{extra}\n\n" if extra else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def _alpaca_plain(fields: Fields) -> tuple[str, str]:
    """Earlier pairs are context here: without a template nothing marks where an earlier answer ends."""
    system = fields.optional_text("system")
    past = [_instruction(instruction, "") + response + "\n\n" for instruction, response in fields.pairs("history")]
    prompt = _instruction(fields.text("instruction"), fields.optional_text("input"))
    return "".join([f"{system}\n\n" if system else "", *past, prompt]), fields.text("output")


FORMATS: dict[str, Format] = {  # in the order of guessing: the fuller form of a row that has several goes first
    "messages": Format(
        required=("messages",), optional=("tools", "system"), turns=lambda f: _chat_turns(f, "messages")
    ),
    "sharegpt": Format(
        required=("conversations",),
        optional=("tools", "system"),
        turns=lambda f: _chat_turns(f, "conversations"),
    ),
    "alpaca": Format(
        required=("instruction", "output"),
        optional=("input", "system", "history"),
        turns=_alpaca_turns,
        plain=_alpaca_plain,
    ),
    "dolly": Format(
        required=("instruction", "response"),
        optional=("context",),
        turns=_dolly_turns,
        plain=lambda f: (_instruction(f.text("instruction"), f.optional_text("context")), f.text("response")),
    ),
    "prompt_completion": Format(
        required=("prompt", "completion"),
        optional=("tools",),
        turns=_prompt_turns,
        plain=lambda f: (f.text("prompt"), f.text("completion")),
    ),
    "question_answer": Format(
        required=("question", "answer"),
        turns=lambda f: _pair_turns("", [], f.text("question"), f.text("answer")),
        plain=lambda f: (f"Question: {f.text('question')}\nAnswer:", " " + f.text("answer")),
    ),
    "text": Format(required=("text",), plain=lambda f: ("", f.text("text"))),
}


def check_columns(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Raises UserError where a column of the file that ``columns`` names is in none of the first ``rows``."""
    seen = dict.fromkeys(key for row in rows for key in row.value)
    for name, column in columns.items():
        if column not in seen:
            raise UserError(
                f"{rows[0].file}: its rows have no column {column!r} (looked at from line {rows[0].line} to "
                f"{rows[-1].line}), they have {_names(seen)}; mend dataset.columns.{name}"
            )


def guess_format(row: Row, columns: Mapping[str, str]) -> Format:
    """The first format that the row's columns, under the names in ``columns``, make up.

    Raises UserError that lists what was seen where none fits.
    """
    for candidate in FORMATS.values():
        if candidate.fits(row, columns):
            return candidate
    if not row.value:
        raise row.error(None, "the row is empty, so the format cannot be guessed; delete the line, or give format")
    seen = _names(row.value) + (f" (and the setting columns names {_names(columns)})" if columns else "")
    forms = "; ".join(f"{name}: {', '.join(form.required)}" for name, form in FORMATS.items())
    names = ("prompt", "completion") if len(row.value) > 1 else ("text",)
    example = ", ".join(f"{ours}: {theirs}" for ours, theirs in zip(names, row.value, strict=False))
    raise row.error(
        None,
        f"the format cannot be guessed from the columns {seen}; give columns or format inside dataset, such as "
        f"columns: {{{example}}} ({forms})",
    )


def named_format(name: str, columns: Mapping[str, str]) -> Format:
    """The format called ``name``. Raises UserError where ``columns`` holds a name that it does not have."""
    form = FORMATS[name]
    known = (*form.required, *form.optional)
    for column in columns:
        if column not in known:
            raise UserError(
                f"dataset.columns.{column}: the format {name} has no such column; it has {', '.join(known)}"
            )
    return form
