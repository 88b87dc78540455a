"""An FP8 base: rows by themselves, products that e4m3's rounding explains, the same bits in company, clear refusals.

Letters: T packed rows, O out features, D in features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlora.config import parse_config
from mlora.engine.memory import MemoryModel
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization, choose_quantization
from mlora.models.spec import Quantization, load_spec
from mlora.models.weights import Checkpoint
from mlora.ops.fp8 import E4M3, Fp8Weight, quantise_rows
from mlora.types import UserError
from tests.cpu.runs import assert_company_changes_no_bit, outcome, run, subject_and_other
from tests.cpu.tiny import save_tiny

CPU = torch.device("cpu")
FP8 = Quantization(kind="fp8")
HALF_STEP = 2.0**-4  # the most that rounding to e4m3 changes a number of, relative to it


def torch_lacks() -> str:
    """Why there are no products with row-wise scales on this CPU; "" where there are."""
    q, scale = torch.ones(16, 16).to(E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(q, q.T, scale, scale.T, out_dtype=torch.float32)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"torch {torch.__version__}: {error}"
    return ""


needs_products = pytest.mark.skipif(bool(torch_lacks()), reason=torch_lacks())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(weight_OD: torch.Tensor) -> Fp8Weight:
    return Fp8Weight.of(*quantise_rows(weight_OD), torch.ones(1, weight_OD.shape[1]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.1")


def test_a_row_is_rounded_to_e4m3_with_the_scale_that_uses_its_range() -> None:
    x = random(5, 64) * torch.tensor([[1e-30], [1e-3], [1.0], [1e4], [1e30]])
    q, scale = quantise_rows(x)
    assert (q.dtype, scale.dtype, scale.shape) == (E4M3, torch.float32, (5, 1))
    assert torch.equal(q.float().abs().amax(1), torch.full((5,), 448.0))
    error = (q.double() * scale.double() - x.double()).abs()
    assert bool((error <= HALF_STEP * x.double().abs() + 2.0**-10 * scale).all())
    assert error.max() > 0


@needs_products
def test_rows_of_zeros_and_of_what_is_not_finite_stay_what_they_are() -> None:
    x = random(32, 64)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    y = fp8(random(48, 64, seed=1)).forward(x, None)
    assert not bool(y[0].any())
    assert not bool(y[1].isfinite().any() or y[2].isfinite().any())
    assert bool(y[3:].isfinite().all())


@needs_products
def test_products_are_those_of_the_rounded_numbers() -> None:
    """Weights whose rows differ a thousandfold: dx is right only if their scales go into dy before it is rounded."""
    spread = torch.logspace(-2, 1, 48)[torch.randperm(48, generator=torch.Generator().manual_seed(3))]
    weight, bias = random(48, 64, seed=1) * spread[:, None], random(48, seed=2)
    x, dy = random(32, 64), random(32, 48, seed=4)
    kept = fp8(weight)
    rounded = [q.double() * scale for q, scale in (quantise_rows(x), quantise_rows(weight))]
    torch.testing.assert_close(kept.forward(x, bias).double(), rounded[0] @ rounded[1].T + bias, rtol=1e-5, atol=1e-4)
    q, scale = quantise_rows(dy, kept.scale_1O)
    torch.testing.assert_close(
        kept.backward(dy).double(), scale * (q.double() @ kept.q_OD.double()), rtol=1e-5, atol=1e-4
    )
    for ours, exact in (
        (kept.forward(x, None), x.double() @ weight.double().T),
        (kept.backward(dy), dy.double() @ weight.double()),
    ):
        assert (ours - exact).norm() / exact.norm() < 0.05


@needs_products
@torch.no_grad()
def test_large_numbers_in_other_rows_change_no_bit() -> None:
    kept, x, dy = fp8(random(48, 64, seed=1)), random(64, 64), random(64, 48, seed=2)
    y, dx = kept.forward(x, None), kept.backward(dy)
    x[16:], dy[16:] = 1e4, -1e4
    assert torch.equal(kept.forward(x, None)[:16], y[:16])
    assert torch.equal(kept.backward(dy)[:16], dx[:16])
    assert torch.equal(kept.forward(x[:16], None), y[:16])


@needs_products
@pytest.mark.parametrize("family", ["llama3.1", "qwen2"])
def test_company_cuts_stages_and_recompute_change_no_bit(tmp_path: Path, family: str) -> None:
    """qwen2 has biases."""
    model = save_tiny(tmp_path / "model", family)
    assert_company_changes_no_bit(tmp_path, model, quantization="fp8")


@needs_products
def test_it_trains_like_the_model_that_was_not_rounded(tmp_path: Path, model: Path) -> None:
    subject = subject_and_other(tmp_path)[0] | {"max_steps": 16, "learning_rate": 4e-3}
    plain = outcome(run(tmp_path / "plain", model, [subject]), "subject").losses
    rounded = outcome(run(tmp_path / "fp8", model, [subject], quantization="fp8"), "subject").losses
    assert plain[-1] < 0.8 * plain[0]
    assert rounded != plain and rounded == pytest.approx(plain, rel=0.05)


def test_the_memory_model_knows_the_sizes(model: Path) -> None:
    """Both copies of the weights, their scales, and the ones that all linears of a slice share."""
    quantization = Quantization(kind="fp8", dense=frozenset({"model.layers.2.mlp.down_proj"}))
    spec, layers = load_spec(model), (1, 2)
    memory = MemoryModel(
        spec=spec, dtype=torch.bfloat16, layers=layers, in_flight=(1, 1), adapters=(), quantization=quantization
    )
    for stage, held in enumerate((range(1), range(1, 3))):
        slice_ = Decoder(spec, Checkpoint(model, spec), held, torch.bfloat16, CPU, quantization)
        found: dict[int, int] = {}
        tensors = [getattr(slice_, "embedding_VD", None), getattr(slice_, "head_VD", None)]
        for layer in slice_._layers.values():
            tensors += [layer._norm_1, layer._norm_2]
            for weight in (weight.matrix() for weight in layer._weights.values()):
                tensors += list(vars(weight).values()) if isinstance(weight, Fp8Weight) else [weight]
        for tensor in tensors:
            if tensor is not None:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        assert memory.need(stage, 16, False).weights == sum(found.values())
        dense = replace(memory, quantization=None).need(stage, 16, False)
        assert memory.need(stage, 16, False).microbatches == dense.microbatches + 16 * 2 * spec.intermediate_size


def chosen(model: Path, **keys: object) -> Quantization | None:
    config = parse_config({"base_model": str(model), "adapters": [{"name": "a", "dataset": "none"}], **keys})
    spec = load_spec(model)
    return choose_quantization(config, spec, Checkpoint(model, spec))


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_modules_of_one_product_are_skipped_together(model: Path) -> None:
    whole = chosen(model, quantization="fp8", quantization_skip_modules=["gate_proj", "up_proj", "layers.0"])
    assert whole is not None and len(whole.dense) == 7 + 2 * 2
    text = refusal(lambda: chosen(model, quantization="fp8", quantization_skip_modules=["k_proj"]))
    assert "with fp8 q_proj, k_proj, v_proj are one product; name all of them or none" in text


def test_sides_that_are_no_multiple_of_16_are_refused(tmp_path: Path) -> None:
    odd = save_tiny(tmp_path / "odd", "llama3.1", intermediate_size=120)
    assert "gate_proj is 120 x 64; write nf4 or int8" in refusal(lambda: chosen(odd, quantization="fp8"))


def test_double_quantisation_is_refused(model: Path) -> None:
    text = refusal(lambda: chosen(model, quantization="fp8", double_quantization=True))
    assert "fp8 has one scale a row" in text


def test_a_gpu_without_fp8_units_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    text = refusal(lambda: check_quantization(FP8, torch.bfloat16, torch.device("cuda")))
    assert "compute capability 8.9" in text and "NVIDIA A100 has 8.0; write nf4 or int8" in text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "write bfloat16" in refusal(lambda: check_quantization(FP8, torch.float32, torch.device("cuda")))


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_device_whose_product_fails_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def product(q_TK: torch.Tensor, q_KM: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no row-wise\nscales here")
        return torch.zeros(q_TK.shape[0], q_KM.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(Checkpoint, "layer", None)
    text = refusal(lambda: run(tmp_path, model, [{"name": "a", "dataset": "none.jsonl"}], quantization="fp8"))
    reason = "no row-wise scales here" if fault == "raises" else "a small product came out wrong"
    assert text.startswith(f"quantization: fp8 does not work on this cpu: {reason}; write nf4 or int8")


def test_float64_is_refused() -> None:
    assert "write float32" in refusal(lambda: check_quantization(FP8, torch.float64, CPU))
