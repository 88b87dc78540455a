"""The frozen decoder of Llama-family models, cut into slices of consecutive layers. It knows nothing of stages.

Letters: T packed rows, D model dim, O out features, V vocabulary, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from mlora.models.spec import ModelSpec
from mlora.models.weights import Checkpoint
from mlora.ops.attention import causal_attention
from mlora.ops.batch_lora import LinearBank, batch_lora
from mlora.ops.elementwise import rms_norm, rotate, swiglu
from mlora.types import MERGED_LINEARS, Microbatch, Segment

_TABLE_ROWS = 1024  # the rotary table grows in steps of this many positions

LayerBanks = Mapping[str, LinearBank]  # merged linear -> adapters' matrices


@dataclass(frozen=True)
class Packed:
    """How the rows of a microbatch are to be read; it travels with the microbatch and is never kept on a module."""

    segments: tuple[Segment, ...]
    lengths: list[int]
    cos_TE: torch.Tensor
    sin_TE: torch.Tensor


@dataclass(frozen=True)
class _Linear:
    weight_OD: torch.Tensor
    bias_O: torch.Tensor | None

    def __call__(self, x_TD: torch.Tensor, bank: LinearBank, packed: Packed) -> torch.Tensor:
        return batch_lora(x_TD, self.weight_OD, self.bias_O, bank, packed.segments)


class Decoder:
    """The model's layers ``layers``; the first slice also embeds, the last also has the final norm and the head."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, layers: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, device
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        self.width = spec.hidden_size
        self._layers = {i: _Layer(spec, i, checkpoint.layer(i), dtype, device) for i in layers}
        if self.is_first:
            self.embedding_VD = checkpoint.embedding().to(device, dtype)
        if self.is_last:
            self.norm_D = checkpoint.final_norm().to(device, dtype)
            shared = self.is_first and spec.tied
            self.head_VD = self.embedding_VD if shared else checkpoint.head().to(device, dtype)
        self._rotary = _Rotary(spec, dtype, device)

    def pack(self, microbatch: Microbatch) -> Packed:
        """Positions restart with every sample; the padding sits at position 0."""
        lengths = microbatch.sample_lengths()
        positions = [torch.arange(n) for n in lengths] + [torch.zeros(microbatch.rows - sum(lengths), dtype=torch.long)]
        cos_TE, sin_TE = self._rotary.at(torch.cat(positions), max(lengths, default=1))
        return Packed(microbatch.segments, lengths, cos_TE, sin_TE)

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, D]."""
        return F.embedding(input_ids_T, self.embedding_VD)

    def run(
        self, x_TD: torch.Tensor, packed: Packed, banks: Mapping[int, LayerBanks], recompute: bool = False
    ) -> torch.Tensor:
        """All layers of the slice. With ``recompute`` only each layer's input is kept for backward."""
        for index, layer in self._layers.items():
            if recompute:
                x_TD = recomputed(layer, x_TD, packed, banks[index], use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = layer(x_TD, packed, banks[index])
        return x_TD

    def norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return rms_norm(x_TD, self.norm_D, self.spec.rms_norm_eps)


class _Layer:
    def __init__(
        self, spec: ModelSpec, index: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec, self._window = spec, spec.windows[index]
        moved = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self._linears = {
            merged: _Linear(
                torch.cat([moved[f"{path}.weight"] for path in paths]).to(device),
                torch.cat([moved[f"{path}.bias"] for path in paths]).to(device)
                if f"{paths[0]}.bias" in moved
                else None,
            )
            for merged, paths in MERGED_LINEARS.items()
        }
        self._norms = {name: tensor.to(device) for name, tensor in moved.items() if "norm" in name}

    def __call__(self, x_TD: torch.Tensor, packed: Packed, banks: LayerBanks) -> torch.Tensor:
        x_TD = x_TD + self._attention(self._norm(x_TD, "input_layernorm"), packed, banks)
        return x_TD + self._mlp(self._norm(x_TD, "post_attention_layernorm"), packed, banks)

    def _attention(self, x_TD: torch.Tensor, packed: Packed, banks: LayerBanks) -> torch.Tensor:
        spec, rows = self._spec, x_TD.shape[0]
        qkv = self._linears["qkv"](x_TD, banks["qkv"], packed).view(rows, -1, spec.head_dim)
        q_THE, k_TKE, v_TKE = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm:
            q_THE, k_TKE = self._norm(q_THE, "self_attn.q_norm"), self._norm(k_TKE, "self_attn.k_norm")
        q_THE, k_TKE = (rotate(x, packed.cos_TE, packed.sin_TE) for x in (q_THE, k_TKE))
        out_THE = causal_attention(q_THE, k_TKE, v_TKE, packed.lengths, self._window)
        return self._linears["o"](out_THE.reshape(rows, -1), banks["o"], packed)

    def _mlp(self, x_TD: torch.Tensor, packed: Packed, banks: LayerBanks) -> torch.Tensor:
        hidden = swiglu(self._linears["gate_up"](x_TD, banks["gate_up"], packed))
        return self._linears["down"](hidden, banks["down"], packed)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._norms[f"{name}.weight"], self._spec.rms_norm_eps)


class _Rotary:
    """cos and sin by position, in float32 as transformers computes them; the tables grow with the longest sample."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
        self._scaling, self._dtype, self._device = spec.rope_scaling, dtype, device
        self._tables = self._compute(_TABLE_ROWS)

    def at(self, positions_T: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        if longest > self._tables[0].shape[0]:
            self._tables = self._compute(-(-longest // _TABLE_ROWS) * _TABLE_ROWS)
        positions_T = positions_T.to(self._device)
        return self._tables[0][positions_T], self._tables[1][positions_T]

    def _compute(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._inv_freq)
        angles = torch.cat((angles, angles), dim=1)
        cos, sin = (table.mul_(self._scaling) for table in (angles.cos(), angles.sin()))
        return cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)
