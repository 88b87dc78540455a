"""Tokens of a text and which of them lie in the trained spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mlora.tasks.template import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALL = 1 << 20  # characters


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of a text. Token i covers its characters ``[starts[i], stops[i])``; together they cover all of it."""

    ids: np.ndarray  # int64 [T]
    starts: np.ndarray  # int64 [T]
    stops: np.ndarray  # int64 [T]

    def straddling(self, place: int) -> bool:
        """Whether a token has characters on both sides of ``place``."""
        return bool(np.any((self.starts < place) & (place < self.stops)))

    def inside(self, start: int, stop: int) -> np.ndarray:
        """Which tokens lie in the span: bool [T]."""
        return (self.starts >= start) & (self.stops <= stop) & (self.stops > start)


class Splitter:
    """Tokenizes texts without any special tokens but those written in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.leading = self._leading()

    def _leading(self) -> list[int]:
        """The tokens, such as the beginning of sequence, that the tokenizer puts before a plain text."""
        bare, dressed = (self._tokenizer("a", add_special_tokens=add).input_ids for add in (False, True))
        for place in range(len(dressed)):
            if dressed[place : place + len(bare)] == bare:
                return list(dressed[:place])
        return []

    def split(self, texts: Sequence[str]) -> Iterator[Tokens]:
        """Tokens of each text, in order."""
        for group in _groups(texts):
            yield from self._split(group)

    def _split(self, texts: list[str]) -> list[Tokens]:
        batch = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [_tokens(*pair) for pair in zip(batch["input_ids"], batch["offset_mapping"], strict=True)]

    def split_at(self, text: str, whole: Tokens, places: Sequence[int]) -> Tokens | None:
        """Tokens of ``text`` of which none straddles ``places``; None where they spell another text than ``whole``."""
        edges = [0, *sorted(set(places)), len(text)]
        pieces = [self._split_piece(text, start, stop) for start, stop in pairwise(edges)]
        joined = Tokens(
            ids=np.concatenate([piece.ids for piece in pieces]),
            starts=np.concatenate([piece.starts for piece in pieces]),
            stops=np.concatenate([piece.stops for piece in pieces]),
        )
        return joined if self._decode(joined) == self._decode(whole) else None

    def _split_piece(self, text: str, start: int, stop: int) -> Tokens:
        """Tokens of ``text[start:stop]`` as they follow other text.

        Sentencepiece-like tokenizers put a blank before whatever they are given, so the piece goes in behind a
        newline, whose tokens are taken off again.
        """
        lead = "\n" if start else ""
        tokens = next(self.split([lead + text[start:stop]]))
        if tokens.straddling(len(lead)):
            lead = ""
            tokens = next(self.split([text[start:stop]]))
        kept = tokens.stops > len(lead) if lead else np.ones(len(tokens.ids), dtype=bool)
        shift = start - len(lead)
        return Tokens(ids=tokens.ids[kept], starts=tokens.starts[kept] + shift, stops=tokens.stops[kept] + shift)

    def _decode(self, tokens: Tokens) -> str:
        text = self._tokenizer.decode(tokens.ids.tolist(), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, in groups that one call of the tokenizer takes: it uses some 100 bytes per character."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _CALL:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _tokens(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Tokens:
    """Byte-level tokenizers leave blanks out of a token's offsets: a token begins where the one before it stops."""
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    stops = places[:, 1]
    previous = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
    return Tokens(ids=np.array(ids, dtype=np.int64), starts=np.minimum(places[:, 0], previous), stops=stops)


def trained_tokens(splitter: Splitter, rendered: Rendered, tokens: Tokens) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids [T] of the text and a mask [T] of the trained ones. ``tokens`` are those of the text tokenized at once.

    None where a token straddles a span's edge and cannot be split there.
    """
    edges = [place for span in rendered.spans for place in span if tokens.straddling(place)]
    split = splitter.split_at(rendered.text, tokens, edges) if edges else tokens
    if split is None:
        return None
    trained = np.zeros(len(split.ids), dtype=bool)
    for start, stop in rendered.spans:
        trained |= split.inside(start, stop)
    return split.ids, trained
