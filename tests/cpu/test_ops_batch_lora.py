"""BatchLoRA against autograd of the formula: values, every gradient, neighbours, and the number of frozen products."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mlora.ops import batch_lora
from mlora.ops.batch_lora import (
    LinearBank,
    LoraGroup,
    LoraPart,
    LoraTerm,
    accumulate_a,
    add_pending,
    backward,
    forward,
)
from mlora.ops.random import keep_mask, key_for
from mlora.ops.routing import Routing
from tests.cpu.packing import routed
from tests.cpu.processor import INTEL, STRICT

D = 80
OUTS = {"q": 48, "k": 16, "v": 32}
WIDTH = sum(OUTS.values())
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6}  # relative to the largest element
# slot (with gaps) -> r, modules, dropout, scaling; slot 7 has another r and scaling in each module
ADAPTERS = {
    0: (3, "qkv", 0.0, 2.0),
    1: (4, "qv", 0.1, 0.5),
    4: (8, "k", 0.0, 1.0),
    7: (24, "kv", 0.1, 1.5),
    20: (64, "qkv", 0.0, 0.25),
    21: (5, "", 0.0, 1.0),  # no target in this linear: it has no entry in the bank
}


def _group(slot: int, dtype: torch.dtype, r: int | None = None) -> LoraGroup:
    own_r, modules, dropout, scaling = ADAPTERS[slot]
    r = r or own_r
    generator = torch.Generator().manual_seed(slot)
    parts, rank, column = [], 0, 0
    for index, (module, width) in enumerate(OUTS.items()):
        if module in modules:
            own = 1 + index if slot == 7 else 1
            stop = rank + r * own
            part = LoraPart(
                index=index,
                ranks=slice(rank, stop),
                columns=slice(column, column + width),
                b_RO=torch.randn(stop - rank, width, generator=generator, dtype=dtype).requires_grad_(),
                grad_b_RO=torch.zeros(stop - rank, width, dtype=dtype),
                key=key_for(slot, module),
                scaling=scaling / own,
            )
            parts.append(part)
            rank = stop
        column += width
    a_RD = torch.randn(rank, D, generator=generator, dtype=dtype).requires_grad_()
    return LoraGroup(a_RD=a_RD, grad_a_RD=torch.zeros(rank, D, dtype=dtype), parts=tuple(parts), dropout=dropout)


def _bank_of(groups: dict[int, LoraGroup]) -> LinearBank:
    bank = LinearBank(len(OUTS))
    for slot, group in groups.items():
        bank.put(slot, group)
    return bank


def _bank(dtype: torch.dtype = torch.float32, slots=tuple(ADAPTERS)) -> LinearBank:
    return _bank_of({slot: _group(slot, dtype) for slot in slots if ADAPTERS[slot][1]})


def _inputs(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """x [rows, D], W, bias and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)
    x_TD, weight_OD, bias_O, dy_TO = (
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((rows, D), (WIDTH, D), (WIDTH,), (rows, WIDTH))
    )
    return x_TD, weight_OD, bias_O, dy_TO


@torch.no_grad()
def _run(
    x_TD: torch.Tensor,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    bank: LinearBank,
    routing: Routing,
    dy_TO: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dX; the gradients of A and B are in the bank."""
    y_TO, term = forward(x_TD, weight_OD, bias_O, bank, routing)
    dx_TD, dterm = backward(dy_TO, weight_OD, term)
    accumulate_a(x_TD, dterm)
    return y_TO, dx_TD


def _formula(
    x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None, bank: LinearBank, routing: Routing
) -> torch.Tensor:
    """The formula and nothing else, differentiable by autograd in x, ``a_RD`` and ``b_RO``."""
    y_TO = F.linear(x_TD, weight_OD, bias_O)
    for segment in routing.segments:
        group = bank.groups.get(segment.slot)
        for sample, first, last in segment.sample_rows() if group else ():
            for part in group.parts:
                dropped_ND = x_TD[first:last]
                if group.dropout > 0 and routing.dropout:
                    keep_ND = keep_mask(part.key, segment.step, sample.ordinal, last - first, D, group.dropout)
                    dropped_ND = dropped_ND * keep_ND / (1 - group.dropout)
                full_TO = torch.zeros_like(y_TO)
                full_TO[first:last, part.columns] = part.scaling * (dropped_ND @ group.a_RD[part.ranks].T) @ part.b_RO
                y_TO = y_TO + full_TO
    return y_TO


def _grads(bank: LinearBank) -> dict[str, torch.Tensor]:
    """What the operator accumulated, by a readable name."""
    found = {}
    for slot, group in bank.groups.items():
        found[f"slot {slot} A"] = group.grad_a_RD
        found |= {f"slot {slot} B{i}": part.grad_b_RO for i, part in enumerate(group.parts)}
    return found


def _autograd(bank: LinearBank) -> dict[str, torch.Tensor]:
    found = {}
    for slot, group in bank.groups.items():
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
    routing = routed(mix)
    bank, reference_bank = _bank(dtype), _bank(dtype)
    x, weight, bias, dy = _inputs(routing.rows, dtype)
    bias = bias if biased else None
    y, dx = _run(x, weight, bias, bank, routing, dy)
    leaf = x.clone().requires_grad_()
    expected = _formula(leaf, weight, bias, reference_bank, routing)
    expected.backward(dy)
    assert _close(y, expected)
    assert _close(dx, leaf.grad)
    ours, theirs = _grads(bank), _autograd(reference_bank)
    for name, grad in ours.items():
        present = int(name.split()[1]) in mix
        assert bool(grad.any()) == present, name
        assert not present or _close(grad, theirs[name]), name


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_two_calls_accumulate(dtype):
    bank, reference_bank = _bank(dtype), _bank(dtype)
    for call, mix in enumerate([{0: [16, 7], 1: [33]}, {1: [7, 1], 20: [16], 0: [1]}]):
        routing = routed(mix, first_ordinal=10 * call)
        x, weight, bias, dy = _inputs(routing.rows, dtype, seed=call)
        _run(x, weight, bias, bank, routing, dy)
        _formula(x, weight, bias, reference_bank, routing).backward(dy)
    theirs = _autograd(reference_bank)
    for name, grad in _grads(bank).items():
        if theirs[name] is not None:
            assert _close(grad, theirs[name]), name
    assert bool(bank.groups[1].grad_a_RD.any()) and bool(bank.groups[20].grad_a_RD.any())


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@torch.no_grad()
def test_evaluation_drops_nothing(mix):
    routing, bank = routed(mix, dropout=False), _bank(torch.float64)
    x, weight, bias, _ = _inputs(routing.rows, torch.float64)
    y, _ = forward(x, weight, bias, bank, routing)
    assert _close(y, _formula(x, weight, bias, bank, routing))
    dropped = any(ADAPTERS[slot][1] and ADAPTERS[slot][2] > 0 for slot in mix)
    assert torch.equal(y, forward(x, weight, bias, bank, routed(mix))[0]) != dropped


def _pending(term: LoraTerm, rows: int) -> LoraTerm:
    """The term as kernels leave it: not added, each module's columns by themselves, anything in what nobody reads."""
    bank, cap = term.bank, term.bank.rank_cap
    products = torch.full((rows, bank.modules * cap), math.nan, dtype=torch.float64)
    own = [(bank.groups[s.slot], rows) for s, _, rows in term.routing.sample_rows() if s.slot in bank.groups]
    for (group, sample_rows), s_NR in zip(own, term.products, strict=True):
        for part in group.parts:
            first = part.index * cap
            products[sample_rows, first : first + part.ranks.stop - part.ranks.start] = s_NR[:, part.ranks]
    return replace(term, products=products, pending=True)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@torch.no_grad()
def test_a_pending_term_comes_to_the_same(mix):
    """Also where an adapter of higher rank joined, or one left, since the term was made."""
    routing, bank = routed(mix), _bank(torch.float64)
    x, weight, bias, dy = _inputs(routing.rows, torch.float64)
    y, term = forward(x, weight, bias, bank, routing)
    dx, dterm = backward(dy, weight, term)
    left = [(F.linear(x, weight, bias), _pending(term, len(x)), y), (dy @ weight, _pending(dterm, len(x)), dx)]
    for change in (lambda: None, lambda: bank.put(30, _group(0, torch.float64, r=100)), lambda: bank.remove(30)):
        change()
        for frozen, pending, whole in left:
            before = frozen.clone()
            assert _close(add_pending(frozen, pending), whole)
            assert torch.equal(frozen, before)
    assert add_pending(y, term) is y and add_pending(y, None) is y


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
    alone, together = routed({slot: sizes}), routed({4: [7, 33], slot: sizes, 21: [1, 16]})
    rows = slice(together.segments[1].start, together.segments[1].stop)
    x, weight, bias, dy = _inputs(160)
    outcomes = []
    for routing, own in ((alone, slice(0, alone.segments[0].stop)), (together, rows)):
        bank = _bank()
        if poison:
            _poison(group for other, group in bank.groups.items() if other != slot)
        own_x = torch.full((routing.rows, D), math.nan if poison else 0.5)
        own_dy = torch.full((routing.rows, WIDTH), math.nan if poison else 0.5)
        own_x[own], own_dy[own] = x[rows], dy[rows]
        y, dx = _run(own_x, weight, bias, bank, routing, own_dy)
        grads = _grads(_bank_of({slot: bank.groups[slot]}))
        outcomes.append([y[own], dx[own], *grads.values()])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize("slot", [0, 7])
def test_the_cut_into_calls_changes_no_bit(slot):
    """Four samples in one call, or in two with the accumulator carried on."""
    sizes = [33, 16, 7, 1]
    x, weight, bias, dy = _inputs(64)
    whole, cut = _bank(), _bank()
    _run(x, weight, bias, whole, routed({slot: sizes}), dy)
    for first, last, start in ((0, 1, 0), (1, 4, 33)):
        routing = routed({slot: sizes[first:last]}, first_ordinal=first)
        tokens = routing.segments[0].stop
        part_x, part_dy = (F.pad(part[start : start + tokens], (0, 0, 0, routing.rows - tokens)) for part in (x, dy))
        _run(part_x, weight, bias, cut, routing, part_dy)
    for name, grad in _grads(whole).items():
        assert torch.equal(grad, _grads(cut)[name]), name


WIDTHS = [(576, 960), (960, 576), (2048, 320), (1536, 576)]  # a library cuts sums of about 900 terms or more


def _products(inner, outer, dtype, threads):
    """A frozen product forward and backward with so many threads; rows and what is made of them."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(336, inner, generator=draw).to(dtype), torch.randn(outer, inner, generator=draw).to(dtype)
    before, transposed = torch.get_num_threads(), weight.T.contiguous()
    torch.set_num_threads(threads)
    try:
        for product in (
            lambda rows: batch_lora._frozen(rows, weight, None),
            lambda rows: batch_lora._frozen_backward(rows, transposed),
        ):
            yield x, product
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
@torch.no_grad()
def test_a_frozen_product_at_a_models_widths_does_not_depend_on_the_number_of_rows(threads, dtype, inner, outer):
    for x, product in _products(inner, outer, dtype, threads):
        whole = product(x)
        assert all(torch.equal(product(x[-count:]), whole[-count:]) for count in (16, 48, 64, 128, 192, 256))


@pytest.mark.skipif(not INTEL, reason=STRICT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
@torch.no_grad()
def test_a_frozen_product_at_a_models_widths_does_not_depend_on_the_number_of_threads(dtype, inner, outer):
    found = [[product(x) for x, product in _products(inner, outer, dtype, threads)] for threads in (1, 2, 4)]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


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
            y, dx = _run(x, weight, bias, bank, routed({0: [33, 7, 2, 1, 1]}), dy)
        finally:
            torch.set_num_threads(before)
        outcomes.append({"y": y, "dX": dx} | _grads(_bank_of({0: bank.groups[0]})))
    for other in outcomes[1:]:
        assert not [name for name, tensor in other.items() if not torch.equal(tensor, outcomes[0][name])]


@torch.no_grad()
def test_another_adapters_step_between_forward_and_backward_changes_nothing():
    routing = routed({0: [16, 7], 1: [33], 20: [7]})
    outcomes = []
    for stepped in (False, True):
        bank = _bank()
        x, weight, bias, dy = _inputs(64)
        _, term = forward(x, weight, bias, bank, routing)
        if stepped:
            for tensor in (bank.groups[1].a_RD, *(part.b_RO for part in bank.groups[1].parts)):
                tensor.add_(1.0)
        dx, dterm = backward(dy, weight, term)
        accumulate_a(x, dterm)
        outcomes.append({name: grad for name, grad in _grads(bank).items() if "slot 1 " not in name})
        outcomes[-1]["dX"] = torch.cat([dx[:23], dx[56:]])
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


@torch.no_grad()
def test_the_number_of_frozen_products_does_not_depend_on_the_number_of_adapters():
    counts = []
    for adapters in (1, 8):
        bank = _bank_of({slot: _group(0, torch.float32) for slot in range(adapters)})
        routing = routed({slot: [16 // adapters, 16 // adapters] for slot in range(adapters)})
        x, weight, bias, dy = _inputs(32)
        with FrozenProducts(weight) as in_forward:
            _, term = forward(x, weight, bias, bank, routing)
        with FrozenProducts(weight) as in_backward:
            _, dterm = backward(dy, weight, term)
            accumulate_a(x, dterm)
        counts.append((in_forward.count, in_backward.count))
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
    bank = _bank_of({0: _like(_group(0, torch.bfloat16), torch.bfloat16, torch.float32)})
    reference_bank = _bank_of({0: _like(bank.groups[0], torch.float64, torch.float64)})
    x, weight, _, dy = _inputs(16, torch.bfloat16)
    for _ in range(samples // 8):
        rows_x, rows_dy = (part[:1].repeat(16, 1) for part in (x, dy))
        _run(rows_x, weight, None, bank, routed({0: [1] * 8}), rows_dy)
    _formula(x.double(), weight.double(), None, reference_bank, routed({0: [1]})).backward(dy.double())
    theirs = _autograd(reference_bank)
    for name, grad in _grads(bank).items():
        assert grad.dtype == torch.float32
        assert (grad - samples * theirs[name]).norm() <= 0.01 * (samples * theirs[name]).norm(), name


def test_the_table_follows_who_is_in_the_bank():
    """A slot's entries hold addresses and sizes of its own matrices; nobody's are zero, and so have no rank."""
    bank = _bank(slots=(0, 7))
    groups = {slot: bank.groups[slot] for slot in (0, 7)}

    def check(*present: int) -> None:
        table = bank.table(torch.device("cpu"))
        assert table.shape[1] == bank.modules and table.shape[0] > max(present)
        expected = torch.zeros(table.shape[:2], dtype=torch.int64)
        for slot in present:
            for part in groups[slot].parts:
                expected[slot, part.index] = part.b_RO.data_ptr()
        assert torch.equal(table[:, :, 1], expected)
        assert torch.equal(table.ne(0).any(2), expected.ne(0))

    check(0, 7)
    bank.remove(0)
    bank.remove(3)
    check(7)
    groups[100] = _group(1, torch.float32)
    bank.put(100, groups[100])
    check(7, 100)
    groups[7] = _group(20, torch.float32)
    bank.put(7, groups[7])
    check(7, 100)
    assert bank.rank_cap == 64


class Products(TorchDispatchMode):
    """The shapes of what matrix products give."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.shapes.append(tuple(out.shape))
        return out


@torch.no_grad()
def test_small_products_are_padded_on_every_cpu():
    """Whether the threads change their bits without it depends on the CPU; see ``_TILE``."""
    for rows, rank in ((3, 8), (40, 5), (33, 24)):
        with Products() as seen:
            batch_lora._product(torch.ones(rows, D), torch.ones(D, rank))
            batch_lora._accumulate(torch.zeros(rank, D), torch.ones(rows, rank), torch.ones(rows, D))
        assert len(seen.shapes) == 2
        assert all(height >= 16 and width % 16 == 0 for height, width in seen.shapes), seen.shapes
