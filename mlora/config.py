"""The configuration of a run: YAML with Hugging Face's and PEFT's names, checked key by key.

Every value is validated when it is read; an error names the key, its place in the file and what to write instead.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from mlora import names
from mlora.files import readable
from mlora.types import LINEAR_MODULES, Faults, UserError

_HEAD_MODULES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
_INITS = (True, False, "gaussian", "orthogonal")

# Keys of PEFT that the engine knows and does not do: the value that changes nothing, and why any other is refused.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_dora": ((False, None), "DoRA normalises the merged weight, which a shared frozen product cannot do"),
    "use_qalora": ((False, None), "QALoRA pools the input of each adapter, which a shared product cannot do"),
    "use_bdlora": ((False, None), "block-diagonal A or B are not stored in blocks here"),
    "bias": (("none", None), "biases belong to the frozen model that all adapters share"),
    "modules_to_save": ((None, []), "full copies of modules would not be shared between adapters"),
    "trainable_token_indices": ((None, []), "the embedding is frozen and shared"),
    "layer_replication": ((None, []), "the frozen model is shared as it stands"),
    "target_parameters": ((None, []), "only linear modules carry adapters"),
    "fan_in_fan_out": ((False, None), "Llama-family models have no Conv1D layers"),
    "lora_bias": ((False, None), "PEFT cannot merge it and vLLM refuses it"),
    "loftq_config": ((None, {}), "LoftQ changes the frozen weights"),
    "alora_invocation_tokens": ((None, []), "an activated LoRA acts on a part of each sequence only"),
    "velora_config": ((None,), "VeLoRA's backward is another one"),
    "kasa_config": ((None,), "KaSA changes the frozen weights"),
    "monteclora_config": ((None,), "MonteCLoRA draws the adapter anew for each step"),
    "arrow_config": ((None,), "Arrow mixes adapters token by token"),
    "eva_config": ((None,), "EVA needs a pass over the data before training"),
    "corda_config": ((None,), "CorDA moves part of the frozen weight into the adapter"),
    "lora_ga_config": ((None,), "LoRA-GA moves part of the frozen weight into the adapter"),
    "megatron_config": ((None,), "Megatron's parallel linears are not used here"),
    "layers_pattern": ((None, [], "layers", ["layers"]), "the layers of Llama-family models are called layers"),
    "task_type": (("CAUSAL_LM", None), "only causal language models are trained"),
    "peft_type": (("LORA", None), "only LoRA adapters are trained"),
}
GRID = {"r": "r", "learning_rate": "lr", "lora_alpha": "alpha"}  # what a grid is over, and how a name tells it
ROW_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow")  # of files that hold rows and never a configuration
_REFUSED_INITS = {
    "pissa": "PiSSA moves part of the frozen weight into the adapter",
    "olora": "OLoRA moves part of the frozen weight into the adapter",
    **{init: REFUSED[f"{init}_config"][1] for init in ("corda", "eva", "loftq", "lora_ga")},
}


def _check_positive(config: object, place: str, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value not in (None, "auto") and value < 1:
            raise UserError(f"{place}{key}: {value} is not a positive number")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where rows are and how they become text: a file, or a data set on the Hugging Face hub."""

    path: Path | None = None
    format: Literal[
        "auto", "text", "prompt_completion", "question_answer", "alpaca", "dolly", "messages", "sharegpt"
    ] = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # our column -> the file's column
    chat_template: str | None = None  # a file, or "none" for the plain format; default: the tokenizer's own
    train_on: Literal["completions", "all"] = "completions"
    hub: str | None = None  # in place of path: OWNER/NAME
    subset: str | None = None  # of the data set on the hub
    split: str | None = None  # default: train
    revision: str | None = None  # branch, tag or commit; default: main
    max_samples: int | None = None  # the first so many rows, dropped ones included
    weight: float | None = None  # share of an epoch's rows, if the adapter has several data sets

    @property
    def label(self) -> str:
        """What the rows are called in a log: the file's name or the hub id."""
        return self.path.name if self.path else str(self.hub)

    def plain(self) -> dict[str, Any]:
        """All keys as plain data, with whole paths: whoever reads them may have another working folder."""
        tree = dataclasses.asdict(self) | {"columns": dict(self.columns)}
        tree["path"] = str(self.path.resolve()) if self.path else None
        if self.chat_template not in (None, "none"):
            tree["chat_template"] = str(Path(self.chat_template).resolve())
        return tree

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub is None):
            raise UserError("dataset: give either path, a file, or hub, a data set's id")
        for key in ("subset", "split", "revision"):
            if self.path is not None and getattr(self, key) is not None:
                raise UserError(f"dataset.{key}: belongs to a data set on the hub, but {self.path} is a file")
        if self.hub is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.hub):
            raise UserError(f"dataset.hub: {self.hub!r} is no id such as tatsu-lab/alpaca; a file is given as path")
        _check_positive(self, "dataset.", "max_samples")
        if self.weight is not None and not 1e-6 <= self.weight <= 1e6:
            raise UserError(f"dataset.weight: {self.weight:g} is outside 1e-06 … 1e+06")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """One LoRA: its data and all its hyper-parameters. Names and meaning are PEFT's and Hugging Face's."""

    name: str
    dataset: DatasetConfig | tuple[DatasetConfig, ...]
    r: int = 16
    lora_alpha: float = 32
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # another r for modules, by pattern as in PEFT
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # and another lora_alpha
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: int | tuple[int, ...] | None = None
    use_rslora: bool = False
    init_lora_weights: bool | str = True
    init_from: Path | None = None  # begin with the matrices of this adapter in PEFT's form
    learning_rate: float = 2e-4
    loraplus_lr_ratio: float = 1.0  # LoRA+: B's rate is so many times learning_rate
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "cosine"
    warmup_steps: float = 0.03  # below 1: a share of all steps, as in transformers 5
    num_train_epochs: float = 3
    max_steps: int = -1  # above 0: this many steps, whatever num_train_epochs says
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0  # 0 switches clipping off
    optim: Literal["adamw_torch", "sgd"] = "adamw_torch"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    seed: int = 42
    max_length: int = 1024
    logging_steps: int = 1
    max_nonfinite_steps: int = 3  # this many skipped steps in a row end the adapter as failed
    eval_dataset: DatasetConfig | None = None  # rows of another file to evaluate on
    val_size: float = 0.0  # or so many rows of the dataset, below 1 a share of them, held out of training
    eval_steps: float | tuple[float, ...] = 0.1  # every n steps, below 1 a share of all; a list: at these shares
    load_best_model_at_end: bool = False  # export the weights with the lowest eval_loss, not the last ones
    early_stopping_patience: int | None = None  # end after so many evaluations without a lower eval_loss
    early_stopping_threshold: float = 0.0  # lower by more than this

    def plain(self) -> dict[str, Any]:
        """All keys as plain data, as they may stand in a configuration file."""
        tree = dataclasses.asdict(self)
        sources = [source.plain() for source in self.sources]
        tree["dataset"] = sources if isinstance(self.dataset, tuple) else sources[0]
        tree["eval_dataset"] = self.eval_dataset.plain() if self.eval_dataset else None
        tree["init_from"] = None if self.init_from is None else str(self.init_from)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in tree.items()}

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The data sets, one or several."""
        return self.dataset if isinstance(self.dataset, tuple) else (self.dataset,)

    @property
    def rows_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def rank(self, module: str) -> int:
        """Of a module, by its global name."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """How much B·A of a module counts."""
        r, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(r) if self.use_rslora else r)

    @property
    def largest_rank(self) -> int:
        return max([self.r, *self.rank_pattern.values()])

    def __post_init__(self) -> None:
        place = f"adapters[{self.name}]"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name):
            raise UserError(f"{place}.name: {self.name!r} is also a folder's name: up to 100 letters, digits, . _ -")
        for key, low, high in _RANGES:
            value = getattr(self, key)
            if not (low <= value <= high):
                raise UserError(f"{place}.{key}: {value} is outside {low} … {high}")
        if self.lora_alpha == 0:
            raise UserError(f"{place}.lora_alpha: 0 would make the adapter do nothing; write a positive number")
        _check_pattern(self.rank_pattern, 4096, f"{place}.rank_pattern")
        _check_pattern(self.alpha_pattern, 1e9, f"{place}.alpha_pattern")
        if self.max_steps == 0:
            raise UserError(f"{place}.max_steps: 0 trains nothing; write -1 to count in num_train_epochs instead")
        for r in (self.r, *self.rank_pattern.values()):
            _check_init(self.init_lora_weights, r, place)
        _check_targets(self, place)
        _check_weights(self.sources, place)
        _check_evaluation(self, place)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the whole name or its last parts, as in PEFT."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("r", 1, 4096),
    ("lora_alpha", 0, 1e9),
    ("lora_dropout", 0.0, 0.99),
    ("learning_rate", 0.0, 1e9),
    ("loraplus_lr_ratio", 1e-6, 1e6),
    ("warmup_steps", 0, 1e12),
    ("num_train_epochs", 1e-9, 1e9),
    ("max_steps", -1, 1e12),
    ("per_device_train_batch_size", 1, 1e9),
    ("gradient_accumulation_steps", 1, 1e9),
    ("max_grad_norm", 0.0, math.inf),
    ("weight_decay", 0.0, 1e9),
    ("adam_beta1", 0.0, 0.999999999),
    ("adam_beta2", 0.0, 0.999999999),
    ("adam_epsilon", 1e-30, 1.0),
    ("seed", 0, 2**63 - 1),
    ("max_length", 2, 1e9),
    ("logging_steps", 1, 1e12),
    ("max_nonfinite_steps", 1, 1e9),
    ("val_size", 0.0, 1e12),
    ("early_stopping_threshold", 0.0, 1e9),
)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is cut over processes. World size = stages × replicas; one of the two may be left out."""

    stages: int | None = None
    replicas: int | None = None
    layers: tuple[int, ...] | None = None  # layers of each stage; default: cut by cost
    in_flight: int | None = None  # 1: S - s microbatches on stage s (1F1B); 2: twice that; default: by the adapters
    transport: Literal["auto", "local", "gloo", "nccl"] = "auto"  # local: the stages are threads of one process

    def __post_init__(self) -> None:
        _check_positive(self, "pipeline.", "stages", "replicas")
        if self.in_flight not in (None, 1, 2):
            raise UserError(f"pipeline.in_flight: {self.in_flight} is not 1 or 2")

    def shape(self, world: int) -> tuple[int, int]:
        """(stages, replicas) for so many processes. Raises UserError where they do not fit."""
        if self.transport == "local":
            if world > 1:
                raise UserError(
                    f"pipeline.transport: local runs the stages in one process, but {world} were started; write auto"
                )
            if self.replicas not in (None, 1):
                raise UserError("pipeline.replicas: a local pipeline is one replica; start processes with torchrun")
            return self.stages or 1, 1
        stages = self.stages or max(1, world // (self.replicas or 1))
        replicas = self.replicas or max(1, world // stages)
        if stages * replicas != world:
            raise UserError(
                f"pipeline: stages {stages} × replicas {replicas} need {stages * replicas} processes, but there "
                f"{'is' if world == 1 else 'are'} {world}; start with torchrun --nproc-per-node, or change the numbers"
            )
        return stages, replicas


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run: one frozen model and the adapters trained on it."""

    base_model: str
    adapters: tuple[AdapterConfig, ...]
    output_dir: Path = Path("runs/default")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"  # of the frozen model
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantization: Literal["nf4", "fp4", "int8", "fp8"] | None = None  # of the frozen linears; default: as stored
    double_quantization: bool | None = None  # of nf4's and fp4's scales too; default: as they are stored, else false
    quantization_skip_modules: tuple[str, ...] = ()  # linears that are not quantised, by names or parts of them
    microbatch_tokens: int | Literal["auto"] = "auto"  # the most rows of one microbatch; a longer sample goes alone
    max_active: int = 64  # adapters trained at once; the others wait
    pipeline: PipelineConfig = PipelineConfig()
    recompute: bool | Literal["auto"] = "auto"  # each layer's activations again in backward: slower, far less memory
    save_steps: int | None = None  # a checkpoint of an adapter after so many of its steps
    save_seconds: float | None = None  # and after so much time; default without save_steps: by what a write takes
    save_total_limit: int = 2  # checkpoints of an adapter that are kept
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()  # where else the numbers go

    def __post_init__(self) -> None:
        if not self.adapters:
            raise UserError("adapters: the list is empty; give at least one adapter with a name and a dataset")
        _check_positive(self, "", "microbatch_tokens", "max_active", "save_steps", "save_total_limit")
        if self.quantization in ("int8", "fp8") and self.double_quantization:
            raise UserError(
                f"double_quantization: {self.quantization} has one scale a row, which is not quantised; leave it out"
            )
        if self.save_seconds is not None and not 0 < self.save_seconds < math.inf:
            raise UserError(f"save_seconds: {self.save_seconds:g} is not a positive number of seconds")
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if [other.lower() for other in names].count(name.lower()) > 1:
                raise UserError(f"adapters: two adapters are called {name!r}; their folders would be the same")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file. ``overrides`` are ``a.b=c`` strings, applied before checking; ``adapters.NAME.key`` works too.

    Raises UserError naming file and place. Relative paths count from the file's folder.
    """
    path = Path(path)
    return parse_config(apply_overrides(_tree(path), overrides), base=path.parent)


def _tree(path: Path) -> dict[str, Any]:
    init = f"mlora init {path} writes a configuration for it"
    if path.suffix.lower() in ROW_SUFFIXES:
        raise UserError(f"{path}: is a file of data and not a configuration; {init}")
    with readable(path):
        raw = path.read_bytes()
    try:
        tree = _yaml(raw.decode())
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        data = f"; if these are data: {init}" if isinstance(tree, list) else ""
        raise UserError(f"{path}: expected keys such as base_model and adapters, found {_kind(tree)}{data}")
    return tree


def load_adapters(path: str | Path) -> tuple[AdapterConfig, ...]:
    """The adapters of a YAML file that has ``adapters``, and ``defaults`` if need be, and nothing else."""
    path = Path(path)
    tree = _tree(path)
    extra = sorted(tree.keys() - {"adapters", "defaults"})
    if extra:
        raise UserError(f"{path}: {extra[0]}: only adapters and defaults can be added to a run")
    return parse_config(tree | {"base_model": "."}, base=path.parent).adapters


def data_config(path: str | Path, overrides: Sequence[str] = ()) -> AdapterConfig:
    """How a data file is read by itself. ``overrides`` are ``a.b=c`` strings of an adapter's keys: dataset.format=…"""
    entry = {"name": "data", "dataset": {"path": str(path)}}
    tree = {"base_model": ".", "adapters": [entry]}
    return parse_config(
        apply_overrides(tree, [f"adapters.data.{override}" for override in _listed(overrides)])
    ).adapters[0]


def _listed(overrides: Sequence[str]) -> Sequence[str]:
    """Raises UserError for one text, which is a sequence of letters too, and for a mapping."""
    if isinstance(overrides, str | Mapping):
        raise UserError("overrides: expected a list of texts, such as ['defaults.learning_rate=1e-4']")
    return overrides


class _UniqueKeys(yaml.SafeLoader):
    """A key that stands twice in a block is a mistake; YAML itself would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key!r} stands twice in the block that begins in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> Any:
    """The document as plain data. Raises ValueError for whatever is wrong with it."""
    try:
        return yaml.load(text, _UniqueKeys)  # a SafeLoader: builds plain data only
    except (yaml.YAMLError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from None


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of plain configuration data with ``a.b=c`` strings applied; ``adapters.NAME.key`` works too."""
    changed = copy.deepcopy(dict(tree))
    for override in _listed(overrides):
        _override(changed, override)
    return changed


def parse_config(tree: Mapping[str, Any], base: str | Path = ".") -> RunConfig:
    """Build a RunConfig from plain data, a mapping as in a YAML file.

    ``base`` is the folder that relative paths count from. Raises UserError naming the place of what is wrong.
    """
    if not isinstance(tree, Mapping):
        raise UserError(f"expected keys such as base_model and adapters, found {_kind(tree)}")
    base, faults, tree = Path(base), Faults(), dict(tree)
    defaults = _defaults(tree.pop("defaults", None) or {}, faults)
    adapters = _adapters(tree.pop("adapters", None), defaults, base, faults)
    tree = _keys(RunConfig, tree, "", faults)
    values: dict[str, Any] = {}
    with faults:
        values["pipeline"] = _pipeline(tree.pop("pipeline", None) or {})
    if "base_model" not in tree:
        faults.append("base_model: missing; write a local folder or a hub id such as HuggingFaceTB/SmolLM2-135M")
    for key, value in tree.items():
        with faults:
            values[key] = _convert(RunConfig, key, value, key)
    faults.end()
    values["output_dir"] = base / values.get("output_dir", RunConfig.output_dir)
    local = _as_path(values["base_model"])
    if local is _NO:
        raise UserError("base_model: neither a path nor a hub id")
    if (base / local).is_dir():
        values["base_model"] = str((base / local).resolve())
    return RunConfig(adapters=tuple(adapters), **values)


def _defaults(tree: object, faults: Faults) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise UserError(f"defaults: expected a block of adapter keys, found {_kind(tree)}")
    defaults = _keys(AdapterConfig, tree, "defaults", faults, also=("grid",))
    for key in ("name", "dataset"):
        if defaults.pop(key, None) is not None:
            faults.append(f"defaults.{key}: every adapter has its own {key}; write it beside the others in adapters")
    return defaults


def _adapters(entries: object, defaults: Mapping[str, Any], base: Path, faults: Faults) -> list[AdapterConfig]:
    if entries is None:
        faults.append(
            "adapters: missing; write a block for each adapter, such as adapters: [{name: mine, dataset: data.jsonl}], "
            "with its keys there or under defaults; mlora init writes such a file"
        )
        return []
    if not isinstance(entries, list):
        raise UserError(f"adapters: expected a list of adapters, found {_kind(entries)}")
    return [made for i, entry in enumerate(entries) for made in _block(entry, defaults, i, base, faults)]


def _pipeline(tree: object) -> PipelineConfig:
    if not isinstance(tree, Mapping):
        raise UserError(f"pipeline: expected a block such as {{stages: 2}}, found {_kind(tree)}")
    faults = Faults()
    tree = _known(PipelineConfig, tree, "pipeline", faults)
    faults.end()
    return PipelineConfig(**{k: _convert(PipelineConfig, k, value, f"pipeline.{k}") for k, value in tree.items()})


def _block(
    entry: object, defaults: Mapping[str, Any], index: int, base: Path, faults: Faults
) -> Iterator[AdapterConfig]:
    """Those of one block: as many as its grid has points. None are made where anything is at fault."""
    if not isinstance(entry, Mapping):
        faults.append(f"adapters[{index}]: expected a block with name and dataset, found {_kind(entry)}")
        return
    place = f"adapters[{entry.get('name') or index}]"
    entry = _keys(AdapterConfig, entry, place, faults, also=("grid",))
    faults += [f"adapters[{index}].{key}: missing" for key in ("name", "dataset") if entry.get(key) is None]
    with faults:
        for point in _grid(entry, defaults, place, faults):
            values = _values(point, defaults, place, base, faults)
            if not faults:
                yield AdapterConfig(**values)


def _grid(entry: Mapping[str, Any], defaults: Mapping[str, Any], place: str, faults: Faults) -> list[dict[str, Any]]:
    """The entry once for each combination of its grid's values, which its name then tells; itself if it has none."""
    grid = entry.get("grid", defaults.get("grid")) or {}
    own = {key: value for key, value in entry.items() if key != "grid"}
    if not isinstance(grid, Mapping):
        raise UserError(f"{place}.grid: expected lists of values such as {{r: [8, 16]}}, found {_kind(grid)}")
    grid = names.canonical(grid, names.ADAPTER, f"{place}.grid", {}, faults)
    for key, values in grid.items():
        if key not in GRID:
            raise UserError(f"{place}.grid.{key}: a grid is over {', '.join(GRID)}")
        if not isinstance(values, list) or not values:
            found = "an empty one" if values == [] else _kind(values)
            raise UserError(f"{place}.grid.{key}: expected a list of values, found {found}")
        if key in own:
            raise UserError(f"{place}.grid.{key}: {place}.{key} is given too; keep one of them")
    if not grid:
        return [own]
    made = []
    for values in itertools.product(*grid.values()):
        pairs = zip(grid, values, strict=True)
        point = {key: _convert(AdapterConfig, key, value, f"{place}.grid.{key}") for key, value in pairs}
        name = "-".join([str(entry.get("name")), *(GRID[key] + _short(x) for key, x in point.items())])
        made.append(own | point | {"name": name})
    return made


def _short(value: float) -> str:
    """As it stands in a name: 16, 0.5, 1e-4."""
    mantissa, exponent = f"{value:e}".split("e")
    return f"{value:g}" if 0.01 <= value < 1e6 or value == 0 else f"{float(mantissa):g}e{int(exponent)}"


def _values(
    entry: Mapping[str, Any], defaults: Mapping[str, Any], place: str, base: Path, faults: Faults
) -> dict[str, Any]:
    """What an AdapterConfig is made of."""
    values: dict[str, Any] = {}
    for source, where in ((defaults, "defaults"), (entry, place)):
        for key, value in source.items():
            with faults:
                if key in ("dataset", "eval_dataset"):
                    make = _dataset if key == "dataset" else _source
                    values[key] = None if value is None else make(value, f"{where}.{key}", base)
                elif key != "grid":
                    values[key] = _convert(AdapterConfig, key, value, f"{where}.{key}")
    if values.get("lr_scheduler_type") == "constant" and values.get("warmup_steps", 0) > 0:
        faults.append(f"{place}.warmup_steps: constant has no warm-up; write lr_scheduler_type: constant_with_warmup")
    if values.get("init_from") is not None:
        values["init_from"] = (base / values["init_from"]).resolve()
    return values


def _dataset(entry: object, place: str, base: Path) -> DatasetConfig | tuple[DatasetConfig, ...]:
    if not isinstance(entry, list):
        return _source(entry, place, base)
    if not entry:
        raise UserError(f"{place}: the list is empty; give a file's path or several")
    return tuple(_source(item, f"{place}[{i}]", base) for i, item in enumerate(entry))


def _source(entry: object, place: str, base: Path) -> DatasetConfig:
    tree, faults = {"path": entry} if isinstance(entry, str) else entry, Faults()
    if isinstance(tree, Mapping) and any(names.DATASET.get(key, key) in ("path", "hub") for key in tree):
        tree = _keys(DatasetConfig, tree, place, faults)
        faults.end()
    if not isinstance(tree, Mapping) or (tree.get("path") is None and tree.get("hub") is None):
        rows = "; rows themselves are read from a file" if isinstance(tree, Mapping) else ""
        raise UserError(f"{place}: expected a file's path or a block with path or hub, found {_kind(entry)}{rows}")
    if isinstance(tree.get("path"), list):
        raise UserError(f"{place}.path: several files are a list under dataset: [first.jsonl, second.jsonl]")
    values = {key: _convert(DatasetConfig, key, value, f"{place}.{key}") for key, value in tree.items()}
    if values.get("path") is not None:
        values["path"] = base / values["path"]
    if values.get("chat_template") not in (None, "none"):
        values["chat_template"] = str(base / values["chat_template"])
    try:
        return DatasetConfig(**values)
    except UserError as error:
        raise UserError(place + str(error).removeprefix("dataset")) from None


def _keys(cls: type, tree: Mapping[Any, Any], place: str, faults: Faults, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of a block under our names. What cannot be one of ``cls`` or ``also`` is left out and goes to faults."""
    aliases, others = {
        AdapterConfig: (names.ADAPTER, ((DatasetConfig, names.DATASET), (RunConfig, names.RUN | names.DTYPES))),
        DatasetConfig: (names.DATASET, ((AdapterConfig, names.ADAPTER),)),
        RunConfig: (names.RUN, ((DatasetConfig, names.DATASET), (AdapterConfig, names.ADAPTER))),
    }[cls]
    elsewhere = {key: words for other in others for key, words in _elsewhere(cls, *other).items()}
    plain = names.canonical(tree, aliases, place, elsewhere, faults)
    if cls is AdapterConfig:
        plain = _without_refused(plain, place, faults)
    return _known(cls, plain, place, faults, also)


def _elsewhere(cls: type, other: type, aliases: Mapping[str, str]) -> dict[str, str]:
    """The keys of ``other``, which do not belong into a block of ``cls``, with the words that say where they belong."""
    own = {f.name for f in dataclasses.fields(cls)} | {"name", "defaults", "adapters"}
    keys = {f.name: f.name for f in dataclasses.fields(other)} | dict(aliases)
    return {
        key: _WHERE[name if name in _WHERE else other.__name__].format(name)
        for key, name in keys.items()
        if key not in own
    }


_WHERE = {
    "RunConfig": "belongs to the run: write {} at the top of the file",
    "AdapterConfig": "belongs to an adapter: write {} under defaults, or beside the adapter's name",
    "DatasetConfig": "belongs to the data: write {} inside dataset",
    "dataset": "belongs to an adapter: write {} beside the adapter's name",
}


def _check_weights(sources: Sequence[DatasetConfig], place: str) -> None:
    weights = [source.weight for source in sources]
    if weights != [None] and None in weights and any(weights):
        raise UserError(f"{place}.dataset[{weights.index(None)}].weight: missing; give all its data sets one, or none")
    if len(weights) == 1 and weights != [None]:
        raise UserError(f"{place}.dataset.weight: a share of one data set means nothing; leave it out")


def _known(
    cls: type, tree: Mapping[Any, Any], place: str, faults: Faults, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    known = sorted({f.name for f in dataclasses.fields(cls)} | set(also))
    dot = f"{place}." if place else ""
    unlike = []
    for key in [key for key in tree if key not in known]:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
        if near:
            faults.append(f"{dot}{key}: unknown key; did you mean {near[0]!r}?")
        else:
            unlike.append(str(key))
    if unlike:
        faults.append(f"{dot}{', '.join(unlike)}: unknown key{'s' * (len(unlike) > 1)}; known keys: {', '.join(known)}")
    return {key: value for key, value in tree.items() if key in known}


def _without_refused(tree: Mapping[str, Any], place: str, faults: Faults) -> dict[str, Any]:
    """The tree without keys of PEFT that are not done here. One that asks for more than what is so goes to faults."""
    for key in [key for key in tree if key in REFUSED]:
        if tree[key] not in REFUSED[key][0]:
            faults.append(f"{place}.{key}: {tree[key]!r} is not supported: {REFUSED[key][1]}; leave it out")
    return {key: value for key, value in tree.items() if key not in REFUSED}


def _check_init(value: object, r: int, place: str) -> None:
    name = str(value).lower()
    for refused, reason in _REFUSED_INITS.items():
        if name.startswith(refused):
            raise UserError(f"{place}.init_lora_weights: {value!r} is not supported: {reason}; write true")
    if value not in _INITS:
        raise UserError(f"{place}.init_lora_weights: {value!r} is not one of true, false, gaussian, orthogonal")
    if value == "orthogonal" and r % 2:
        raise UserError(f"{place}.r: {r} is odd, and orthogonal shares the ranks evenly between A and B; write {r + 1}")


def _check_pattern(patterns: Mapping[str, float], high: float, place: str) -> None:
    for pattern, value in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{place}: {pattern!r} is no valid regular expression: {error}") from None
        if not 0 < value <= high:
            raise UserError(f"{place}: {pattern}: {value:g} is not a positive number up to {high:g}")


def _check_targets(adapter: AdapterConfig, place: str) -> None:
    targets = adapter.target_modules
    for target in (targets,) if isinstance(targets, str) else targets:
        if target.split(".")[-1] in _HEAD_MODULES:
            raise UserError(
                f"{place}.target_modules: {target!r} is not supported: embedding and head are frozen and shared by all "
                f"adapters (and tied to each other in many models); choose from {', '.join(LINEAR_MODULES)}"
            )
    if not targets:
        raise UserError(f"{place}.target_modules: empty; write all-linear or some of {', '.join(LINEAR_MODULES)}")
    if isinstance(targets, str) and targets != "all-linear" and adapter.layers_to_transform is not None:
        raise UserError(f"{place}.layers_to_transform: works with a list of target_modules only, as in PEFT")


def _check_evaluation(adapter: AdapterConfig, place: str) -> None:
    if adapter.eval_dataset is not None and adapter.val_size:
        raise UserError(f"{place}: eval_dataset and val_size both name rows to evaluate on; leave one out")
    if adapter.val_size >= 1 and adapter.val_size % 1:
        raise UserError(f"{place}.val_size: {adapter.val_size:g} is neither a share below 1 nor a number of rows")
    steps = adapter.eval_steps
    if isinstance(steps, tuple):
        if not steps or not all(0 < share <= 1 for share in steps):
            raise UserError(f"{place}.eval_steps: a list holds shares of all steps, such as [0.25, 0.5, 1]")
    elif steps <= 0 or (steps > 1 and steps % 1) or math.isinf(steps):
        raise UserError(f"{place}.eval_steps: {steps:g} is neither a share below 1 nor a number of steps")
    _check_positive(adapter, f"{place}.", "early_stopping_patience")
    if adapter.eval_dataset is None and not adapter.val_size:
        for key in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(adapter, key):
                raise UserError(f"{place}.{key}: needs rows to evaluate on; give val_size or an eval_dataset")


def _convert(cls: type, key: str, value: object, place: str) -> Any:
    """``value`` as the type that the field's annotation asks for."""
    annotation = typing.get_type_hints(cls)[key]
    options = _options(annotation)
    for option in options:
        converted = _as(option, value)
        if converted is not _NO:
            return converted
    items = [option.__args__[0] for option in options if typing.get_origin(option) is tuple]
    if isinstance(value, list | tuple) and items and typing.get_origin(items[0]) is Literal:
        options, value = tuple(items), next(item for item in value if _as(items[0], item) is _NO)
    choices = [str(choice) for option in options if typing.get_origin(option) is Literal for choice in option.__args__]
    if choices:
        said = str(value).lower()
        begun = [choice for choice in choices if said.startswith(choice)]  # "cosine_with_min_lr" is a cosine
        near = begun or difflib.get_close_matches(said, choices, n=1, cutoff=0.6)
        raise UserError(
            f"{place}: {value!r} is not one of {', '.join(choices)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    raise UserError(
        f"{place}: expected {' or '.join(_name(option) for option in options)}, found {_kind(value)}"
        + ("" if value is None else f" {value!r}")
    )


_NO = object()


def _options(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


def _as(option: Any, value: object) -> Any:
    origin = typing.get_origin(option)
    if option is type(None):
        return None if value is None else _NO
    if origin is Literal:
        return value if value in option.__args__ else _NO
    if origin is tuple:
        return _as_tuple(option.__args__[0], value)
    if origin is not None:
        return _as_mapping(option.__args__[1], value)
    if option in (int, float):
        return _as_number(option, value)
    if option is Path:
        return _as_path(value)
    return value if type(value) is option else _NO


def _as_path(value: object) -> Any:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        return _NO
    too_long = any(len(part.encode()) > 255 for part in Path(value).parts) or len(str(value)) > 4000
    return _NO if too_long else Path(value).expanduser()


def _as_tuple(item: Any, value: object) -> Any:
    if not isinstance(value, list | tuple):
        return _NO
    items = tuple(_as(item, x) for x in value)
    return _NO if _NO in items else items


def _as_mapping(item: Any, value: object) -> Any:
    value = {} if value is None else value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return _NO
    items = {key: _as(item, x) for key, x in value.items()}
    return _NO if _NO in items.values() else items


def _as_number(option: type, value: object) -> Any:
    """YAML 1.1 reads 2e-4 as text, so text that is a number counts as one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _NO
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _NO
    if math.isnan(number) or (option is int and not number.is_integer()):
        return _NO
    return (int(value) if isinstance(value, int) else int(number)) if option is int else number


def _name(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        return f"a list of which each is {_name(option.__args__[0])}"
    if typing.get_origin(option) is not None:
        return "a mapping of names"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    return names.get(option, "nothing")


def _kind(value: object) -> str:
    kinds = {type(None): "nothing", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if isinstance(value, Mapping):
        return "a block"
    return kinds.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply ``a.b=c``. The value is YAML; ``adapters.NAME`` finds the adapter of that name."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"override {override}: expected KEY=VALUE, such as defaults.learning_rate=1e-4")
    node: Any = tree
    key = path
    while "." in key:
        node, key = _descend(node, key, override)
    if not isinstance(node, dict):
        raise UserError(f"override {override}: {path.removesuffix('.' + key)} is not a block")
    try:
        node[key] = _yaml(text)
    except ValueError:
        raise UserError(f"override {override}: the value is not valid YAML") from None


def _descend(node: Any, path: str, override: str) -> tuple[Any, str]:
    """One block down: the block, and the rest of the path below it."""
    if isinstance(node, list):
        named = {f"{entry['name']}.": entry for entry in node if isinstance(entry, dict) and "name" in entry}
        name = max(filter(path.startswith, named), key=len, default="")
        if name:
            return named[name], path.removeprefix(name)
        place, _, below = path.partition(".")
        if place.isdigit() and int(place) < len(node) and isinstance(node[int(place)], dict):
            return node[int(place)], below
        raise UserError(f"override {override}: there is no adapter of that name, and no block of that number")
    key, _, rest = path.partition(".")
    if not isinstance(node, dict):
        raise UserError(f"override {override}: {key} is not inside a block")
    if isinstance(node.get(key), str) and key == "dataset":
        node[key] = {"path": node[key]}
    if node.get(key) is None:
        node[key] = {}
    return node[key], rest
