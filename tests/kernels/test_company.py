"""An adapter's bits in kernels: the same alone, and behind and before strangers at another place of the microbatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlora.ops.batch_lora import LoraTerm
from mlora.ops.kernels import elementwise, lora
from tests.kernels.lora_cases import ADAPTERS, DEVICE, DTYPES, bank_of, gradients, products_of_dy, routing_of

WIDTHS, IN_WIDTH = (48, 32), 80
OWN = {1: [70, 2], 4: [127], 9: [33, 1]}  # slot -> lengths; of them 1 has dropout


def _products(slot, lengths, own, dtype):
    """Everything that kernels compute of one adapter's rows, from the same numbers in those rows."""
    adapters = {each: ADAPTERS[each] for each in lengths}
    bank, dbank = (
        bank_of(WIDTHS, IN_WIDTH, dtype, adapters=adapters),
        bank_of((64,), WIDTHS[0], dtype, adapters=adapters),
    )
    routing = routing_of(lengths)
    first = next(segment.start for segment in routing.segments if segment.slot == slot)
    rows = slice(first, first + sum(lengths[slot]))
    x, y, dy, gate_up, d = (_filled(routing.rows, rows, tensor, dtype) for tensor in own)
    s = lora.shrink(x, bank, routing)
    ds = lora.backward_b(dy, s, bank, routing)
    lora.accumulate_a(ds, x, bank, routing)
    forward = LoraTerm(products=s, bank=bank, routing=routing, through="B", pending=True)
    backward = LoraTerm(products=ds, bank=bank, routing=routing, through="A", pending=True)
    dterm = LoraTerm(
        products=products_of_dy(y[:, :64].contiguous(), dbank, routing),
        bank=dbank,
        routing=routing,
        through="A",
        pending=True,
    )
    gate_up_bank = bank_of((WIDTHS[0], WIDTHS[0]), IN_WIDTH, dtype, adapters=adapters)
    term = replace(forward, products=lora.shrink(x, gate_up_bank, routing), bank=gate_up_bank)
    lora.expand(y, forward)
    lora.expand(x, backward)
    found = [y, x, *elementwise.swiglu_backward(gate_up, term, d, dterm)]
    grads = {name: grad for name, grad in gradients(bank).items() if name.startswith(f"slot {slot} ")}
    return [tensor[rows].cpu() for tensor in found], grads


def _filled(rows, own_rows, own, dtype):
    tensor = torch.randn(rows, own.shape[1]).to(DEVICE, dtype)
    tensor[own_rows] = own.to(DEVICE, dtype)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot", OWN)
def test_an_adapters_bits_do_not_depend_on_company_and_place(slot, dtype):
    generator = torch.Generator().manual_seed(slot)
    widths = (IN_WIDTH, sum(WIDTHS), sum(WIDTHS), 2 * WIDTHS[0], WIDTHS[0])
    own = [torch.randn(sum(OWN[slot]), width, generator=generator) for width in widths]
    alone, alone_grads = _products(slot, {slot: OWN[slot]}, own, dtype)
    # 7 has 200 ranks and dropout; NumPy, which the interpreter multiplies with, would sum more ranks in another order
    stranger = 7 if DEVICE == "cuda" else 9 if slot == 1 else 1
    company = {0: [5, 1], slot: OWN[slot], stranger: [33, 64]}
    together, grads = _products(slot, company, own, dtype)
    assert all(map(torch.equal, together, alone))
    assert grads.keys() == alone_grads.keys() and all(torch.equal(grads[name], alone_grads[name]) for name in grads)
