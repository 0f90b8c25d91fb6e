"""Remove the casts that the others made idle, and move those of a called subgraph's operands to the caller.

Before::

    %a: bfloat16 = linear(%x, %w)
    %b: float32 = to(%a, torch.float32)      # the user's .float()
    %c: bfloat16 = cast(%b, torch.bfloat16)  # undoes it, and nothing was lost
    %d: bfloat16 = relu(%c)
    %e: bfloat16 = to(%d, torch.bfloat16)    # already is

After::

    %a: bfloat16 = linear(%x, %w)
    %d: bfloat16 = relu(%a)

A narrowing cast followed by a widening one stays: it rounds. The user's own cast stays where someone still reads it,
and wherever its value is written to in place, since a cast makes a copy and folding it would make an alias.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.canonicalize import subgraphs
from fxprec.passes.casts import CASTS, cast
from fxprec.passes.context import Context
from fxprec.passes.insert_casts import actual_dtype, alias_root
from fxprec.passes.ir import Op, PassResult, Precision, Rule
from fxprec.passes.op_names import cast_target
from fxprec.passes.op_table import rule_of

__all__ = ["fold_casts"]


def fold_casts(gm: GraphModule, context: Context) -> PassResult:
    """Fold identities and round trips; hoist casts of subgraph operands. ``gm.meta["folded"]`` counts them."""
    folded = 0
    written = _written_roots(gm)
    for node in list(gm.graph.nodes):
        if not _is_cast(node):
            continue
        source = _source(node, written)
        if source is not None and source is not node:
            node.replace_all_uses_with(source)
            folded += 1
    for node in reversed(list(gm.graph.nodes)):
        if _is_cast(node) and not node.users and (node.meta.get("inserted") or cast_target(node) is not None):
            gm.graph.erase_node(node)
    for call, sub in _calls(gm):
        hoisted = _hoist(gm, call, sub)
        folded += fold_casts(sub, context).gm.meta.get("folded", 0) if not hoisted else 0
    gm.meta["folded"] = gm.meta.get("folded", 0) + folded
    return PassResult(gm, folded > 0)


def _is_cast(node: Node) -> bool:
    op: Op | None = node.meta.get("op")
    return op is not None and op.name == "to" and bool(node.args) and isinstance(node.args[0], Node)


def _source(node: Node, written: set[Node]) -> Node | None:
    """The earlier node that holds the very value of this cast already; None if there is none."""
    target = _pure_target(node)
    if target is None or alias_root(node) in written:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    if alias_root(source) in written:
        return None
    if _known(source) == target:
        return source
    while _is_cast(source) and _pure_target(source) is not None:
        inner = source.args[0]
        assert isinstance(inner, Node)
        if alias_root(inner) in written or not _lossless(_known(inner), _known(source)):
            return None
        if _known(inner) == target:
            return inner
        source = inner
    return None


def _pure_target(node: Node) -> torch.dtype | None:
    """The dtype a cast leads to, if changing the dtype is all that it does and it always does it."""
    if node.target in CASTS:
        return node.args[1] if node.target is cast else None  # type: ignore[return-value]
    extra = node.kwargs.keys() - {"dtype"}
    if extra or any(isinstance(a, torch.device | str) for a in node.args[1:]) or len(node.args) > 2:
        return None
    return cast_target(node)


def _known(node: Node) -> torch.dtype | None:
    """The dtype of a value where it is certain: not where a run-time test decides."""
    info = node.meta.get("dtype")
    if node.target in CASTS and node.target is not cast:
        return None
    if node.op in ("placeholder", "get_attr"):
        return info if isinstance(info, torch.dtype) else None
    return actual_dtype(node) if isinstance(info, torch.dtype) else None


def _lossless(narrow: torch.dtype | None, wide: torch.dtype | None) -> bool:
    return narrow is not None and (narrow == wide or wide in (torch.float32, torch.float64))


def _written_roots(gm: GraphModule) -> set[Node]:
    roots = set()
    for node in gm.graph.nodes:
        op: Op | None = node.meta.get("op")
        if op is not None and op.in_place:
            roots.add(alias_root(node))
    return roots


def _calls(gm: GraphModule) -> list[tuple[Node, GraphModule]]:
    """Higher-order calls of exactly one subgraph that is called exactly once."""
    subs = {id(sub) for sub in subgraphs(gm)}
    calls = []
    for node in gm.graph.nodes:
        if node.op == "get_attr" and "." not in node.target and id(getattr(gm, node.target, None)) in subs:
            users = [user for user in node.users if user.args and user.args[0] is node]
            if len(node.users) == len(users) == 1:
                calls.append((users[0], getattr(gm, node.target)))
    return calls


def _hoist(gm: GraphModule, call: Node, sub: GraphModule) -> bool:
    """An operand that the subgraph only ever reads through one cast is cast outside, where a shadow can serve it."""
    placeholders = [n for n in sub.graph.nodes if n.op == "placeholder"]
    operands = call.args[1:]
    if len(operands) != len(placeholders) or rule_of(call.meta["op"].name if "op" in call.meta else "") is not None:
        return False
    changed = False
    for position, (operand, inner) in enumerate(zip(operands, placeholders, strict=True)):
        users = list(inner.users)
        if len(users) != 1 or not isinstance(operand, Node) or users[0].target is not cast:
            continue
        dtype = users[0].args[1]
        assert isinstance(dtype, torch.dtype)
        with gm.graph.inserting_before(call):
            outer = gm.graph.call_function(cast, (operand, dtype))
        outer.meta = {**users[0].meta, "numel": operand.meta.get("numel")}
        call.update_arg(position + 1, outer)
        users[0].replace_all_uses_with(inner)
        sub.graph.erase_node(users[0])
        inner.meta["dtype"] = dtype
        inner.meta["precision"] = Precision(None, dtype, dtype, Rule.KEEP, "cast by the caller")
        changed = True
    if changed:
        sub.recompile()
    return changed
