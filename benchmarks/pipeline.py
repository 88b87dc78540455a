"""The pipeline over the GPUs of one host, against FSDP2 + PEFT and torch's 1F1B: tokens per second, bubble, bytes.

    python benchmarks/pipeline.py --nproc 2 --out pipeline.jsonl       # all rows at the shape of Llama-3.1-8B
    python benchmarks/pipeline.py --nproc 4 --rows mlora/8x16x512 fsdp/16x512
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --shape tiny --device cpu --microbatch-tokens 512 \\
        --rows mlora/8x4x64 mlora/8x2x16-96 fsdp/4x64 1f1b/8x2x64

Rows:
    mlora/JOBSxSAMPLESxTOKENS  a stage per process; a step of each job has so many samples. The engine's own planner
                               packs them into microbatches of at most --microbatch-tokens. TOKENS may be a range,
                               128-2048: lengths are drawn from it.
    fsdp/SAMPLESxTOKENS        FSDP2 + PEFT, one job with so many samples on each process
    fsdp-kept/SAMPLESxTOKENS   the same, a layer's weights kept from forward to backward instead of gathered twice
    1f1b/NxSAMPLESxTOKENS      torch.distributed.pipelining, one job: a step is N microbatches, then a flush

Weights and tokens are random, every token is a target, adapters are r=16 on all linears. Ours runs in its repeatable
mode. Each way has processes of its own, which share their GPUs where there are fewer of them (to try it, not to time).

A stream of ours is about --stream full microbatches from the first F to the last B, ramps included. A short one goes
first and compiles the kernels; what the next one takes on each stage is fitted as a + b · rows, and the simulator
predicts with that the time and the bubble of the others. Between ramps is where all adapters are still in the stream.
F, B and STEP are timed where they run, on a GPU by its own events, so a stage is idle also where its GPU waits for its
host. Replicas need no script: start benchmarks/throughput.py once for each GPU at the same time, each with its own
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pipeline_prediction import Line
from throughput import (
    ALPHA,
    MAX_NORM,
    RATE,
    SHAPES,
    Case,
    Peer,
    R,
    RandomCheckpoint,
    Result,
    allocated,
    device_name,
    measure,
    table,
)

from mlora import RunConfig, parse_config
from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.data.sampler import shares
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.cadence import Cadence
from mlora.engine.coordinator import Coordinator
from mlora.engine.device import choose_device, choose_dtype, full_rows, prepare, prepare_for_nccl
from mlora.engine.layout import first_layers, layer_counts
from mlora.engine.loggers import Loggers
from mlora.engine.prepare import in_flight_factor
from mlora.engine.recorder import Recorder
from mlora.engine.requests import Requests
from mlora.engine.world import World, torchrun_world
from mlora.models.decoder import Decoder
from mlora.models.spec import ModelSpec, Quantization, linear_shapes, load_spec
from mlora.pipeline.executor import Entry, Executor, Window
from mlora.pipeline.schedule import (
    Action,
    CostModel,
    Position,
    StepRef,
    Stream,
    Timed,
    bubble,
    busy_shares,
    in_flight,
    makespan,
    rows,
    simulate,
)
from mlora.pipeline.stage import Batch, Stage
from mlora.pipeline.transport.base import Direction, Transport
from mlora.pipeline.transport.control import Control
from mlora.pipeline.transport.distributed import distributed_control, distributed_transport
from mlora.pipeline.transport.liveness import Liveness
from mlora.types import Microbatch, StepDecision

ROWS = (
    *("mlora/8x16x512", "mlora/8x8x512", "mlora/8x4x512", "mlora/8x2x512", "mlora/8x1x512", "mlora/8x4x128-2048"),
    *("fsdp/16x512", "fsdp/4x512", "fsdp/1x512", "fsdp-kept/16x512", "fsdp-kept/4x512", "fsdp-kept/1x512"),
    "1f1b/8x2x512",
)
PASSED_ON = [
    "shape",
    "layers",
    "device",
    "quantization",
    "microbatch_tokens",
    "stream",
    "in_flight",
    "repeats",
    "steps",
]
PEER_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class Row:
    """What is measured: ``jobs`` are microbatches of a step for 1f1b."""

    way: str
    jobs: int
    samples: int
    shortest: int
    longest: int
    name: str

    @classmethod
    def parse(cls, name: str) -> Row:
        match = re.fullmatch(r"(mlora|1f1b)/(\d+)x(\d+)x(\d+)(?:-(\d+))?|(fsdp(?:-kept)?)/(\d+)x(\d+)", name)
        if not match or (match[5] and match[1] == "1f1b"):
            raise argparse.ArgumentTypeError(f"{name!r} is no row; write mlora/8x4x512, fsdp/4x512 or 1f1b/8x2x512")
        if match[1] is None:
            return cls(match[6], 1, int(match[7]), int(match[8]), int(match[8]), name)
        jobs, samples, shortest = (int(match[group]) for group in (2, 3, 4))
        return cls(match[1], jobs, samples, shortest, int(match[5] or shortest), name)


class RandomData:
    """Stands for mlora.data.TokenData: rows of random tokens, all of them targets."""

    def __init__(self, row: Row, count: int, vocab_size: int, seed: int) -> None:
        draw = random.Random(seed)
        self.lengths = np.array([draw.randint(row.shortest, row.longest) for _ in range(count)], np.int32)
        self.target_tokens = self.lengths - 1
        self.shares = shares([count], None)
        self._ids = np.random.default_rng(seed).integers(vocab_size, size=row.longest, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.roll(self._ids, index)[: self.lengths[index]]
        return ids, ids


class Stopwatch:
    """Times of a device in seconds since 1970, so that those of all processes of a host can be compared."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
        self._epoch = time.time() - time.perf_counter()
        self._zero, self._origin = self.mark(), time.time()

    def mark(self) -> Any:
        """Now, for the device: an event of its current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        if not self._cuda:
            return self._epoch + mark
        mark.synchronize()
        return self._origin + self._zero.elapsed_time(mark) / 1e3


class TimedStage(Stage):
    """Keeps when each F, B and STEP began and ended on the device."""

    def __init__(self, model: Decoder, index: int) -> None:
        super().__init__(model)
        self._index, self._device = index, model.device
        self.start_stream()

    def start_stream(self) -> None:
        self._watch = Stopwatch(self._device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._steps: Counter[int] = Counter()

    @property
    def timeline(self) -> list[Timed]:
        return [Timed(action, self._watch.seconds(a), self._watch.seconds(b)) for action, a, b in self._marks]

    def forward(self, batch: Batch, x_TD: torch.Tensor | None = None) -> torch.Tensor | None:
        with self._timed(Action(stage=self._index, kind="F", position=batch.microbatch.index)):
            return super().forward(batch, x_TD)

    def backward(self, index: int, dout_TD: torch.Tensor | None = None) -> torch.Tensor:
        with self._timed(Action(stage=self._index, kind="B", position=index)):
            return super().backward(index, dout_TD)

    def step(self, slot: int, decision: StepDecision) -> None:
        ref = StepRef(adapter=slot, slot=slot, step=self._steps[slot])
        self._steps[slot] += 1
        with self._timed(Action(stage=self._index, kind="STEP", step=ref)):
            super().step(slot, decision)

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start = self._watch.mark()
        yield
        self._marks.append((action, start, self._watch.mark()))


class CountingTransport(Transport):
    """Counts the bytes of the tensors that are sent."""

    sent = 0

    def send(self, direction: Direction, tensors: Sequence[torch.Tensor], note: str = "") -> None:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        super().send(direction, tensors, note)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A stream: what was planned, when it ran on every stage, and the bytes that each stage sent."""

    positions: list[Position]
    flight: tuple[int, ...]
    timeline: list[Timed]
    sent: list[int]


def run_config(row: Row, microbatches: int, device: torch.device, options: argparse.Namespace) -> RunConfig:
    """A run of about so many full microbatches."""
    tokens = row.jobs * row.samples * (row.shortest + row.longest) / 2  # of a step of each
    steps = max(1, round(microbatches * options.microbatch_tokens / tokens))
    defaults = {"r": R, "lora_alpha": ALPHA, "learning_rate": RATE, "max_grad_norm": MAX_NORM}
    tree = {
        "base_model": "none",
        "device": device.type,
        "microbatch_tokens": options.microbatch_tokens,
        "pipeline": {"in_flight": options.in_flight},
        "save_steps": 1_000_000_000,
        "defaults": defaults | {"per_device_train_batch_size": row.samples, "max_steps": steps},
        "adapters": [{"name": str(job), "dataset": "none", "seed": job} for job in range(row.jobs)],
    }
    return parse_config(tree)


def flights(row: Row, config: RunConfig, stages: int, full: int) -> tuple[int, ...]:
    """Microbatches in flight on each stage, as the engine chooses."""
    step_rows = [row.samples * (row.shortest + row.longest) / 2] * row.jobs
    return in_flight(stages, config.pipeline.in_flight or in_flight_factor(config, stages, step_rows, full))


def adapter_runs(row: Row, config: RunConfig, spec: ModelSpec) -> list[AdapterRun]:
    return [
        AdapterRun(
            index=index,
            config=adapter,
            data=RandomData(row, row.samples * adapter.max_steps, spec.vocab_size, index),  # type: ignore[arg-type]
            targets=match_targets(adapter, spec.num_layers),
        )
        for index, adapter in enumerate(config.adapters)
    ]


class Pipeline:
    """This process's stage of the engine. The adapters join once and are trained on in every later stream."""

    def __init__(
        self, spec: ModelSpec, world: World, store: dist.Store, device: torch.device, options: argparse.Namespace
    ) -> None:
        prepare_for_nccl()
        prepare(device)
        self._spec, self._world, self._device, self._options = spec, world, device, options
        self._dtype = choose_dtype("auto", device)
        self._layers = first_layers(layer_counts(spec, world.size))
        own = range(*self._layers[world.rank : world.rank + 2])
        checkpoint = RandomCheckpoint(spec, self._dtype, device)
        quantization = Quantization(kind=options.quantization) if options.quantization else None
        model = Decoder(spec, checkpoint, own, self._dtype, device, quantization)  # type: ignore[arg-type]
        self._stage, self._own = TimedStage(model, world.rank), own
        self._control: Control = distributed_control(store, world.rank, world.size)
        transport = distributed_transport(store, range(world.size), world.rank, device)
        self._transport = CountingTransport(transport.stage, transport.stages, transport._links)
        self._joined: set[int] = set()

    def measure(self, row: Row) -> Result | None:
        """The row's result on rank 0."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._stream(row, self._options.stream // 3)  # compiles
        streams = [self._stream(row, self._options.stream) for _ in range(1 + self._options.repeats)]
        peaks = self._control.gather_objects(_peak_gib(self._device))
        if self._world.rank > 0:
            return None
        about = {"row": row.name, "device": device_name(self._device), "torch": torch.__version__}
        return about | {"layers": self._layers, "gib": peaks} | summary(streams[0], streams[1:])

    def close(self) -> None:
        self._transport.close()
        self._control.close()

    def _stream(self, row: Row, microbatches: int) -> Measured:
        config = run_config(row, microbatches, self._device, self._options)
        flight = flights(row, config, self._world.size, full_rows(self._device))
        coordinator = self._coordinator(row, config, flight) if self._world.rank == 0 else None
        executor = Executor(self._stage, self._transport, flight, self._layers, self._meet, coordinator)
        planned: list[Position] = []
        self._stage.start_stream()
        before = self._transport.sent
        if coordinator is None:
            executor.run(iter(self._control.next, None))
        else:
            executor.run(_noting(coordinator.windows(self._control.publish), planned))
            failed = [a.reason for a in map(coordinator.adapter, range(row.jobs)) if a.state != "ended"]
            assert not failed, f"{row.name}: {failed}"
        own = self._stage.timeline, self._transport.sent - before
        parts = self._control.gather_objects(own) or [own]
        timeline = [timed for part, _ in parts for timed in part]
        return Measured(positions=planned, flight=flight, timeline=timeline, sent=[sent for _, sent in parts])

    def _coordinator(self, row: Row, config: RunConfig, flight: tuple[int, ...]) -> Coordinator:
        recorder = Recorder(Path(os.devnull), lambda: None, Loggers((), Path(os.devnull)))
        adapters = adapter_runs(row, config, self._spec)
        return Coordinator(config, adapters, flight, recorder, None, Requests(), Cadence(config))

    def _meet(self, entry: Entry) -> None:
        assert entry.kind in ("join", "leave"), entry
        if entry.kind == "leave" or entry.slot in self._joined:
            return
        assert entry.config is not None
        shapes = linear_shapes(self._spec)
        state = AdapterState(entry.config, entry.targets, shapes, self._own, self._dtype, self._device)
        self._stage.join(entry.slot, state)
        self._joined.add(entry.slot)


def _noting(windows: Iterable[Window], planned: list[Position]) -> Iterator[Window]:
    for window in windows:
        planned += window.positions
        yield window


def _peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def summary(fit: Measured, streams: Sequence[Measured]) -> Result:
    """Medians over ``streams``; the prediction is made with costs from ``fit``."""
    trained = [p.microbatch for p in fit.positions if p.microbatch]
    tokens = sum(map(token_count, trained))
    predicted = predict(fit)
    spans = [makespan(stream.timeline) for stream in streams]
    boundaries = len(fit.flight) - 1
    return {
        "in_flight": fit.flight,
        "microbatches": len(trained),
        "rows": _spread([microbatch.rows for microbatch in trained]),
        "adapters": _spread([len(microbatch.segments) for microbatch in trained]),
        "tokens": tokens,
        "tokens_per_s": [tokens / span for span in spans],
        "between_ramps": [rate_between(stream) for stream in streams],
        "seconds": spans,
        "predicted_s": makespan(predicted),
        "bubble": [bubble_between(stream, stream.timeline) for stream in streams],
        "predicted_bubble": bubble_between(fit, predicted),
        "busy": [busy_shares(stream.timeline) for stream in streams],
        "forward_ms": [median_ms(streams, "F", stage) for stage in range(boundaries + 1)],
        "backward_ms": [median_ms(streams, "B", stage) for stage in range(boundaries + 1)],
        "step_ms": [median_ms(streams, "STEP", stage) for stage in range(boundaries + 1)],
        "sent": streams[-1].sent,
    }


def _spread(numbers: Sequence[int]) -> tuple[int, float, int]:
    return min(numbers), statistics.median(numbers), max(numbers)


def median_ms(streams: Sequence[Measured], kind: str, stage: int) -> float:
    own = [t for stream in streams for t in stream.timeline if (t.action.kind, t.action.stage) == (kind, stage)]
    return 1e3 * statistics.median(timed.stop - timed.start for timed in own)


def filled(stream: Measured, timeline: Sequence[Timed]) -> tuple[float, float]:
    """Between the ramps: from the last stage's first F to stage 0's F of the step with which the first adapter ends.

    Behind that the planner has fewer adapters than before, and makes the microbatches smaller.
    """
    ends = {s.adapter: p.index for p in stream.positions if p.microbatch for s in p.microbatch.segments}
    forwards = [timed for timed in timeline if timed.action.kind == "F"]
    start = min(timed.start for timed in forwards if timed.action.stage == len(stream.flight) - 1)
    (stop,) = (t.stop for t in forwards if (t.action.stage, t.action.position) == (0, min(ends.values())))
    return start, stop


def bubble_between(stream: Measured, timeline: Sequence[Timed]) -> float:
    """nan for a stream so short that its ramps meet."""
    start, stop = filled(stream, timeline)
    cut = [Timed(t.action, max(t.start, start), min(t.stop, stop)) for t in timeline]
    inside = [timed for timed in cut if timed.stop > timed.start]
    return bubble(inside) if inside else float("nan")


def rate_between(stream: Measured) -> float:
    """Tokens per second between stage 0's first B and its last one between the ramps."""
    own = [t for t in stream.timeline if (t.action.stage, t.action.kind) == (0, "B")]
    ends = {t.action.position: t.stop for t in own if t.stop <= filled(stream, stream.timeline)[1]}
    if len(ends) < 2:
        return float("nan")
    first, last = min(ends), max(ends)
    inside = [p.microbatch for p in stream.positions if p.microbatch and first < p.index <= last]
    return sum(map(token_count, inside)) / (ends[last] - ends[first])


def token_count(microbatch: Microbatch) -> int:
    return sum(microbatch.sample_lengths())


def predict(fit: Measured) -> list[Timed]:
    """The timeline from the simulator. STEPs, which take no time there, are spread over the B of their stage."""
    row_counts = {p.index: p.microbatch.rows for p in fit.positions if p.microbatch}
    stages = len(fit.flight)

    def line(kind: str, stage: int) -> Line:
        own = [t for t in fit.timeline if (t.action.kind, t.action.stage) == (kind, stage)]
        points = [(row_counts[t.action.position], t.stop - t.start) for t in own if t.action.position is not None]
        if len({row_count for row_count, _ in points}) == 1:
            return Line(fixed=statistics.median(seconds for _, seconds in points), per_row=0.0)
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        return Line(fixed=intercept, per_row=slope)

    def steps(stage: int) -> float:
        own = [t for t in fit.timeline if (t.action.kind, t.action.stage) == ("STEP", stage)]
        return sum(timed.stop - timed.start for timed in own) / len(row_counts)

    costs = {kind: [line(kind, stage) for stage in range(stages)] for kind in ("F", "B")}
    shares_of_steps = [steps(stage) for stage in range(stages)]
    model = CostModel(
        forward=lambda stage, row_count: costs["F"][stage](row_count),
        backward=lambda stage, row_count: costs["B"][stage](row_count) + shares_of_steps[stage],
    )
    timeline = simulate(rows(fit.positions, fit.flight), Stream(fit.positions, stages), model)
    return [timed for timed in timeline if timed.action.kind in ("F", "B")]


def random_peer(config: LlamaConfig, dtype: torch.dtype) -> torch.nn.Module:
    """transformers + PEFT without memory: 16 GB need not pass through the host. Adapters have the model's dtype."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        base.config.use_cache = False
        lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, lora, autocast_adapter_dtype=False).train()


def fill(module: torch.nn.Module, body: torch.nn.Module, config: LlamaConfig, device: torch.device) -> None:
    """Random weights on the device, in the parts that this process holds; ``body`` has the table of positions."""
    module.to_empty(device=device)
    with device:
        body.rotary_emb = type(body.rotary_emb)(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            own.fill_(1.0) if "norm" in name else own.normal_(0, 0.0 if "lora_B" in name else 0.02)


def trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Sharded(Peer):
    """FSDP2 around every decoder layer of transformers + PEFT; bfloat16 adapters, fused AdamW."""

    def __init__(self, config: LlamaConfig, spec: ModelSpec, device: torch.device, kept: bool = False) -> None:
        from torch.distributed.fsdp import fully_shard

        self._device, self._model = device, random_peer(config, choose_dtype("auto", device))
        body = self._model.get_base_model().model
        for layer in body.layers:
            fully_shard(layer, reshard_after_forward=not kept)
        fully_shard(self._model)
        fill(self._model, body, config, device)
        self.weights = allocated(device)
        self._parameters = trainable(self._model)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=RATE, fused=True)
        self._autocast = nullcontext  # type: ignore[assignment]


class Slice(torch.nn.Module):
    """Some layers of transformers' model, with the embedding before the first or norm and head behind the last."""

    def __init__(self, model: torch.nn.Module, layers: range, count: int) -> None:
        super().__init__()
        body: Any = model.model
        self.embed = body.embed_tokens if layers.start == 0 else None
        self.layers = torch.nn.ModuleList(body.layers[index] for index in layers)
        self.rotary_emb = body.rotary_emb
        self.norm, self.head = (body.norm, model.lm_head) if layers.stop == count else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rope = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, position_ids=positions, position_embeddings=rope)
        return x if self.norm is None else self.head(self.norm(x))


class OneFOneB:
    """torch.distributed.pipelining's 1F1B over the engine's own cut of the layers, flushed in every step."""

    def __init__(self, config: LlamaConfig, spec: ModelSpec, device: torch.device) -> None:
        self._device, self._rank, self._world = device, dist.get_rank(), dist.get_world_size()
        layers = first_layers(layer_counts(spec, self._world))
        model: Any = random_peer(config, choose_dtype("auto", device))
        own = range(*layers[self._rank : self._rank + 2])
        self._slice = Slice(model.get_base_model(), own, spec.num_layers)
        fill(self._slice, self._slice, config, device)
        self.weights = allocated(device)
        self._parameters = trainable(self._slice)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=RATE, fused=True)

    def work(self, case: Case, tokens: torch.Tensor) -> Callable[[], float | None]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = PipelineStage(self._slice, self._rank, self._world, self._device)
        schedule = Schedule1F1B(stage, n_microbatches=case.jobs, loss_fn=_loss)
        own, losses = tokens.flatten(0, 1).to(self._device), []  # type: ignore[var-annotated]
        if self._rank == 0:
            return partial(schedule.step, own)
        if self._rank < self._world - 1:
            return schedule.step
        return partial(schedule.step, target=own, losses=losses)

    def step(self, work: Callable[[], float | None]) -> None:
        work()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        squares = norm.float() ** 2
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, MAX_NORM, squares.sqrt())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def predicted(self, case: Case) -> None:
        return None


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


PEERS = {"fsdp": Sharded, "fsdp-kept": partial(Sharded, kept=True), "1f1b": OneFOneB}


def measure_peer(way: Any, spec: ModelSpec, row: Row, device: torch.device, steps: int) -> Result:
    """As in throughput.py, with the tokens of all processes."""
    case = Case(row.way, row.jobs, row.samples, row.longest, "")
    result = measure(way, spec, case, steps, device) | {"row": row.name}
    for key in ("tokens", "tokens_per_s") if row.way != "1f1b" and "note" not in result else ():
        result[key] *= dist.get_world_size()
    return result


def child(options: argparse.Namespace) -> None:
    """One process of a way, with all the way's rows; rank 0 prints a line for each."""
    world = torchrun_world()
    assert world is not None, "--child is for processes that torchrun started"
    device = own_device(choose_device(options.device), world)
    torch.manual_seed(world.rank)
    config, spec = shape_of(options)
    way = options.rows[0].way
    if way == "mlora":
        store = world.open_store()
        with Liveness(store, world.rank, world.size):
            pipeline = Pipeline(spec, world, store, device, options)
            for row in options.rows:
                report(pipeline.measure(row))
            pipeline.close()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PEER_TIMEOUT)
    peer = PEERS[way](config, spec, device)
    for row in options.rows:
        result = measure_peer(peer, spec, row, device, options.steps)
        report(result if world.rank == 0 else None)
    dist.barrier()
    dist.destroy_process_group()


def shape_of(options: argparse.Namespace) -> tuple[LlamaConfig, ModelSpec]:
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    config = LlamaConfig(**SHAPES[options.shape] | layers)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return config, load_spec(Path(folder))


def own_device(device: torch.device, world: World) -> torch.device:
    if device.type == "cpu":
        return device
    if torch.cuda.device_count() < world.size:  # NCCL refuses two ranks on one device of one host
        os.environ |= {"NCCL_HOSTID": f"host{world.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def report(result: Result | None) -> None:
    if result is not None:
        print(json.dumps(result), flush=True)


def run_way(group: Sequence[Row], options: argparse.Namespace) -> Iterator[Result]:
    """Measure rows of one way in processes of their own; a row without a result has a note."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc))
    flags = ["--child"]
    for name in PASSED_ON:
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, *launcher, __file__, *flags, "--rows", *(row.name for row in group)]
    done = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
                done += 1
    for row in group[done:]:
        yield {"row": row.name, "note": f"failed: exit {process.returncode}"}


def stream_line(result: Result) -> list[str]:
    def per_stage(key: str, form: str) -> str:
        return " / ".join(format(value, form) for value in result[key])

    rates, inner = result["tokens_per_s"], result["between_ramps"]
    low, middle, high = result["rows"]
    busy = [statistics.median(shares) for shares in zip(*result["busy"], strict=True)]
    megabytes = [sent / 1e6 / result["microbatches"] for sent in result["sent"]]
    return [
        result["row"],
        str(result["in_flight"][0]),
        f"{result['microbatches']} of {low} / {middle:g} / {high}",
        f"{result['adapters'][1]:g}",
        f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})",
        f"{statistics.median(inner):,.0f}",
        f"{statistics.median(result['bubble']):.1%} / {result['predicted_bubble']:.1%}",
        f"{result['predicted_s'] / statistics.median(result['seconds']):.2f}",
        " / ".join(f"{share:.0%}" for share in busy),
        per_stage("forward_ms", ".1f"),
        per_stage("backward_ms", ".1f"),
        per_stage("step_ms", ".2f"),
        " / ".join(f"{amount:.1f}" for amount in megabytes),
        per_stage("gib", ".1f") if result["gib"][0] is not None else "",
    ]


STREAM_HEAD = (
    *("row", "w(0)", "microbatches, rows least / median / most", "adapters in each", "tokens/s with ramps"),
    *("between ramps", "bubble there, measured / predicted", "time predicted / measured", "busy", "F ms", "B ms"),
    *("STEP ms", "MB sent per microbatch", "GiB"),
)
PEER_HEAD = ("row", "tokens of a step", "ms", "least", "most", "tokens/s", "GiB")


def peer_line(result: Result) -> list[str]:
    times = (f"{result[key] * 1e3:.1f}" for key in ("seconds", "least", "most"))
    gib = "" if result["gib"] is None else f"{result['gib']:.1f}"
    return [result["row"], f"{result['tokens']:,}", *times, f"{result['tokens_per_s']:,.0f}", gib]


def comparisons(found: Mapping[str, Result]) -> Iterator[tuple[str, float, str]]:
    """What, value, bar (two GPUs, Llama-3.1-8B): every comparison of which both rows were measured."""
    rate = {name: _rate(result) for name, result in found.items()}
    if "mlora/8x16x512" in rate:
        yield "mlora/8x16x512, tokens/s", rate["mlora/8x16x512"], "≥ 36,000"
    bars = {"16": "≥ 1.45", "4": "≥ 2.3", "1": "≥ 9"}
    pairs = [(f"mlora/8x{n}x512", f"{way}/{n}x512", bars[n]) for n in bars for way in ("fsdp", "fsdp-kept")]
    for ours, other, bar in (*pairs, ("mlora/8x16x512", "1f1b/8x2x512", "")):
        if ours in rate and other in rate:
            yield f"{ours} against {other}", rate[ours] / rate[other], bar


def _rate(result: Result) -> float:
    rates = result["tokens_per_s"]
    return statistics.median(rates) if isinstance(rates, list) else rates


def show(results: Sequence[Result], options: argparse.Namespace) -> None:
    found = {result["row"]: result for result in results if "note" not in result}
    ours = [stream_line(result) for name, result in found.items() if name.startswith("mlora")]
    peers = [peer_line(result) for name, result in found.items() if not name.startswith("mlora")]
    print(f"shape {options.shape}, {options.nproc} processes, r={R} on all linears\n")
    if ours:
        print(table(STREAM_HEAD, ours) + "\n")
    if peers:
        print(table(PEER_HEAD, peers) + "\n")
    lines = [[what, f"{value:,.2f}", bar] for what, value, bar in comparisons(found)]
    if lines:
        print(table(("comparison", "value", "bar (llama-8b, 2 H200)"), lines) + "\n")
    for result in results:
        if "note" in result:
            print(f"{result['row']}: {result['note']}")


def keep(result: Result, options: argparse.Namespace) -> None:
    """Append it to --out as soon as it is there, with what the command line says."""
    if options.out:
        facts = {name: getattr(options, name) for name in ("nproc", *PASSED_ON)}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result | {"options": facts}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Row.parse, default=[Row.parse(name) for name in ROWS])
    parser.add_argument("--nproc", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape's")
    parser.add_argument("--quantization", choices=("nf4", "int8"), help="of our frozen linears, not of the peers'")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--stream", type=int, default=24, help="full microbatches of a stream of ours, about")
    parser.add_argument("--in-flight", type=int, choices=(1, 2), help="as pipeline.in_flight; default: the engine's")
    parser.add_argument("--repeats", type=int, default=5, help="measured streams of a row of ours")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of a peer's row")
    parser.add_argument("--out", type=Path, help="a file to which each result is appended as one line of JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    results = []
    for way, group in groupby(options.rows, key=lambda row: row.way):
        start = time.perf_counter()
        for result in run_way(list(group), options):
            results.append(result)
            keep(result, options)
        print(f"{way}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    show(results, options)


if __name__ == "__main__":
    main()
