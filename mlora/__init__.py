"""Fine-tune several LoRA adapters of one frozen Llama-family model at once."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlora.config import AdapterConfig, DatasetConfig, RunConfig, data_config, load_config, parse_config
from mlora.types import Interrupted, UserError

if TYPE_CHECKING:
    from mlora.engine.adapter_run import StepReport
    from mlora.engine.evaluate import Evaluation, evaluate
    from mlora.engine.generate import Answer, Sampling, generate, read_prompts, text_prompt
    from mlora.engine.merge import Merged, merge
    from mlora.engine.results import AdapterResult, Results
    from mlora.engine.run import train
    from mlora.engine.use import Models

__version__ = "0.1.0"

# MKL's sums are then the same for any number of threads and rows; it looks at this before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = [
    "AdapterConfig",
    "AdapterResult",
    "Answer",
    "DatasetConfig",
    "Evaluation",
    "Interrupted",
    "Merged",
    "Models",
    "Results",
    "RunConfig",
    "Sampling",
    "StepReport",
    "UserError",
    "data_config",
    "evaluate",
    "generate",
    "load_config",
    "merge",
    "parse_config",
    "read_prompts",
    "text_prompt",
    "train",
]

_LAZY = {
    "mlora.engine.adapter_run": ("StepReport",),
    "mlora.engine.evaluate": ("Evaluation", "evaluate"),
    "mlora.engine.generate": ("Answer", "Sampling", "generate", "read_prompts", "text_prompt"),
    "mlora.engine.merge": ("Merged", "merge"),
    "mlora.engine.results": ("AdapterResult", "Results"),
    "mlora.engine.run": ("train",),
    "mlora.engine.use": ("Models",),
}


def __getattr__(name: str) -> Any:
    """What stands on torch is imported when it is first used, so that ``mlora --help`` answers at once."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'mlora' has no attribute {name!r}")
