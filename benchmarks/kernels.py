"""Time and memory traffic of each kernel at the shapes of Llama-3.1-8B.

    python benchmarks/kernels.py [--adapters 8] [--samples 16] [--tokens 512] [--r 16] [--dropout 0.0]

The bytes are the least that each kernel must move; a copy on one H200 moves about 4,000 GB/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlora.ops import batch_lora, elementwise
from mlora.ops.attention import attention, attention_backward
from mlora.ops.batch_lora import LoraTerm
from mlora.ops.cross_entropy import linear_cross_entropy
from mlora.ops.elementwise import Heads
from mlora.ops.kernels import lora
from tests.kernels.lora_cases import bank_of, products_of_dy, routing_of

D, INNER, HEADS = 4096, 14336, Heads(query=32, key_value=8, size=128)
QKV, OUT, GATE_UP, DOWN = (4096, 1024, 1024), (D,), (INNER, INNER), (D,)
LINEARS = (("qkv", QKV, D), ("o", OUT, D), ("gate_up", GATE_UP, D), ("down", DOWN, INNER))
PARTS = ["products", "elementwise", "attention", "frozen", "cut", "border", "loss"]
BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * 0.1


class Cases:
    """Inputs of one layer for a microbatch of ``adapters`` with equal shares of ``samples`` samples."""

    def __init__(self, adapters: int, samples: int, tokens: int, r: int, dropout: float) -> None:
        self.adapters = dict.fromkeys(range(adapters), (r, dropout, 2.0))
        lengths = {slot: [tokens] * (samples // adapters) for slot in range(adapters)}
        self.rows = samples * tokens
        self.routing = routing_of(lengths, "cuda", rows=self.rows)
        self.copy = 2 * self.rows

    def bank(self, widths: tuple[int, ...], in_width: int) -> batch_lora.LinearBank:
        return bank_of(widths, in_width, BF16, "cuda", self.adapters)

    def products(self, name: str, widths: tuple[int, ...], in_width: int) -> None:
        """The four grouped products of one linear, and adding them in a pass of their own."""
        bank, x, dy = self.bank(widths, in_width), random(self.rows, in_width), random(self.rows, sum(widths))
        out, routing = sum(widths), self.routing
        s = lora.shrink(x, bank, routing)
        ds = lora.backward_b(dy, s, bank, routing)
        to_y = LoraTerm(products=s, bank=bank, routing=routing, through="B", pending=True)
        to_x = LoraTerm(products=ds, bank=bank, routing=routing, through="A", pending=True)
        show(f"{name} S", lambda: lora.shrink(x, bank, routing), in_width * self.copy)
        show(f"{name} dB and dS", lambda: lora.backward_b(dy, s, bank, routing), out * self.copy)
        show(f"{name} dA", lambda: lora.accumulate_a(ds, x, bank, routing), in_width * self.copy)
        show(f"{name} expand y", lambda: lora.expand(dy, to_y), 2 * out * self.copy)
        show(f"{name} expand dx", lambda: lora.expand(x, to_x), 2 * in_width * self.copy)

    def term(self, widths: tuple[int, ...], in_width: int, through: str) -> LoraTerm:
        bank, source = self.bank(widths, in_width), random(self.rows, in_width if through == "B" else sum(widths))
        products = (lora.shrink if through == "B" else products_of_dy)(source, bank, self.routing)
        return LoraTerm(products=products, bank=bank, routing=self.routing, through=through, pending=True)

    def elementwise(self) -> None:
        x, y, weight = random(self.rows, D), random(self.rows, D), random(D)
        term, dterm = self.term(OUT, D, "B"), self.term(GATE_UP, D, "A")
        show("norm", lambda: elementwise.rms_norm(x, weight, 1e-5), 2 * D * self.copy)
        show("add norm", lambda: elementwise.add_norm(x, y, term, weight, 1e-5), 4 * D * self.copy)
        show("add", lambda: elementwise.add(x, y, term), 3 * D * self.copy)
        show("norm backward", lambda: elementwise.rms_norm_backward(x, weight, 1e-5, y, dterm, x), 5 * D * self.copy)
        gate_up, dhidden = random(self.rows, 2 * INNER), random(self.rows, INNER)
        term, dterm = self.term(GATE_UP, D, "B"), self.term(DOWN, INNER, "A")
        show("swiglu", lambda: elementwise.swiglu(gate_up, term), 3 * INNER * self.copy)
        work = gate_up.clone()
        show("swiglu backward", lambda: elementwise.swiglu_backward(work, term, dhidden, dterm), 6 * INNER * self.copy)

    def attention(self) -> None:
        qkv, term = random(self.rows, sum(QKV)), self.term(QKV, D, "B")
        angles = torch.rand(self.rows, 64, device="cuda").repeat(1, 2)
        cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
        show("rotate", lambda: elementwise.rotate(qkv, term, cos, sin, HEADS), 2 * sum(QKV) * self.copy)
        show("rotate backward", lambda: elementwise.rotate_backward(qkv, None, cos, sin, HEADS), 10240 * self.copy)
        qkv = random(self.rows, sum(QKV))
        out, kept = attention(qkv, HEADS, self.routing)
        show("attention", lambda: attention(qkv, HEADS, self.routing), 0)
        show("attention backward", lambda: attention_backward(out, out, kept, qkv, HEADS, self.routing), 0)

    def frozen(self) -> None:
        for name, widths, in_width in LINEARS:
            x, w = random(self.rows, in_width), random(sum(widths), in_width)
            y = x @ w.T
            show(f"frozen {name} y", lambda x=x, w=w: torch.nn.functional.linear(x, w), 0, 2 * x.numel() * w.shape[0])
            show(f"frozen {name} dx", lambda y=y, w=w: y @ w, 0, 2 * x.numel() * w.shape[0])

    def cut(self) -> None:
        """The frozen products in parts, by rows or by columns, and with the weight stored the other way round."""
        for name, widths, in_width in LINEARS:
            x, w = random(self.rows, in_width), random(sum(widths), in_width)
            y = x @ w.T
            turned = w.T.contiguous().T
            for direction, rows, columns, other, out in (("y", x, w.T, turned.T, y), ("dx", y, w, turned, x)):
                ways = {
                    "as it is": [(rows, columns, out)],
                    "by rows": [(a, columns, o) for a, o in zip(rows.chunk(2), out.chunk(2), strict=True)],
                    "by columns": [(rows, b, o) for b, o in zip(columns.chunk(2, 1), out.chunk(2, 1), strict=True)],
                    "turned": [(rows, other, out)],
                }
                for way, parts in ways.items():
                    work = partial(multiply, parts)
                    show(f"{name} {direction} {way}", work, 0, 2 * x.numel() * len(w))

    def border(self) -> None:
        """The other way: 16 more columns of the weight for each adapter, B in them for y, A for dx."""
        extra = 16 * len(self.adapters)
        for name, widths, in_width in LINEARS:
            x, w = random(self.rows, in_width + extra), random(sum(widths), in_width + extra)
            dy, w_dx = random(self.rows, sum(widths) + extra), random(sum(widths) + extra, in_width)
            y = x @ w.T
            show(f"bordered {name} y", lambda x=x, w=w: torch.nn.functional.linear(x, w), 0, 2 * x.numel() * w.shape[0])
            show(f"bordered {name} dx", lambda dy=dy, w=w_dx: dy @ w, 0, 2 * dy.numel() * in_width)
            show(f"bordered {name} y += x w", lambda x=x, w=w, y=y: y.addmm_(x, w.T), 0, 2 * x.numel() * w.shape[0])

    def loss(self) -> None:
        hidden, head = random(self.rows, D), random(128256, D)
        labels = torch.randint(128256, (self.rows,), device="cuda")
        weights = torch.full((self.rows,), 1e-3, device="cuda", dtype=torch.float64)
        flops = 4 * hidden.numel() * len(head)
        show("cross-entropy", lambda: linear_cross_entropy(hidden, head, labels, weights), 0, flops)


def multiply(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    for rows, columns, out in parts:
        torch.mm(rows, columns, out=out)


def show(name: str, work: Callable[[], object], bytes_: int, flops: int = 0) -> None:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    ms = triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")
    rate = f"{bytes_ / ms / 1e6:8.0f} GB/s" if bytes_ else f"{flops / ms / 1e9:8.0f} TFLOP/s" if flops else ""
    print(f"{name:24s} {1000 * ms:8.1f} us {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("adapters", 8), ("samples", 16), ("tokens", 512), ("r", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--parts", nargs="*", default=PARTS)
    options = parser.parse_args()
    cases = Cases(options.adapters, options.samples, options.tokens, options.r, options.dropout)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(options)}")
    if "products" in options.parts:
        for name, widths, in_width in LINEARS:
            cases.products(name, widths, in_width)
    for part in PARTS[1:]:
        if part in options.parts:
            getattr(cases, part)()


if __name__ == "__main__":
    main()
