"""One stage at work: its slice of the model, its part of every adapter, and the executor that walks the stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mlora.adapters.state import AdapterState
from mlora.config import RunConfig
from mlora.models.decoder import Decoder
from mlora.models.spec import linear_shapes, load_spec
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.pipeline.executor import Decider, Entry, Executor, Window
from mlora.pipeline.stage import Stage
from mlora.pipeline.transport.base import Transport

Deliver = Callable[[Entry, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every stage must know of a run, as plain data. ``targets`` are by adapter, ``layers`` per stage."""

    config: RunConfig
    targets: tuple[tuple[str, ...], ...]
    first_layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    replicas: int
    dtype: torch.dtype
    model_digest: str


def model_digest(folder: Path) -> str:
    """Of the model's configuration and of the name, size and header of every weights file; reads no weights."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(8)
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(int.from_bytes(header, "little")))
    return digest.hexdigest()


class Worker:
    """Builds a stage and runs its row.

    Args:
        job: the run.
        device: where this stage computes.
        transport: this stage's messages; None where there is one stage.
        deliver: takes an adapter's matrices of this stage when it leaves, named ``MODULE.A`` and ``MODULE.B``.
        decider: on stage 0, decides about steps.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        transport: Transport | None,
        deliver: Deliver,
        decider: Decider | None = None,
    ) -> None:
        index = transport.stage if transport else 0
        folder = resolve_base_model(job.config.base_model)
        self._job, self._device, self._deliver = job, device, deliver
        self._spec = load_spec(folder)
        self._layers = range(*job.first_layers[index : index + 2])
        model = Decoder(self._spec, Checkpoint(folder, self._spec), self._layers, job.dtype, device)
        self._stage = Stage(model, job.config.recompute)
        self._states: dict[int, AdapterState] = {}
        self.executor = Executor(self._stage, transport, job.in_flight, job.first_layers, self._meet, decider)

    def run(self, windows: Iterable[Window]) -> None:
        """Walk the stream to its end."""
        self.executor.run(windows)

    def _meet(self, entry: Entry) -> None:
        if entry.kind == "reset":
            self._stage.reset(entry.slot)
            return
        if entry.kind == "join":
            config, targets = self._job.config.adapters[entry.adapter], self._job.targets[entry.adapter]
            shapes = linear_shapes(self._spec)
            state = AdapterState(config, targets, shapes, self._layers, self._job.dtype, self._device)
            self._states[entry.slot] = state
            self._stage.join(entry.slot, state)
            return
        self._stage.leave(entry.slot)
        matrices = self._states.pop(entry.slot).matrices()
        pairs = {name: dict(zip("AB", pair, strict=True)) for name, pair in matrices.items()}
        self._deliver(entry, {f"{name}.{k}": matrix for name, pair in pairs.items() for k, matrix in pair.items()})
