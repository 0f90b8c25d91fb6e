"""Give every node its canonical op, and leave only in-place writes whose dtype cannot matter.

Before::

    %a = linear(%x, %w)
    %b = exp_(%a)                         # FULL, in place: %a would have to be FP32 to be written

After::

    %a = linear(%x, %w)
    %exp = exp(%a)
    %b = copy_(%a, %exp)                  # copy_ converts; every alias of %a still sees the write

In-place ops that follow or promote (``relu_``, ``add_``, ``x[i] = y``) stay: they run in whatever dtype their target
has. Besides, each of these is spelled in one way::

    f(..., out=y)                  write_out(y, f(...))
    x @= y                         x = x @ y
    f(input=x)                     f(x), of views and in-place ops: ``ops.aliases`` looks at ``args[0]`` alone
    x.type(h.type())               x.to(h)
    h.to(h.dtype), h.type_as(h)    h
    linear_cross_entropy(...)      a product and a loss (``losses``)
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from fxprec.passes.canonical.in_place import has_dtype_of_its_own, is_in_place, out_by_copy, write_by_copy
from fxprec.passes.canonical.losses import split_head_loss
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import Op, argument, notes
from fxprec.passes.ops.aliases import outside_writes
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import facts_of


@bodies_first
def canonicalize(gm: GraphModule, context: Context) -> PassResult:
    """Annotate ``meta["op"]``, and rewrite each node as the module says."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is operator.imatmul:  # tensors have none: ``x @= y`` makes a new one, and rebinds the name
            node.target, changed = operator.matmul, True
        changed |= _cast_by_tensor(node)
        op = canonical_op(node)
        if op is None:
            continue
        annotations = notes(node)
        annotations.op = op = Op(op.name, is_in_place(node, op))
        if annotations.as_written:  # within an autocast of the user's, which nothing may change
            continue
        changed |= _first_by_position(node, op)
        if op.name == "to":
            changed |= _cast_to_own_dtype(node)
            continue
        if op.in_place and op.name not in ("copy", "setitem") and has_dtype_of_its_own(node, op, context):
            write_by_copy(gm, node, op)
            changed = True
        elif node.kwargs.get("out") is not None:
            out_by_copy(gm, node, op)
            changed = True
        elif op.name == "linear_cross_entropy":
            changed |= split_head_loss(gm, node)
    # Nobody may keep a copy of these from before a call: of a weight that is written no packed one (``pack``).
    for node in outside_writes(gm):
        notes(node).written = True
    return PassResult(gm, changed)


def _cast_by_tensor(node: Node) -> bool:
    """Write ``x.to(h)`` for ``x.type(h.type())``, whose string would name the dtype that ``h`` has when it is low."""
    named = argument(node, 1, "dtype") if node.target == "type" else None
    if not isinstance(named, Node) or named.target != "type" or len(named.args) != 1 or named.kwargs:
        return False
    rest = {name: value for name, value in node.kwargs.items() if name != "dtype"}
    node.target, node.args, node.kwargs = "to", (node.args[0], named.args[0], *node.args[2:]), rest
    if not named.users:
        node.graph.erase_node(named)
    return True


def _cast_to_own_dtype(node: Node) -> bool:
    """Let readers of ``h.to(h.dtype)``, or ``h.type_as(h)``, read ``h``, which it gives."""
    own, *others = [*node.args, *node.kwargs.values()]
    named = others[0] if len(others) == 1 else None
    if isinstance(named, Node) and named.target in (getattr, "type") and named.args in ((own,), (own, "dtype")):
        named = own
    if not isinstance(named, Node) or named is not own:
        return False
    node.replace_all_uses_with(named)
    node.graph.erase_node(node)
    return True


def _first_by_position(node: Node, op: Op) -> bool:
    name = next((name for name in ("input", "self") if name in node.kwargs), None)
    if node.args or name is None or not (op.in_place or facts_of(op.name).view):
        return False
    node.args = (node.kwargs[name],)
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
    return True
