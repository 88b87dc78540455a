"""Fine-tune several LoRA adapters of one frozen Llama-family model at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlora.config import AdapterConfig, DatasetConfig, RunConfig, load_config, parse_config
from mlora.types import Interrupted, UserError

if TYPE_CHECKING:
    from mlora.engine.adapter_run import StepReport
    from mlora.engine.results import AdapterResult, Results
    from mlora.engine.run import train

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "AdapterResult",
    "DatasetConfig",
    "Interrupted",
    "Results",
    "RunConfig",
    "StepReport",
    "UserError",
    "load_config",
    "parse_config",
    "train",
]

_LAZY = {
    "AdapterResult": "mlora.engine.results",
    "Results": "mlora.engine.results",
    "StepReport": "mlora.engine.adapter_run",
    "train": "mlora.engine.run",
}


def __getattr__(name: str) -> Any:
    """What stands on torch is imported when it is first used, so that ``mlora --help`` answers at once."""
    if name not in _LAZY:
        raise AttributeError(f"module 'mlora' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
