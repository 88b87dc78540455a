"""Where Triton kernels stand in for the plain PyTorch form of an operator: on CUDA, except in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

CPU_ROWS = 64  # of one product on a CPU


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
    """The product, on a CPU in blocks of equal shape: for other numbers of rows its library would sum in another order.

    MKL does so from 192 rows on where sums have about 900 terms or more, and with several threads from 32 on.
    """
    if x_TD.device.type != "cpu":
        return product(x_TD)
    rows = len(x_TD)
    blocks = F.pad(x_TD, (0, 0, 0, -rows % CPU_ROWS)).split(CPU_ROWS)
    return torch.cat([product(block_ND) for block_ND in blocks])[:rows]
