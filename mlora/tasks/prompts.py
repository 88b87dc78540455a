"""Prompts: a row without its answer, as tokens behind which a model goes on; in the form in which it was trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlora.config import DatasetConfig
from mlora.tasks.formats import Fields, Format, guess_format, named_format
from mlora.tasks.labels import Splitter
from mlora.tasks.sft import chat_template
from mlora.types import Row, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWERS = ("output", "completion", "answer", "response")  # columns that a row of questions may lack


class Prompter:
    """Renders rows without their answers. ``config`` says, as for training, what the rows' columns are."""

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._template = config, chat_template(config, tokenizer)
        self._splitter = Splitter(tokenizer)

    def encode(self, row: Row) -> list[int]:
        """Tokens of the row up to where the answer begins.

        A conversation's last turn is left out where it is the assistant's; columns of answers may be missing. Raises
        UserError, with file and line, for a row of no known format, and for one without any token.
        """
        form, row = self._format(row)
        fields = Fields(row, self._config.columns)
        if self._template and (chat := form.conversation(fields)):
            if chat.turns and chat.turns[-1].role == "assistant":
                chat = chat.first(len(chat.turns) - 1)
            if not chat.turns:
                raise row.error(None, "the conversation asks nothing; give it a user's turn")
            ids = self.split(self._template.render_prompt(chat, row))
        else:
            ids = self._splitter.leading + self.split(form.plain_text(fields)[0])
        if not ids:
            raise row.error(None, "the prompt is empty; begin with at least a word")
        return ids

    def split(self, text: str) -> list[int]:
        """Tokens of a text, without any before or behind it."""
        return next(self._splitter.split([text])).ids.tolist()

    def _format(self, row: Row) -> tuple[Format, Row]:
        """The row's format, and the row with empty answers where it has none."""
        columns = self._config.columns
        blank = {columns.get(name, name): "" for name in _ANSWERS}
        filled = replace(row, value={**blank, **row.value})
        if self._config.format != "auto":
            return named_format(self._config.format, columns), filled
        try:
            return guess_format(row, columns), row
        except UserError as error:
            try:
                return guess_format(filled, columns), filled
            except UserError:
                raise error from None
