"""How A and B start: PEFT's distributions, drawn by (adapter seed, global module name)."""

from __future__ import annotations

import math

import torch

from mlora.config import AdapterConfig
from mlora.ops.random import INIT_A, INIT_B, key_for, normal, uniform


def initial_matrices(
    config: AdapterConfig, name: str, in_features: int, out_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 A [r, in] and B stored [r, out].

    ``init_lora_weights`` as in PEFT: true is Kaiming-uniform A (bound 1/√in) and zero B; gaussian is A of deviation 1/r
    and zero B; orthogonal spans A and B by the even and odd rows of one orthogonal matrix, so that B·A = 0; false draws
    both as ``nn.Linear`` does.
    """
    r, key = config.rank(name), key_for(config.seed, name)
    if config.init_lora_weights == "orthogonal":
        basis, _ = torch.linalg.qr(normal(key, INIT_A, (r + in_features, r), 1.0)[:r])
        spread_a = normal(key, INIT_A, (r + in_features, r), 0.1)[r:, : r // 2]
        spread_b = normal(key, INIT_B, (out_features, r // 2), 0.1)
        return (spread_a @ basis[0::2]).T, (spread_b @ basis[1::2]).T
    b_RO = torch.zeros(r, out_features, dtype=torch.float64)
    if config.init_lora_weights == "gaussian":
        return normal(key, INIT_A, (r, in_features), 1 / r), b_RO
    if config.init_lora_weights is False:
        b_RO = uniform(key, INIT_B, (r, out_features), 1 / math.sqrt(r))
    return uniform(key, INIT_A, (r, in_features), 1 / math.sqrt(in_features)), b_RO
