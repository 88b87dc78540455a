"""Norm, rotary embedding and SwiGLU against autograd of the plain formulas; a row has the same bits wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlora.ops.batch_lora import LinearBank, LoraGroup, LoraPart, LoraTerm
from mlora.ops.elementwise import (
    Heads,
    add,
    add_norm,
    rms_norm,
    rms_norm_backward,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)
from mlora.ops.random import keep_mask, key_for
from tests.cpu.packing import routed

EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _angles(rows: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(rows, dtype=dtype), 100.0 ** -torch.arange(width // 2, dtype=dtype))
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def _plain_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _plain_turn(x, cos, sin):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _plain_rotate(qkv, cos, sin, heads):
    q, k, v = heads.split(qkv)
    if heads.q_norm is not None:
        q, k = _plain_norm(q, heads.q_norm), _plain_norm(k, heads.k_norm)
    return torch.cat((_plain_turn(q, cos, sin), _plain_turn(k, cos, sin), v), 1).flatten(1)


def _plain_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _term(rows: int, width: int, pending: bool, through: str = "B", seed: int = 7) -> LoraTerm:
    """S (or dS) of two adapters, the second with dropout, that reach ``width`` columns; the last row is nobody's."""
    routing = routed({0: [1, 2], 3: [rows - 4]})
    columns, inner = (width, 5) if through == "B" else (5, width)
    bank = LinearBank(1)
    for slot, (r, dropout) in {0: (3, 0.0), 3: (2, 0.4)}.items():
        a_RD, b_RO = _random(r, inner, seed=seed + slot), _random(r, columns, seed=seed + slot + 1)
        part = LoraPart(
            index=0,
            ranks=slice(0, r),
            columns=slice(0, columns),
            b_RO=b_RO,
            grad_b_RO=b_RO,
            key=key_for(slot, "part"),
            scaling=2.0,
        )
        bank.put(slot, LoraGroup(a_RD=a_RD, grad_a_RD=a_RD, parts=(part,), dropout=dropout))
    products = _random(rows, bank.rank_cap, seed=seed)
    return LoraTerm(products=products, bank=bank, routing=routing, through=through, pending=pending)


def _update(term: LoraTerm, width: int) -> torch.Tensor:
    """What the term adds: S·B of each slot's rows, or drop(dS·A)."""
    found = torch.zeros(len(term.products), width, dtype=torch.float64)
    for segment in term.routing.segments:
        group = term.bank.groups[segment.slot]
        for sample, first, last in segment.sample_rows():
            s_NR = term.products[first:last, : len(group.a_RD)]
            found[first:last] = s_NR @ (group.parts[0].b_RO if term.through == "B" else group.a_RD)
            if term.through == "A" and group.dropout > 0:
                keep = keep_mask(group.parts[0].key, segment.step, sample.ordinal, last - first, width, group.dropout)
                found[first:last] *= keep.double() / (1 - group.dropout)
    return found


ROWS = 7
SETTLED = replace(_term(ROWS, 5, pending=False), products=[])  # everything is added already
COS, SIN = _angles(ROWS, 6)
WEIGHT = 1 + 0.3 * _random(10, seed=1)
HEADS = Heads(query=3, key_value=2, size=6)
NORMED_HEADS = replace(HEADS, q_norm=1 + 0.3 * _random(6, seed=3), k_norm=1 + 0.3 * _random(6, seed=4), eps=EPS)


@dataclass(frozen=True)
class Case:
    """An operator of one tensor: forward, dx from (x, dy), and the plain formula, which autograd can differentiate."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    plain: Callable[[torch.Tensor], torch.Tensor]


def _norm_case(weight, shape):
    return Case(
        lambda x: rms_norm(x, weight, EPS),
        lambda x, dy: rms_norm_backward(x, weight, EPS, dy)[0],
        shape,
        lambda x: _plain_norm(x, weight),
    )


def _rotate_case(cos, sin, heads, shape):
    def turn(x):
        return rotate(x, SETTLED, cos(x), sin(x), heads)

    return Case(
        lambda x: turn(x)[0],
        lambda x, dy: rotate_backward(dy, turn(x)[1], cos(x), sin(x), heads),
        shape,
        lambda x: _plain_rotate(x, cos(x), sin(x), heads),
    )


def _swiglu_case(shape):
    return Case(
        lambda x: swiglu(x, SETTLED), lambda x, dy: swiglu_backward(x, SETTLED, dy, SETTLED)[0], shape, _plain_swiglu
    )


CASES = {
    "rms_norm": _norm_case(WEIGHT, (ROWS, 10)),
    "rms_norm of heads": _norm_case(WEIGHT, (ROWS, 3, 10)),
    "rotate": _rotate_case(lambda x: COS, lambda x: SIN, HEADS, (ROWS, 42)),
    "rotate normed heads": _rotate_case(lambda x: COS, lambda x: SIN, NORMED_HEADS, (ROWS, 42)),
    "swiglu": _swiglu_case((ROWS, 22)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Explicit(torch.autograd.Function):
    """A case with its explicit backward, as autograd would call it; both may write over what they get."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, case: Case) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.case = case
        return case.forward(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.case.backward(x.clone(), grads[0].clone()), None


@each_case
def test_values_and_gradients_equal_the_plain_formula(case):
    x = _random(*case.shape).requires_grad_()
    expected = case.plain(x)
    dy = _random(*expected.shape, seed=2)
    expected.backward(dy)
    y, dx = case.forward(x.detach().clone()), case.backward(x.detach().clone(), dy.clone())
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: Explicit.apply(x, case), x)


PENDING_MADE = {"added": False, "pending": True}


@pytest.mark.parametrize("pending", PENDING_MADE.values(), ids=PENDING_MADE)
@pytest.mark.parametrize("through", ["B", "A"])
def test_what_batch_lora_left_is_taken_in(pending, through):
    """A pending term is added, one that is added already is not added twice."""
    x, y = _random(ROWS, 10), _random(ROWS, 10, seed=1)
    term = _term(ROWS, 10, pending, through)
    whole = y + _update(term, 10) if pending else y
    close = {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(add(None, y.clone(), term), whole, **close)
    torch.testing.assert_close(add(x, y.clone(), term), x + whole, **close)
    total, normed = add_norm(x, y.clone(), term, WEIGHT, EPS)
    torch.testing.assert_close(total, x + whole, **close)
    torch.testing.assert_close(normed, _plain_norm(x + whole, WEIGHT), **close)
    leaf = x.clone().requires_grad_()
    expected = _plain_norm(leaf, WEIGHT)
    expected.backward(whole)
    residual = _random(ROWS, 10, seed=2)
    for own, rest in ((residual, residual), (None, torch.zeros(ROWS, 10, dtype=torch.float64))):
        dx, again = rms_norm_backward(x, WEIGHT, EPS, y.clone(), term, own)
        torch.testing.assert_close(dx, rest + leaf.grad, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(again, expected, **close)


@pytest.mark.parametrize("pending", PENDING_MADE.values(), ids=PENDING_MADE)
@pytest.mark.parametrize("heads", [HEADS, NORMED_HEADS], ids=["plain", "normed"])
def test_rotate_takes_in_what_batch_lora_left(pending, heads):
    qkv, term = _random(ROWS, 42), _term(ROWS, 42, pending)
    whole = qkv + _update(term, 42) if pending else qkv.clone()
    turned, before = rotate(qkv, term, COS, SIN, heads)
    torch.testing.assert_close(turned, _plain_rotate(whole, COS, SIN, heads), rtol=1e-13, atol=1e-13)
    assert (before is None) == (heads is HEADS)
    if before is not None:
        torch.testing.assert_close(before, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("pending", PENDING_MADE.values(), ids=PENDING_MADE)
def test_swiglu_takes_in_what_batch_lora_left(pending):
    gate_up, dhidden = _random(ROWS, 22), _random(ROWS, 11, seed=1)
    term, dterm = _term(ROWS, 22, pending), _term(ROWS, 11, pending, "A", seed=20)
    whole = gate_up + _update(term, 22) if pending else gate_up
    dwhole = dhidden + _update(dterm, 11) if pending else dhidden
    leaf = whole.clone().requires_grad_()
    expected = _plain_swiglu(leaf)
    expected.backward(dwhole)
    hidden = swiglu(gate_up, term)
    dgate_up, again = swiglu_backward(gate_up.clone(), term, dhidden.clone(), dterm)
    torch.testing.assert_close(hidden, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(dgate_up, leaf.grad, rtol=1e-12, atol=1e-13)
    assert torch.equal(again, hidden)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_backward_makes_again_has_the_bits_of_forward(dtype):
    """A's gradients are taken from it. What is not given up to be written over stays as it was."""
    x, dy, residual = (_random(40, 114, dtype=dtype, seed=seed) for seed in range(3))
    weight, dhidden = 1 + 0.3 * _random(114, dtype=dtype, seed=3), _random(40, 57, dtype=dtype, seed=4)
    before = [tensor.clone() for tensor in (x, residual, weight)]
    _, again = rms_norm_backward(x, weight, EPS, dy, None, residual)
    assert all(map(torch.equal, (x, residual, weight), before))
    assert torch.equal(again, rms_norm(x, weight, EPS))
    assert torch.equal(again, add_norm(x, torch.zeros_like(x), SETTLED, weight, EPS)[1])
    hidden = swiglu(x, SETTLED)
    assert torch.equal(swiglu_backward(x, SETTLED, dhidden, SETTLED)[1], hidden)


@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
def test_swiglu_stays_finite_at_extremes(value):
    x = torch.tensor([[value, 3.0]])
    slope = 1.0 if value > 0 else 0.0
    assert swiglu(x, SETTLED).item() == pytest.approx(3 * max(value, 0.0), abs=1e-30)
    dx, _ = swiglu_backward(x, SETTLED, torch.ones(1, 1), SETTLED)
    assert dx.tolist() == [[pytest.approx(3 * slope, abs=1e-30), pytest.approx(max(value, 0.0), abs=1e-30)]]


def test_half_precision_is_computed_in_float32():
    x = _random(16, 512, dtype=torch.bfloat16)
    weight = torch.ones(512, dtype=torch.bfloat16)
    exact = _plain_norm(x.double(), weight.double())
    assert rms_norm(x, weight, EPS).dtype == torch.bfloat16
    assert ((rms_norm(x, weight, EPS) - exact).abs() <= exact.abs() * 2**-8).all()


def _float_cases():
    weight = 1 + 0.3 * _random(50, dtype=torch.float32, seed=1)
    cos, sin = (table.expand(1600, -1) for table in _angles(1, 50, torch.float32))
    heads = Heads(query=1, key_value=1, size=50)
    normed = replace(heads, q_norm=weight, k_norm=weight, eps=EPS)
    turn = {name: lambda x, table=table: table[: len(x)] for name, table in (("cos", cos), ("sin", sin))}
    return {
        "rms_norm": _norm_case(weight, (50,)),
        "rotate": _rotate_case(turn["cos"], turn["sin"], heads, (150,)),
        "rotate normed heads": _rotate_case(turn["cos"], turn["sin"], normed, (150,)),
        "swiglu": _swiglu_case((114,)),
    }


def _with_gradient(case, x, dy):
    return case.forward(x.clone()), case.backward(x.clone(), dy.clone())


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("case", _float_cases().values(), ids=_float_cases())
def test_bits_of_a_row_do_not_depend_on_its_place_or_on_threads(case, threads):
    """Four threads share 1600 rows as three parts, each cut in the middle of a row."""
    x = _random(1600, *case.shape, dtype=torch.float32) * 4
    dy = _random(1600, *case.forward(x.clone()).shape[1:], dtype=torch.float32, seed=2)
    alone = [_with_gradient(case, x[i : i + 16], dy[i : i + 16]) for i in range(0, 1600, 16)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = _with_gradient(case, x, dy)
        shifted = _with_gradient(case, x[3:], dy[3:])
    finally:
        torch.set_num_threads(before)
    for whole, moved, parts in zip(together, shifted, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
        assert torch.equal(whole[3:], moved)
