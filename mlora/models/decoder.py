"""The frozen decoder of Llama-family models, cut into slices of consecutive layers. It knows nothing of stages.

Forward and backward are written out: the model is frozen, so backward needs dX only, and what is kept between them is
chosen by hand. Norms and SwiGLU products are made again in backward.

Letters: T packed rows, D model dim, O out features, C columns of q, k and v together, I intermediate size,
V vocabulary, H query heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mlora.models.quantised import FrozenLinears
from mlora.models.spec import ModelSpec, Quantization
from mlora.models.weights import Weights
from mlora.ops import batch_lora
from mlora.ops.attention import attention, attention_backward
from mlora.ops.batch_lora import LinearBank, LoraTerm
from mlora.ops.elementwise import (
    Heads,
    add,
    add_norm,
    rms_norm,
    rms_norm_backward,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)
from mlora.ops.routing import Routing, route
from mlora.types import MERGED_LINEARS, Microbatch

_TABLE_ROWS = 1024  # the rotary table grows in steps of this many positions

LayerBanks = Mapping[str, LinearBank]  # merged linear -> adapters' matrices
Attend = Callable[[torch.Tensor, Heads, Routing, "int | None"], tuple[torch.Tensor, Any]]  # see mlora.ops.attention


@dataclass(frozen=True)
class Packed:
    """How the rows of a microbatch are to be read; it travels with the microbatch and is never kept on a module."""

    routing: Routing
    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Microbatches of one kind differ in what these tensors hold."""
        return self.routing.kind

    def clone(self) -> Packed:
        """The same in other memory."""
        return Packed(self.routing.clone(), self.cos_TE.clone(), self.sin_TE.clone())

    def copy_(self, other: Packed) -> None:
        """Take over what another of the same kind holds."""
        self.routing.copy_(other.routing)
        self.cos_TE.copy_(other.cos_TE)
        self.sin_TE.copy_(other.sin_TE)


@dataclass(frozen=True, kw_only=True)
class _LayerKept:
    """What a layer keeps for backward besides its input: 92 KiB a token in an 8B model, S and log-sum-exp apart."""

    turned_TC: torch.Tensor
    before_TC: torch.Tensor | None
    attended: torch.Tensor
    attention: Any
    middle_TD: torch.Tensor
    gate_up: torch.Tensor
    terms: Mapping[str, LoraTerm]


@dataclass(frozen=True)
class Kept:
    """What a slice keeps for backward: each layer's input and, unless it is to be recomputed, the rest."""

    packed: Packed
    banks: Mapping[int, LayerBanks]
    inputs: list[torch.Tensor]
    layers: list[_LayerKept | None]


class Decoder:
    """The model's layers ``layers``; the first slice also embeds, the last also has the final norm and the head.

    ``quantization``: how the layers' linears are kept; None: in ``dtype``, as all else.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Weights,
        layers: range,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, device
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        self.width = spec.hidden_size
        linears = FrozenLinears(spec, quantization, dtype, device)
        self._layers = {i: _Layer(spec, i, checkpoint.layer(i), linears, dtype, device) for i in layers}
        if self.is_first:
            self.embedding_VD = checkpoint.embedding().to(device, dtype)
        if self.is_last:
            self.norm_D = checkpoint.final_norm().to(device, dtype)
            shared = self.is_first and spec.tied
            self.head_VD = self.embedding_VD if shared else linears.head(checkpoint)
        self._rotary = _Rotary(spec, dtype, device)

    def pack(self, microbatch: Microbatch, dropout: bool = True) -> Packed:
        """Positions restart with every sample; the padding sits at position 0."""
        routing = route(microbatch, self.device, dropout)
        return Packed(routing, *self._rotary.at(routing.positions_T, routing.longest))

    def pack_at(self, routing: Routing, positions_T: torch.Tensor, longest: int) -> Packed:
        """The same with positions of another's choice, all below ``longest``."""
        return Packed(routing, *self._rotary.at(positions_T, longest))

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, D]."""
        return F.embedding(input_ids_T, self.embedding_VD)

    def infer(
        self,
        x_TD: torch.Tensor,
        packed: Packed,
        banks: Mapping[int, LayerBanks],
        attend: Mapping[int, Attend] | None = None,
    ) -> torch.Tensor:
        """All layers of the slice, keeping nothing. ``attend`` takes the place of each layer's attention."""
        for index, layer in self._layers.items():
            x_TD, _ = layer.forward(x_TD, packed, banks[index], attend[index] if attend else attention)
        return x_TD

    def forward(
        self, x_TD: torch.Tensor, packed: Packed, banks: Mapping[int, LayerBanks], recompute: bool = False
    ) -> tuple[torch.Tensor, Kept]:
        """All layers of the slice. With ``recompute`` only each layer's input is kept for backward."""
        kept = Kept(packed, banks, [], [])
        for index, layer in self._layers.items():
            kept.inputs.append(x_TD)
            x_TD, layer_kept = layer.forward(x_TD, packed, banks[index])
            kept.layers.append(None if recompute else layer_kept)
        return x_TD, kept

    def backward(self, kept: Kept, dx_TD: torch.Tensor) -> torch.Tensor:
        """dX of the slice's input, from that of its output. Adds to the adapters' gradients, uses ``kept`` up."""
        for index, layer in reversed(self._layers.items()):
            x_TD, layer_kept = kept.inputs.pop(), kept.layers.pop()
            if layer_kept is None:
                _, layer_kept = layer.forward(x_TD, kept.packed, kept.banks[index])
            dx_TD = layer.backward(x_TD, layer_kept, kept.packed, dx_TD)
        return dx_TD

    def norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return rms_norm(x_TD, self.norm_D, self.spec.rms_norm_eps)

    def norm_backward(self, x_TD: torch.Tensor, dnormed_TD: torch.Tensor) -> torch.Tensor:
        """dX of the final norm's input."""
        return rms_norm_backward(x_TD, self.norm_D, self.spec.rms_norm_eps, dnormed_TD)[0]


class _Layer:
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        tensors: Mapping[str, torch.Tensor],
        linears: FrozenLinears,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights = {merged: linears.weight(tensors, index, merged) for merged in MERGED_LINEARS}
        self._biases = {
            m: torch.cat([tensors[f"{path}.bias"] for path in paths]).to(device, dtype)
            for m, paths in MERGED_LINEARS.items()
            if f"{paths[0]}.bias" in tensors
        }
        norms = {name.removesuffix(".weight"): x.to(device, dtype) for name, x in tensors.items() if "norm" in name}
        self._norm_1, self._norm_2 = norms["input_layernorm"], norms["post_attention_layernorm"]
        self._eps, self._window = spec.rms_norm_eps, spec.windows[index]
        self._heads = Heads(
            query=spec.num_heads,
            key_value=spec.num_kv_heads,
            size=spec.head_dim,
            q_norm=norms.get("self_attn.q_norm"),
            k_norm=norms.get("self_attn.k_norm"),
            eps=spec.rms_norm_eps,
        )

    def forward(
        self, x_TD: torch.Tensor, packed: Packed, banks: LayerBanks, attend: Attend = attention
    ) -> tuple[torch.Tensor, _LayerKept]:
        terms: dict[str, LoraTerm] = {}

        def linear(merged: str, x: torch.Tensor) -> torch.Tensor:
            weight, bias = self._weights[merged].matrix(), self._biases.get(merged)
            y, terms[merged] = batch_lora.forward(x, weight, bias, banks[merged], packed.routing)
            return y

        qkv_TC = linear("qkv", rms_norm(x_TD, self._norm_1, self._eps))
        turned_TC, before_TC = rotate(qkv_TC, terms["qkv"], packed.cos_TE, packed.sin_TE, self._heads)
        attended, kept = attend(turned_TC, self._heads, packed.routing, self._window)
        o_TD = linear("o", attended)
        middle_TD, normed_TD = add_norm(x_TD, o_TD, terms["o"], self._norm_2, self._eps)
        gate_up = linear("gate_up", normed_TD)
        down_TD = linear("down", swiglu(gate_up, terms["gate_up"]))
        return add(middle_TD, down_TD, terms["down"]), _LayerKept(
            turned_TC=turned_TC,
            before_TC=before_TC,
            attended=attended,
            attention=kept,
            middle_TD=middle_TD,
            gate_up=gate_up,
            terms=terms,
        )

    def backward(self, x_TD: torch.Tensor, kept: _LayerKept, packed: Packed, dx_TD: torch.Tensor) -> torch.Tensor:
        def linear(merged: str, dy: torch.Tensor) -> tuple[torch.Tensor, LoraTerm]:
            return batch_lora.backward(dy, self._weights[merged].matrix(), kept.terms[merged])

        dhidden, dterm = linear("down", dx_TD)
        dgate_up, hidden = swiglu_backward(kept.gate_up, kept.terms["gate_up"], dhidden, dterm)
        batch_lora.accumulate_a(hidden, dterm)
        dnormed_TD, dterm = linear("gate_up", dgate_up)
        dx_TD, normed_TD = rms_norm_backward(kept.middle_TD, self._norm_2, self._eps, dnormed_TD, dterm, dx_TD)
        batch_lora.accumulate_a(normed_TD, dterm)
        dattended, dterm = linear("o", dx_TD)
        batch_lora.accumulate_a(kept.attended, dterm)
        dattended = add(None, dattended, dterm)
        dqkv_TC = attention_backward(
            dattended, kept.attended, kept.attention, kept.turned_TC, self._heads, packed.routing, self._window
        )
        dqkv_TC = rotate_backward(dqkv_TC, kept.before_TC, packed.cos_TE, packed.sin_TE, self._heads)
        dnormed_TD, dterm = linear("qkv", dqkv_TC)
        dx_TD, normed_TD = rms_norm_backward(x_TD, self._norm_1, self._eps, dnormed_TD, dterm, dx_TD)
        batch_lora.accumulate_a(normed_TD, dterm)
        return dx_TD


class _Rotary:
    """cos and sin by position, in float32 as transformers computes them; the tables grow with the longest sample."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
        self._scaling, self._dtype, self._device = spec.rope_scaling, dtype, device
        self._tables = self._compute(_TABLE_ROWS)

    def at(self, positions_T: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        if longest > self._tables[0].shape[0]:
            self._tables = self._compute(-(-longest // _TABLE_ROWS) * _TABLE_ROWS)
        return self._tables[0][positions_T], self._tables[1][positions_T]

    def _compute(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._inv_freq)
        angles = torch.cat((angles, angles), dim=1)
        cos, sin = (table.mul_(self._scaling) for table in (angles.cos(), angles.sin()))
        return cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)
