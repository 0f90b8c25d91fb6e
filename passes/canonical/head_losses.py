"""``linear_cross_entropy`` as the product and the loss that torch's reference makes of it, each with its own precision.

Before, and after::

    %loss = linear_cross_entropy(%x, %w, %target)      %linear = linear(%x, %w, None)              # LOW
                                                       %loss = cross_entropy(%linear, %target)     # FULL

A weight of more than two dimensions (or of who knows how many) is flattened first, and its logits are unflattened.
With ``options=`` torch runs kernels of its own, a chunk of rows at a time, in the dtype of the hidden states: that call
stays.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.passes.graph.annotations import Op, notes
from fxprec.passes.graph.fetched import attribute_of

_NAMES: Final = ("input", "linear_weight", "target")
_OF_LOSS: Final = ("weight", "reduction", "ignore_index", "label_smoothing")


def split_head_loss(gm: GraphModule, node: Node) -> bool:
    """Replace a call of torch's ``linear_cross_entropy`` by a linear and a cross entropy. True where it was one."""
    if node.target is not getattr(F, "linear_cross_entropy", None):  # torch 2.13 has it
        return False
    given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    bias, options = given.pop("linear_bias", None), given.pop("options", None)
    if options is not None or given.keys() - {*_NAMES, *_OF_LOSS}:
        return False
    hidden, weight, target = (given.pop(name) for name in _NAMES)
    if given.get("ignore_index", 0) is None:  # which cross_entropy does not take
        del given["ignore_index"]
    with gm.graph.inserting_before(node):
        if _rank(weight) == 2:
            logits = _call(node, "linear", F.linear, hidden, weight, bias)
        else:
            bias = bias if bias is None else _call(node, "flatten", torch.flatten, bias)
            flat = _call(node, "linear", F.linear, hidden, _call(node, "flatten", torch.flatten, weight, 0, -2), bias)
            shape = _call(node, "getattr", getattr, weight, "shape")
            classes = _call(node, "getitem", operator.getitem, shape, slice(None, -1))
            logits = _call(node, "unflatten", torch.unflatten, flat, -1, classes)
    node.target, node.args, node.kwargs = F.cross_entropy, (logits, target), given
    notes(node).op = Op("cross_entropy")
    return True


def _call(before: Node, name: str, function: Callable[..., Any], *args: Any) -> Node:
    """A call that is part of what ``before`` did, with its shape where those of its arguments are known."""
    made = before.graph.call_function(function, args)
    made.meta = {key: value for key, value in before.meta.items() if key != "val"} | {"op": Op(name)}
    sources = made.all_input_nodes
    if all("val" in source.meta for source in sources):
        values = map_arg(args, lambda source: source.meta["val"])
        modes = (value.meta["val"].fake_mode for value in sources if hasattr(value.meta["val"], "fake_mode"))
        with next(modes, contextlib.nullcontext()), torch.no_grad():
            made.meta["val"] = function(*values)
    return made


def _rank(weight: Any) -> int | None:
    """Return how many dimensions the weight has, or None where only a call tells."""
    if not isinstance(weight, Node):
        return None
    value = attribute_of(weight) if weight.op == "get_attr" else weight.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None
