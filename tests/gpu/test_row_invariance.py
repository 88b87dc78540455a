"""cuBLAS: a row of a frozen product is the same bits however many rows there are, from 1,024 on, for the shapes listed.

The engine pads microbatches to at least that many rows (mlora.engine.device.row_bucket) and relies on this.
"""

from __future__ import annotations

import pytest
import torch

from mlora.engine.device import prepare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = {  # out features, in features
    "llama8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}
ROWS = (1024, 1280, 2048, 4096, 8192)


@pytest.mark.parametrize("forward", [True, False], ids=["y", "dx"])
@pytest.mark.parametrize(("model", "shape"), [(m, s) for m, shapes in SHAPES.items() for s in shapes], ids=str)
def test_rows_do_not_change_with_their_number(model, shape, forward):
    prepare(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    matrix = weight.T if forward else weight
    x = torch.randn(ROWS[-1], matrix.shape[0], device="cuda", dtype=torch.bfloat16, generator=generator)
    whole = x @ matrix
    differing = [rows for rows in ROWS if not torch.equal(x[:rows] @ matrix, whole[:rows])]
    assert not differing
    moved = torch.cat([x[37:1061], x[:1024]])
    assert torch.equal((moved @ matrix)[:1024], whole[37:1061])
