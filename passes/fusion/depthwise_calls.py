"""Low depthwise convolutions on a CPU become calls whose backward runs in FP32, where bfloat16 has no fast kernel.

Before::

    %conv2d: bfloat16 = conv2d(%x, %w, %b, (1, 1), (3, 3), (1, 1), 40)

After::

    %conv2d: bfloat16 = depthwise_conv2d(%x, %w, %b, (1, 1), (3, 3), (1, 1), 40)

The forward is torch's, to the bit. A call decides at run time, by sizes alone (``fxprec.kernels.cpu.depthwise.pays``):
filters larger than 3 x 3 or with steps, of an image that is not tiny, where a backward follows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, Proxy

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.fusion.aligned_rows import weight_sizes
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.retrace import leaf

_WHY: Final = "where it is depthwise, with filters above 3 x 3 or steps, its backward runs in FP32"


def depthwise_conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    """``F.conv2d``, with a backward in FP32 where that is faster."""
    if isinstance(input, Proxy):
        return leaf(depthwise_conv2d, input, weight, bias, stride, padding, dilation, groups)
    if input.dtype is torch.bfloat16 and input.device.type == "cpu":
        from fxprec.kernels.cpu import depthwise  # whose ops are registered when it is imported

        steps, around, apart = map(_two, (stride, padding, dilation))
        if depthwise.pays(input, weight, bias, steps, apart, groups):
            return depthwise.depthwise_conv2d(input, weight, bias, steps, around, apart)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


@bodies_first
def call_depthwise(gm: GraphModule, context: Context) -> PassResult:
    """Replace what is computed in bfloat16 on a CPU and may gain, by the weight's sizes if they are known."""
    changed, low = False, context.low
    serves = context.device == "cpu" and context.native_mixed and low is torch.bfloat16
    for node in gm.graph.nodes if serves else ():
        if node.op != "call_function" or notes(node).op.name != "conv2d":
            continue
        decided = notes(node).precision
        if decided.compute is not low:
            continue
        numbers = [argument(node, 3 + i, name, default) for i, (name, default) in enumerate(_DEFAULTS.items())]
        if not all(map(_are_numbers, numbers)) or numbers[-1] == 1 or not _may_gain(node, *numbers[:3]):
            continue
        node.target = depthwise_conv2d
        notes(node).precision = decided._replace(why=f"{decided.why}; {_WHY}")
        changed = True
    return PassResult(gm, changed)


def _may_gain(node: Node, stride: Any, _: Any, dilation: Any) -> bool:
    from fxprec.kernels.cpu.depthwise import has_no_kernel

    sizes = weight_sizes(node)
    return sizes is None or has_no_kernel(sizes, _two(stride), _two(dilation))


_DEFAULTS: Final = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _are_numbers(size: object) -> bool:
    """Neither a word, such as "same", nor computed."""
    values = size if isinstance(size, tuple | list) else (size,)
    return 0 < len(values) <= 2 and all(isinstance(each, int) for each in values)


def _two(size: Any) -> tuple[int, int]:
    """Return a size of two dimensions as a pair: torch takes one number for both."""
    values = tuple(size) if isinstance(size, tuple | list) else (size,)
    return values[0], values[-1]
