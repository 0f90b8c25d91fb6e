"""Let native sums that accumulate in FP32 read low-precision input, so that no FP32 copy is materialised.

Before::

    %a: bfloat16 = linear(%x, %w)
    %mean: float32 = mean(%a, -1)                          # reads bfloat16, computes float32

After::

    %a: bfloat16 = linear(%x, %w)
    %mean: float32 = mean(%a, -1, dtype=torch.float32)     # accumulates and puts out FP32, reads BF16

Norms need no rewriting: batch, layer and group norm take low input beside FP32 weights as they are, and ``decide`` lets
their input be either dtype where the device has such a kernel.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import annotated
from fxprec.passes.ops.table import facts_of


@bodies_first
def accumulate_wide(gm: GraphModule, context: Context) -> PassResult:
    """Add ``dtype=torch.float32`` to each sum and mean that reads low and has an FP32 result."""
    changed = False
    for node, noted in annotated(gm.graph):
        precision = noted.precision
        if not facts_of(noted.op.name).dtype_keyword or precision.reads is precision.output:
            continue
        reads_low = isinstance(precision.reads, torch.dtype)
        if reads_low and precision.output is torch.float32 and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            noted.fused = "accumulates in FP32 while it reads low"
            changed = True
    return PassResult(gm, changed)
