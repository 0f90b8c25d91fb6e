"""Rewrites losses into the forms whose precision can be chosen, or that no value saturates.

``take_logits`` makes of a binary cross entropy of a sigmoid the one of its logits. Before::

    %p = sigmoid(%x)
    %flat = view(%p, -1)
    %loss = binary_cross_entropy(%flat, %target, %weight, reduction="sum")

After::

    %finite = nan_to_num(%x, nan, 100.0, -100.0)
    %flat = view(%finite, -1)
    %loss = binary_cross_entropy_with_logits(%flat, %target, %weight, reduction="sum")

The loss is the same function of ``x``: ``-t log s(x) - (1 - t) log(1 - s(x)) = max(x, 0) - t x + log(1 + e^-|x|)``.
In FP32 the left side ends at 16.6, where ``s(x)`` is 1 and torch takes 100 for the infinite logarithm; the right one
does not. An infinite ``x``, as a mask leaves it, would be NaN on the right: it becomes 100 or -100, for which the right
side is what torch says of the left one. Others who read the sigmoid keep it. It stays where it is returned as well, so
that the loss has a gradient with respect to it, and where somebody writes to its memory.

``split_head_loss``, which ``canonicalize`` calls, makes of torch's ``linear_cross_entropy`` a product and a loss, each
with its own precision, as torch's reference does. Before, and after::

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

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import Op, notes
from fxprec.passes.graph.patterns import Pattern, WholeGraph, rewrite_matches
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.ops.names import cast_target
from fxprec.passes.ops.table import facts_at

#: What torch's loss takes for the infinite logarithm of 0.
_INFINITE: Final = 100.0
#: Of the sigmoid's meta, what the node takes over that makes its input finite.
_HANDED_ON: Final = ("nn_module_stack", "stack_trace", "val", "example_value", "autocast")
#: For the report.
INSTEAD: Final = "in place of binary_cross_entropy of a sigmoid"


@bodies_first
def take_logits(gm: GraphModule, context: Context) -> PassResult:
    """Replace binary cross entropies of sigmoids, but at O0, which changes nothing."""
    return rewrite_matches(gm, context, _PATTERNS if context.policy.level != "O0" else ())


def _loss_of_sigmoid(loss: Node, around: WholeGraph) -> list[Node] | None:
    """Match a loss of a sigmoid whose memory nobody writes to; return the sigmoid and the views behind it."""
    if loss.target not in (F.binary_cross_entropy, torch.ops.aten.binary_cross_entropy.default):
        return None
    chain = _to_sigmoid(loss)
    if chain is None or any(map(around.is_written, (*chain, chain[0].args[0]))):
        return None
    return chain


def _to_sigmoid(loss: Node) -> list[Node] | None:
    """Return the sigmoid and its views up to the one that a loss reads; None where it reads something else."""
    node = loss.args[0] if loss.args else loss.kwargs.get("input")
    chain: list[Node] = []
    while isinstance(node, Node):
        if any(user.op == "output" for user in node.users) or not node.args or notes(node).op.in_place:
            return None
        chain.append(node)
        op = notes(node).op
        if op.name == "sigmoid":
            return chain[::-1] if isinstance(node.args[0], Node) else None
        passes = cast_target(node) in (None, torch.float32) if op.name == "to" else facts_at(node).view
        if not passes or len([*node.all_input_nodes]) != 1:
            return None
        node = node.args[0]
    return None


def _call_with_logits(loss: Node, chain: list[Node]) -> None:
    graph, (sigmoid, *views) = loss.graph, chain
    logits = sigmoid.args[0]
    assert isinstance(logits, Node)
    with graph.inserting_before(loss):
        logits = graph.call_function(torch.nan_to_num, (logits, float("nan"), _INFINITE, -_INFINITE))
        notes(logits).op = Op("nan_to_num")
        logits.meta.update({key: sigmoid.meta[key] for key in _HANDED_ON if key in sigmoid.meta})
        for view in views:
            logits = graph.node_copy(view, lambda _, of=logits: of)
    # The logits stand first by position, however the probabilities were given.
    if loss.target is F.binary_cross_entropy:
        loss.target, replaced = F.binary_cross_entropy_with_logits, "input"
        loss.args = (logits, *loss.args[1:])
    else:  # aten has the weight of positives between the others, which go by name
        loss.target, replaced = torch.ops.aten.binary_cross_entropy_with_logits.default, "self"
        named = dict(zip((replaced, "target", "weight", "reduction"), loss.args, strict=False))
        loss.args, loss.kwargs = (logits,), {**named, **loss.kwargs}
    loss.kwargs = {name: value for name, value in loss.kwargs.items() if name != replaced}
    annotations = notes(loss)
    annotations.op, annotations.instead_of = Op("binary_cross_entropy_with_logits"), INSTEAD
    for node in reversed(chain):
        if not node.users:
            graph.erase_node(node)


_PATTERNS: Final = (Pattern(("binary_cross_entropy",), _loss_of_sigmoid, _call_with_logits),)

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
    """Make a call that is part of what ``before`` did, with its shape where those of its arguments are known."""
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
