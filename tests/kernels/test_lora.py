"""The kernels of BatchLoRA against the plain PyTorch form, with odd samples, ranks, widths and absent modules."""

from __future__ import annotations

import pytest
import torch

from mlora.ops import batch_lora
from mlora.ops.batch_lora import LoraTerm
from mlora.ops.kernels import lora
from tests.kernels.lora_cases import DEVICE, DTYPES, assert_close, bank_of, gradients, routing_of, to_float32

SHAPES = {
    "qkv": ((48, 16, 32), 80, {(4, 1), (9, 0), (9, 1), (9, 2)}),  # one adapter without k, one without any
    "gate_up of odd widths": ((50, 50), 30, {(0, 1)}),
    "down": ((64,), 272, ()),
}


@pytest.fixture(params=[(shape, dtype) for shape in SHAPES for dtype in DTYPES], ids=str)
def case(request):
    """A bank, inputs and incoming gradient in one dtype, and a random frozen weight."""
    (widths, in_width, skip), dtype = SHAPES[request.param[0]], request.param[1]
    rows = routing_of().rows
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype)
        for shape in ((rows, in_width), (sum(widths), in_width), (rows, sum(widths)))
    )
    return bank_of(widths, in_width, dtype, skip=skip), x, w, dy


@pytest.mark.parametrize("dropout", [True, False])
def test_forward(case, dropout):
    bank, x, w, _ = case
    routing = routing_of(dropout=dropout)
    expected, _ = batch_lora.forward(x.cpu().float(), w.cpu().float(), None, to_float32(bank), routing)
    y = x @ w.T
    products = lora.shrink(x, bank, routing)
    lora.expand(y, LoraTerm(products=products, bank=bank, routing=routing, through="B", pending=True))
    tokens = sum(routing.sample_lengths)
    assert_close(y[:tokens], expected[:tokens], x.dtype)


def test_backward_and_all_gradients(case):
    bank, x, w, dy = case
    routing, before, reference = routing_of(), gradients(bank), to_float32(bank)
    _, term = batch_lora.forward(x.cpu().float(), w.cpu().float(), None, reference, routing)
    expected, dterm = batch_lora.backward(dy.cpu().float(), w.cpu().float(), term)
    batch_lora.accumulate_a(x.cpu().float(), dterm)
    dx = dy @ w
    ds = lora.backward_b(dy, lora.shrink(x, bank, routing), bank, routing)
    lora.accumulate_a(ds, x, bank, routing)
    lora.expand(dx, LoraTerm(products=ds, bank=bank, routing=routing, through="A", pending=True))
    assert_close(dx, expected, x.dtype)
    ours, theirs = gradients(bank), gradients(reference)
    for name, value in ours.items():
        assert_close(value, theirs[name], x.dtype)
        assert not torch.equal(value, before[name]), name


def test_rows_of_nobody_stay_as_they_are(case):
    bank, x, w, _ = case
    routing = routing_of()
    tokens = sum(routing.sample_lengths)
    y = torch.full((routing.rows, w.shape[0]), 7.0, device=DEVICE, dtype=x.dtype)
    products = lora.shrink(x, bank, routing)
    lora.expand(y, LoraTerm(products=products, bank=bank, routing=routing, through="B", pending=True))
    assert bool((y[tokens:] == 7).all()) and not bool((y[:tokens] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_with_programs_of_their_own_give_the_same_bits(dtype, monkeypatch):
    """Samples of several pieces, in a program that walks an adapter's and in one for each piece."""
    monkeypatch.setattr("mlora.ops.routing.PIECE", 96)
    monkeypatch.setattr(lora, "PIECE", 96)
    widths, in_width, skip = SHAPES["gate_up of odd widths"]
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(routing_of().rows, n, generator=generator).to(DEVICE, dtype) for n in (in_width, sum(widths)))
    found = []
    for enough in (0, 1_000_000):
        monkeypatch.setattr(lora, "ENOUGH_PROGRAMS", enough)
        bank, routing = bank_of(widths, in_width, dtype, skip=skip), routing_of()
        ds = lora.backward_b(dy, lora.shrink(x, bank, routing), bank, routing)
        lora.accumulate_a(ds, x, bank, routing)
        found.append(gradients(bank) | {"ds": ds[: sum(routing.sample_lengths)].cpu()})
    walked, apart = found
    for name, value in walked.items():
        assert torch.equal(value, apart[name]), name
    reference = to_float32(bank_of(widths, in_width, dtype, skip=skip))
    _, term = batch_lora.forward(x.cpu().float(), torch.zeros(sum(widths), in_width), None, reference, routing)
    _, dterm = batch_lora.backward(dy.cpu().float(), torch.zeros(sum(widths), in_width), term)
    batch_lora.accumulate_a(x.cpu().float(), dterm)
    for name, value in gradients(reference).items():
        assert_close(apart[name], value, dtype)
