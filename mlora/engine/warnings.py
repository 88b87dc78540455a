"""What other programs will not take of an adapter as it is configured, said before it is trained."""

from __future__ import annotations

import math

from mlora.config import AdapterConfig

_VLLM_DEFAULT_RANK = 16
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank can be


def deployment_warnings(config: AdapterConfig) -> list[str]:
    """One line for each thing that vLLM's defaults refuse or llama.cpp's converter reads wrongly."""
    warnings, r = [], config.largest_rank
    if r > _VLLM_RANKS[-1]:
        warnings.append(f"{config.name}: vLLM serves adapters up to r {_VLLM_RANKS[-1]}, not r {r}")
    elif r > _VLLM_DEFAULT_RANK:
        least = next(rank for rank in _VLLM_RANKS if rank >= r)
        warnings.append(
            f"{config.name}: r {r} is over vLLM's default of {_VLLM_DEFAULT_RANK}; "
            f"serve it with --max-lora-rank {least}"
        )
    if config.rank_pattern or config.alpha_pattern:
        warnings.append(
            f"{config.name}: vLLM and llama.cpp do not read rank_pattern and alpha_pattern, and would scale otherwise; "
            "mlora merge makes a model of the adapter that they read"
        )
    if config.use_rslora:
        warnings.append(
            f"{config.name}: llama.cpp's converter ignores use_rslora and would scale by lora_alpha / r; "
            f"for it train with use_rslora false and lora_alpha {config.lora_alpha * math.sqrt(config.r):g}"
        )
    return warnings
