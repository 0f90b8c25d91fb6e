"""Layer norms that read low values on a CPU become calls that add up their weights' gradients in FP32.

Before::

    %layer_norm: bfloat16 = layer_norm(%linear, (64,), %w, %b, 1e-05)

After::

    %layer_norm: bfloat16 = layer_norm(%linear, (64,), %w, %b, 1e-05)      # that of this file

The forward is torch's, to the bit. A call decides at run time: ours runs where a backward may follow that has gradients
for the weight or the bias.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Proxy

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.grad_mode import ever_records
from fxprec.passes.graph.retrace import leaf

_WHY: Final = "its backward adds up the gradients of weight and bias in FP32"


def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``F.layer_norm``, with gradients of weight and bias that are added up in FP32."""
    if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def _layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    if isinstance(input, Proxy):
        return leaf(layer_norm, input, normalized_shape, weight, bias, eps)
    if input.dtype is not torch.bfloat16 or input.device.type != "cpu":
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    from fxprec.kernels.cpu import layer_norm as kernel  # whose ops are registered when it is imported

    return kernel.layer_norm(input, normalized_shape, weight, bias, eps)


@bodies_first
def call_layer_norms(gm: GraphModule, context: Context) -> PassResult:
    """Replace those with a weight or a bias that are bfloat16, in graphs that are differentiated."""
    changed = False
    records = context.device == "cpu" and ever_records(gm.graph, context.gradients)
    for node in gm.graph.find_nodes(op="call_function", target=F.layer_norm) if records else ():
        if notes(node).precision.output is not torch.bfloat16:
            continue
        if argument(node, 2, "weight") is not None or argument(node, 3, "bias") is not None:
            node.target = layer_norm
            decided = notes(node).precision
            notes(node).precision = decided._replace(why=f"{decided.why}; {_WHY}")
            changed = True
    return PassResult(gm, changed)
