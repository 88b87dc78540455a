"""Adapters of odd shapes in one merged linear, and microbatches of odd samples, for the tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from mlora.ops.batch_lora import LinearBank, LoraGroup, LoraPart
from mlora.ops.kernels import lora
from mlora.ops.random import key_for
from mlora.ops.routing import Routing, route
from mlora.types import Microbatch, SampleRef, Segment, padded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs the kernels
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # relative to the largest element

# slot (with gaps) -> r, dropout, scaling; slot 1 has another r and scaling in each module
ADAPTERS = {0: (3, 0.0, 2.0), 1: (8, 0.1, 0.5), 4: (24, 0.0, 1.0), 7: (200, 0.25, 0.75), 9: (16, 0.0, 1.5)}
LENGTHS = {0: [1, 5], 1: [70, 2], 4: [127], 7: [33, 64], 9: [1]}  # slot -> lengths of its samples


def bank_of(
    widths: tuple[int, ...], in_width: int, dtype=torch.float32, device=DEVICE, adapters=None, skip=()
) -> LinearBank:
    """``widths``: out features of each module; ``skip``: (slot, module) without a target."""
    bank = LinearBank(len(widths))
    for slot, (r, dropout, scaling) in (ADAPTERS if adapters is None else adapters).items():
        modules = [i for i in range(len(widths)) if (slot, i) not in skip]
        if modules:
            bank.put(slot, _group(slot, r, dropout, scaling, modules, widths, in_width, dtype, device))
    return bank


def _group(slot, r, dropout, scaling, modules, widths, in_width, dtype, device):
    generator = torch.Generator().manual_seed(slot)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * 0.2).to(device, dtype)

    def grads(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    parts, ranks = [], 0
    for i in modules:
        times = 1 + i if slot == 1 else 1
        own = r * times
        parts.append(
            LoraPart(
                index=i,
                ranks=slice(ranks, ranks + own),
                columns=slice(sum(widths[:i]), sum(widths[: i + 1])),
                b_RO=random(own, widths[i]),
                grad_b_RO=grads(own, widths[i]),
                key=key_for(slot, f"module {i}"),
                scaling=scaling / times,
            )
        )
        ranks += own
    return LoraGroup(
        a_RD=random(ranks, in_width),
        grad_a_RD=grads(ranks, in_width),
        parts=tuple(parts),
        dropout=dropout,
    )


def routing_of(lengths=None, device=DEVICE, dropout=True, rows=None) -> Routing:
    segments, start = [], 0
    for slot, sizes in (LENGTHS if lengths is None else lengths).items():
        samples = tuple(SampleRef(i, 3 + i, size) for i, size in enumerate(sizes))
        segments.append(
            Segment(adapter=slot, slot=slot, step=5, start=start, samples=samples, target_tokens=1, ends_step=False)
        )
        start = segments[-1].stop
    microbatch = Microbatch(index=0, segments=tuple(segments), rows=rows or padded(start + 3))
    return route(microbatch, torch.device(device), dropout)


def products_of_dy(dy: torch.Tensor, bank: LinearBank, routing: Routing) -> torch.Tensor:
    """dS alone: with S = 0 nothing is added to dB."""
    return lora.backward_b(dy, torch.zeros(len(dy), bank.modules * bank.rank_cap).to(dy), bank, routing)


def gradients(bank: LinearBank) -> dict[str, torch.Tensor]:
    """Copies of all accumulators by a readable name."""
    found = {}
    for slot, group in bank.groups.items():
        found[f"slot {slot} A"] = group.grad_a_RD.cpu().clone()
        found |= {f"slot {slot} B{part.index}": part.grad_b_RO.cpu().clone() for part in group.parts}
    return found


def to_float32(bank: LinearBank) -> LinearBank:
    """The same values on the CPU, for the reference."""
    copied = LinearBank(bank.modules)
    for slot, group in bank.groups.items():
        parts = tuple(
            replace(part, b_RO=part.b_RO.cpu().float(), grad_b_RO=part.grad_b_RO.cpu().clone()) for part in group.parts
        )
        a_RD, grad_a_RD = group.a_RD.cpu().float(), group.grad_a_RD.cpu().clone()
        copied.put(slot, replace(group, parts=parts, a_RD=a_RD, grad_a_RD=grad_a_RD))
    return copied


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Where the reference had float32 throughout, and we had ``dtype``."""
    limit = TOLERANCE[dtype] * max(1.0, theirs.abs().max().item())
    torch.testing.assert_close(ours.cpu().to(theirs.dtype), theirs, rtol=TOLERANCE[dtype], atol=limit)
