"""Writes in-place ops with a dtype of their own, and ``out=``, as a call that makes a new tensor and a converting copy.

::

    %b = exp_(%a)                 ->    %exp = exp(%a)
                                        %b = copy_(%a, %exp)

    %b = pow_(%a, 2)              ->    %clone = clone(%a)               # which the backward of pow reads
                                        %pow = pow(%clone, 2)
                                        %b = copy_(%a, %pow)

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
from fxprec.passes.graph.annotations import Op, Rule, argument, module_path
from fxprec.passes.graph.casts import write_out
from fxprec.passes.ops.spellings import RESULT_FIELDS
from fxprec.passes.ops.table import facts_at, facts_of, row_of
from fxprec.passes.torch_internals import OpOverload


def is_in_place(node: Node, op: Op) -> bool:
    """Return whether the call writes to its first argument, by its name or by a flag."""
    return op.in_place or _is_flagged(node, facts_of(op.name).inplace)


def _is_flagged(node: Node, position: int | None) -> bool:
    flag = node.kwargs.get("inplace") if position is None else argument(node, position, "inplace")
    return flag is True


def has_dtype_of_its_own(node: Node, op: Op, context: Context) -> bool:
    """Return whether the op's rule, overrides counted, is LOW, FULL or a dtype, which its target may not have."""
    rule = context.policy.resolve(op.name, node, module_path(node), row_of(op.name), context.device).rule
    return isinstance(rule, torch.dtype) or rule in (Rule.LOW, Rule.FULL)


def write_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """Write ``x.copy_(f(x, ...))`` for ``x.f_(...)``: legal whatever aliases x, and copy_ converts."""
    twin = out_of_place(node)
    if twin is None:
        where = f" in {module_path(node)}" if module_path(node) else ""
        raise PolicyError(
            f"%{node.name}{where}: the policy wants a dtype for {op.name!r}, which writes in place and has no form "
            "that does not. It runs in the dtype of what it writes: name the op that makes that tensor instead"
        )
    target, args, kwargs = twin
    with gm.graph.inserting_before(node):
        # The backward of the new op may read its input, which ``copy_`` overwrites: then it gets a copy of that.
        if not facts_of(op.name).overwritable:
            args = (gm.graph.call_method("clone", args[:1]), *args[1:])
            args[0].meta = {**node.meta, "op": Op("clone")}
        value = gm.graph.create_node(node.op, target, args, kwargs)
        written = gm.graph.call_method("copy_", (node.args[0], value))
    _finish(node, value, written, op)


def out_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """Write ``write_out(y, f(x))`` for ``f(x, out=y)``; of several results each by itself."""
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
    # Who took a result by its place or its name reads what was written there; others get a tuple.
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


def out_of_place(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return target, args and kwargs of the out-of-place form of an in-place call (``add`` of ``add_``), or None."""
    args, kwargs = node.args, {key: value for key, value in node.kwargs.items() if key != "inplace"}
    position = facts_at(node).inplace
    if node.op == "call_method":
        name = str(node.target)
        name = "__" + name[3:] if name.startswith("__i") else name.rstrip("_")
        target: Any = name if hasattr(torch.Tensor, name) else None
    elif _is_flagged(node, position):
        # The flag is the last argument.
        target, args = node.target, args[:position]
    else:
        target = _twin(node.target)
    return None if target is None else (target, args, kwargs)


def _twin(target: Any) -> Callable[..., Any] | None:
    """Return the out-of-place form of a function: ``torch.exp`` of ``torch.exp_``; None where there is none."""
    if isinstance(target, OpOverload):
        # The packet, which chooses by its arguments: pow_.Scalar is pow.Tensor_Scalar, not pow.Scalar.
        return getattr(getattr(torch.ops, target.namespace), target.overloadpacket.__name__.rstrip("_"), None)
    name = target.__name__
    if getattr(target, "__module__", None) == "_operator":
        return getattr(operator, name.removeprefix("i"))
    homes = (torch, torch.nn.functional, torch.special, torch.Tensor)
    return next((getattr(home, name.rstrip("_")) for home in homes if hasattr(home, name.rstrip("_"))), None)
