"""``mlora check``: reads and tokenizes all that a run would, and shows what it would train on. Trains nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from mlora.config import RunConfig
from mlora.data import TokenData
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.base import Base, open_base
from mlora.engine.evaluation import is_due
from mlora.engine.init_from import load_initial
from mlora.engine.layout import layer_counts
from mlora.engine.loggers import check_installed
from mlora.engine.memory import MemoryModel
from mlora.engine.output import check_free, check_inputs
from mlora.engine.prepare import prepare_adapter
from mlora.models.quantised import check_quantization
from mlora.models.spec import ModelSpec, linear_shapes
from mlora.types import IGNORE, UserError

_SHOWN = 1200  # characters of a sample; of a longer one the beginning and the end are shown
_CONTROLS = [code for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\t\n"]
_VISIBLE = {code: f"\\x{code:02x}" for code in _CONTROLS}  # a row's own would move the cursor of the terminal
_BINS, _BAR = 8, 40
_PROBE = "Aa éÅ ß ñ ж 中 あ 한 ע 🙂 ½ “”\t\n  x"


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found. ``adapters`` are the texts by name, ``errors`` what would keep a run from starting."""

    adapters: dict[str, str]
    errors: tuple[str, ...]


def check(config: RunConfig) -> Check:
    """Look at all adapters, also behind one that is at fault. Raises UserError for the model or the whole run."""
    check_inputs(config)
    base, cut = open_base(config), config.pipeline
    layer_counts(base.spec, cut.stages or len(cut.layers or [base.spec.num_layers]), cut.layers)
    print(f"weights    {_weights(base)}", flush=True)
    for warning in (*_missing_here(config, base), *tokenizer_warnings(base.tokenizer)):
        print(f"warning: {warning}", flush=True)
    texts, errors = {}, []
    for index, adapter in enumerate(config.adapters):
        try:
            prepared = prepare_adapter(index, adapter, base)
            load_initial(prepared, base)
            texts[adapter.name] = "\n".join(_lines(prepared, base))
        except UserError as error:
            errors.append(str(error))
    return Check(adapters=texts, errors=tuple(errors))


def _missing_here(config: RunConfig, base: Base) -> Iterator[str]:
    """What would keep a run from starting on this machine, where it may run on another."""
    try:
        check_free(config.output_dir)
        check_installed(config.report_to)
        check_quantization(base.quantization, base.dtype, base.device)
    except UserError as error:
        yield f"a run would not start here: {error}"


def _weights(base: Base) -> str:
    """What the frozen model takes on one device, with how its linears are kept. Needs no bitsandbytes."""
    layers, quantization = (base.spec.num_layers,), base.quantization
    model = MemoryModel(
        spec=base.spec, dtype=base.dtype, layers=layers, in_flight=(1,), adapters=(), quantization=quantization
    )
    name, size = str(base.dtype).removeprefix("torch."), model.need(0, 0, False).weights / 2**20
    kept = f"linears {quantization}, the rest {name}" if quantization else f"all {name}"
    return f"{size:,.2f} MiB in one stage: {kept}"


def tokenizer_warnings(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What is unusual about the tokenizer, in a line each."""
    found = []
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        found.append(
            f"the tokenizer's pad token is its end of sequence {tokenizer.eos_token!r}: harmless here, where nothing "
            "is padded, but some programs then never learn the end"
        )
    ids = tokenizer(_PROBE, add_special_tokens=False).input_ids
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    lost = sorted(set(_PROBE) - set(back))
    if lost:
        found.append(f"the tokenizer loses characters, such as {' '.join(map(repr, lost[:8]))}")
    return found


def _lines(adapter: AdapterRun, base: Base) -> Iterator[str]:
    data, stats, tokenizer = adapter.data, adapter.data.stats, base.tokenizer
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(stats.dropped.items())) or "none"
    yield f"rows       {stats.rows:,} read, {stats.kept:,} kept, {stats.truncated:,} of them cut at their end"
    yield f"dropped    {dropped}"
    yield f"tokens     {stats.tokens:,}, trained {stats.target_tokens:,} ({stats.target_tokens / stats.tokens:.1%})"
    yield from _labelled("lengths", _histogram(data.lengths))
    yield from _labelled("modules", _modules(adapter, base.spec))
    yield from _labelled("training", _training(adapter))
    yield from _labelled("warning", _warnings(adapter, tokenizer))
    for number, index in enumerate(sorted({0, len(data) // 2, len(data) - 1}), 1):
        title = f"sample {number}: {data.lengths[index]} tokens, {data.target_tokens[index]} of them trained"
        yield f"{title}; trained text stands in [[ ]]"
        yield from (f"  | {line}" for line in _marked(data, index, tokenizer).translate(_VISIBLE).split("\n"))


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"{label:<10} {line}"
        label = ""


def _histogram(lengths: np.ndarray) -> list[str]:
    """Rows by their number of tokens, in bins of equal width."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = np.bincount((lengths - low) // width)
    digits = len(f"{high + width:,}")
    return [
        f"{low + i * width:>{digits},} - {low + (i + 1) * width - 1:>{digits},}  "
        f"{'#' * -(-int(count) * _BAR // int(counts.max())):<{_BAR}} {count:,}"
        for i, count in enumerate(counts)
    ]


def _modules(adapter: AdapterRun, spec: ModelSpec) -> list[str]:
    shapes = linear_shapes(spec)
    kinds = Counter(name.split(".")[-1] for name in adapter.targets)
    ranks = [adapter.config.rank(name) for name in adapter.targets]
    parameters = sum(r * sum(shapes[name.split(".")[-1]]) for r, name in zip(ranks, adapter.targets, strict=True))
    matched = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return [
        f"{len(adapter.targets)} matched: {matched}",
        f"r {', '.join(map(str, sorted({*ranks})))}: {parameters:,} parameters are trained",
    ]


def _training(adapter: AdapterRun) -> list[str]:
    config, total = adapter.config, adapter.total_steps
    epochs = adapter.sampler.epoch(total - 1)
    lines = [f"{total:,} steps of {config.rows_per_step} rows, {epochs:.2f} epochs of {len(adapter.data):,} rows"]
    if adapter.held_out is not None:
        due = [done for done in range(1, total + 1) if is_due(config, done, total)]
        shown = ", ".join(map(str, due[:3])) + (" …" if len(due) > 4 else "") + (f", {due[-1]}" if len(due) > 3 else "")
        lines.append(f"evaluated on {len(adapter.held_out):,} held-out rows behind steps {shown}")
    return lines


def _warnings(adapter: AdapterRun, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What the data say; the lines about deployment and lengths are printed as before a run."""
    data, config = adapter.data, adapter.config
    found = []
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id:
        lost = sum(int((data.sample(i)[0] == unknown).sum()) for i in range(len(data)))
        found += [f"{lost:,} unknown tokens: the tokenizer loses characters of this data"] if lost else []
    silent = sum(_silent(*data.sample(int(i)), tokenizer) for i in range(len(data)))
    if silent:
        rows = f"{silent:,} row{'s have' if silent > 1 else ' has'}"
        found.append(f"{rows} an empty answer, which teaches the adapter to say nothing; fill it or delete the row")
    if data.stats.truncated:
        share = data.stats.truncated / data.stats.kept
        found.append(f"{share:.1%} of the rows are cut at max_length {config.max_length}; raise it, or split the rows")
    if len(data) < config.rows_per_step:
        found.append(f"a step takes {config.rows_per_step} rows and there are {len(data)}: each step is a whole epoch")
    return found


def _silent(ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether of some answer nothing but its end is trained."""
    trained = np.concatenate([labels[1:] != IGNORE, [False]])  # nothing predicts the first token
    before = np.concatenate([[False], trained[:-2]])
    alone = trained[:-1] & ~before & ~trained[1:]
    return bool(np.isin(ids[1:][alone], tokenizer.all_special_ids).any())


def _marked(data: TokenData, index: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """A row's text, special tokens and all; each unbroken run of trained tokens in [[ ]]."""
    ids, labels = (part.tolist() for part in data.sample(index))  # nothing predicts the first one
    pieces: list[tuple[bool, list[int]]] = []
    for token, label in zip(ids, [IGNORE, *labels[1:]], strict=True):
        trained = label != IGNORE
        if not pieces or pieces[-1][0] != trained:
            pieces.append((trained, []))
        pieces[-1][1].append(token)
    texts = ((trained, tokenizer.decode(run, clean_up_tokenization_spaces=False)) for trained, run in pieces)
    whole = "".join(f"[[{text}]]" if trained else str(text) for trained, text in texts)
    if len(whole) <= _SHOWN:
        return whole
    return f"{whole[: _SHOWN // 2]}\n… {len(whole) - _SHOWN:,} characters …\n{whole[-_SHOWN // 2 :]}"
