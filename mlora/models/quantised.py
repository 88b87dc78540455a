"""Quantised frozen weights: NF4, FP4 and int8 as bitsandbytes makes them, dequantised before every product; or FP8.

FP8 weights are multiplied as they are (mlora.ops.fp8). With the others a quantised model is the dense model of its
dequantised weights: products are the same ones in the compute dtype, so whatever holds of them (neighbours, stages,
recompute) holds here. LLM.int8's decomposition of outliers is not used: it chooses columns by all rows of a product, so
neighbours' rows would change an adapter.

Each module of a merged linear is quantised by itself, and all are dequantised into the rows of one buffer, which the
next merged linear uses again.

Letters: O out features, D in features, V vocabulary.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from mlora.config import RunConfig
from mlora.models.spec import ModelSpec, Quantization, linear_shapes
from mlora.models.weights import Checkpoint, Weights
from mlora.ops.fp8 import E4M3, MULTIPLE, Fp8Weight, quantise_rows
from mlora.types import MERGED_LINEARS, UserError, linear_names, module_name

_INSTALL = "pip install 'mlora-engine[quant]'"
_FP8_UNITS = (8, 9)  # compute capability of the first GPUs that have them

# Whoever imports it first (peft and transformers do, too) is told to install a kernel that multiplies by 4-bit weights,
# which nothing here does. Its other messages are shown.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))


class FrozenWeight(Protocol):
    """The weight of a merged linear."""

    def matrix(self) -> torch.Tensor | Fp8Weight:
        """[O, D] in the compute dtype, to be used before that of another weight of the slice is asked for; or FP8."""


@dataclass(frozen=True)
class DenseWeight:
    """A weight in the compute dtype."""

    weight_OD: torch.Tensor

    def matrix(self) -> torch.Tensor:
        return self.weight_OD

    def write(self, out_OD: torch.Tensor) -> None:
        """A copy, where other modules of the merged linear are quantised."""
        out_OD.copy_(self.weight_OD)


@dataclass(frozen=True)
class Int8Weight:
    """One module's weight as whole numbers, with the size of a row's steps in float32."""

    values_OD: torch.Tensor
    steps_O1: torch.Tensor

    def write(self, out_OD: torch.Tensor) -> None:
        """Dequantised, rounded once to the compute dtype."""
        torch.mul(self.values_OD, self.steps_O1, out=out_OD)


@dataclass(frozen=True)
class FourBitWeight:
    """One module's weight as ``packed`` uint8 [n, 1], two weights a byte, and bitsandbytes' QuantState.

    ``state.dtype`` is the compute dtype.
    """

    packed: torch.Tensor
    state: Any

    def write(self, out_OD: torch.Tensor) -> None:
        """Dequantised."""
        if out_OD.is_cuda:
            _bitsandbytes().dequantize_4bit(self.packed, self.state, out=out_OD)
        else:  # its kernels for CPUs cannot write into a tensor that is there
            out_OD.copy_(_bitsandbytes().dequantize_4bit(self.packed, self.state))


@dataclass(frozen=True)
class Fp8Rows:
    """One module's weight in e4m3, with its rows' scales in float32."""

    q_OD: torch.Tensor
    scale_O1: torch.Tensor

    def write(self, out_OD: torch.Tensor) -> None:
        """Dequantised, rounded once."""
        out_OD.copy_(self.q_OD.float() * self.scale_O1)


ModuleWeight = DenseWeight | Int8Weight | FourBitWeight | Fp8Rows


@dataclass(frozen=True)
class QuantisedWeight:
    """A merged linear whose modules are kept by themselves, and written together into ``buffer`` [n] when needed.

    ``parts`` come with the shapes of their matrices.
    """

    parts: Sequence[tuple[tuple[int, int], ModuleWeight]]
    buffer: torch.Tensor

    def matrix(self) -> torch.Tensor:
        rows, columns = sum(shape[0] for shape, _ in self.parts), self.parts[0][0][1]
        matrix_OD = self.buffer[: rows * columns].view(rows, columns)
        start = 0
        for (count, _), weight in self.parts:
            weight.write(matrix_OD[start : start + count])
            start += count
        return matrix_OD


class FrozenLinears:
    """Makes the merged linears of one slice; those that are quantised share one buffer in ``dtype``, FP8 its ones.

    The buffer is made once, so that it lies where a CUDA graph that has read it will find it again.
    """

    def __init__(
        self, spec: ModelSpec, quantization: Quantization | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._quantization, self._dtype, self._device = quantization, dtype, device
        self._shapes = linear_shapes(spec) | {"lm_head": (spec.vocab_size, spec.hidden_size)}
        if quantization is not None and quantization.kind == "fp8":
            self._ones = torch.ones(1, max(columns for _, columns in self._shapes.values()), device=device)
        elif quantization is not None:
            self._buffer = torch.empty(buffer_elements(spec), dtype=dtype, device=device)

    def weight(self, tensors: Mapping[str, torch.Tensor], layer: int, merged: str) -> FrozenWeight:
        """The weight from the tensors of its layer (``Checkpoint.layer``), quantised where it is to be and is not yet.

        Of what is quantised, one module's weight at a time is there in ``dtype``. What is kept shares no memory with
        ``tensors``. Raises UserError where stored scales are damaged.
        """
        paths = MERGED_LINEARS[merged]
        quantization, names = self._quantization, [module_name(layer, path) for path in paths]
        if quantization is None or quantization.dense.issuperset(names):
            whole = torch.cat([tensors[f"{path}.weight"].to(self._dtype) for path in paths])
            return DenseWeight(whole.to(self._device))
        shapes = [self._shapes[path.split(".")[-1]] for path in paths]
        parts = [self._part(tensors, path, name, quantization) for path, name in zip(paths, names, strict=True)]
        if self._device.type == "cpu":
            _give_back_freed()
        if quantization.kind == "fp8":
            return self._fp8([part for part in parts if isinstance(part, Fp8Rows)])
        return QuantisedWeight(list(zip(shapes, parts, strict=True)), self._buffer)

    def head(self, weights: Weights) -> torch.Tensor:
        """[V, D] in ``dtype``: dequantised once and for all where it is stored quantised."""
        tensors = {"lm_head.weight": weights.head(), **weights.head_scales()}
        if len(tensors) == 1:
            return tensors["lm_head.weight"].to(self._device, self._dtype)
        return self._written(tensors, "lm_head", "lm_head")

    def dequantised(self, tensors: Mapping[str, torch.Tensor], layer: int, path: str) -> torch.Tensor:
        """One module's weight [O, D] in ``dtype``, as products read it."""
        return self._written(tensors, path, module_name(layer, path))

    def _written(self, tensors: Mapping[str, torch.Tensor], path: str, name: str) -> torch.Tensor:
        assert self._quantization is not None
        out_OD = torch.empty(self._shapes[path.split(".")[-1]], dtype=self._dtype, device=self._device)
        self._part(tensors, path, name, self._quantization).write(out_OD)
        return out_OD

    def _fp8(self, parts: Sequence[Fp8Rows]) -> Fp8Weight:
        q_OD = torch.cat([part.q_OD.view(torch.uint8) for part in parts]).view(E4M3)
        return Fp8Weight.of(q_OD, torch.cat([part.scale_O1 for part in parts]), self._ones[:, : q_OD.shape[1]])

    def _part(
        self, tensors: Mapping[str, torch.Tensor], path: str, name: str, quantization: Quantization
    ) -> ModuleWeight:
        weight = tensors[f"{path}.weight"]
        if f"{path}.SCB" in tensors:
            return Int8Weight(weight.to(self._device, copy=True), _steps(tensors[f"{path}.SCB"].to(self._device)))
        if f"{path}.weight.absmax" in tensors:
            return self._stored_four_bit(tensors, path, name)
        if name in quantization.dense:
            return DenseWeight(weight.to(self._device, self._dtype, copy=True))
        return _quantised(weight.to(self._device, self._dtype), quantization)

    def _stored_four_bit(self, tensors: Mapping[str, torch.Tensor], path: str, name: str) -> FourBitWeight:
        prefix, shape = f"{path}.weight.", self._shapes[path.split(".")[-1]]
        scales = {key.removeprefix(prefix): x.clone() for key, x in tensors.items() if key.startswith(prefix)}
        try:
            state = _bitsandbytes().QuantState.from_dict(scales, device=self._device)
            blocks = -(-shape[0] * shape[1] // state.blocksize)
            good = (tuple(state.shape), state.absmax.numel()) == (shape, blocks)
        except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            good = False
        if not good:
            raise UserError(
                f"{name}.weight: the scales stored with it are damaged or of another weight; fetch them again"
            )
        state.dtype = self._dtype
        packed = tensors[f"{path}.weight"].reshape(-1).view(torch.uint8).view(-1, 1)
        return FourBitWeight(packed.to(self._device, copy=True), state)


def choose_quantization(config: RunConfig, spec: ModelSpec, checkpoint: Checkpoint) -> Quantization | None:
    """How a run keeps the frozen linears: as they are stored, or else as its configuration says.

    Raises UserError where the two contradict each other, or where a name is no linear's.
    """
    kind, double, skip = config.quantization, config.double_quantization, config.quantization_skip_modules
    stored = checkpoint.stored
    if stored is not None:
        if kind not in (None, stored.kind) or double not in (None, stored.double) or skip:
            raise UserError(
                f"quantization: the weights of {config.base_model} are stored as {stored} and used as they are; leave "
                "out quantization, double_quantization and quantization_skip_modules, or give the original weights"
            )
        return stored
    if kind is None:
        if double or skip:
            key = "double_quantization" if double else "quantization_skip_modules"
            raise UserError(
                f"{key}: nothing is quantised without quantization; write quantization: nf4, or leave it out"
            )
        return None
    quantization = Quantization(kind=kind, double=bool(double), dense=_skipped(skip, spec))
    if kind == "fp8":
        _check_fits_fp8(quantization, spec)
    return quantization


def to_note(quantization: Quantization, dtype: torch.dtype) -> str:
    """How a base was kept, for the file of an adapter that was trained on it."""
    name = str(dtype).removeprefix("torch.")
    return json.dumps(asdict(quantization) | {"dense": sorted(quantization.dense), "dtype": name}, sort_keys=True)


def from_note(note: str) -> tuple[Quantization, torch.dtype]:
    """What ``to_note`` has written. Raises ValueError where it is something else."""
    try:
        fields = json.loads(note)
        dtype = getattr(torch, fields.pop("dtype"))
        quantization = Quantization(**fields | {"dense": frozenset(fields["dense"])})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a note on a quantised base: {error}") from None
    return quantization, dtype


def check_quantization(quantization: Quantization | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError where weights cannot be quantised or dequantised here; tries it with a small one."""
    if quantization is None:
        return
    if quantization.kind == "fp8":
        _check_fp8(dtype, device)
        return
    if find_spec("bitsandbytes") is None:
        raise UserError(f"quantization: {quantization.kind} needs bitsandbytes: {_INSTALL}")
    if dtype == torch.float64:
        raise UserError(f"dtype: float64 is finer than {quantization.kind} is dequantised to; write float32")

    def comes_back() -> bool:
        small_OD = torch.ones(64, 64, dtype=dtype, device=device)
        _quantised(small_OD, quantization).write(small_OD)
        return bool((small_OD == 1).all())

    hint = f"bring it up to date ({_INSTALL} -U), see python -m bitsandbytes, or take a base that is not quantised"
    _try("bitsandbytes", device, comes_back, "a weight of ones did not come back", hint)


def _try(what: str, device: torch.device, works: Callable[[], bool], wrong: str, hint: str) -> None:
    """Raises UserError where a small trial fails."""
    try:
        reason = "" if works() else wrong
    except Exception as error:  # native libraries, torch and Triton raise what they like where they do not fit a device
        reason = " ".join(str(error).split()) or type(error).__name__
    if reason:
        raise UserError(f"quantization: {what} does not work on this {device.type}: {reason}; {hint}")


def _check_fits_fp8(quantization: Quantization, spec: ModelSpec) -> None:
    """Raises UserError where a merged linear cannot be one FP8 product."""
    for module, (rows, columns) in linear_shapes(spec).items():
        if rows % MULTIPLE or columns % MULTIPLE:
            raise UserError(
                f"quantization: fp8 multiplies by weights whose sides are multiples of {MULTIPLE}, and {module} is "
                f"{rows} x {columns}; write nf4 or int8"
            )
    for index in range(spec.num_layers):
        for paths in MERGED_LINEARS.values():
            skipped = {path.split(".")[-1] for path in paths if module_name(index, path) in quantization.dense}
            if skipped and len(skipped) < len(paths):
                others = ", ".join(path.split(".")[-1] for path in paths)
                raise UserError(
                    f"quantization_skip_modules: with fp8 {others} are one product; name all of them or none"
                )


def _check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError where FP8 products are not there, or wrong; tries a small one."""
    instead = "write nf4 or int8, or leave quantization out"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_UNITS:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise UserError(
            f"quantization: fp8 needs a GPU with FP8 units (compute capability 8.9, Ada and Hopper, or later), and "
            f"{name} has {major}.{minor}; {instead}"
        )
    if dtype == torch.float64 or (device.type == "cuda" and dtype != torch.bfloat16):
        name, wanted = str(dtype).removeprefix("torch."), "bfloat16" if device.type == "cuda" else "float32"
        raise UserError(f"dtype: {name} is not what products in fp8 give here; write {wanted}, or leave it out")

    def is_right() -> bool:
        x_TD = torch.linspace(-1, 1, 256 * 64, dtype=dtype, device=device).view(256, 64)
        q_TD, scale_T1 = quantise_rows(x_TD)
        weight_OD = Fp8Weight.of(q_TD[:64], scale_T1[:64], torch.ones(1, 64, device=device))
        wide_TD = q_TD.float() * scale_T1
        expected_TO = (wide_TD @ wide_TD[:64].T).to(dtype)
        return torch.allclose(weight_OD.forward(x_TD, None), expected_TO, rtol=0.02, atol=0.1)

    _try("fp8", device, is_right, "a small product came out wrong", instead)


def buffer_bytes(spec: ModelSpec, quantization: Quantization | None, dtype: torch.dtype) -> int:
    """What the quantised weights of a slice share."""
    if quantization is None:
        return 0
    if quantization.kind == "fp8":
        return 4 * max(columns for _, columns in linear_shapes(spec).values())
    return dtype.itemsize * buffer_elements(spec)


def buffer_elements(spec: ModelSpec) -> int:
    """How many weights the largest merged linear has: the buffer of a slice with quantised weights."""
    shapes = linear_shapes(spec)
    merged = [[shapes[path.split(".")[-1]] for path in paths] for paths in MERGED_LINEARS.values()]
    return max(sum(rows * columns for rows, columns in parts) for parts in merged)


def _quantised(weight_OD: torch.Tensor, quantization: Quantization) -> Int8Weight | FourBitWeight | Fp8Rows:
    """As transformers' loading with bitsandbytes does it, or FP8; on the weight's device and from its dtype."""
    if quantization.kind == "fp8":
        return Fp8Rows(*quantise_rows(weight_OD))
    if quantization.kind == "int8":
        values_OD, absmax_O, _ = _bitsandbytes().int8_vectorwise_quant(weight_OD.contiguous().to(torch.float16))
        return Int8Weight(values_OD, _steps(absmax_O))
    packed, state = _bitsandbytes().quantize_4bit(
        weight_OD.contiguous(), quant_type=quantization.kind, compress_statistics=quantization.double
    )
    return FourBitWeight(packed, state)


def _give_back_freed() -> None:
    """What quantising on a CPU has freed. glibc keeps blocks below 32 MB, in the end more than the model in 16 bits."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _steps(absmax_O: torch.Tensor) -> torch.Tensor:
    return absmax_O.unsqueeze(1).mul(1.0 / 127.0)


def _skipped(names: Sequence[str], spec: ModelSpec) -> frozenset[str]:
    """The linears that ``names`` mean: each is a whole name, or a part of one between dots."""
    linears = linear_names(spec.num_layers)
    skipped: set[str] = set()
    for name in names:
        found = {linear for linear in linears if f".{name}." in f".{linear}."}
        if not found:
            raise UserError(
                f"quantization_skip_modules: {name!r} is no linear of the model's layers; write for example down_proj, "
                "model.layers.0 or model.layers.0.mlp.down_proj (embedding, norms and head are never quantised)"
            )
        skipped |= found
    return frozenset(skipped)


def _bitsandbytes() -> Any:
    """Its functions; imported when they are needed, since it is an extra."""
    return import_module("bitsandbytes.functional")
