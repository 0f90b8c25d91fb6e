"""Take the bias out of a linear or convolution that only row operations read: it joins their region.

Before, and after (``%bias`` is the FP32 parameter: within a kernel its cast costs nothing)::

    %linear = linear(%x, %w, %bias_bf16)         %linear = linear(%x, %w, None)
    %gelu = gelu(%linear)                        %low = cast(%bias, torch.bfloat16)
                                                 %add = add(%linear, %low)
                                                 %gelu = gelu(%add)

The kernel reads the product anyway, so the addition is free, and in the backward the sum over rows that is the bias's
gradient comes out of the same pass. ``addmm(%bias, %x, %w)`` becomes ``mm``, and views that keep the last dimension may
stand between. ``put_back`` undoes it where no region came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.fusion.row_operations import is_row_operation
from fxprec.passes.graph.annotations import CASTABLE, Op, Precision, Rule, argument, notes
from fxprec.passes.graph.casts import CASTS, cast
from fxprec.passes.ops.table import facts_at


@dataclass(frozen=True, slots=True)
class SplitBias:
    """Bias that was taken out of its product."""

    product: Node
    end: Node  # of the views behind it
    bias: Node
    add: Node
    call: tuple[Any, Any, Any]  # target, args and kwargs of the product as it was


def split_biases(graph: Graph) -> list[SplitBias]:
    """Split every bias that may join a region."""
    found = []
    for node in [*graph.nodes]:
        behind = facts_at(node).bias  # dimensions behind that of the bias: 0 of a matrix product, those of an image
        if behind is None:
            continue
        bias, end = _bias(node), _end_of_views(node)
        fits = all(map(is_row_operation, end.users)) and any(notes(user).op.name != "to" for user in end.users)
        if isinstance(bias, Node) and fits and notes(bias).dtype in CASTABLE:
            found.append(_split(graph, node, end, bias, behind))
    return found


def _end_of_views(product: Node) -> Node:
    """Return the last of the views that follow a matrix product, as long as each keeps its last dimension."""
    node = product
    while facts_at(product).bias == 0 and len(node.users) == 1:
        (user,) = node.users
        shapes = [getattr(each.meta.get("val"), "shape", None) for each in (node, user)]
        if notes(user).op.name not in ("view", "reshape") or None in shapes or shapes[0][-1:] != shapes[1][-1:]:  # type: ignore[index]
            return node
        node = user
    return node


def _split(graph: Graph, product: Node, end: Node, bias: Node, behind: int) -> SplitBias:
    low = notes(product).precision.output
    # The sum reads the parameter itself: in the kernel it is FP32, and so is its gradient.
    parameter = bias.args[0] if bias.target in CASTS else bias
    assert isinstance(parameter, Node)
    # For now of the bias itself: its cast and its view are made before the addition, which reads them then.
    with graph.inserting_after(end):
        added = graph.call_function(torch.add, (end, bias))
    with graph.inserting_before(added):
        # A convolution's bias is one value a channel, with the dimensions of the image behind it.
        if behind:
            shape = (-1,) + (1,) * behind
            view = graph.call_method("reshape", (parameter, *shape))
            view.meta = _shaped(parameter, shape) | {"op": Op("reshape")}
            notes(view).precision = Precision.arriving(None, torch.float32, Rule.FOLLOW, "a view of the bias")
            parameter = view
        # Rounded as the product would have had it: the values are the same with and without the region.
        if low in LOW_DTYPES and notes(parameter).precision.output is not low:
            name = f"{bias.name}_joined"
            parameter = graph.create_node("call_function", cast, (parameter, low), name=name)
            parameter.meta = _shaped(bias, (-1,) + (1,) * behind) | {
                # As of each cast that a pass inserts: the original program has none, so its dtype is the one it gives.
                "op": Op("to"), "inserted": True, "in_registers": True, "dtype": low,
                "precision": Precision.arriving(low, low, Rule.KEEP, f"in the registers of what reads {product.name}"),
            }  # fmt: skip
    end.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    added.update_arg(1, parameter)
    added.meta = {key: value for key, value in end.meta.items() if key != "in_registers"} | {
        "op": Op("add"),
        "bias_of": product.name,
        "precision": Precision.arriving(torch.float32, low, Rule.PROMOTE, f"the bias of {product.name}"),
    }
    call = (product.target, product.args, product.kwargs)
    _drop_bias(product)
    return SplitBias(product, end, bias, added, call)


def put_back(graph: Graph, split: SplitBias) -> set[Node]:
    """Undo one split, and return the nodes that are gone."""
    product, added = split.product, split.add
    product.target, product.args, product.kwargs = split.call
    added.replace_all_uses_with(split.end)
    chain = added.args[1]
    graph.erase_node(added)
    gone = {added}
    while isinstance(chain, Node) and chain.op.startswith("call") and not chain.users:
        source = chain.args[0]
        graph.erase_node(chain)
        gone.add(chain)
        chain = source
    return gone


def _bias(product: Node) -> Any:
    if notes(product).op.name == "addmm":
        plain = product.target is torch.addmm and len(product.args) == 3 and not product.kwargs
        bias = product.args[0] if plain else None
        return bias if isinstance(bias, Node) and len(getattr(bias.meta.get("val"), "shape", ())) == 1 else None
    return argument(product, 2, "bias")


def _drop_bias(product: Node) -> None:
    if notes(product).op.name == "addmm":
        product.target, product.args = torch.mm, product.args[1:]
    elif len(product.args) > 2:
        product.update_arg(2, None)
    else:
        product.update_kwarg("bias", None)


def _shaped(source: Node, shape: tuple[int, ...]) -> dict[str, Any]:
    value = source.meta.get("val")
    known = {"val": value.reshape(shape)} if isinstance(value, torch.Tensor) and len(shape) > 1 else {}
    kept = {k: source.meta[k] for k in ("nn_module_stack", "stack_trace", "numel", "val", "dtype") if k in source.meta}
    return kept | known | {"is_zero_dim": False}
