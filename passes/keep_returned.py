"""Let others read a returned value as it is returned, so that it lies on the path of gradients.

In the original program ``h.retain_grad()`` and ``torch.autograd.grad(loss, h)`` of a returned ``h`` give its gradient,
since what comes after it reads this very tensor. A cast that hangs beside the low value would lie on no path.

Before::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_1: bfloat16 = linear(%linear, %v_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %linear_1_f32: float32 = cast(%linear_1, torch.float32)
    return (%linear_1_f32, %linear_f32)

After::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %linear_f32_bf16: bfloat16 = cast(%linear_f32, torch.bfloat16)
    %linear_1: bfloat16 = linear(%linear_f32_bf16, %v_bf16)
    %linear_1_f32: float32 = cast(%linear_1, torch.float32)
    return (%linear_1_f32, %linear_f32)

The way there and back loses nothing. It is taken only where gradients are recorded, and only by a value that is
returned and read as well. Of memory that is written in place only those count that read it after the last write.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.context import Context, PassResult
from fxprec.passes.graph.annotations import UNKNOWN, Op, Precision, Rule, notes
from fxprec.passes.graph.casts import cast, cast_if_float
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.names import cast_target

_SHORT: Final = {torch.float16: "f16", torch.bfloat16: "bf16"}
_HANDED_ON: Final = ("nn_module_stack", "stack_trace", "numel", "val")


def keep_returned(gm: GraphModule, context: Context) -> PassResult:
    """Route the readers of each low value that is returned in a wider dtype through what is returned."""
    if context.policy.level == "O0":
        return PassResult(gm, False)
    recorded = grad_mode_at_nodes(gm.graph, context.gradients)
    roots = alias_roots(gm.graph)
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    last: dict[Node, Node] = {}  # root of memory -> the last node that writes to it
    for node in gm.graph.nodes:
        last.update((roots[target], node) for target in written_by(node))
    changed = False
    for returned in dict.fromkeys(gm.graph.output_node().all_input_nodes):
        source = _widened(returned)
        if source is None or source.op == "placeholder" or not recorded[source]:
            continue
        after = last.get(roots[source], source)
        if position[after] < position[source]:
            after = source
        readers = [
            (user, same)
            for same in _same_tensor(source)
            for user in same.users
            if user is not returned and user.op != "output" and position[user] > position[after]
        ]
        if readers:
            _read_through(gm.graph, after, returned, readers)
            changed = True
    return PassResult(gm, changed)


def _same_tensor(node: Node) -> list[Node]:
    """Return the nodes that stand for the very tensor: in-place ops give what they wrote to."""
    while notes(node).op.in_place and isinstance(node.args[0], Node):
        node = node.args[0]
    found = [node]
    for each in found:
        found += [user for user in each.users if notes(user).op.in_place and user.args[:1] == (each,)]
    return found


def _widened(node: Node) -> Node | None:
    """Return the low value that a node widens and the original program had as it was; None: it does something else."""
    source = node.args[0] if node.args else None
    if notes(node).op.name != "to" or not isinstance(source, Node) or notes(node).dtype != notes(source).dtype:
        return None
    narrow, wide = actual_dtype(source), node.args[1] if node.target in (cast, cast_if_float) else cast_target(node)
    return source if narrow in _SHORT and wide is torch.float32 else None


def _read_through(graph: Graph, after: Node, returned: Node, readers: list[tuple[Node, Node]]) -> None:
    """Make the returned cast right after that node, and let the readers (with what each reads now) cast that."""
    source = returned.args[0]
    assert isinstance(source, Node)
    dtype = actual_dtype(source)
    assert dtype is not None
    after.append(returned)
    unknown = notes(source).dtype is UNKNOWN
    function = cast_if_float if unknown else cast
    with graph.inserting_after(returned):
        back = new_node(graph, "call_function", function, (returned, dtype), {}, f"{returned.name}_{_SHORT[dtype]}")
    why = f"cast inserted to have {returned.name}, which is returned, on the gradient's path"
    back.meta.update(
        {each: returned.meta[each] for each in _HANDED_ON if each in returned.meta},
        op=Op("to"),
        dtype=UNKNOWN if unknown else dtype,
        precision=Precision.arriving(dtype, dtype, Rule.KEEP, why),
        inserted=True,
        returns=True,
    )
    if "val" in source.meta:
        back.meta["val"] = source.meta["val"]
    for reader, read in readers:
        reader.replace_input_with(read, back)
