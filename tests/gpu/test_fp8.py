"""FP8 on a GPU: rows by themselves for any number of rows, and e4m3's tolerance.

    python -m pytest tests/gpu/test_fp8.py tests/kernels/test_fp8.py -s      # also shows the products' times

Letters: T packed rows, O out features, D in features.
"""

from __future__ import annotations

import pytest
import torch

from mlora.engine.device import prepare
from mlora.models.quantised import check_quantization
from mlora.models.spec import Quantization
from mlora.ops import fp8
from mlora.ops.fp8 import Fp8Weight, quantise_rows
from tests.gpu.test_row_invariance import ROWS, SHAPES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8 units"
)
CASES = [(model, shape) for model, shapes in SHAPES.items() for shape in shapes]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def kept(shape: tuple[int, int]) -> tuple[torch.Tensor, Fp8Weight]:
    """A weight whose rows differ a hundredfold, and the same in FP8."""
    prepare(torch.device("cuda"))
    spread = torch.logspace(-2, 0, shape[0], device="cuda", dtype=torch.bfloat16)
    weight = random(*shape, seed=1) * spread[torch.randperm(shape[0], device="cuda")][:, None]
    return weight, Fp8Weight.of(*quantise_rows(weight), torch.ones(1, shape[1], device="cuda"))


def products(weight: Fp8Weight, shape: tuple[int, int]):
    """Both, with the width of what each takes."""
    yield "y", lambda x: weight.forward(x, None), shape[1]
    yield "dx", weight.backward, shape[0]


@pytest.mark.parametrize(("model", "shape"), CASES, ids=str)
def test_rows_do_not_change_with_their_number_place_or_neighbours(model, shape):
    _, weight = kept(shape)
    for name, product, width in products(weight, shape):
        x = random(ROWS[-1], width, seed=2)
        whole = product(x)
        differing = [rows for rows in ROWS if not torch.equal(product(x[:rows]), whole[:rows])]
        assert not differing, f"{name}: other bits with {differing} rows"
        assert torch.equal(product(torch.cat([x[37:1061], x[:1024]]))[:1024], whole[37:1061]), name
        loud = x.clone()
        loud[700:] = 1e4
        assert torch.equal(product(loud)[:700], whole[:700]), name
        loud[700:] = torch.nan
        assert torch.equal(product(loud)[:700], whole[:700]), name


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
@pytest.mark.parametrize(("model", "shape"), CASES, ids=str)
def test_products_are_as_near_to_float64_as_e4m3_allows(model, shape, fast, monkeypatch):
    """Rounding both sides to e4m3 moves a product by about 3.7 % of its length. Fast sums keep 13 bits behind the point
    and are cut after every 32 terms, so that a sum of K terms may lose K / 32 times 2⁻¹⁴ of itself, 5 % of 28,672."""
    monkeypatch.setattr(fp8, "FAST_ACCUMULATION", fast)
    dense, weight = kept(shape)
    other = weight.q_OD.double()
    for name, product, width in products(weight, shape):
        x = random(1024, width, seed=3)
        q, scale = quantise_rows(x, weight.scale_1O if name == "dx" else None)
        rounded = (q.double() * scale) @ (other if name == "dx" else (other * weight.scale_1O.T).T)
        exact = x.double() @ (dense.double() if name == "dx" else dense.double().T)
        ours = product(x).double()
        to_rounded, to_exact = (float((ours - y).norm() / y.norm()) for y in (rounded, exact))
        sums = f"{'fast' if fast else 'full'} sums"
        print(
            f"{model} {shape} {name}, {sums}: {to_rounded:.2%} from the rounded numbers' product, {to_exact:.2%} in all"
        )
        cut = width / 32 * 2**-14 if fast else 0.0
        assert to_rounded < 0.005 + cut and to_exact < 0.045 + cut


def test_the_probe_takes_this_gpu():
    prepare(torch.device("cuda"))
    check_quantization(Quantization(kind="fp8"), torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
def test_times(fast, monkeypatch):
    """Not a test of speed: shows 8B's products at 8,192 rows in microseconds beside bfloat16's, and the quantising."""
    monkeypatch.setattr(fp8, "FAST_ACCUMULATION", fast)
    for shape in SHAPES["llama8b"]:
        dense, weight = kept(shape)
        x, dy = random(8192, shape[1]), random(8192, shape[0])
        times = {
            "bf16 y": _micros(lambda x=x, dense=dense: x @ dense.T),
            "fp8 y": _micros(lambda x=x, weight=weight: weight.forward(x, None)),
            "of it q(x)": _micros(lambda x=x: quantise_rows(x)),
            "bf16 dx": _micros(lambda dy=dy, dense=dense: dy @ dense),
            "fp8 dx": _micros(lambda dy=dy, weight=weight: weight.backward(dy)),
            "of it q(dy)": _micros(lambda dy=dy, weight=weight: quantise_rows(dy, weight.scale_1O)),
        }
        print(shape, "fast" if fast else "full", ", ".join(f"{name} {micros:.0f}" for name, micros in times.items()))
        assert all(micros > 0 for micros in times.values())


def _micros(work) -> float:
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 100
