"""Fine-tune several LoRA adapters of one frozen Llama-family model at once."""

from __future__ import annotations

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
    "AdapterResult": "mlora.engine.results",
    "Answer": "mlora.engine.generate",
    "Evaluation": "mlora.engine.evaluate",
    "Merged": "mlora.engine.merge",
    "Models": "mlora.engine.use",
    "Results": "mlora.engine.results",
    "Sampling": "mlora.engine.generate",
    "StepReport": "mlora.engine.adapter_run",
    "evaluate": "mlora.engine.evaluate",
    "generate": "mlora.engine.generate",
    "merge": "mlora.engine.merge",
    "read_prompts": "mlora.engine.generate",
    "text_prompt": "mlora.engine.generate",
    "train": "mlora.engine.run",
}


def __getattr__(name: str) -> Any:
    """What stands on torch is imported when it is first used, so that ``mlora --help`` answers at once."""
    if name not in _LAZY:
        raise AttributeError(f"module 'mlora' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
