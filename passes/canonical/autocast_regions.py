"""Resolve what the user's own ``with torch.autocast(...)`` means for the nodes within.

A region is what stands between a call that enters autocast and the one that leaves it. What becomes of it depends on
what it says:

====================================  ==================================================================================
autocast(enabled=False)               its nodes are marked ``False`` and keep their original dtypes. So it is also where
                                      it names another device type than the conversion's: code that writes
                                      ``autocast("cuda", enabled=False)`` means "FP32 here", wherever it runs
in the conversion's low dtype         its nodes are marked with that dtype. The policy decides as elsewhere, but the
                                      original dtype of a value is the one that autocast gave it when it was captured,
                                      and results of the region are returned in that
in another dtype                      runs as it is written
in the low dtype, with an op whose    runs as it is written: we would leave the op's dtypes alone, autocast may change
rule is KEEP (``_is_kept_op``)        them
any that enables it, at O0            runs as it is written
enabled, of another device type       means nothing here: its nodes are marked as those around it
====================================  ==================================================================================

Where nodes are marked, the calls that enter and leave go::

    %_ = _enter_autocast(cpu, None, False, None)
    %c = mul(%b, %s)                          ->      %c = mul(%b, %s)             # meta["autocast"] = False
    %_1 = _exit_autocast(%_)

A region that runs as it is written becomes the body of an op that enters autocast. So an error in it leaves autocast as
it was, and no pass can move anything in or out. Regions within it become bodies of that body, whatever they say::

    %_ = _enter_autocast(cpu, torch.float16, True, None)      %body = get_attr[autocast_0]
    %h = linear(%x, %w)                               ->      %call = wrap_with_autocast(cpu, torch.float16, True, None,
    %_1 = _exit_autocast(%_)                                                             %body, %x, %w)
    return %h                                                 %h = getitem(%call, 0)
                                                              return %h
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.context import Context, PassResult, bodies_last
from fxprec.passes.graph.annotations import Rule, argument, notes
from fxprec.passes.graph.subgraphs import body_of
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import facts_of
from fxprec.passes.torch_internals import HigherOrderOperator, enter_autocast, exit_autocast, wrap_with_autocast

#: What capture wrote on a node of the value that it saw.
_SEEN: Final = ("val", "example_value")


@bodies_last
def resolve_autocast_regions(gm: GraphModule, context: Context) -> PassResult:
    """Mark the nodes of regions and erase their borders, or make bodies of them."""
    return PassResult(gm, _resolve(gm, context, within=False))


def _resolve(gm: GraphModule, context: Context, within: bool) -> bool:
    """Resolve the regions of one graph; return whether there were any.

    Args:
        within: the graph is the body of a region that runs as it is written, and so do those further in.
    """
    open_regions: list[bool | torch.dtype] = []  # the mark of each region that the node is in, the innermost last
    erase: list[Node] = []
    kept: list[list[Node]] = []  # the nodes of each outermost region that runs as it is written, its borders included
    depth = 0  # how many regions deep the node is, from such a region on; 0: in none
    for node in gm.graph.nodes:
        enters, exits = (node.op == "call_function" and node.target is each for each in (enter_autocast, exit_autocast))
        if depth or (enters and (within or notes(node).as_written or _runs_as_written(node, context))):
            if not depth:
                kept.append([])
            depth += enters - exits
            # A graph that breaks within a region may end there.
            if node.op != "output":
                kept[-1].append(node)
        elif enters:
            open_regions.append(_mark_within(node, context, open_regions[-1] if open_regions else True))
            erase.append(node)
        elif exits:
            open_regions.pop()
            erase.append(node)
        elif open_regions and open_regions[-1] is not True:
            _mark(node, open_regions[-1])
    for node in reversed(erase):
        gm.graph.erase_node(node)
    for region in kept:
        body = _make_body(gm, region, context)
        if body is not None:
            _resolve(body, context, within=True)
    return bool(erase or kept)


def is_kept_region(node: Node, context: Context) -> bool:
    """Return whether a node calls a body under an autocast of the user's that runs as it is written."""
    if node.target is not wrap_with_autocast:
        return False
    _, dtype, enabled, _, fetched, *_ = node.args  # as ``_call_body`` writes them
    body = body_of(fetched)  # type: ignore[arg-type]
    made_here = body is not None and any(notes(each).as_written for each in body.graph.nodes)
    # A program may have such calls of its own: those are kept unless they enable the dtype that we lower to.
    return made_here or enabled is False or dtype is not context.low


def _runs_as_written(enter: Node, context: Context) -> bool:
    """Return whether a region runs as it is written (see the module's table)."""
    enabled, device = argument(enter, 2, "enabled", True), argument(enter, 0, "device_type")
    if not enabled or device != context.device:
        return False
    if context.policy.level == "O0" or _dtype_of(enter) is not context.low:
        return True
    return any(_is_kept_op(node) for node in _nodes_within(enter))


def _nodes_within(enter: Node) -> Iterator[Node]:
    """Yield the nodes of a region; to the end of the graph where nothing leaves it."""
    node = enter.next
    while node.op != "output" and not (node.target is exit_autocast and node.args[0] is enter):
        yield node
        node = node.next


def _is_kept_op(node: Node) -> bool:
    """Return whether we would leave an op's dtypes alone (KEEP), and it computes, so that autocast may change them.

    An op without a row of the table is such a one, too: ``facts_of`` says KEEP of it. A callable that is no op at all
    (``canonical_op`` is None) is not.
    """
    if node.op != "call_function" and node.op != "call_method":
        return False
    op = canonical_op(node)
    if op is None or node.target in (enter_autocast, exit_autocast) or isinstance(node.target, HigherOrderOperator):
        return False
    row = facts_of(op.name)
    computes = row.result != "none" and not row.arrives and not row.random
    return computes and row.rule is Rule.KEEP and bool(node.all_input_nodes)


def _dtype_of(enter: Node) -> torch.dtype:
    return argument(enter, 1, "dtype") or torch.get_autocast_dtype(argument(enter, 0, "device_type"))


def _mark_within(
    enter: Node, context: Context, around: bool | torch.dtype, as_written: bool = False
) -> bool | torch.dtype:
    """Return the mark of the nodes of a region: False, its dtype, or the mark of the nodes around it.

    Args:
        around: that mark.
        as_written: torch itself runs the region, so that one of another device type does nothing, even if it disables.
    """
    enabled = bool(argument(enter, 2, "enabled", True))
    if argument(enter, 0, "device_type") != context.device and (enabled or as_written):
        return around
    return _dtype_of(enter) if enabled else False


def _mark(node: Node, region: bool | torch.dtype, as_written: bool = False) -> None:
    """Write the mark of a region on a node and, if need be, on all nodes in the bodies that it calls.

    Bodies are found as attributes of the module that owns the node's graph, so the graph must have one by now.

    The dtype that autocast gave a value is taken from the value that dynamo saw (``meta["example_value"]``): in a
    checkpoint's body nobody has taken that over as ``meta["val"]`` yet.
    """
    notes(node).autocast = region
    if "example_value" in node.meta:
        node.meta.setdefault("val", node.meta["example_value"])
    if as_written:
        notes(node).as_written = True
    if as_written or isinstance(region, torch.dtype):
        for body in filter(None, map(body_of, node.all_input_nodes)):
            for inner in body.graph.nodes:
                _mark(inner, region, as_written)


def _make_body(gm: GraphModule, region: Sequence[Node], context: Context) -> GraphModule | None:
    """Move the nodes of a region, from its first border to its last, into a body; None where nothing is in it."""
    enter = region[0]
    # The exit is a border only where it is this region's: a graph may end before it.
    borders = [enter, *(node for node in region[-1:] if node.target is exit_autocast and node.args[0] is enter)]
    inside = dict.fromkeys(node for node in region if node not in borders and node.op != "get_attr")
    body = None
    if inside:
        # What the region reads becomes the body's inputs, what others read of it its results.
        read = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in inside)
        given = [node for node in inside if any(user not in inside and user not in borders for user in node.users)]
        body = GraphModule(gm, _body_graph(inside, read, given), "AutocastBody")
        for node in body.graph.nodes:
            if node.op.startswith("call"):
                # The region around has marked the node already, if that runs as it is written, too.
                _mark(node, _mark_within(enter, context, notes(node).autocast, as_written=True), as_written=True)
        # Bodies that it calls itself are its own attributes now, and no arguments.
        read = [node for node in read if body_of(node) is None]
        results = _call_body(gm, body, enter, next(reversed(inside)), read, given)
        for node, result in results.items():
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in (*borders[1:], *reversed(inside), enter):
        gm.graph.erase_node(node)
    return body


def _body_graph(inside: Iterable[Node], read: Iterable[Node], given: Iterable[Node]) -> Graph:
    """Return a graph of copies of the nodes inside, with what they read as inputs, and what others read as results."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in sorted(read, key=lambda node: body_of(node) is not None):  # placeholders come first
        fetches = body_of(node) is not None
        copies[node] = graph.get_attr(str(node.target)) if fetches else graph.placeholder(node.name)
        copies[node].meta.update({key: node.meta[key] for key in _SEEN if key in node.meta})
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in given))
    return graph


def _call_body(
    gm: GraphModule, body: GraphModule, enter: Node, last: Node, read: Iterable[Node], given: Iterable[Node]
) -> dict[Node, Node]:
    """Call a body behind the last node of its region; return the nodes of the region with what stands for each now."""
    graph = gm.graph
    name = next(name for name in map("autocast_{}".format, count()) if not hasattr(gm, name))
    setattr(gm, name, body)
    settings = (argument(enter, 0, "device_type"), _dtype_of(enter), argument(enter, 2, "enabled", True))
    with graph.inserting_after(last):
        fetched = graph.get_attr(name)
    with graph.inserting_after(fetched):
        call = graph.call_function(wrap_with_autocast, (*settings, argument(enter, 3, "cache_enabled"), fetched, *read))
    call.meta.update({key: last.meta[key] for key in ("nn_module_stack", "stack_trace") if key in last.meta})
    call.meta.update({key: tuple(node.meta.get(key) for node in given) for key in _SEEN})
    results: dict[Node, Node] = {}
    behind = call
    for position, node in enumerate(given):
        with graph.inserting_after(behind):
            behind = results[node] = graph.call_function(operator.getitem, (call, position))
        behind.meta.update({key: value for key, value in node.meta.items() if key != "autocast"})
    return results
