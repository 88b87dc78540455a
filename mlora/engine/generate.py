"""``mlora generate``: texts of the base model and of adapters, all of a batch as rows of the same microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mlora.config import AdapterConfig, DatasetConfig
from mlora.data import open_source
from mlora.engine.device import choose_device, choose_dtype, prepare
from mlora.engine.trained import BARE_SLOT, BASE, base_of, find_trained, load_stage
from mlora.models.decoder import Decoder
from mlora.models.generate import CachedDecoder
from mlora.models.spec import ModelSpec, load_spec, read_json
from mlora.models.tokenizer import load_tokenizer
from mlora.ops.random import key_for
from mlora.pipeline.stage import Banks
from mlora.tasks import Prompter
from mlora.types import ROW_MULTIPLE, Microbatch, Row, SampleRef, Segment, UserError, padded

_MICROBATCH_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; else a draw from the ``top_p`` of what is likeliest.

    A draw is a function of ``seed``, the prompt's number and the token's place, the same for every adapter.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {self.max_new_tokens}: give a positive number")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature:g}: give 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p:g}: give a share of the probability above 0 and up to 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: give a number from 0 to 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one adapter (or the base model, ``BASE``) said to one prompt; ``ended``: it came to an end by itself."""

    prompt: int  # from 0
    adapter: str
    text: str
    tokens: tuple[int, ...]
    ended: bool


@dataclass(kw_only=True)
class _Sequence:
    """One prompt under one adapter. ``new`` are the tokens that the model has not seen yet."""

    index: int
    prompt: int
    slot: int
    new: list[int]
    said: list[int] = field(default_factory=list)
    ended: bool = False


class Generator:
    """A base model with adapters, ready to answer.

    Args:
        places: folders of adapters, or of runs, whose adapters are all taken; none: the base model alone.
        base: the base model where it is not what the adapters name.
        with_base: whether the base model answers too.
        dtype, device: as in a configuration.
        batch_size: the most sequences at once; it changes no bit on a CPU.
    """

    def __init__(
        self,
        places: Sequence[str | Path],
        base: str | None = None,
        with_base: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        batch_size: int = 16,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"--batch-size {batch_size}: give a positive number")
        adapters = find_trained(places)
        folder = base_of(adapters, base)
        chosen = choose_device(device)
        prepare(chosen)
        self._spec = load_spec(folder)
        self.tokenizer = load_tokenizer(folder, self._spec.vocab_size)
        self._ends = _ends(folder, self.tokenizer)
        stage = load_stage(folder, adapters, choose_dtype(dtype, chosen), chosen)
        assert isinstance(stage.model, Decoder)
        self._decoder, self._banks, self._batch_size = stage.model, stage.banks, batch_size
        self._names = {slot: adapter.name for slot, adapter in enumerate(adapters, BARE_SLOT + 1)}
        if with_base or not adapters:
            self._names = {BARE_SLOT: BASE} | self._names

    def answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Answer]:
        """Every adapter's answer to every prompt, prompt by prompt. Raises UserError where a prompt is too long."""
        for i, prompt in enumerate(prompts):
            _check_length(i, len(prompt), sampling, self._spec)
        asked = [(i, slot) for i in range(len(prompts)) for slot in self._names]
        for first in range(0, len(asked), self._batch_size):
            sequences = [
                _Sequence(index=index, prompt=i, slot=slot, new=list(prompts[i]))
                for index, (i, slot) in enumerate(asked[first : first + self._batch_size])
            ]
            _run(self._decoder, self._banks, sequences, sampling, self._ends)
            for sequence in sequences:
                yield self._answer(sequence)

    def _answer(self, sequence: _Sequence) -> Answer:
        text = self.tokenizer.decode(sequence.said, skip_special_tokens=True)
        assert isinstance(text, str)
        return Answer(
            prompt=sequence.prompt,
            adapter=self._names[sequence.slot],
            text=text,
            tokens=tuple(sequence.said),
            ended=sequence.ended,
        )


def read_prompts(config: AdapterConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts of a data file, its answers left out."""
    (source,) = config.sources
    prompter = Prompter(source, tokenizer)
    return [prompter.encode(row) for row in open_source(source).rows()]


def text_prompt(text: str, system: str | None, plain: bool, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A user's turn in the tokenizer's chat template; ``plain``, or without a template, the text as it stands."""
    if plain or not tokenizer.chat_template:
        if system is not None:
            raise UserError("--system: only a conversation has a system's turn; leave it out, or leave --plain out")
        value: dict[str, object] = {"prompt": text}
    else:
        turns = [] if system is None else [{"role": "system", "content": system}]
        value = {"messages": [*turns, {"role": "user", "content": text}]}
    return Prompter(DatasetConfig(path=Path("--prompt")), tokenizer).encode(Row(value, "--prompt", 1))


def _run(
    decoder: Decoder, banks: Banks, sequences: Sequence[_Sequence], sampling: Sampling, ends: frozenset[int]
) -> None:
    """Go on with all sequences until each has ended or has its most tokens."""
    cached = CachedDecoder(decoder, banks, [len(s.new) + sampling.max_new_tokens for s in sequences])
    active = sorted(sequences, key=lambda sequence: sequence.slot)
    while active:
        for part in _parts(active):
            owners, news = [s.index for s in part], [len(s.new) for s in part]
            logits_SV = cached.extend(*_microbatch(part), owners, news).float().cpu()
            for sequence, logits_V in zip(part, logits_SV, strict=True):
                token = _choose(logits_V, sampling, sequence)
                sequence.ended = token in ends
                sequence.new = [token]
                sequence.said += [] if sequence.ended else [token]
        active = [s for s in active if not s.ended and len(s.said) < sampling.max_new_tokens]


def _parts(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    """The sequences in order, in parts of so many new tokens as one microbatch may have, or of one that has more."""
    parts: list[list[_Sequence]] = []
    room = 0
    for sequence in sequences:
        if not parts or len(sequence.new) > room:
            parts.append([])
            room = _MICROBATCH_ROWS
        parts[-1].append(sequence)
        room -= len(sequence.new)
    return parts


def _microbatch(sequences: Sequence[_Sequence]) -> tuple[Microbatch, torch.Tensor]:
    """The new tokens of all sequences, those of one slot side by side."""
    segments: list[Segment] = []
    start = 0
    for slot in dict.fromkeys(sequence.slot for sequence in sequences):
        own = [sequence for sequence in sequences if sequence.slot == slot]
        samples = tuple(SampleRef(0, ordinal, length) for ordinal, length in enumerate(_sample_lengths(own)))
        segments.append(
            Segment(adapter=slot, slot=slot, step=0, start=start, samples=samples, target_tokens=1, ends_step=False)
        )
        start = segments[-1].stop
    tokens = [token for sequence in sequences for token in sequence.new]
    rows = padded(len(tokens))
    return Microbatch(0, tuple(segments), rows), torch.tensor(tokens + [0] * (rows - len(tokens)))


def _sample_lengths(sequences: Sequence[_Sequence]) -> list[int]:
    """Of one adapter. Sequences of one new row each share samples: a sample's products have 16 rows at least."""
    lengths = [len(sequence.new) for sequence in sequences]
    if max(lengths) > 1:
        return lengths
    return [min(ROW_MULTIPLE, len(lengths) - first) for first in range(0, len(lengths), ROW_MULTIPLE)]


def _choose(logits_V: torch.Tensor, sampling: Sampling, sequence: _Sequence) -> int:
    """The likeliest token, or a draw: the first token, likeliest first, where the summed probability passes it."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities, tokens = torch.softmax(logits_V.double() / sampling.temperature, dim=0).sort(
        descending=True, stable=True
    )
    sums = probabilities.cumsum(0)
    kept = int((sums - probabilities < sampling.top_p).sum())  # the likeliest one always
    draw = _uniform(sampling.seed, sequence.prompt, len(sequence.said)) * float(sums[kept - 1])
    return int(tokens[min(int((sums[:kept] <= draw).sum()), kept - 1)])


def _uniform(seed: int, prompt: int, place: int) -> float:
    """In [0, 1)."""
    key = key_for(seed, "generate")
    philox = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=np.array([0, place, prompt, 0], np.uint64))
    return float(np.random.Generator(philox).random())


def _ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the model's own, as in transformers, and the one that training puts at the end."""
    file = folder / "generation_config.json"
    named = read_json(file if file.exists() else folder / "config.json").get("eos_token_id")
    ends: Sequence[object] = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*ends, tokenizer.eos_token_id) if isinstance(token, int))


def _check_length(prompt: int, length: int, sampling: Sampling, spec: ModelSpec) -> None:
    if length + sampling.max_new_tokens > spec.max_positions:
        raise UserError(
            f"prompt {prompt + 1}: its {length} tokens and {sampling.max_new_tokens} new ones are more than the "
            f"{spec.max_positions} positions of the model; shorten it, or give a smaller --max-new-tokens"
        )
