"""Take the bias out of a linear or convolution whose one reader is a row operation: it joins that one's region.

Before, and after (``%bias`` is the FP32 parameter: within a kernel its cast costs nothing)::

    %linear = linear(%x, %w, %bias_bf16)         %linear = linear(%x, %w, None)
    %gelu = gelu(%linear)                        %low = cast(%bias, torch.bfloat16)
                                                 %add = add(%linear, %low)
                                                 %gelu = gelu(%add)

The kernel reads the product anyway, so the addition is free, and in the backward the sum over rows that is the bias's
gradient comes out of the same pass. ``put_back`` undoes it where no region came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fxprec.passes.casts import CASTS, cast
from fxprec.passes.ir import Op, Precision, Rule
from fxprec.passes.row_operations import is_row_operation

__all__ = ["SplitBias", "put_back", "split_biases"]

#: Dimensions behind that of the channels.
_BEHIND: Final = {"linear": 0, "conv1d": 1, "conv2d": 2, "conv3d": 3}


@dataclass(frozen=True, slots=True)
class SplitBias:
    """One bias that was taken out."""

    product: Node
    bias: Node
    add: Node


def split_biases(graph: Graph) -> list[SplitBias]:
    """Split every bias that may join a region."""
    found = []
    for node in [*graph.nodes]:
        op: Op | None = node.meta.get("op")
        if op is not None and op.name in _BEHIND and len(node.users) == 1:
            (user,) = node.users
            bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
            if isinstance(bias, Node) and is_row_operation(user) and user.meta["op"].name != "to":
                found.append(_split(graph, node, bias, _BEHIND[op.name]))
    return found


def _split(graph: Graph, product: Node, bias: Node, behind: int) -> SplitBias:
    low = product.meta["precision"].output
    parameter = bias.args[0] if bias.target in CASTS else bias
    assert isinstance(parameter, Node)
    with graph.inserting_after(product):
        end = added = graph.call_function(torch.add, (product, bias))
    with graph.inserting_before(end):
        if behind:
            shape = (-1,) + (1,) * behind
            view = graph.call_method("reshape", (parameter, *shape))
            view.meta = _shaped(parameter, shape) | {"op": Op("reshape")}
            view.meta["precision"] = Precision(None, None, torch.float32, Rule.FOLLOW, "a view of the bias")
            parameter = view
        if low in (torch.float16, torch.bfloat16):
            name = f"{bias.name}_joined"
            parameter = graph.create_node("call_function", cast, (parameter, low), name=name)
            parameter.meta = _shaped(bias, (-1,) + (1,) * behind) | {
                "op": Op("to"), "inserted": True, "in_registers": True, "dtype": low,
                "precision": Precision(None, low, low, Rule.KEEP, f"in the registers of what reads {product.name}"),
            }  # fmt: skip
    product.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    added.update_arg(1, parameter)
    added.meta = {key: value for key, value in product.meta.items() if key != "in_registers"} | {
        "op": Op("add"),
        "bias_of": product.name,
        "precision": Precision(None, torch.float32, low, Rule.PROMOTE, f"the bias of {product.name}"),
    }
    _set_bias(product, None)
    return SplitBias(product, bias, added)


def put_back(graph: Graph, split: SplitBias) -> None:
    """Undo one split."""
    product, added = split.product, split.add
    _set_bias(product, split.bias)
    added.replace_all_uses_with(product)
    chain = added.args[1]
    graph.erase_node(added)
    while isinstance(chain, Node) and chain.op != "get_attr" and not chain.users:
        source = chain.args[0]
        graph.erase_node(chain)
        chain = source


def _set_bias(product: Node, bias: Node | None) -> None:
    if len(product.args) > 2:
        product.update_arg(2, bias)
    else:
        product.update_kwarg("bias", bias)


def _shaped(source: Node, shape: tuple[int, ...]) -> dict[str, Any]:
    value = source.meta.get("val")
    known = {"val": value.reshape(shape)} if isinstance(value, torch.Tensor) and len(shape) > 1 else {}
    kept = {k: source.meta[k] for k in ("nn_module_stack", "stack_trace", "numel", "val", "dtype") if k in source.meta}
    return kept | known | {"scalar": False}
