"""Attention over cached keys and values, for generation: a sequence's earlier rows are not computed again.

Letters: T packed rows, D model dim, C columns of q, k and v together, N new rows of one sequence, L all its rows,
H query heads, K key/value heads, E head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from mlora.models.decoder import Decoder, LayerBanks
from mlora.ops.attention import one_sequence
from mlora.ops.cross_entropy import logits
from mlora.ops.elementwise import Heads
from mlora.ops.routing import Routing, route
from mlora.types import Microbatch, padded


class CachedDecoder:
    """A decoder, or a slice of one, that adds rows to several sequences and keeps the keys and values of those before.

    On a CPU a sequence's logits are the same bits whatever others there are.

    Args:
        decoder: layers of the model.
        banks: the adapters' matrices by layer.
        capacities: the most rows that each sequence will have.
    """

    def __init__(self, decoder: Decoder, banks: Mapping[int, LayerBanks], capacities: Sequence[int]) -> None:
        self._decoder, self._banks = decoder, banks
        self._lengths = [0] * len(capacities)
        self._longest = max(capacities)
        spec = decoder.spec
        self._kv = {
            (layer, i): torch.zeros(
                2, capacity, spec.num_kv_heads, spec.head_dim, dtype=decoder.dtype, device=decoder.device
            )
            for layer in decoder.layers
            for i, capacity in enumerate(capacities)
        }

    @torch.no_grad()
    def extend(
        self,
        microbatch: Microbatch,
        input_ids_T: torch.Tensor,
        owners: Sequence[int],
        news: Sequence[int],
        x_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits behind the last new row of each sequence in ``owners``, [sequences, V]; or rows for the next slice.

        ``x_TD`` are the rows of the slice before; the first one embeds.

        Their rows lie one after another, ``news[i]`` of the i-th. The microbatch says whose adapter they are; a sample
        of it may hold the rows of several sequences.
        """
        decoder, routing = self._decoder, route(microbatch, self._decoder.device, dropout=False)
        packed = decoder.pack_at(routing, self._positions(routing.rows, owners, news), self._longest)
        attend = {layer: partial(self._attend, layer, owners, news) for layer in decoder.layers}
        x_TD = decoder.embed(input_ids_T.to(decoder.device)) if x_TD is None else x_TD
        out_TD = decoder.infer(x_TD, packed, self._banks, attend)
        for owner, new in zip(owners, news, strict=True):
            self._lengths[owner] += new
        if not decoder.is_last:
            return out_TD
        last = torch.tensor(news).cumsum(0) - 1
        rows = F.pad(last, (0, padded(len(last)) - len(last)))  # so that no row's product depends on how many there are
        return logits(decoder.norm(out_TD[rows.to(decoder.device)]), decoder.head_VD)[: len(last)]

    def _positions(self, rows: int, owners: Sequence[int], news: Sequence[int]) -> torch.Tensor:
        """Each row's place in its sequence; 0 in the padding."""
        firsts = [self._lengths[owner] for owner in owners]
        places = torch.cat([torch.arange(first, first + new) for first, new in zip(firsts, news, strict=True)])
        return F.pad(places, (0, rows - len(places))).to(self._decoder.device)

    def _attend(
        self,
        layer: int,
        owners: Sequence[int],
        news: Sequence[int],
        qkv_TC: torch.Tensor,
        heads: Heads,
        routing: Routing,
        window: int | None = None,
    ) -> tuple[torch.Tensor, None]:
        """As mlora.ops.attention.attention, over the kept rows too; the new rows are added to them."""
        outputs, first = [], 0
        for owner, new in zip(owners, news, strict=True):
            q, k, v = heads.split(qkv_TC[first : first + new])
            kv, length = self._kv[layer, owner], self._lengths[owner]
            first, stop = first + new, length + new
            kv[0, length:stop], kv[1, length:stop] = k, v
            start = 0 if window is None else max(0, length - window + 1)  # the first that any new row sees
            outputs.append(one_sequence(q, kv[0, start:stop], kv[1, start:stop], length - start, window))
        padding = qkv_TC.new_zeros(routing.rows - first, heads.query * heads.size)
        return torch.cat([*outputs, padding]), None
