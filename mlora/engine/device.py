"""Device, dtype, and the settings that keep arithmetic repeatable."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from mlora.ops.batch_lora import FLOAT32_ROWS
from mlora.types import UserError, padded

_LEAST_CUDA_ROWS = 1024
_FULL_CUDA_ROWS = 2048


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


def row_bucket(device: torch.device, dtype: torch.dtype) -> Callable[[int], int]:
    """Rows of a microbatch with its padding, so that no row's product depends on how many others there are.

    A CPU's products are then the same for any multiple of 16 (``in_blocks``). cuBLAS changes kernels with the number
    of rows; for the shapes that tests/gpu/test_row_invariance.py lists it did not from 1,024 rows on (one H200,
    bfloat16). In float32 it does, so products are taken in blocks of as many rows.
    """
    if device.type == "cpu":
        return padded
    if dtype == torch.float32:
        return lambda rows: padded(max(rows, 1), FLOAT32_ROWS)
    return lambda rows: max(_LEAST_CUDA_ROWS, padded(rows, 256))


def full_rows(device: torch.device) -> int:
    """Rows from which what a microbatch costs by itself (launches, weights read for few rows) no longer counts.

    On one H200 17 layers of Llama-8B's shape take 2 ms + 12 µs a row for F, and as much for B.
    """
    return padded(1) if device.type == "cpu" else _FULL_CUDA_ROWS


def prepare_for_nccl() -> None:
    """Leave the watch over NCCL to Liveness: torch's own would end the process before the first real error is shown."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


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
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (its stub lacks it)
