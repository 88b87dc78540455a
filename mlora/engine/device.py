"""Device, dtype, and the settings that keep arithmetic repeatable."""

from __future__ import annotations

import os

import torch

from mlora.types import UserError


def choose_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda, but torch sees no CUDA device here; write auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 on a CPU, where 16-bit products are slow."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def prepare(device: torch.device) -> None:
    """Make equal inputs give equal bits.

    On a CPU element-wise work is cut by threads, and cuts inside a vector can change bits: a power of two of threads
    cuts at multiples of the vector width.
    """
    if device.type == "cpu":
        torch.set_num_threads(1 << (torch.get_num_threads().bit_length() - 1))
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(True)
