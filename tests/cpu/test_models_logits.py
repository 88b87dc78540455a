"""The engine's logits and gradients equal transformers' for every family, with samples packed side by side.

Letters: T packed rows, D model dim, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlora.models.decoder import Decoder
from mlora.models.spec import load_spec
from mlora.models.weights import Checkpoint
from mlora.ops.batch_lora import LinearBank
from mlora.types import MERGED_LINEARS
from tests.cpu.packing import packed
from tests.cpu.tiny import FAMILIES, VOCAB, save_tiny

LENGTHS = (23, 1, 17)
CPU = torch.device("cpu")
MICROBATCH = packed({0: LENGTHS})


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def slices(folder: Path, dtype: torch.dtype) -> list[Decoder]:
    """The model cut in two."""
    spec = load_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    return [Decoder(spec, checkpoint, layers, dtype, CPU) for layers in (range(1), range(1, spec.num_layers))]


def no_adapters(decoder: Decoder) -> dict[int, dict[str, LinearBank]]:
    return {i: {m: LinearBank(len(paths)) for m, paths in MERGED_LINEARS.items()} for i in decoder.layers}


def padded_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Samples' rows side by side as MICROBATCH has them, zeros in the padding."""
    rows = torch.cat(parts)
    return torch.cat([rows, rows.new_zeros(MICROBATCH.rows - len(rows), *rows.shape[1:])])


@torch.no_grad()
def engine_logits(folder: Path, ids: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Logits [T, V] from two slices of the model, without padding."""
    x = padded_rows(ids)
    for decoder in slices(folder, dtype):
        x_TD = decoder.embed(x) if decoder.is_first else x
        x = decoder.infer(x_TD, decoder.pack(MICROBATCH), no_adapters(decoder))
    return (decoder.norm(x) @ decoder.head_VD.T)[: MICROBATCH.tokens]


@torch.no_grad()
def engine_gradient(folder: Path, ids: list[torch.Tensor], dlogits_TV: torch.Tensor, recompute: bool) -> torch.Tensor:
    """dX of the embeddings [T, D], without padding, from that of the logits."""
    x, kept = padded_rows(ids), []
    decoders = slices(folder, dlogits_TV.dtype)
    for decoder in decoders:
        x_TD = decoder.embed(x) if decoder.is_first else x
        x, kept_here = decoder.forward(x_TD, decoder.pack(MICROBATCH), no_adapters(decoder), recompute)
        kept.append(kept_here)
    dx_TD = decoder.norm_backward(x, padded_rows([dlogits_TV @ decoder.head_VD]))
    for decoder, kept_here in zip(reversed(decoders), reversed(kept), strict=True):
        dx_TD = decoder.backward(kept_here, dx_TD)
    assert not dx_TD[MICROBATCH.tokens :].any()
    return dx_TD[: MICROBATCH.tokens]


def wide_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def transformers_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers rounds to float32 inside its norms; in float64 they are replaced, so that all else can be seen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms if dtype == torch.float64 else ():
        norm.forward = partial(wide_norm, norm)
    return model


SPECIAL = {
    "llama with biases": ("llama2", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
    ),
    "qwen2 with yarn": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3 with its own head": ("qwen3", {"tie_word_embeddings": False}),
    "linear rope": ("tinyllama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}
CASES = {family: (family, {}) for family in FAMILIES} | SPECIAL


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_logits_equal_transformers(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    save_tiny(tmp_path, family, **changes)
    ids = samples()
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        model = transformers_model(tmp_path, dtype)
        expected = torch.cat([model(input_ids=sample[None]).logits[0] for sample in ids])
        assert expected.std() > 0.5  # logits that hardly differ would prove nothing
        torch.testing.assert_close(engine_logits(tmp_path, ids, dtype), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_the_gradient_of_the_embeddings_equals_transformers(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **changes)
    ids = samples()
    model = transformers_model(tmp_path, torch.float64)
    leaves = [model.get_input_embeddings()(sample).detach().requires_grad_() for sample in ids]
    logits = torch.cat([model(inputs_embeds=leaf[None]).logits[0] for leaf in leaves])
    dlogits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    logits.backward(dlogits)
    expected = torch.cat([leaf.grad for leaf in leaves])
    assert expected.std() > 0.5
    for recompute in (False, True):
        ours = engine_gradient(tmp_path, ids, dlogits, recompute)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12 * expected.abs().max().item())
