"""In-place ops with a dtype of their own, and ``out=``, as a call that makes a new tensor and a copy that converts.

::

    %b = exp_(%a)                 ->    %exp = exp(%a)
                                        %b = copy_(%a, %exp)

    %b = matmul(%x, %y, out=%c)   ->    %matmul = matmul(%x, %y)
                                        %b = write_out(%c, %matmul)      # resizes %c as torch does
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.errors import PolicyError
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import Op, Rule, module_path
from fxprec.passes.graph.casts import write_out
from fxprec.passes.ops.attributes import RESULT_FIELDS
from fxprec.passes.ops.table import facts_of, rule_of
from fxprec.passes.torch_internals import OpOverload, op_name_of


def is_in_place(node: Node, op: Op) -> bool:
    """Whether the call writes to its first argument, by its name or by a flag."""
    if op.in_place or node.kwargs.get("inplace") is True:
        return True
    position = facts_of(op.name).inplace
    return position is not None and len(node.args) > position and node.args[position] is True


def has_dtype_of_its_own(node: Node, op: Op, context: Context) -> bool:
    """Whether the op's rule, overrides counted, is LOW, FULL or a dtype: what it would write to may have another."""
    rule, _ = context.policy.resolve(op.name, node, module_path(node), rule_of(op.name), context.device)
    return isinstance(rule, torch.dtype) or rule in (Rule.LOW, Rule.FULL)


def write_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """``x.f_(...)`` -> ``x.copy_(f(x, ...))``: legal whatever aliases x, and copy_ converts."""
    target = node.args[0]
    with gm.graph.inserting_before(node):
        value = _functional_form(gm, node, op)
        written = gm.graph.call_method("copy_", (target, value))
    _finish(node, value, written, op)


def out_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """``f(x, out=y)`` -> ``y.copy_(f(x))``; of several results each by itself."""
    out: Any = node.kwargs["out"]
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    with gm.graph.inserting_before(node):
        value = gm.graph.create_node(node.op, target, node.args, {k: v for k, v in node.kwargs.items() if k != "out"})
        if isinstance(out, Node):
            return _finish(node, value, gm.graph.call_function(write_out, (out, value)), op)
        written: list[Node] = []
        for position, each in enumerate(out):
            part = gm.graph.call_function(operator.getitem, (value, position))
            written.append(gm.graph.call_function(write_out, (each, part)))
            part.meta = {**node.meta, "op": Op("getitem")}
            written[-1].meta = {**node.meta, "op": Op("copy", in_place=True)}
    value.meta = {**node.meta, "op": Op(op.name)}
    for user in list(node.users):
        if user.target in (operator.getitem, getattr):
            position = user.args[1]
            user.replace_all_uses_with(written[RESULT_FIELDS[position] if isinstance(position, str) else position])  # type: ignore[index]
            gm.graph.erase_node(user)
        else:
            user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n: tuple(written) if n is node else n)  # type: ignore[misc, arg-type, return-value]
    gm.graph.erase_node(node)


def _finish(node: Node, value: Node, written: Node, op: Op) -> None:
    value.meta = {**node.meta, "op": Op(op.name)}
    written.meta = {**node.meta, "op": Op("copy", in_place=True)}
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)


def _functional_form(gm: GraphModule, node: Node, op: Op) -> Node:
    if node.op == "call_method":
        assert isinstance(node.target, str)
        name = node.target.rstrip("_") if not node.target.startswith("__i") else "__" + node.target[3:]
        if not hasattr(torch.Tensor, name):
            raise _no_twin(node, op)
        return gm.graph.call_method(name, node.args, node.kwargs)
    args, kwargs = node.args, dict(node.kwargs)
    position = facts_of(op.name).inplace
    if kwargs.pop("inplace", False):
        pass
    elif position is not None and len(args) > position and args[position] is True:
        args = (*args[:position], False, *args[position + 1 :])
    else:
        twin = _functional(node.target)
        if twin is None:
            raise _no_twin(node, op)
        return gm.graph.call_function(twin, args, kwargs)
    return gm.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


def _functional(target: Any) -> Callable[..., Any] | None:
    """The out-of-place twin of an in-place function: torch.exp_ -> torch.exp; aten.exp_.default, operator.ipow."""
    if isinstance(target, OpOverload):  # the packet: pow_.Scalar is pow.Tensor_Scalar, not pow.Scalar
        return getattr(getattr(torch.ops, target.namespace), op_name_of(target).rstrip("_"), None)
    name = target.__name__
    if getattr(target, "__module__", None) == "_operator":
        return getattr(operator, name.removeprefix("i"))
    homes = (torch, torch.nn.functional, torch.special, torch.Tensor)
    return next((getattr(home, name.rstrip("_")) for home in homes if hasattr(home, name.rstrip("_"))), None)


def _no_twin(node: Node, op: Op) -> PolicyError:
    where = f" in {module_path(node)}" if module_path(node) else ""
    return PolicyError(
        f"%{node.name}{where}: the policy wants a dtype for {op.name!r}, which writes in place and has no form "
        "that does not. It runs in the dtype of what it writes: name the op that makes that tensor instead"
    )
