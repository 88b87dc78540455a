"""``mlora generate``: texts of the base model and of adapters, all of a batch as rows of the same microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mlora.config import AdapterConfig, DatasetConfig
from mlora.data import open_source
from mlora.engine.ranks import run_stages
from mlora.engine.requests import Requests
from mlora.engine.use import Models, Use
from mlora.engine.worker import Seat
from mlora.models.decoder import Decoder
from mlora.models.generate import CachedDecoder
from mlora.models.spec import ModelSpec, load_spec, read_json
from mlora.models.tokenizer import load_tokenizer
from mlora.ops.random import key_for, philox
from mlora.pipeline.transport.base import Direction, Spec
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
            raise UserError(f"max_new_tokens {self.max_new_tokens}: give a positive number")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature {self.temperature:g}: give 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p:g}: give a share of the probability above 0 and up to 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed {self.seed}: give a number from 0 to 2^63 - 1")


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


Ask = Callable[[PreTrainedTokenizerBase], Sequence[Sequence[int]]]  # the prompts' tokens


@dataclass(frozen=True, kw_only=True)
class _Work(Use):
    """What every stage must know: all of them go through the same sequences, token by token."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    batch_size: int
    ends: frozenset[int]

    def batches(self) -> Iterator[list[_Sequence]]:
        """Every adapter under every prompt, prompt by prompt."""
        asked = [(i, slot) for i in range(len(self.prompts)) for slot in self.names]
        for first in range(0, len(asked), self.batch_size):
            yield [
                _Sequence(index=index, prompt=i, slot=slot, new=list(self.prompts[i]))
                for index, (i, slot) in enumerate(asked[first : first + self.batch_size])
            ]


def generate(
    models: Models,
    ask: Ask,
    sampling: Sampling,
    batch_size: int = 16,
    on_answer: Callable[[Answer], object] = lambda answer: None,
) -> list[Answer]:
    """Every adapter's answer to every prompt, prompt by prompt. Raises UserError where a prompt is too long.

    Args:
        ask: gives the prompts, called on the first rank alone.
        batch_size: the most sequences at once; it changes no bit on a CPU.
        on_answer: called with each answer on the first rank, as soon as it is there.
    """
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size}: give a positive number")
    found: list[Answer] = run_stages(lambda world: _Lead(models, world, ask, sampling, batch_size, on_answer), _follow)
    return found


class _Lead:
    """Stage 0, which has the tokenizer."""

    def __init__(
        self,
        models: Models,
        world: int,
        ask: Ask,
        sampling: Sampling,
        batch_size: int,
        on_answer: Callable[[Answer], object],
    ) -> None:
        use = models.use(world)
        spec = load_spec(use.folder)
        self._tokenizer, self._on_answer = load_tokenizer(use.folder, spec.vocab_size), on_answer
        prompts = ask(self._tokenizer)
        for i, prompt in enumerate(prompts):
            _check_length(i, len(prompt), sampling, spec)
        ends = _ends(use.folder, self._tokenizer)
        self.job = _Work(**vars(use), prompts=prompts, sampling=sampling, batch_size=batch_size, ends=ends)

    def run(self, seat: Seat, requests: Requests, ask: Callable[[str], None]) -> list[Answer]:
        answers = []
        for sequence in _sequences(self.job, seat, requests):
            answers.append(self._answer(sequence))
            self._on_answer(answers[-1])
        return answers

    def _answer(self, sequence: _Sequence) -> Answer:
        text = self._tokenizer.decode(sequence.said, skip_special_tokens=True)
        assert isinstance(text, str)
        return Answer(
            prompt=sequence.prompt,
            adapter=self.job.names[sequence.slot],
            text=text,
            tokens=tuple(sequence.said),
            ended=sequence.ended,
        )


def _follow(job: _Work, seat: Seat) -> None:
    for _ in _sequences(job, seat, Requests()):
        pass


def _sequences(job: _Work, seat: Seat, requests: Requests) -> Iterator[_Sequence]:
    """All of them, each batch when it has ended."""
    slice_ = _Slice(job, seat)
    for batch in job.batches():
        slice_.start(batch)
        active = sorted(batch, key=lambda sequence: sequence.slot)
        while active:
            requests.check()
            for part in _parts(active):
                for sequence, token in zip(part, slice_.tokens(part), strict=True):
                    sequence.ended = token in job.ends
                    sequence.new = [token]
                    sequence.said += [] if sequence.ended else [token]
            active = [s for s in active if not s.ended and len(s.said) < job.sampling.max_new_tokens]
        yield from batch


class _Slice:
    """One stage's layers. Rows go down from stage to stage, the last one chooses the tokens, and these go up again."""

    def __init__(self, job: _Work, seat: Seat) -> None:
        stage = job.open_stage(seat)
        assert isinstance(stage.model, Decoder)
        self._decoder, self._banks, self._sampling = stage.model, stage.banks, job.sampling
        self._transport = seat.transport

    def start(self, batch: Sequence[_Sequence]) -> None:
        """Forget the sequences before."""
        room = [len(sequence.new) + self._sampling.max_new_tokens for sequence in batch]
        self._cached = CachedDecoder(self._decoder, self._banks, room)

    def tokens(self, part: Sequence[_Sequence]) -> list[int]:
        """The next token of each sequence."""
        microbatch, input_ids_T = _microbatch(part)
        x_TD, decoder = None, self._decoder
        if not decoder.is_first:
            x_TD = self._receive(Direction.FORWARD, Spec((microbatch.rows, decoder.width), decoder.dtype))
        out = self._cached.extend(microbatch, input_ids_T, [s.index for s in part], [len(s.new) for s in part], x_TD)
        if decoder.is_last:
            logits_SV = out.float().cpu()
            tokens = [_choose(logits_V, self._sampling, s) for logits_V, s in zip(logits_SV, part, strict=True)]
        else:
            self._send(Direction.FORWARD, out)
            tokens = self._receive(Direction.BACKWARD, Spec((len(part),), torch.int64)).tolist()
        if not decoder.is_first:
            self._send(Direction.BACKWARD, torch.tensor(tokens, device=decoder.device))
        return tokens

    def _send(self, direction: Direction, tensor: torch.Tensor) -> None:
        assert self._transport is not None
        self._transport.send(direction, [tensor])

    def _receive(self, direction: Direction, spec: Spec) -> torch.Tensor:
        assert self._transport is not None
        return self._transport.receive(direction, [spec]).wait()[0]


def read_prompts(config: AdapterConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts of a data file, its answers left out."""
    (source,) = config.sources
    prompter = Prompter(source, tokenizer)
    return [prompter.encode(row) for row in open_source(source).rows()]


def text_prompt(text: str, system: str | None, plain: bool, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A user's turn in the tokenizer's chat template; ``plain``, or without a template, the text as it stands."""
    if plain or not tokenizer.chat_template:
        if system is not None:
            raise UserError("system: only a conversation has a system's turn; leave it out, or leave plain out")
        value: dict[str, object] = {"prompt": text}
    else:
        turns = [] if system is None else [{"role": "system", "content": system}]
        value = {"messages": [*turns, {"role": "user", "content": text}]}
    return Prompter(DatasetConfig(path=Path("prompt")), tokenizer).encode(Row(value, "prompt", 1))


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
    generator = philox(key_for(sampling.seed, "generate"), 0, sequence.prompt, len(sequence.said))
    draw = float(np.random.Generator(generator).random()) * float(sums[kept - 1])
    return int(tokens[min(int((sums[:kept] <= draw).sum()), kept - 1)])


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
            f"{spec.max_positions} positions of the model; shorten it, or choose a smaller max_new_tokens"
        )
