"""One linear with adapters, forward and backward, as a multiple of the frozen linear alone.

    python benchmarks/one_linear.py --out results.jsonl              # the linears of Llama-3.1-8B
    python benchmarks/one_linear.py --rows 4096x4096/8192/4x16 4096x4096/8192/4x16/0.1
    python benchmarks/one_linear.py --shape tiny --device cpu

A row is named INxOUT/TOKENS/ADAPTERSxR, with /DROPOUT where there is some. Frozen alone is x·Wᵀ and dY·W; the loop is
PEFT's way for several adapters in one batch: the frozen product, then each adapter's own on its rows, added in place.
Before a row is timed, outputs and all gradients of both ways are compared where there is no dropout.

Letters: T rows, D in features, O out features, R one adapter's rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

from mlora.engine.device import choose_device, choose_dtype, prepare
from mlora.ops import batch_lora
from mlora.ops.batch_lora import LinearBank, LoraGroup, LoraPart
from mlora.ops.elementwise import add
from mlora.ops.random import key_for
from mlora.ops.routing import route
from mlora.types import Microbatch, SampleRef, Segment

SCALING = 2.0
LENGTH = 512  # of a sample, at most
INPUTS = 4  # pairs of x and dY, used in turn so that none is still in the cache
ROUNDS = 3  # the ways take turns, since the device's clock changes with its temperature
TOLERANCE = 0.1  # of the adapters' part; one adapter of 64 left out is 0.125

SHAPES = {
    "llama-8b": (((4096, 4096), (4096, 14336), (14336, 4096)), 8192),
    "tiny": (((64, 64), (64, 112), (112, 64)), 128),
}
BARS = {"4096x4096/8192/4x16": 1.13, "4096x4096/8192/4x16/0.1": 1.18, "4096x4096/16384/64x8": 1.10}

Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]  # x, dY -> y, dX, then each dA and dB


@dataclass(frozen=True)
class Case:
    """A row: its name says everything."""

    in_features: int
    out_features: int
    rows: int
    adapters: int
    r: int
    dropout: float

    @property
    def name(self) -> str:
        name = f"{self.in_features}x{self.out_features}/{self.rows}/{self.adapters}x{self.r}"
        return name + (f"/{self.dropout}" if self.dropout else "")

    @property
    def own_rows(self) -> list[slice]:
        """Each adapter's rows."""
        own = self.rows // self.adapters
        return [slice(start, start + own) for start in range(0, self.rows, own)]


class Tensors:
    """What all ways of one case share. A [R, D] and B [R, O] are in the frozen weight's dtype."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._dtype, self._device = choose_dtype("auto", device), device
        self.weight_OD = self._normal(case.out_features, case.in_features, 0.02)
        self.x_TD = [self._normal(case.rows, case.in_features) for _ in range(INPUTS)]
        self.dy_TO = [self._normal(case.rows, case.out_features) for _ in range(INPUTS)]
        self.a_RD = [self._normal(case.r, case.in_features, case.in_features**-0.5) for _ in range(case.adapters)]
        self.b_RO = [self._normal(case.r, case.out_features, 0.04) for _ in range(case.adapters)]

    def _normal(self, rows: int, columns: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device=self._device).normal_(0, std)


def frozen(case: Case, tensors: Tensors) -> Step:
    weight_OD = tensors.weight_OD
    return lambda x_TD, dy_TO: (F.linear(x_TD, weight_OD), dy_TO @ weight_OD)


def ours(case: Case, tensors: Tensors) -> Step:
    """The engine's operator; it adds to float32 accumulators, which are the step's last results.

    In the model the kernel behind a linear adds the adapters' part on its way; here that takes a pass of its own.
    """
    length = min(LENGTH, case.rows // case.adapters)
    samples = tuple(SampleRef(i, i, length) for i in range(case.rows // case.adapters // length))
    segments = tuple(
        Segment(slot, slot, 0, rows.start, samples, rows.stop - rows.start, ends_step=True)
        for slot, rows in enumerate(case.own_rows)
    )
    bank, grads = LinearBank(modules=1), []
    for slot, (a_RD, b_RO) in enumerate(zip(tensors.a_RD, tensors.b_RO, strict=True)):
        grad_a_RD, grad_b_RO = (torch.zeros_like(x, dtype=torch.float32) for x in (a_RD, b_RO))
        part = LoraPart(
            index=0,
            ranks=slice(0, case.r),
            columns=slice(0, case.out_features),
            b_RO=b_RO,
            grad_b_RO=grad_b_RO,
            key=key_for(slot, "one"),
            scaling=SCALING,
        )
        group = LoraGroup(a_RD=a_RD, grad_a_RD=grad_a_RD, parts=(part,), dropout=case.dropout)
        bank.put(slot, group)
        grads += [grad_a_RD, grad_b_RO]
    routing = route(Microbatch(0, segments, case.rows), tensors.weight_OD.device)

    def step(x_TD: torch.Tensor, dy_TO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y_TO, term = batch_lora.forward(x_TD, tensors.weight_OD, None, bank, routing)
        y_TO = add(None, y_TO, term)
        dx_TD, dterm = batch_lora.backward(dy_TO, tensors.weight_OD, term)
        batch_lora.accumulate_a(x_TD, dterm)
        return y_TO, add(None, dx_TD, dterm), *grads

    return step


def loop(case: Case, tensors: Tensors) -> Step:
    """PEFT's arithmetic: float32 adapters under bf16 autocast, dropout of torch."""
    pairs = [[x.float().requires_grad_() for x in pair] for pair in zip(tensors.a_RD, tensors.b_RO, strict=True)]
    transposed = [(a_RD, b_RO.detach().T.contiguous().requires_grad_()) for a_RD, b_RO in pairs]
    parameters = [x for pair in transposed for x in pair]

    def step(x_TD: torch.Tensor, dy_TO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_TD = x_TD.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=x_TD.is_cuda):
            y_TO = F.linear(x_TD, tensors.weight_OD)
            for rows, (a_RD, b_OR) in zip(case.own_rows, transposed, strict=True):
                y_TO[rows] += F.linear(F.linear(F.dropout(x_TD[rows], case.dropout), a_RD), b_OR) * SCALING
        dx_TD, *grads = torch.autograd.grad(y_TO, [x_TD, *parameters], dy_TO)
        return y_TO, dx_TD, *(grad if i % 2 == 0 else grad.T for i, grad in enumerate(grads))

    return step


WAYS: dict[str, Callable[[Case, Tensors], Step]] = {"frozen": frozen, "mlora": ours, "loop": loop}


class Bench:
    """All ways of one case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self._case, self._cuda = case, device.type == "cuda"
        self._tensors = Tensors(case, device)
        self._steps = {name: way(case, self._tensors) for name, way in WAYS.items()}

    def check(self) -> None:
        """Ours and the loop must agree in the adapters' part of y and dX and in every dA and dB."""
        x_TD, dy_TO = self._tensors.x_TD[0], self._tensors.dy_TO[0]
        results = {name: [x.detach().float() for x in step(x_TD, dy_TO)] for name, step in self._steps.items()}
        alone = results["frozen"]
        for i, (mine, theirs) in enumerate(zip(results["mlora"], results["loop"], strict=True)):
            wanted = theirs - alone[i] if i < len(alone) else theirs
            error = float((mine - theirs).norm() / wanted.norm())
            assert error <= TOLERANCE, f"{self._case.name}: result {i} differs from the loop's by {error:.3f}"

    def milliseconds(self) -> dict[str, float]:
        """Medians over the rounds."""
        rounds = [{name: self._time(name) for name in WAYS} for _ in range(ROUNDS)]
        return {name: statistics.median(times[name] for times in rounds) for name in WAYS}

    def _time(self, name: str) -> float:
        step, inputs = self._steps[name], cycle(zip(self._tensors.x_TD, self._tensors.dy_TO, strict=True))

        def work() -> None:
            step(*next(inputs))

        torch.use_deterministic_algorithms(name == "mlora")
        if not self._cuda:
            return timed_on_cpu(work)
        from triton.testing import do_bench

        return do_bench(work, warmup=50, rep=150, return_mode="median")


def timed_on_cpu(work: Callable[[], None]) -> float:
    """Median milliseconds of five calls after one."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def all_cases(shape: str) -> list[Case]:
    linears, rows = SHAPES[shape]
    banks = [(rows, 1, 16), (rows, 4, 16), (rows, 8, 16), (rows, 4, 64), (2 * rows, 64, 8)]
    return [Case(*linear, *bank, dropout) for linear in linears for bank in banks for dropout in (0.0, 0.1)]


def measure(case: Case, device: torch.device) -> dict[str, float]:
    bench = Bench(case, device)
    if not case.dropout:
        bench.check()
    return bench.milliseconds()


def append(path: Path, row: str, times: dict[str, float], device: torch.device) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"row": row, "device": name, "torch": torch.__version__, "ms": times}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="default: all of the shape")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="a file to which each result is appended as one line of JSON")
    options = parser.parse_args()
    cases = {case.name: case for case in all_cases(options.shape)}
    for name in options.rows or ():
        if name not in cases:
            parser.error(f"--rows: {name!r} is none of {', '.join(cases)}")
    device = choose_device(options.device)
    prepare(device)
    print(
        "| IN x OUT / tokens / adapters x r / dropout | frozen, ms | mLoRA / frozen | loop / frozen | bar (one H200) |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in options.rows or cases:
        times = measure(cases[name], device)
        if options.out:
            append(options.out, name, times, device)
        alone = times["frozen"]
        bar = f"≤ {BARS[name]:.2f}" if name in BARS else ""
        ratios = f"{times['mlora'] / alone:.2f} | {times['loop'] / alone:.2f}"
        print(f"| {name} | {alone:.3f} | {ratios} | {bar} |", flush=True)


if __name__ == "__main__":
    main()
