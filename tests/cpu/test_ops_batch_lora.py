"""BatchLoRA against the formula: values, every gradient, neighbours, and how many frozen products are made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlora.ops.batch_lora import LoraGroup, LoraPart, batch_lora, batch_lora_reference
from mlora.ops.random import key_for
from mlora.types import SampleRef, Segment, padded

D = 80
OUTS = {"q": 48, "k": 16, "v": 32}
WIDTH = sum(OUTS.values())
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6}  # relative to the largest element
# slot (with gaps) -> r, modules, dropout, scaling
ADAPTERS = {
    0: (3, "qkv", 0.0, 2.0),
    1: (4, "qv", 0.1, 0.5),
    4: (8, "k", 0.0, 1.0),
    7: (24, "kv", 0.1, 1.5),
    20: (64, "qkv", 0.0, 0.25),
    21: (5, "", 0.0, 1.0),  # no target in this linear: it has no entry in the bank
}


def _group(slot: int, dtype: torch.dtype) -> LoraGroup:
    r, modules, dropout, scaling = ADAPTERS[slot]
    generator = torch.Generator().manual_seed(slot)
    parts, rank, column = [], 0, 0
    for module, width in OUTS.items():
        if module in modules:
            b_RO = torch.randn(r, width, generator=generator, dtype=dtype).requires_grad_()
            ranks, columns = slice(rank, rank + r), slice(column, column + width)
            key = key_for(slot, module)
            grad_b_RO = torch.zeros(r, width, dtype=dtype)
            parts.append(LoraPart(ranks=ranks, columns=columns, b_RO=b_RO, grad_b_RO=grad_b_RO, key=key))
            rank += r
        column += width
    a_RD = torch.randn(rank, D, generator=generator, dtype=dtype).requires_grad_()
    return LoraGroup(
        a_RD=a_RD, grad_a_RD=torch.zeros(rank, D, dtype=dtype), parts=tuple(parts), scaling=scaling, dropout=dropout
    )


def _bank(dtype: torch.dtype = torch.float32, slots=tuple(ADAPTERS)) -> dict[int, LoraGroup]:
    return {slot: _group(slot, dtype) for slot in slots if ADAPTERS[slot][1]}


def _segments(lengths: dict[int, list[int]], first_ordinal: int = 0) -> tuple[Segment, ...]:
    segments, start = [], 0
    for slot, sizes in lengths.items():
        samples = tuple(SampleRef(i, first_ordinal + i, size) for i, size in enumerate(sizes))
        segments.append(
            Segment(adapter=slot, slot=slot, step=5, start=start, samples=samples, target_tokens=1, ends_step=False)
        )
        start = segments[-1].stop
    return tuple(segments)


def _inputs(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """x [rows, D] as a leaf, W, bias and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)
    x_TD, weight_OD, bias_O, dy_TO = (
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((rows, D), (WIDTH, D), (WIDTH,), (rows, WIDTH))
    )
    return x_TD.requires_grad_(), weight_OD, bias_O, dy_TO


def _grads(bank: dict[int, LoraGroup]) -> dict[str, torch.Tensor]:
    """What the operator accumulated, by a readable name."""
    found = {}
    for slot, group in bank.items():
        found[f"slot {slot} A"] = group.grad_a_RD
        found |= {f"slot {slot} B{i}": part.grad_b_RO for i, part in enumerate(group.parts)}
    return found


def _autograd(bank: dict[int, LoraGroup]) -> dict[str, torch.Tensor]:
    found = {}
    for slot, group in bank.items():
        found[f"slot {slot} A"] = group.a_RD.grad
        found |= {f"slot {slot} B{i}": part.b_RO.grad for i, part in enumerate(group.parts)}
    return found


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= LIMITS[ours.dtype] * max(1.0, theirs.abs().max().item()))


MIXES = {
    "one adapter": {0: [33]},
    "no dropout": {0: [16, 7], 4: [1, 33], 20: [7]},
    "dropout beside none": {1: [33, 7, 1], 0: [16], 7: [1, 1, 16]},
    "absent target": {21: [33, 1], 7: [7]},
    "all": {20: [1, 33], 7: [16], 21: [7], 4: [33, 33], 1: [7, 1], 0: [16, 16, 7]},
}


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_every_gradient_equal_the_formulas(mix, dtype, biased):
    segments = _segments(mix)
    rows = padded(segments[-1].stop)
    bank, reference_bank = _bank(dtype), _bank(dtype)
    x, weight, bias, dy = _inputs(rows, dtype)
    bias = bias if biased else None
    y = batch_lora(x, weight, bias, bank, segments)
    y.backward(dy)
    reference_x = x.detach().clone().requires_grad_()
    expected = batch_lora_reference(reference_x, weight, bias, reference_bank, segments)
    expected.backward(dy)
    assert _close(y, expected)
    assert _close(x.grad, reference_x.grad)
    ours, theirs = _grads(bank), _autograd(reference_bank)
    for name, grad in ours.items():
        present = int(name.split()[1]) in mix
        assert bool(grad.any()) == present, name
        assert not present or _close(grad, theirs[name]), name


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_two_calls_accumulate(dtype):
    bank, reference_bank = _bank(dtype), _bank(dtype)
    for call, mix in enumerate([{0: [16, 7], 1: [33]}, {1: [7, 1], 20: [16], 0: [1]}]):
        segments = _segments(mix, first_ordinal=10 * call)
        x, weight, bias, dy = _inputs(padded(segments[-1].stop), dtype, seed=call)
        batch_lora(x, weight, bias, bank, segments).backward(dy)
        batch_lora_reference(x, weight, bias, reference_bank, segments).backward(dy)
    theirs = _autograd(reference_bank)
    for name, grad in _grads(bank).items():
        if theirs[name] is not None:
            assert _close(grad, theirs[name]), name
    assert bool(bank[1].grad_a_RD.any()) and bool(bank[20].grad_a_RD.any())


def _poison(groups) -> None:
    with torch.no_grad():
        for group in groups:
            for tensor in (group.a_RD, *(part.b_RO for part in group.parts)):
                tensor.fill_(math.nan)


@pytest.mark.parametrize("slot", [0, 1, 7, 20])
@pytest.mark.parametrize("poison", [False, True])
def test_company_and_poison_change_no_bit(slot, poison):
    """The subject's rows alone and between strangers whose rows and parameters, like the padding, may hold NaN."""
    sizes = [33, 16, 7, 1]
    alone, together = _segments({slot: sizes}), _segments({4: [7, 33], slot: sizes, 21: [1, 16]})
    rows = slice(together[1].start, together[1].stop)
    x, weight, bias, dy = _inputs(160)
    outcomes = []
    for segments, own in ((alone, slice(0, alone[0].stop)), (together, rows)):
        bank = _bank()
        if poison:
            _poison(group for other, group in bank.items() if other != slot)
        total = padded(segments[-1].stop)
        own_x = torch.full((total, D), math.nan if poison else 0.5)
        own_dy = torch.full((total, WIDTH), math.nan if poison else 0.5)
        own_x[own], own_dy[own] = x.detach()[rows], dy[rows]
        own_x.requires_grad_()
        y = batch_lora(own_x, weight, bias, bank, segments)
        y.backward(own_dy)
        grads = _grads({slot: bank[slot]})
        outcomes.append([y[own].detach(), own_x.grad[own], *grads.values()])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize("slot", [0, 7])
def test_the_cut_into_calls_changes_no_bit(slot):
    """Four samples in one call, or in two with the accumulator carried on."""
    sizes = [33, 16, 7, 1]
    x, weight, bias, dy = _inputs(64)
    whole, cut = _bank(), _bank()
    batch_lora(x, weight, bias, whole, _segments({slot: sizes})).backward(dy)
    for first, last, start in ((0, 1, 0), (1, 4, 33)):
        segments = _segments({slot: sizes[first:last]}, first_ordinal=first)
        rows = slice(start, segments[0].stop + start)
        pad = padded(segments[0].stop) - segments[0].stop
        part_x = torch.nn.functional.pad(x.detach()[rows], (0, 0, 0, pad)).requires_grad_()
        part_dy = torch.nn.functional.pad(dy[rows], (0, 0, 0, pad))
        batch_lora(part_x, weight, bias, cut, segments).backward(part_dy)
    for name, grad in _grads(whole).items():
        assert torch.equal(grad, _grads(cut)[name]), name


@pytest.mark.parametrize("r", [3, 4, 8, 16, 24, 64])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_threads_change_no_bit(monkeypatch, r, dropout):
    """Products with few rows or columns, which a threaded library may cut along the inner dimension."""
    monkeypatch.setitem(ADAPTERS, 0, (r, "qkv", dropout, 2.0))
    outcomes = []
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            bank = _bank()
            x, weight, bias, dy = _inputs(64)
            y = batch_lora(x, weight, bias, bank, _segments({0: [33, 7, 2, 1, 1]}))
            y.backward(dy)
        finally:
            torch.set_num_threads(before)
        outcomes.append({"y": y.detach(), "dX": x.grad} | _grads({0: bank[0]}))
    for other in outcomes[1:]:
        assert not [name for name, tensor in other.items() if not torch.equal(tensor, outcomes[0][name])]


def test_another_adapters_step_between_forward_and_backward_changes_nothing():
    segments = _segments({0: [16, 7], 1: [33], 20: [7]})
    outcomes = []
    for stepped in (False, True):
        bank = _bank()
        x, weight, bias, dy = _inputs(64)
        y = batch_lora(x, weight, bias, bank, segments)
        if stepped:
            with torch.no_grad():
                for tensor in (bank[1].a_RD, *(part.b_RO for part in bank[1].parts)):
                    tensor.add_(1.0)
        y.backward(dy)
        outcomes.append({name: grad for name, grad in _grads(bank).items() if "slot 1 " not in name})
        outcomes[-1]["dX"] = torch.cat([x.grad[:23], x.grad[56:]])
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


class FrozenProducts(TorchDispatchMode):
    """Counts matrix products that read ``weight``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.storage, self.count = weight.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in ("mm", "addmm", "addmm_", "linear", "matmul", "bmm"):
            self.count += any(t.untyped_storage().data_ptr() == self.storage for t in tensors)
        return func(*args, **(kwargs or {}))


def test_the_number_of_frozen_products_does_not_depend_on_the_number_of_adapters():
    counts = []
    for adapters in (1, 8):
        bank = {slot: _group(0, torch.float32) for slot in range(adapters)}
        segments = _segments({slot: [16 // adapters, 16 // adapters] for slot in range(adapters)})
        x, weight, bias, dy = _inputs(32)
        with FrozenProducts(weight) as forward:
            y = batch_lora(x, weight, bias, bank, segments)
        with FrozenProducts(weight) as backward:
            y.backward(dy)
        counts.append((forward.count, backward.count))
    assert counts == [(1, 1), (1, 1)]


def _like(group: LoraGroup, values: torch.dtype, sums: torch.dtype) -> LoraGroup:
    """The group with parameters in one dtype and accumulators in another."""
    parts = tuple(
        replace(p, b_RO=p.b_RO.detach().to(values).requires_grad_(), grad_b_RO=p.grad_b_RO.to(sums))
        for p in group.parts
    )
    a_RD = group.a_RD.detach().to(values).requires_grad_()
    return replace(group, a_RD=a_RD, grad_a_RD=group.grad_a_RD.to(sums), parts=parts)


def test_bfloat16_accumulates_in_float32():
    """2048 equal samples: a bfloat16 accumulator would stop growing after 256 of them."""
    samples = 2048
    bank = {0: _like(_group(0, torch.bfloat16), torch.bfloat16, torch.float32)}
    reference_bank = {0: _like(bank[0], torch.float64, torch.float64)}
    x, weight, _, dy = _inputs(16, torch.bfloat16)
    for _ in range(samples // 8):
        segments = _segments({0: [1] * 8})
        rows_x, rows_dy = x.detach()[:1].repeat(16, 1).requires_grad_(), dy[:1].repeat(16, 1)
        batch_lora(rows_x, weight, None, bank, segments).backward(rows_dy)
    batch_lora_reference(x.detach().double(), weight.double(), None, reference_bank, _segments({0: [1]})).backward(
        dy.double()
    )
    theirs = _autograd(reference_bank)
    for name, grad in _grads(bank).items():
        assert grad.dtype == torch.float32
        assert (grad - samples * theirs[name]).norm() <= 0.01 * (samples * theirs[name]).norm(), name
