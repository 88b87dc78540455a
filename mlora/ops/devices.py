"""Where Triton kernels stand in for the plain PyTorch form of an operator: on CUDA, except in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

CPU_ROWS = 64  # of one product on a CPU, where products are taken in blocks
_TRIED_ROWS = (16, 48, 64, 192, 256, 336)


def has_kernels(x: torch.Tensor) -> bool:
    """Whether operators on x run kernels."""
    return x.is_cuda and x.dtype != torch.float64


def kernels(name: str) -> ModuleType:
    """A module of mlora.ops.kernels, imported where it is first needed: a machine without a GPU needs no Triton."""
    return importlib.import_module(f"mlora.ops.kernels.{name}")


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device, without waiting for what the device has still to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU by way of pinned memory; the host waits once for all."""
    copies = [x.to("cpu", non_blocking=True) if x.is_cuda else x.clone() for x in tensors]
    if any(x.is_cuda for x in tensors):
        torch.cuda.current_stream().synchronize()
    return copies


class Fetched:
    """Numbers on their way from the device; several are fetched while the host waits for the first."""

    def __init__(self, x: torch.Tensor) -> None:
        self._host = x.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if x.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def tolist(self) -> list[float]:
        """The numbers, once they are here."""
        if self._arrived:
            self._arrived.synchronize()
        return self._host.tolist()


def in_blocks(product: Callable[[torch.Tensor], torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
    """The product; on a CPU whose library would sum in another order for another number of rows, in equal blocks."""
    if x_TD.device.type != "cpu" or _rows_are_independent(x_TD.dtype):
        return product(x_TD)
    rows = len(x_TD)
    blocks = F.pad(x_TD, (0, 0, 0, -rows % CPU_ROWS)).split(CPU_ROWS)
    return torch.cat([product(block_ND) for block_ND in blocks])[:rows]


@cache
@torch.no_grad()
def _rows_are_independent(dtype: torch.dtype) -> bool:
    """Whether a product's rows are the same without the others, tried at widths at which libraries begin to cut sums.

    MKL's are in its strict mode, for which ``mlora`` asks and which Intel's CPUs have; oneDNN's, in bfloat16, are not.
    """
    draw = torch.Generator().manual_seed(0)
    for inner, outer in ((960, 576), (2048, 320)):
        x_TD, weight_OD = (torch.randn(n, inner, generator=draw).to(dtype) for n in (_TRIED_ROWS[-1], outer))
        for weight_DO in (weight_OD.T, weight_OD.T.contiguous()):
            whole_TO = x_TD @ weight_DO
            if not all(torch.equal(x_TD[-n:] @ weight_DO, whole_TO[-n:]) for n in _TRIED_ROWS):
                return False
    return True
