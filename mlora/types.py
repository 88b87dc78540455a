"""Plain records that travel through the engine. This module never imports torch.

Words are those of ARCHITECTURE.md: a *sample* is one tokenized sequence, a *segment* is the rows of a microbatch that
belong to one adapter, a *microbatch* is what passes through the stages as one tensor of packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

IGNORE = -100  # the label of a token that is not trained, as in transformers
# The linears of a decoder layer as they are multiplied: modules that share an input are one merged product.
MERGED_LINEARS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LINEAR_PATHS = tuple(path for paths in MERGED_LINEARS.values() for path in paths)
LINEAR_MODULES = tuple(path.split(".")[-1] for path in LINEAR_PATHS)
ROW_MULTIPLE = 16  # a microbatch is padded to a multiple of this many rows


class UserError(ValueError):
    """Something the user can mend. The text says what is wrong, where, and what to do next; one line for each thing."""


class Faults(list[str]):
    """What is wrong in several places, to be said at once: ``with faults:`` notes a UserError and goes on behind it."""

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError):
            self.append(str(error))
        return isinstance(error, UserError)

    def end(self) -> None:
        """Raises UserError with a line for each that was noted."""
        if self:
            raise UserError("\n".join(dict.fromkeys(self)))


class Note(UserWarning):
    """Something in a configuration that is taken, but in another way than it is written there."""


class Interrupted(KeyboardInterrupt):
    """A run that a signal has stopped: what had been reached is in its checkpoints."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@dataclass(frozen=True)
class Row:
    """One record of a data file, with its place for error messages (``line`` counts from 1)."""

    value: Mapping[str, object]
    file: str
    line: int

    def error(self, column: str | None, message: str) -> UserError:
        """A UserError that names file, line and (if given) column."""
        where = f"{self.file}:{self.line}" + (f", column '{column}'" if column else "")
        return UserError(f"{where}: {message}")


@dataclass(frozen=True)
class Encoded:
    """A tokenized row. ``labels[i]`` is ``input_ids[i]`` where token i is trained and ``IGNORE`` elsewhere."""

    input_ids: Sequence[int]
    labels: Sequence[int]
    truncated: bool = False

    @property
    def target_tokens(self) -> int:
        """How many tokens are predicted: trained labels after the shift (the first token has no predecessor)."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass(frozen=True)
class SampleRef:
    """A sample inside one step: ``index`` is its row in the data set, ``ordinal`` its place in the step's order."""

    index: int
    ordinal: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """The samples of one adapter's step in canonical order (longest first, then index)."""

    adapter: int
    step: int
    samples: tuple[SampleRef, ...]
    target_tokens: int


@dataclass(frozen=True)
class StepDecision:
    """How an adapter's step ends on every stage: rate and clip coefficient of the whole adapter, or skipped.

    With ``save`` every stage meets a "save" entry right behind the STEP, so before the adapter's next microbatch; with
    ``keep`` a "keep" entry right before it, since the weights that it changes are the adapter's best so far.
    """

    learning_rate: float
    coefficient: float
    skip: bool
    save: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Segment:
    """The rows ``[start, stop)`` of a microbatch that belong to one adapter, whole samples of one step in order."""

    adapter: int
    slot: int
    step: int
    start: int
    samples: tuple[SampleRef, ...]
    target_tokens: int
    ends_step: bool

    @property
    def stop(self) -> int:
        return self.start + sum(sample.length for sample in self.samples)

    def sample_rows(self) -> list[tuple[SampleRef, int, int]]:
        """Each sample with its rows ``[first, last)`` of the microbatch."""
        rows, first = [], self.start
        for sample in self.samples:
            rows.append((sample, first, first + sample.length))
            first += sample.length
        return rows


@dataclass(frozen=True)
class Microbatch:
    """One tensor's worth of packed samples. ``rows`` includes the padding at the end."""

    index: int
    segments: tuple[Segment, ...]
    rows: int

    @property
    def tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def sample_lengths(self) -> list[int]:
        """Lengths of all samples in row order, without the padding."""
        return [sample.length for segment in self.segments for sample in segment.samples]


def module_name(layer: int, path: str) -> str:
    """The global name of a module, as in transformers and PEFT: model.layers.3.self_attn.q_proj."""
    return f"model.layers.{layer}.{path}"


def linear_names(layers: int) -> list[str]:
    """The global names of all linears of so many layers, in model order."""
    return [module_name(layer, path) for layer in range(layers) for path in LINEAR_PATHS]


def padded(rows: int, multiple: int = ROW_MULTIPLE) -> int:
    """``rows`` rounded up to a multiple of ``multiple``."""
    return -(-rows // multiple) * multiple
