"""Exported adapters against real PEFT: both load the same files, both must give the same logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.checkpoint.peft_files import read_adapter
from mlora.config import AdapterConfig, parse_config
from mlora.engine.device import prepare
from mlora.models.decoder import Decoder
from mlora.models.quantised import check_quantization
from mlora.models.spec import linear_shapes, load_spec
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.stage import Batch, Stage
from mlora.types import Microbatch, SampleRef, Segment, UserError, padded

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
    """Compare the logits of every adapter under ``output_dir``/adapters, in float32 on the CPU. Needs ``peft``.

    Raises UserError where there is none, or where files are damaged or made for another base model.
    """
    try:
        import peft  # noqa: F401
    except ImportError:
        raise UserError("mlora verify needs PEFT: pip install 'mlora-engine[verify]'") from None
    folders = sorted(path for path in (Path(output_dir) / "adapters").glob("[!.]*") if path.is_dir())
    if not folders:
        raise UserError(f"{output_dir}: there is no adapter under {Path(output_dir) / 'adapters'}")
    return [_verify(folder) for folder in folders]


def _verify(folder: Path) -> LogitsCheck:
    peft_config, matrices = read_adapter(folder)
    base = resolve_base_model(_base_model(peft_config, folder))
    torch.manual_seed(0)
    input_ids = torch.randint(0, load_spec(base).vocab_size, (_ROWS,))
    ours = _engine_logits(base, peft_config, matrices, input_ids, folder)
    theirs, without = _peft_logits(base, folder, input_ids)
    return LogitsCheck(
        name=folder.name,
        max_difference=float((ours - theirs).abs().max()),
        scale=float(theirs.abs().max()),
        changed=float((theirs - without).abs().max()),
    )


def _base_model(peft_config: dict[str, object], folder: Path) -> str:
    name = peft_config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{folder / 'adapter_config.json'}: base_model_name_or_path is missing; write the base model")
    return name


def _engine_logits(
    base: Path,
    peft_config: dict[str, object],
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]],
    input_ids: torch.Tensor,
    folder: Path,
) -> torch.Tensor:
    device = torch.device("cpu")
    prepare(device)
    spec = load_spec(base)
    layers = range(spec.num_layers)
    config = _adapter_config(peft_config, folder)
    targets = match_targets(config, spec.num_layers)
    state = AdapterState(config, targets, linear_shapes(spec), layers, torch.float32, device)
    try:
        state.load(matrices)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    checkpoint = Checkpoint(base, spec)
    check_quantization(checkpoint.stored, torch.float32, device)
    stage = Stage(Decoder(spec, checkpoint, layers, torch.float32, device, checkpoint.stored))
    stage.join(0, state)
    sample = (SampleRef(0, 0, len(input_ids)),)
    segment = Segment(adapter=0, slot=0, step=0, start=0, samples=sample, target_tokens=1, ends_step=True)
    microbatch = Microbatch(0, (segment,), padded(len(input_ids)))
    return stage.evaluate(Batch(microbatch, input_ids, input_ids))


def _adapter_config(peft_config: dict[str, object], folder: Path) -> AdapterConfig:
    """PEFT's fields that the engine knows, checked as if they stood in a configuration file; nothing is dropped."""
    names = {field.name for field in dataclasses.fields(AdapterConfig)}
    known = {key: value for key, value in peft_config.items() if key in names}
    adapter = {**known, "name": folder.name, "dataset": str(folder), "lora_dropout": 0}
    try:
        return parse_config({"base_model": str(folder), "adapters": [adapter]}).adapters[0]
    except UserError as error:
        raise UserError(f"{folder / 'adapter_config.json'}: {error}") from None


def _peft_logits(base: Path, folder: Path, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with and without the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if load_spec(base).stored:  # else bitsandbytes would round what goes through an int8 weight too
        plain = plain.dequantize()
    model = PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        adapted = model(input_ids[None]).logits[0]
        with model.disable_adapter():
            return adapted, model(input_ids[None]).logits[0]
