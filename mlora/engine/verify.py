"""Exported adapters against real PEFT: both load the same files, both must give the same logits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlora.engine.device import prepare
from mlora.engine.trained import BARE_SLOT, Trained, base_of, find_trained, load_stage, one_sample
from mlora.models.spec import load_spec
from mlora.types import UserError

_ROWS = 48  # tokens of the sample whose logits are compared
_TOLERANCE = 1e-4  # relative to the largest logit, float32 on a CPU


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """One adapter's comparison. ``changed`` is how much the adapter moves the base model's logits."""

    name: str
    max_difference: float
    scale: float
    changed: float

    @property
    def ok(self) -> bool:
        return self.max_difference <= _TOLERANCE * self.scale and self.changed > 0


def verify_run(output_dir: str | Path) -> list[LogitsCheck]:
    """Compare the logits of every adapter that a run has exported, in float32 on the CPU. Needs ``peft``.

    Raises UserError where there is none, or where files are damaged or made for another base model.
    """
    try:
        import peft  # noqa: F401
    except ImportError:
        raise UserError("mlora verify needs PEFT: pip install 'mlora-engine[verify]'") from None
    return [_verify(adapter) for adapter in find_trained([output_dir])]


def _verify(adapter: Trained) -> LogitsCheck:
    base = base_of([adapter], None)
    torch.manual_seed(0)
    input_ids = torch.randint(0, load_spec(base).vocab_size, (_ROWS,))
    ours = _engine_logits(base, adapter, input_ids)
    theirs, without = _peft_logits(base, adapter.folder, input_ids)
    return LogitsCheck(
        name=adapter.name,
        max_difference=float((ours - theirs).abs().max()),
        scale=float(theirs.abs().max()),
        changed=float((theirs - without).abs().max()),
    )


def _engine_logits(base: Path, adapter: Trained, input_ids: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu")
    prepare(device)
    stage = load_stage(base, [adapter], torch.float32, device)
    return stage.evaluate(one_sample(input_ids, BARE_SLOT + 1))


def _peft_logits(base: Path, folder: Path, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with and without the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if load_spec(base).stored:  # else bitsandbytes would round what goes through an int8 weight too
        plain = _dequantised(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers to PEFT, on names that both will change
        model = PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        adapted = model(input_ids[None]).logits[0]
        with model.disable_adapter():
            return adapted, model(input_ids[None]).logits[0]


def _dequantised(model: Any) -> Any:
    """All of it in float32, to which neither bitsandbytes nor transformers goes by itself from a 16-bit checkpoint."""
    for parameter in model.parameters():
        if hasattr(parameter, "quant_state"):
            parameter.quant_state.dtype = torch.float32
    return model.dequantize().float()
