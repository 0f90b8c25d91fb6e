"""On a GPU low linears whose outputs are no whole 16 bytes become calls that compute some more.

Before::

    %logits: bfloat16 = linear(%x, %weight_low)              # 50257 classes

After::

    %logits: bfloat16 = aligned_linear(%x, %weight_low)      # the same values, of 50264 classes

Why, and what it does: ``fxprec.kernels.nn.aligned_linear``. What is small at run time, or watched by a compiler or a
mode, is torch's linear.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy

from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.fusion.kernel_calls import cross_entropy
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.retrace import leaf

#: Multiplications of a product from which on the slow kernel loses more than a call takes: 2 FLOP each at some 100
#: TFLOP/s in the place of 600 (measured on an H200).
_WORTH: Final = 1 << 30
#: Elements of 16 bits in 16 bytes.
_VECTOR: Final = 8


def aligned_linear(input: Any, weight: Any, bias: Any = None, apart: bool = False) -> Any:
    """``F.linear``, with outputs of whole 16 bytes where that pays; ``apart``: its rows may lie apart in memory."""
    if isinstance(input, Proxy):
        return leaf(aligned_linear, input, weight, bias, apart)
    if (
        input.is_cuda
        and watcher(COMPILER, SCRIPT, TRANSFORM, DUAL, ANY_MODE) is None
        and weight.dtype in LOW_DTYPES
        and type(input) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and input.numel() * len(weight) >= _WORTH
    ):
        from fxprec.kernels.nn.aligned_linear import aligned_linear as kernel

        y = kernel(input, weight, bias)
        return y if apart else y.contiguous()
    return F.linear(input, weight, bias)


@bodies_first
def align_rows(gm: GraphModule, context: Context) -> PassResult:
    """Replace those of weights whose number of rows is no multiple of 8.

    It comes behind ``fuse``: a bias may have left its linear for a region.
    """
    changed, low = False, context.low
    serves = context.device == "cuda" and (context.regions or context.native_mixed)
    for node in gm.graph.find_nodes(op="call_function", target=F.linear) if serves else ():
        sizes = weight_sizes(node)
        if notes(node).precision.compute is low and sizes is not None and len(sizes) == 2 and sizes[0] % _VECTOR:
            node.target = aligned_linear
            node.kwargs = {**node.kwargs, "apart": all(_takes_pitch(user, sizes[0]) for user in node.users)}
            notes(node).fused = f"a product of {-(-sizes[0] // _VECTOR) * _VECTOR} outputs"
            changed = True
    return PassResult(gm, changed)


def _takes_pitch(reader: Node, columns: int) -> bool:
    """Return whether a reader gives the same for rows that lie apart; a view that cuts them would fail."""
    name = notes(reader).op.name
    if reader.target in CASTS or reader.target in (cross_entropy, F.cross_entropy) or name == "fused_region":
        return True
    if name == "flatten" or (name == "view" and columns in (reader.args[-1], _last(reader.args[-1]))):
        return all(_takes_pitch(each, columns) for each in reader.users)
    return False


def _last(sizes: Any) -> Any:
    return sizes[-1] if isinstance(sizes, tuple | list) and sizes else None


def weight_sizes(node: Node) -> tuple[int, ...] | None:
    """Return the sizes of the weight of a linear or convolution, below its cast; None where nobody knows."""
    weight = argument(node, 1, "weight")
    if isinstance(weight, Node) and weight.target in CASTS:
        weight = weight.args[0]
    return notes(weight).sizes if isinstance(weight, Node) else None
