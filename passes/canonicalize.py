"""Give every node its canonical op, and leave only in-place writes whose dtype cannot matter.

Before::

    %a = linear(%x, %w)
    %b = exp_(%a)                         # FULL, in place: %a would have to be FP32 to be written
    %_ = _enter_autocast(cpu, None, False, None)
    %c = mul(%b, %s)
    %_1 = _exit_autocast(%_)

After::

    %a = linear(%x, %w)
    %exp = exp(%a)
    %b = copy_(%a, %exp)                  # copy_ converts; every alias of %a still sees the write
    %c = mul(%b, %s)                      # meta["autocast"] = False: keeps its original dtype

``f(..., out=y)`` becomes ``y.copy_(f(...))`` in the same way. In-place ops that follow or promote (``relu_``, ``add_``,
``x[i] = y``) stay: they run in whatever dtype their target has. Of views and in-place ops, ``f(input=x)`` becomes
``f(x)``: who asks what shares memory looks at the first argument.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.ir import Op, PassResult, Rule, module_path
from fxprec.passes.op_names import canonical_op, cast_target
from fxprec.passes.op_table import rule_of

__all__ = ["canonicalize", "every_graph", "subgraphs"]

#: Position of the ``inplace`` argument of functionals that take one.
_INPLACE_POSITION: Final = {
    "relu": 1, "relu6": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1, "selu": 1,
    "leaky_relu": 2, "elu": 2, "celu": 2, "threshold": 3, "hardtanh": 3, "rrelu": 4,
    "dropout": 3, "dropout1d": 3, "dropout2d": 3, "dropout3d": 3, "alpha_dropout": 3, "feature_alpha_dropout": 3,
}  # fmt: skip


def canonicalize(gm: GraphModule, context: Context) -> PassResult:
    """Annotate ``meta["op"]``; resolve autocast regions, ``inplace=`` flags, in-place LOW/FULL ops and ``out=``."""
    changed = False
    for sub in subgraphs(gm):
        changed |= canonicalize(sub, context).changed
    changed |= _drop_autocast_regions(gm)
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is operator.imatmul:  # tensors have none: ``x @= y`` makes a new one, and rebinds the name
            node.target, changed = operator.matmul, True
        op = canonical_op(node)
        if op is None:
            continue
        node.meta["op"] = op = op._replace(in_place=_is_in_place(node, op))
        changed |= _first_by_position(node, op)
        if op.name == "to":
            _mark_derived(node, context)
        elif op.in_place and op.name not in ("copy", "setitem") and _must_not_write(node, op, context):
            _write_by_copy(gm, node, op)
            changed = True
        elif node.kwargs.get("out") is not None:
            _out_by_copy(gm, node, op)
            changed = True
    return PassResult(gm, changed)


def subgraphs(gm: GraphModule) -> Iterator[GraphModule]:
    """The graphs that higher-order ops of ``gm`` call (bodies of checkpointed regions, branches, loops), once each."""
    seen: set[int] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, node.target, None) if "." not in node.target else None
            if isinstance(value, GraphModule) and id(value) not in seen:
                seen.add(id(value))
                yield value


def every_graph(gm: GraphModule) -> Iterator[GraphModule]:
    """``gm`` and the graphs below it, at any depth."""
    yield gm
    for sub in subgraphs(gm):
        yield from every_graph(sub)


def _drop_autocast_regions(gm: GraphModule) -> bool:
    """Mark the nodes inside ``with autocast(enabled=False)``, and erase enter and exit: our graphs run without it."""
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    disabled: list[bool] = []
    erase: list[Node] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is enter:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            disabled.append(not enabled)
            erase.append(node)
        elif node.op == "call_function" and node.target is leave:
            disabled.pop()
            erase.append(node)
        elif disabled and disabled[-1]:
            node.meta["autocast"] = False
    for node in reversed(erase):
        gm.graph.erase_node(node)
    return bool(erase)


def _mark_derived(node: Node, context: Context) -> None:
    """``x.to(y.dtype)``, traced where y was low already, reads as a cast to a literal low dtype: tell the two apart.

    Only dynamo traces under autocast and bakes dtypes; a literal stands in the source line, or is the method's name.
    """
    if "example_value" not in node.meta or cast_target(node) is not context.low or node.target in ("half", "bfloat16"):
        return
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    code = [line for line in lines if set(line.strip()) - set("^~ ")]
    if code and not any(literal in code[-1] for literal in ("float16", "half")):
        node.meta["derived_cast"] = True


def _is_in_place(node: Node, op: Op) -> bool:
    if op.in_place or node.kwargs.get("inplace") is True:
        return True
    position = _INPLACE_POSITION.get(op.name)
    return position is not None and len(node.args) > position and node.args[position] is True


def _first_by_position(node: Node, op: Op) -> bool:
    row = rule_of(op.name)
    name = next((name for name in ("input", "self") if name in node.kwargs), None)
    if node.args or name is None or not (op.in_place or (row is not None and row.view)):
        return False
    node.args = (node.kwargs[name],)
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
    return True


def _must_not_write(node: Node, op: Op, context: Context) -> bool:
    rule, _ = context.policy.resolve(op.name, node, module_path(node), rule_of(op.name), context.device)
    return isinstance(rule, torch.dtype) or rule in (Rule.LOW, Rule.FULL)


def _write_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """``x.f_(...)`` -> ``x.copy_(f(x, ...))``: legal whatever aliases x, and copy_ converts."""
    target = node.args[0]
    with gm.graph.inserting_before(node):
        value = _functional_form(gm, node, op)
        written = gm.graph.call_method("copy_", (target, value))
    _finish(node, value, written, op)


def _out_by_copy(gm: GraphModule, node: Node, op: Op) -> None:
    """``f(x, out=y)`` -> ``y.copy_(f(x))``; of several results each by itself."""
    out: Any = node.kwargs["out"]
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    with gm.graph.inserting_before(node):
        value = gm.graph.create_node(node.op, target, node.args, {k: v for k, v in node.kwargs.items() if k != "out"})
        if isinstance(out, Node):
            return _finish(node, value, gm.graph.call_method("copy_", (out, value)), op)
        for position, each in enumerate(out):
            part = gm.graph.call_function(operator.getitem, (value, position))
            written = gm.graph.call_method("copy_", (each, part))
            part.meta = {**node.meta, "op": Op("getitem")}
            written.meta = {**node.meta, "op": Op("copy", in_place=True)}
            for user in [user for user in node.users if user.target is operator.getitem and user.args[1] == position]:
                user.replace_all_uses_with(written)
                gm.graph.erase_node(user)
    value.meta = {**node.meta, "op": Op(op.name)}
    node.replace_all_uses_with(value)
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
        return gm.graph.call_method(name, node.args, node.kwargs)
    args, kwargs = node.args, dict(node.kwargs)
    position = _INPLACE_POSITION.get(op.name)
    if kwargs.pop("inplace", False):
        pass
    elif position is not None and len(args) > position and args[position] is True:
        args = (*args[:position], False, *args[position + 1 :])
    else:
        return gm.graph.call_function(_functional(node.target), args, kwargs)
    return gm.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


def _functional(target: Any) -> Callable[..., Any]:
    """The out-of-place twin of an in-place function: torch.exp_ -> torch.exp; aten.exp_.default, operator.ipow."""
    if isinstance(target, OpOverload):  # the packet: pow_.Scalar is pow.Tensor_Scalar, not pow.Scalar
        return getattr(getattr(torch.ops, target.namespace), target._opname.rstrip("_"))
    name = target.__name__
    if target.__module__ == "_operator":
        return getattr(operator, name.removeprefix("i"))
    for home in (torch, torch.nn.functional, torch.special, torch.Tensor):
        if hasattr(home, name.rstrip("_")):
            return getattr(home, name.rstrip("_"))
    raise NotImplementedError(f"in-place function {name} has no out-of-place twin in torch")
