"""What the compiler makes of kernels that have several forms, seen without a GPU: sums must begin with zero in each.

In float32 Triton moves what a product is added to into the product's sum, where the sum is a single product; with more
ranks, which another adapter may bring, it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mlora.ops.kernels import UNFUSED, elementwise, lora

POINTERS = {"tiles": "*i32", "table": "*i64", "dtable": "*i64"}
NUMBERS = ("width", "columns", "stride", "eps", "query_heads", "kv_heads")

def forms(kernel, **constants):
    names, sizes = kernel.arg_names, {"row_tile": 16, "column_tile": 64, "aligned": True} | constants
    signature = {n: "constexpr" if n in sizes else POINTERS.get(n, "i32" if n in NUMBERS else "*fp32") for n in names}
    fixed = {(i,): sizes[n] for i, n in enumerate(names) if n in sizes}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=UNFUSED).asm["ttgir"]
    return re.findall(r"tt\\.dot [^,]+, [^,]+, (%[^, ]+)", text)

cap = int(sys.argv[1])
swiglu = {"cap": cap, "adapted": True, "column_tiles": 2, "stages": 1}
print(*forms(elementwise._swiglu_kernel, **swiglu))
print(*forms(elementwise._swiglu_backward_kernel, dcap=cap, dadapted=True, dropout=cap > 16, **swiglu))
print(*forms(elementwise._add_kernel, cap=cap, adapted=True))
print(*forms(lora._expand_kernel, cap=cap, dropout=False, side=0, modules=1))
"""


@pytest.mark.parametrize("cap", [16, 128])
def test_sums_of_terms_begin_with_zero(cap):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cap)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert [len(sums) for sums in kernels] == ([2, 3, 1, 1] if cap == 16 else [4, 6, 2, 2])
    # of 64 ranks each; the first of a module begins with a constant, the next goes on with the one before
    for sums in kernels:
        assert all(first.startswith("%cst") for first in sums[:: max(1, cap // 64)]), sums
