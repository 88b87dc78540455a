"""The engine's logits equal transformers' for every family, with samples packed side by side.

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
from mlora.types import MERGED_LINEARS, Microbatch, SampleRef, Segment, padded
from tests.cpu.tiny import FAMILIES, VOCAB, save_tiny

LENGTHS = (23, 1, 17)
CPU = torch.device("cpu")


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def pack(ids: list[torch.Tensor]) -> tuple[Microbatch, torch.Tensor]:
    """The samples as one microbatch, with its input ids [T]."""
    refs = tuple(SampleRef(i, i, len(sample)) for i, sample in enumerate(ids))
    segment = Segment(adapter=0, slot=0, step=0, start=0, samples=refs, target_tokens=1, ends_step=True)
    rows = padded(segment.stop)
    return Microbatch(0, (segment,), rows), torch.cat([*ids, torch.zeros(rows - segment.stop, dtype=torch.long)])


def engine_logits(folder: Path, ids: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Logits [T, V] from two slices of the model, without padding."""
    spec = load_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    microbatch, x = pack(ids)
    for layers in (range(1), range(1, spec.num_layers)):
        decoder = Decoder(spec, checkpoint, layers, dtype, CPU)
        banks = {index: {merged: {} for merged in MERGED_LINEARS} for index in layers}
        x_TD = decoder.embed(x) if decoder.is_first else x
        x = decoder.run(x_TD, decoder.pack(microbatch), banks)
    return (decoder.norm(x) @ decoder.head_VD.T)[: microbatch.tokens]


def wide_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def transformers_logits(folder: Path, ids: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """transformers rounds to float32 inside its norms; in float64 they are replaced, so that all else can be seen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms if dtype == torch.float64 else ():
        norm.forward = partial(wide_norm, norm)
    return torch.cat([model(input_ids=sample[None]).logits[0] for sample in ids])


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
        expected = transformers_logits(tmp_path, ids, dtype)
        assert expected.std() > 0.5  # logits that hardly differ would prove nothing
        torch.testing.assert_close(engine_logits(tmp_path, ids, dtype), expected, rtol=0, atol=tolerance)
