"""Run a rewritten graph on fake tensors, and compare what comes out with what the passes wrote on its nodes.

This knows nothing of rules, ports or casts: torch itself says which dtype each call gives for the dtypes that arrive.
A call that cannot be run on fake tensors (of an op without a row, of a body, of our own kernels, one that reads values,
or one that has no fake) gives what its annotation says, so that its readers are judged all the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.kernels.torch_internals import FakeTensor
from fxprec.passes.costs.byte_costs import attribute_of
from fxprec.passes.dtypes.fake_results import quietly
from fxprec.passes.graph.annotations import CASTABLE, Rule, notes
from fxprec.passes.graph.casts import CASTS, cast
from fxprec.passes.ops.table import rule_of
from fxprec.passes.torch_internals import FakeTensorMode, HigherOrderOperator, tree_leaves, tree_map

#: Casts that look at run time what arrives.
_LOOK: Final = CASTS - {cast}


class Disagreement(NamedTuple):
    """A result whose dtype is not what the annotation says."""

    node: Node
    got: torch.dtype
    stated: torch.dtype | None


def run_on_fakes(gm: GraphModule) -> Iterator[Disagreement]:
    """Every node of a graph whose result has another dtype than stated; none where no fake values were captured."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is not None:
        with quietly(mode):
            yield from _run(gm, mode)


def differs(node: Node, value: Any) -> Disagreement | None:
    """Whether the tensors of a result have other dtypes than its node's annotations say."""
    precision = notes(node).precision
    if not isinstance(value, torch.Tensor) and (_taken_apart(node) or precision.output is None):
        return None  # several results: each is stated where it is taken out
    if (node.target is operator.getitem and not node.users) or (node.target in _LOOK and precision.output is None):
        return None
    unused = notes(node).wide if precision.rule is not Rule.KEEP else ()
    info = notes(node).dtype
    for port, leaf in enumerate(tree_leaves(value)):
        if not isinstance(leaf, torch.Tensor) or port in unused:
            continue
        stated = precision.output if leaf.dtype in CASTABLE else info if isinstance(info, torch.dtype) else leaf.dtype
        if leaf.dtype != stated:
            return Disagreement(node, leaf.dtype, stated)
    return None


def _taken_apart(node: Node) -> bool:
    """Whether every reader takes one of the results."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)


def _run(gm: GraphModule, mode: FakeTensorMode) -> Iterator[Disagreement]:
    values: dict[Node, Any] = {}
    known: dict[object, Any] = {}  # layers are alike: a call runs once for the same op on the same dtypes and shapes
    for node in gm.graph.nodes:
        if not _runs(node, values):
            values[node] = _stated(node, mode)
            continue
        key = _key(node, values)
        if key is not None and key in known:
            values[node] = known[key]
        else:
            try:
                values[node] = _call(node, values)
            except Exception:  # without a fake, or one that does not take these: what is stated is all there is
                values[node] = _stated(node, mode)
                continue
            if key is not None:
                known[key] = values[node]
        found = differs(node, values[node])
        if found is not None:
            yield found


def _key(node: Node, values: dict[Node, Any]) -> object:
    """What the dtype of a result follows from; None where that is more than can be compared."""
    if notes(node).op.in_place:
        return None

    def described(argument: Any) -> object:
        if isinstance(argument, Node):
            argument = values[argument]
        if isinstance(argument, torch.Tensor):
            return argument.dtype, argument.shape, argument.device
        if isinstance(argument, tuple | list):
            return tuple(map(described, argument))
        if isinstance(argument, dict):
            return tuple((name, described(value)) for name, value in argument.items())
        if isinstance(argument, slice):
            return "slice", *map(described, (argument.start, argument.stop, argument.step))
        return type(argument), argument

    key = (node.target, described(node.args), described(node.kwargs))
    try:
        hash(key)
    except Exception:  # a symbolic size
        return None
    return key


def _runs(node: Node, values: dict[Node, Any]) -> bool:
    """Whether a call of torch's, with every tensor that it reads at hand as a plain fake one."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return False
    row = rule_of(notes(node).op.name)
    if row is None or row.result == "none":
        return False
    if str(getattr(node.target, "__module__", "")).startswith("fxprec.") and node.target not in CASTS:
        return False
    return all(_is_plain(values[source]) for source in node.all_input_nodes)


def _is_plain(value: Any) -> bool:
    if type(value) is FakeTensor:
        return True
    leaves = tree_leaves(value)
    return value is not None and all(type(leaf) is FakeTensor or not isinstance(leaf, torch.Tensor) for leaf in leaves)


def _call(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _stated(node: Node, mode: FakeTensorMode) -> Any:
    """The captured fake value in the dtypes that the annotation says: a copy where the graph may write to it."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return None  # it may have several results, each of a dtype of its own
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = attribute_of(node)
        value = mode.from_tensor(value, static_shapes=True) if type(value) in _PLAIN else None
    dtype = notes(node).precision.output
    copy = notes(node).written or node.op not in ("placeholder", "get_attr")

    def stated(leaf: Any) -> Any:
        if type(leaf) is not FakeTensor:
            return leaf
        return leaf.to(dtype if dtype and leaf.dtype in CASTABLE else leaf.dtype, copy=copy)

    return tree_map(stated, value)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
