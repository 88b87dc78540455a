"""The fused kernels against the plain PyTorch form, each with terms that are still to be added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlora.ops import elementwise
from mlora.ops.batch_lora import LoraTerm
from mlora.ops.elementwise import Heads
from mlora.ops.kernels import cross_entropy, lora, squares
from mlora.ops.kernels import elementwise as fused
from tests.kernels.lora_cases import DEVICE, DTYPES, assert_close, bank_of, products_of_dy, routing_of, to_float32

EPS = 1e-5
LENGTHS = {0: [1, 5], 1: [19, 2], 4: [33], 7: [9, 6], 9: [1]}  # a row is a row to these kernels: few are enough


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _terms(widths, in_width, through, dtype, seed=0):
    """A pending term with real products on the device, and the same for the reference."""
    routing, bank = routing_of(LENGTHS), bank_of(widths, in_width, dtype)
    source = _random(routing.rows, in_width if through == "B" else sum(widths), seed=seed).to(DEVICE, dtype)
    products = lora.shrink(source, bank, routing) if through == "B" else products_of_dy(source, bank, routing)
    term = LoraTerm(products=products, bank=bank, routing=routing, through=through, pending=True)
    return term, replace(term, products=products.cpu().float(), bank=to_float32(bank))


@pytest.fixture(params=DTYPES, ids=str)
def same(request):
    """Runs a fused kernel and its reference on the same values."""

    def check(name, *arguments):
        def sent(x, device, dtype):
            return x.to(device, dtype) if isinstance(x, torch.Tensor) else x

        device_arguments, cpu_arguments = [], []
        for x in arguments:
            pair = x if isinstance(x, tuple) else (x, x)
            rounded = sent(pair[1], "cpu", request.param)
            device_arguments.append(sent(pair[0], DEVICE, request.param))
            cpu_arguments.append(sent(rounded, "cpu", torch.float32))
        device_arguments = [x.clone() if isinstance(x, torch.Tensor) else x for x in device_arguments]
        theirs, ours = getattr(elementwise, name)(*cpu_arguments), getattr(fused, name)(*device_arguments)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        for mine, other in pairs:
            if other is not None:
                assert_close(mine, other, request.param)
        return ours

    check.dtype = request.param
    return check


@pytest.mark.parametrize("shape", [(37, 300), (5, 7, 24)])
def test_norm(same, shape):
    same("rms_norm", _random(*shape), 1 + 0.3 * _random(shape[-1], seed=1), EPS)


@pytest.mark.parametrize("width", [48, 300])
def test_add_norm_and_add(same, width):
    terms = _terms((width,), 40, "B", same.dtype)
    rows = terms[0].routing.rows
    x, y, weight = _random(rows, width), _random(rows, width, seed=1), _random(width, seed=2)
    same("add_norm", x, y, terms, weight, EPS)
    same("add", x, y, terms)
    same("add", None, y, terms)


@pytest.mark.parametrize("residual", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_norm_backward(same, residual):
    width = 300
    terms = _terms((48, 16, 32), width, "A", same.dtype)
    rows = terms[0].routing.rows
    x, weight, d = _random(rows, width), _random(width, seed=1), _random(rows, width, seed=2)
    rest = _random(rows, width, seed=3) if residual else None
    same("rms_norm_backward", x, weight, EPS, d, terms, rest)
    same("rms_norm_backward", x, weight, EPS, d, None, rest)


@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.slow), 24])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(same, size, normed):
    norms = [(1 + 0.3 * _random(size, seed=i)).to(same.dtype) for i in (8, 9)]
    heads = [
        Heads(query=4, key_value=2, size=size, eps=EPS, **(
            {name: norm.to(*to) for name, norm in zip(("q_norm", "k_norm"), norms, strict=True)} if normed else {}
        ))
        for to in ((DEVICE, same.dtype), ("cpu", torch.float32))
    ]  # fmt: skip
    terms = _terms((4 * size, 2 * size, 2 * size), 40, "B", same.dtype)
    positions = terms[0].routing.positions_T.cpu()
    angles = _random(200, size // 2).repeat(1, 2)[positions]
    qkv, d = _random(len(positions), 8 * size), _random(len(positions), 8 * size, seed=2)
    _, before = same("rotate", qkv, terms, angles.cos(), angles.sin(), tuple(heads))
    pair = (before, before.cpu()) if normed else None
    same("rotate_backward", d, pair, angles.cos(), angles.sin(), tuple(heads))


@pytest.mark.parametrize("width", [pytest.param(48, marks=pytest.mark.slow), 75])
def test_swiglu(same, width):
    terms = _terms((width, width), 40, "B", same.dtype)
    dterms = _terms((30,), width, "A", same.dtype, seed=3)
    rows = terms[0].routing.rows
    gate_up, d = _random(rows, 2 * width), _random(rows, width, seed=2)
    same("swiglu", gate_up, terms)
    same("swiglu_backward", gate_up, terms, d, dterms)


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_cross_entropy(vocabulary):
    logits, labels = 5 * _random(6, vocabulary), torch.tensor([0, 3, vocabulary - 1, 7, 9, 2])
    weights = torch.tensor([0.5, 1.0, 0.25, 0.0, 1.0, 2.0], dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    (expected.double() * weights).sum().backward()
    work = logits.to(DEVICE, copy=True)
    labels, weights = labels.to(DEVICE), weights.to(DEVICE)
    assert_close(cross_entropy.cross_entropy(work, labels, weights, True), expected.detach())
    assert_close(work, leaf.grad)
    assert not bool(work[3].any())
    untouched = logits.to(DEVICE, copy=True)
    cross_entropy.cross_entropy(untouched, labels, weights, False)
    assert torch.equal(untouched.cpu(), logits)


def test_sums_of_squares():
    grad = _random(1024 * 7)
    blocks = squares.block_sums(grad.to(DEVICE), 1024)
    torch.testing.assert_close(blocks.cpu(), grad.view(7, 1024).double().square().sum(1))
    sums = squares.range_sums(blocks, torch.tensor([0, 2, 2, 7], device=DEVICE)).cpu()
    torch.testing.assert_close(sums, torch.stack([x.sum() for x in blocks.cpu().split([2, 0, 5])]))


def test_terms_of_no_adapter_change_nothing():
    routing, bank = routing_of(), bank_of((48, 48), 40, adapters={})
    products = lora.shrink(_random(routing.rows, 40).to(DEVICE), bank, routing)
    term = LoraTerm(products=products, bank=bank, routing=routing, through="B", pending=True)
    gate_up = _random(routing.rows, 96)
    ours, theirs = fused.swiglu(gate_up.to(DEVICE), term), elementwise.swiglu(gate_up, term)
    assert_close(ours, theirs)
