"""Tokens per second and peak memory against transformers + PEFT, with and without Liger-Kernel, one process per row.

    python benchmarks/throughput.py --out results.jsonl              # all rows at the shape of Llama-3.1-8B
    python benchmarks/throughput.py --rows mlora/8x2x512 peft/1x16x512
    python benchmarks/throughput.py --rows mlora/8x2x512 nf4/8x2x512 fp8/8x2x512 qlora/1x16x512 # or any others
    python benchmarks/throughput.py --profile mlora/8x2x512          # time by kernel
    python benchmarks/throughput.py --small-curve                    # tokens/s over the microbatch's size
    python benchmarks/throughput.py --shape tiny --device cpu --rows mlora/8x2x64 peft/1x16x64

A row is named WAY/JOBSxSAMPLESxTOKENS: so many jobs, each with so many samples of so many tokens. All jobs share one
microbatch; with ``-in-turn`` each has its own, one after another; with ``-checkpointing`` a peer keeps only the input
of each layer. WAY is mlora, frozen (this engine, the same samples, no adapters, no steps), nf4 (double quantised), int8
or fp8 (this engine with such a base), peft, liger (PEFT with Liger-Kernel) or qlora (PEFT on bitsandbytes' NF4, double
quantised). Peers train one job; N jobs one after another take them N times as long. "weights" are the model's GiB on
the device, embedding and head too, without the buffer into which a quantised base is dequantised.

Weights and tokens are random, every token is a target, adapters are r=16 on all linears, a step is forward, backward,
clip and AdamW. Ours runs in its repeatable mode, the peers in their default one under bf16 autocast, as the Trainer of
transformers runs them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from mlora import parse_config
from mlora.adapters.optimizer import clip_coefficient
from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.engine.device import choose_device, choose_dtype, prepare, row_bucket
from mlora.engine.memory import MemoryModel
from mlora.models.decoder import Decoder
from mlora.models.quantised import buffer_bytes
from mlora.models.spec import ModelSpec, Quantization, linear_shapes, load_spec
from mlora.models.weights import Weights
from mlora.ops.exact import exact_sum
from mlora.pipeline.stage import Batch, Stage, StepSums
from mlora.types import IGNORE, LINEAR_PATHS, Microbatch, SampleRef, Segment, StepDecision

R, ALPHA, RATE, MAX_NORM = 16, 32, 1e-4, 1.0
WARM_UP = 3
PROFILED = 2  # steps under the profiler
ATTENTION = re.compile("attn|attention|flash|fmha|sdpa", re.IGNORECASE)  # names of kernels
LONG = 2048  # samples of this length or more have their share of attention reported

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama2-13b": {
        "vocab_size": 32000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama-70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
    },
}

OURS = (
    "mlora/8x2x512",
    "frozen/8x2x512",
    "mlora/8x1x512",
    "mlora/8x1x512-in-turn",
    "mlora/32x1x256",
    "mlora/32x1x256-in-turn",
    "mlora/1x1x512",
    "mlora/4x1x2048",
    "mlora/1x1x16384",
)
QUANTIZATIONS = {
    "nf4": Quantization(kind="nf4", double=True),
    "int8": Quantization(kind="int8"),
    "fp8": Quantization(kind="fp8"),
}
QUANTISED = (
    *(f"{way}/8x{samples}x512" for way in QUANTIZATIONS for samples in (2, 1)),
    "qlora/1x16x512",
    "qlora/1x1x512",
)
PEERS = ("peft", "liger", "qlora")
SIZES = ("16x512", "1x512", "1x256", "4x2048", "1x16384")
ROWS = (*OURS, *(f"{way}/1x{size}" for way in ("peft", "liger") for size in SIZES), *QUANTISED)
CURVE_TOKENS, CURVE_JOBS = (512, 1024, 2048, 4096, 8192, 16384), (1, 8, 32)

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row: its name says everything."""

    way: str
    jobs: int
    samples: int
    tokens: int
    suffix: str

    @classmethod
    def parse(cls, name: str) -> Case:
        ways = "|".join(("mlora", "frozen", *QUANTIZATIONS, *PEERS))
        match = re.fullmatch(rf"({ways})/(\d+)x(\d+)x(\d+)(-in-turn|-checkpointing)?", name)
        if not match:
            raise argparse.ArgumentTypeError(f"{name!r} is no row; write WAY/JOBSxSAMPLESxTOKENS, as in mlora/8x2x512")
        way, jobs, samples, tokens, suffix = match.groups()
        case = cls(way, int(jobs), int(samples), int(tokens), suffix or "")
        if way in PEERS and case.jobs > 1:
            raise argparse.ArgumentTypeError(f"{name}: a peer trains one job at a time; write {way}/1x…")
        if suffix and (suffix == "-checkpointing") != (way in PEERS):
            raise argparse.ArgumentTypeError(
                f"{name}: -in-turn is for this engine, -checkpointing for {', '.join(PEERS)}"
            )
        return case

    @property
    def name(self) -> str:
        return f"{self.way}/{self.jobs}x{self.samples}x{self.tokens}{self.suffix}"

    @property
    def tokens_per_step(self) -> int:
        return self.jobs * self.samples * self.tokens


class Way(Protocol):
    """One way to train. ``work`` is made once from the tokens [jobs, samples, tokens]; a step may return a loss.

    ``weights`` are the model's bytes on the device, 0 on a CPU; ``predicted`` those of all, where a model says it.
    """

    weights: int

    def work(self, case: Case, tokens: torch.Tensor) -> Any: ...
    def step(self, work: Any) -> float | torch.Tensor | None: ...
    def predicted(self, case: Case) -> int | None: ...


class RandomCheckpoint(Weights):
    """Stands for mlora.models.weights.Checkpoint: a model without biases, drawn tensor by tensor on the device."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device

    def embedding(self) -> torch.Tensor:
        return self._normal(self._spec.vocab_size, self._spec.hidden_size)

    def head(self) -> torch.Tensor:
        return self.embedding()

    def final_norm(self) -> torch.Tensor:
        return torch.ones(self._spec.hidden_size, dtype=self._dtype, device=self._device)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        shapes = linear_shapes(self._spec)
        linears = {f"{path}.weight": self._normal(*shapes[path.split(".")[-1]]) for path in LINEAR_PATHS}
        norms = ("input_layernorm", "post_attention_layernorm")
        return linears | {f"{norm}.weight": self.final_norm() for norm in norms}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0, 0.02)


class Engine:
    """This engine's only stage with ``adapters`` adapters.

    For the frozen model alone, adapters without steps and with one matrix of rank 1 in the first layer stand for the
    owners of the rows, without whom there is no attention either.
    """

    def __init__(self, spec: ModelSpec, adapters: int, way: str, device: torch.device) -> None:
        prepare(device)
        layers, dtype, frozen = range(spec.num_layers), choose_dtype("auto", device), way == "frozen"
        quantization = QUANTIZATIONS.get(way)
        self._device, self._dtype, self._frozen = device, dtype, frozen
        checkpoint: Any = RandomCheckpoint(spec, dtype, device)
        self._stage = Stage(Decoder(spec, checkpoint, layers, dtype, device, quantization))
        self.weights = allocated(device) - buffer_bytes(spec, quantization, dtype)
        self._memory = MemoryModel(
            spec=spec, dtype=dtype, layers=[len(layers)], in_flight=[1], adapters=[], quantization=quantization
        )
        shape = {"r": 1, "target_modules": ["k_proj"], "layers_to_transform": [0]} if frozen else {"r": R}
        for slot in range(adapters):
            adapter = {"name": str(slot), "dataset": "none", "lora_alpha": ALPHA, "seed": slot} | shape
            config = parse_config({"base_model": "none", "adapters": [adapter]}).adapters[0]
            targets = match_targets(config, spec.num_layers)
            if not frozen:
                self._memory = replace(self._memory, adapters=[*self._memory.adapters, (config, targets)])
            self._stage.join(slot, AdapterState(config, targets, linear_shapes(spec), layers, dtype, device))

    def work(self, case: Case, tokens: torch.Tensor) -> list[Batch]:
        slots = range(case.jobs)
        return [self._batch(tokens, own) for own in ([[slot] for slot in slots] if case.suffix else [slots])]

    def step(self, work: list[Batch]) -> float | None:
        return [self._train(batch) for batch in work][-1]

    def predicted(self, case: Case) -> int:
        rows = case.tokens_per_step // (case.jobs if case.suffix else 1)
        return self._memory.need(0, row_bucket(self._device, self._dtype)(rows), recompute=False).total

    def _train(self, batch: Batch) -> float | None:
        self._stage.forward(batch)
        self._stage.backward(batch.microbatch.index)
        if self._frozen:
            for segment in batch.microbatch.segments:
                self._stage.reset(segment.slot)
            return None
        return [self._finish(segment, self._stage.close_step(segment.slot)) for segment in batch.microbatch.segments][
            -1
        ]

    def _finish(self, segment: Segment, sums: StepSums) -> float:
        """The adapter's STEP, decided as mlora.engine.adapter_run decides it; returns the mean loss."""
        norm = math.sqrt(exact_sum(sums.squares))
        assert math.isfinite(sums.loss) and math.isfinite(norm), f"slot {segment.slot}: loss {sums.loss}, norm {norm}"
        self._stage.step(segment.slot, StepDecision(RATE, clip_coefficient(norm, MAX_NORM), False))
        return sums.loss / segment.target_tokens

    def _batch(self, tokens: torch.Tensor, slots: Sequence[int]) -> Batch:
        _, samples, length = tokens.shape
        refs = tuple(SampleRef(i, i, length) for i in range(samples))
        segments = tuple(
            Segment(slot, slot, 0, place * samples * length, refs, samples * (length - 1), ends_step=True)
            for place, slot in enumerate(slots)
        )
        rows = row_bucket(self._device, self._dtype)(segments[-1].stop)
        padding = rows - segments[-1].stop
        own = tokens[list(slots)].view(-1, length)
        targets = torch.nn.functional.pad(own[:, 1:], (0, 1), value=IGNORE)
        return Batch(
            Microbatch(slots[0], segments, rows),
            torch.nn.functional.pad(own.flatten(), (0, padding)).to(self._device),
            torch.nn.functional.pad(targets.flatten(), (0, padding), value=IGNORE),
        )


class Peer:
    """transformers + PEFT as its Trainer runs it: float32 adapters, bf16 autocast, fused AdamW, no cache of keys."""

    def __init__(self, config: LlamaConfig, way: str, checkpointing: bool, device: torch.device) -> None:
        from peft import LoraConfig, get_peft_model

        if way == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

            apply_liger_kernel_to_llama()
        dtype = choose_dtype("auto", device)
        with device:
            base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if way == "qlora":
            quantise_as_qlora(base, dtype)
        self.weights = allocated(device)
        base.config.use_cache = False
        if checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self._device, self._model = device, get_peft_model(base, lora).train()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=RATE, fused=True)
        self._autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=device.type == "cuda")

    def work(self, case: Case, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[0].to(self._device)

    def step(self, work: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss = self._model(input_ids=work, labels=work).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def predicted(self, case: Case) -> None:
        return None


def quantise_as_qlora(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Every linear of the layers as transformers' loading with bitsandbytes makes it of a checkpoint."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.model.layers.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear:
                out_features, in_features = linear.weight.shape
                with torch.device("meta"):
                    four = Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype, quant_type="nf4")
                packed = Params4bit(linear.weight.data, False, quant_type="nf4", compress_statistics=True, module=four)
                four.weight = packed.to(linear.weight.device)
                setattr(parent, name, four)
    model.is_loaded_in_4bit = True


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device; on a CPU nobody counts them."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


class Clock:
    """Seconds between marks: CUDA events, so that the host may run ahead of the device, or a CPU's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        synchronize(self._cuda)
        return [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairwise(self._marks)]


def synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def build(cases: Sequence[Case], shape: str, device: torch.device) -> tuple[Way, ModelSpec]:
    """The way of ``cases``, which all have the same, and what the model is."""
    torch.manual_seed(0)
    config, case = LlamaConfig(**SHAPES[shape]), cases[0]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        spec = load_spec(Path(folder))
    if case.way in PEERS:
        return Peer(config, case.way, case.suffix == "-checkpointing", device), spec
    return Engine(spec, max(case.jobs for case in cases), case.way, device), spec


def measure(way: Way, spec: ModelSpec, case: Case, steps: int, device: torch.device) -> Result:
    """Medians over ``steps`` steps after the warm-up; where the device's memory is too small, a note that says so."""
    about = {"row": case.name, "device": device_name(device), "torch": torch.__version__}
    try:
        return about | _measure(way, spec, case, steps, device)
    except torch.OutOfMemoryError:
        pass  # outside the handler no frame of the failed step is kept alive
    torch.cuda.empty_cache()
    return about | {"note": "out of memory"}


def _measure(way: Way, spec: ModelSpec, case: Case, steps: int, device: torch.device) -> Result:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step = stepper(way, spec, case)
    for _ in range(WARM_UP):
        step()
    synchronize(cuda)
    clock = Clock(device)
    clock.mark()
    for _ in range(steps):
        loss = step()
        clock.mark()
    seconds = clock.seconds()
    median = statistics.median(seconds)
    result = {
        "tokens": case.tokens_per_step,
        "seconds": median,
        "least": min(seconds),
        "most": max(seconds),
        "tokens_per_s": case.tokens_per_step / median,
        "tflops": 4 * parameters(spec) * case.tokens_per_step / median / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "predicted": bytes_ / 2**30 if cuda and (bytes_ := way.predicted(case)) else None,
        "weights": way.weights / 2**30 if cuda else None,
        "loss": None if loss is None else float(loss),
    }
    if case.tokens >= LONG:
        result["attention"] = attention_share(time_by_kernel(step, cuda))
    return result


def stepper(way: Way, spec: ModelSpec, case: Case) -> Callable[[], float | torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab_size, (case.jobs, case.samples, case.tokens), generator=generator)
    return partial(way.step, way.work(case, tokens))


def parameters(spec: ModelSpec) -> int:
    """Of all products: every linear of every layer and the head; the embedding is none."""
    linears = sum(rows * columns for rows, columns in linear_shapes(spec).values())
    return spec.num_layers * linears + spec.vocab_size * spec.hidden_size


def time_by_kernel(step: Callable[[], object], cuda: bool) -> dict[str, tuple[float, float]]:
    """Seconds and calls per step of each kernel; on a CPU of each of torch's operations."""
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
        synchronize(cuda)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [e for e in profiler.key_averages() if e.device_type == wanted and not e.is_user_annotation]
    micros = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total for e in events}
    return {e.key: (micros[e.key] / 1e6 / PROFILED, e.count / PROFILED) for e in events if micros[e.key]}


def attention_share(kernels: Mapping[str, tuple[float, float]]) -> float | None:
    """Share of all kernels' time; None where no kernel's name tells that it is attention's."""
    attention = [seconds for name, (seconds, _) in kernels.items() if ATTENTION.search(name)]
    return sum(attention) / sum(seconds for seconds, _ in kernels.values()) if attention else None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def run_child(cases: Sequence[Case], options: argparse.Namespace) -> list[Result]:
    """Measure ``cases`` in a process of their own; one result each, with a note where there are no figures."""
    if cases[0].way == "liger" and (note := no_liger(options)):
        return [{"row": case.name, "note": note} for case in cases]
    flags = ("--shape", options.shape, "--device", options.device, "--steps", str(options.steps))
    command = [sys.executable, __file__, *flags, "--child", *(case.name for case in cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        sys.stderr.write(done.stderr)
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        results += [{"row": case.name, "note": f"failed: {reason}"} for case in cases[len(results) :]]
    return results


def no_liger(options: argparse.Namespace) -> str | None:
    if find_spec("liger_kernel") is None:
        return "skipped: Liger-Kernel is not installed"
    return "skipped: Liger-Kernel needs a GPU" if choose_device(options.device).type == "cpu" else None


def collect(groups: Sequence[Sequence[Case]], options: argparse.Namespace) -> dict[str, Result]:
    """Results by row, one process per group; each goes to ``--out`` as soon as it is there."""
    found: dict[str, Result] = {}
    for group in groups:
        start = time.perf_counter()
        for result in run_child(group, options):
            found[result["row"]] = result
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result | {"shape": options.shape}) + "\n")
        print(f"{group[-1].name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; numbers stand to the right of the first column."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, rule, *lines)
    )


def rows_table(found: Mapping[str, Result]) -> str:
    measures = ("row", "tokens", "ms", "least", "most", "tokens/s", "TFLOP/s (4NT)")
    head = (*measures, "GiB", "predicted", "weights", "loss", "attention")
    return table(head, [_cells(result, len(head)) for result in found.values()])


def _cells(result: Result, count: int) -> list[str]:
    if "note" in result:
        return [result["row"], result["note"], *[""] * (count - 2)]
    times = (f"{result[key] * 1e3:.1f}" for key in ("seconds", "least", "most"))
    optional = (
        ("gib", "{:.1f}"),
        ("predicted", "{:.1f}"),
        ("weights", "{:.2f}"),
        ("loss", "{:.2f}"),
        ("attention", "{:.1%}"),
    )
    return [
        result["row"],
        f"{result['tokens']:,}",
        *times,
        f"{result['tokens_per_s']:,.0f}",
        f"{result['tflops']:,.0f}",
        *("" if result.get(key) is None else form.format(result[key]) for key, form in optional),
    ]


def comparisons(found: Mapping[str, Result]) -> Iterator[tuple[str, float, str]]:
    """What, value, bar (of Llama-3.1-8B on one H200): every comparison of which all rows were measured."""
    measured = {name: result for name, result in found.items() if "note" not in result}
    shared = measured.get("mlora/8x2x512")
    if shared:
        yield "tokens/s, 8 adapters, 16 x 512", shared["tokens_per_s"], "≥ 19,000"
        if shared["gib"]:
            yield "GiB, 8 adapters, 16 x 512", shared["gib"], "≤ 45"
    pairs = [
        ("mlora/8x2x512", ("peft/1x16x512",), 1, "≥ 1.6"),
        ("mlora/8x2x512", ("liger/1x16x512",), 1, "≥ 1.33"),
        ("mlora/8x1x512", ("peft/1x1x512", "liger/1x1x512"), 8, "≥ 5"),
        ("mlora/32x1x256", ("peft/1x1x256", "liger/1x1x256"), 32, "≥ 10"),
        ("mlora/1x1x512", ("peft/1x1x512", "liger/1x1x512"), 1, "≥ 2.5"),
        ("mlora/8x1x512", ("mlora/8x1x512-in-turn",), 1, ""),
        ("mlora/32x1x256", ("mlora/32x1x256-in-turn",), 1, ""),
        ("mlora/4x1x2048", ("peft/1x4x2048", "liger/1x4x2048"), 1, ""),
        ("mlora/1x1x16384", ("peft/1x1x16384", "liger/1x1x16384"), 1, ""),
        ("nf4/8x2x512", ("mlora/8x2x512",), 1, "≥ 0.92"),
        ("fp8/8x2x512", ("mlora/8x2x512",), 1, "≥ 1.25"),
        ("int8/8x2x512", ("mlora/8x2x512",), 1, ""),
        ("nf4/8x2x512", ("qlora/1x16x512",), 1, "≥ 1.35"),
        ("nf4/8x1x512", ("qlora/1x1x512",), 8, "≥ 5"),
        ("fp8/8x1x512", ("mlora/8x1x512",), 1, ""),
    ]
    for ours, others, times, bar in pairs:
        others = tuple(name for name in others if name in measured)
        if ours in measured and others:
            best = min(others, key=lambda name: measured[name]["seconds"])
            value = times * measured[best]["seconds"] / measured[ours]["seconds"]
            yield f"{ours}: speed against {f'{times} x ' if times > 1 else ''}{best}", value, bar
    for name, most in (("nf4/8x2x512", "≤ 5.5"), ("fp8/8x2x512", "≤ 16")):
        if name in measured and measured[name].get("weights"):
            yield f"{name}: GiB of weights", measured[name]["weights"], most
    if shared and "frozen/8x2x512" in measured:
        yield "8 adapters: time over frozen", shared["seconds"] / measured["frozen/8x2x512"]["seconds"], "≤ 1.06"


def show_rows(options: argparse.Namespace) -> None:
    found = collect([[case] for case in options.rows], options)
    print(f"shape {options.shape}, r={R} on all linears, medians of {options.steps} steps\n")
    print(rows_table(found))
    barred = options.shape == "llama-8b"
    lines = [[what, f"{value:,.2f}", bar if barred else ""] for what, value, bar in comparisons(found)]
    if lines:
        print("\n" + table(("comparison", "value", "bar (llama-8b, one H200)"), lines))


def curve_case(way: str, jobs: int, tokens: int) -> Case:
    """``jobs`` jobs with ``tokens`` tokens in all, in samples of at most 512."""
    own = tokens // jobs
    length = min(512, own)
    return Case(way, jobs, own // length, length, "")


def show_curve(options: argparse.Namespace) -> None:
    """A peer's N jobs one after another run at the rate of one of them."""
    sizes = [(tokens, jobs) for tokens in CURVE_TOKENS for jobs in CURVE_JOBS]
    ours = [curve_case("mlora", jobs, tokens) for tokens, jobs in sizes]
    peers = sorted({tokens // jobs for tokens, jobs in sizes})
    found = collect([ours, [curve_case("peft", 1, tokens) for tokens in peers]], options)

    def cell(tokens: int, jobs: int) -> str:
        mlora, peft = (found[curve_case(*of).name] for of in (("mlora", jobs, tokens), ("peft", 1, tokens // jobs)))
        gain = "" if "note" in mlora or "note" in peft else f" ({mlora['tokens_per_s'] / peft['tokens_per_s']:.1f} x)"
        return " / ".join(r.get("note") or f"{r['tokens_per_s']:,.0f}" for r in (mlora, peft)) + gain

    print(f"shape {options.shape}, tokens/s: mLoRA with all jobs in one microbatch / PEFT one job after another\n")
    head = ["tokens of all jobs", *(f"jobs: {jobs}" for jobs in CURVE_JOBS)]
    print(table(head, [[f"{tokens:,}", *(cell(tokens, jobs) for jobs in CURVE_JOBS)] for tokens in CURVE_TOKENS]))


def show_profile(case: Case, options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    way, spec = build([case], options.shape, device)
    step = stepper(way, spec, case)
    for _ in range(WARM_UP):
        step()
    kernels = time_by_kernel(step, device.type == "cuda")
    total = sum(seconds for seconds, _ in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:25]
    print(f"{case.name}, shape {options.shape}: {total * 1e3:.1f} ms of kernels per step, {len(kernels)} kernels\n")
    lines = [[name[:100], f"{s * 1e3:.2f}", f"{calls:g}", f"{s / total:.1%}"] for name, (s, calls) in longest]
    print(table(("kernel", "ms per step", "calls", "share"), lines))


def child(cases: Sequence[Case], options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    way, spec = build(cases, options.shape, device)
    for case in cases:
        print(json.dumps(measure(way, spec, case, options.steps, device)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Case.parse, default=[Case.parse(name) for name in ROWS])
    parser.add_argument("--profile", type=Case.parse, metavar="ROW", help="show one row's time by kernel")
    parser.add_argument("--small-curve", action="store_true", help="tokens/s over the microbatch's size and the jobs")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of a row")
    parser.add_argument("--out", type=Path, help="a file to which each result is appended as one line of JSON")
    parser.add_argument("--child", nargs="+", type=Case.parse, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
    elif options.profile:
        show_profile(options.profile, options)
    elif options.small_curve:
        show_curve(options)
    else:
        show_rows(options)


if __name__ == "__main__":
    main()
