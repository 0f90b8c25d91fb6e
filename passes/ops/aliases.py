"""Find nodes that may share memory, and who writes to it. A cast may: ``x.to(dtype)`` is ``x`` where it has that dtype.

Nodes share memory through views and in-place writes, through the names of one weight, and where capture says so: what
lies outside of the graph (inputs, parameters, buffers) and shares memory has one ``meta["memory"]``::

    %a = placeholder                  # meta["memory"] = 0: was called with one tensor twice
    %b = placeholder                  # meta["memory"] = 0
    %low = cast(%b, torch.bfloat16)
    %c = mul_(%a, 2)                  # %low is stale from here on

Of NumPy's calls, which dynamo traces, nobody says which return a view, or write (``fill``, ``out=``): each may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Final

from torch.fx import Graph, GraphModule, Node

from fxprec.passes.graph.annotations import Op, Rule, annotated, arg_nodes, argument, notes
from fxprec.passes.graph.subgraphs import body_of
from fxprec.passes.ops.table import OpRule, facts_of
from fxprec.passes.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, numpy_call, schema_of

#: NumPy's calls that write nothing where no third array is given, and give an array of their own.
_NUMPY_NEW: Final = frozenset(
    "add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift eq ne lt le gt ge copy sum mean "
    "max min std var all any item tolist".split()
)
#: And those that may give a view.
_NUMPY_VIEWS: Final = frozenset(
    "attribute getitem reshape flatten ravel transpose squeeze asarray array astype".split()
)


def alias_roots(graph: Graph, sources: Callable[[Node], Iterable[Node]] | None = None) -> dict[Node, Node]:
    """Node -> the first node of those that may share its memory; itself where there is no other.

    Args:
        sources: node -> those of its arguments whose memory its result may share; None: ``shared_sources``.
    """
    sources = sources or shared_sources
    parent: dict[Node, Node] = {}
    outside: dict[object, Node] = {}

    def root(node: Node) -> Node:
        while (above := parent[node]) is not node:
            parent[node] = parent[above]
            node = above
        return node

    for node in graph.nodes:
        parent[node] = node
        others = sources(node)
        if node.op in ("placeholder", "get_attr"):
            keys: list[object] = [node.target] if node.op == "get_attr" else []
            if (memory := notes(node).memory) is not None:
                keys.append(("memory", memory))
            others = (*others, *[outside.setdefault(key, node) for key in keys])
        for other in others:
            if other in parent:  # the graph of a region names nodes of the graph around, which are not its own
                first, second = sorted((root(other), root(node)))  # in the order of the graph
                parent[second] = first
    return {node: root(node) for node in parent}


def shared_sources(node: Node) -> Iterator[Node]:
    """Return the arguments whose memory the result may share."""
    if not node.args:
        return
    op = notes(node).op
    if isinstance(node.target, HigherOrderOperator):
        if node.target.name() == "register_hook":  # who reads the tensor later reads this
            yield node.all_input_nodes[0]
        yield from (operand for operand, _, given_back in _operands(node) if given_back)
        return
    if (name := numpy_call(node.target)) is not None:
        if name not in _NUMPY_NEW or _takes_out(node):
            yield from node.all_input_nodes
        return
    facts = facts_of(op.name)
    if not op.in_place and not facts.view:
        return
    first = node.args[0]
    if isinstance(first, Node) and (facts.rule is not Rule.PROMOTE or op.in_place):
        yield first
    else:  # a view of each: broadcast_tensors(x, y), as which views that promote are taken, and atleast_1d([x, y])
        yield from (source for port, source in arg_nodes(node) if port == 0 or not isinstance(first, tuple | list))


def written_by(node: Node) -> Iterable[Node]:
    """Return the arguments that a call writes to, as its name or schema tells.

    Also those that no copy may stand in for (``OpRule.strides``), as if it wrote to them.
    """
    return _written_by(node, notes(node).op) if node.op.startswith("call") else ()


def _written_by(node: Node, op: Op) -> Iterable[Node]:
    target = node.target
    facts = facts_of(op.name)
    if not (op.in_place or facts.strides or facts.writes):
        if isinstance(target, (str, BuiltinFunctionType)):  # most calls end here: they have no body, and no schema
            return ()
        if isinstance(target, FunctionType) and numpy_call(target) is None:
            return ()
    return _written(node, op, facts)


def _written(node: Node, op: Op, facts: OpRule) -> Iterator[Node]:
    if isinstance(node.target, HigherOrderOperator):
        yield from (operand for operand, written, _ in _operands(node) if written)
    elif (name := numpy_call(node.target)) is not None:
        if name not in _NUMPY_NEW | _NUMPY_VIEWS or _takes_out(node):
            yield from node.all_input_nodes
    elif op.in_place or (facts.strides and _may_have_gaps(node.args[0])):
        yield from (source for port, source in arg_nodes(node) if port == 0)
    elif (writes := facts.writes) is not None:
        flag = argument(node, *writes.flag)
        if flag is not None and flag is not False:
            yield from (source for port, source in arg_nodes(node) if port in writes.ports)
    elif (overload := _overload(node.target)) is not None and schema_of(overload).is_mutable:
        written = {
            key
            for position, each in enumerate(schema_of(overload).arguments)
            if each.alias_info is not None and each.alias_info.is_write
            for key in (position, each.name)
        }
        yield from (source for port, source in arg_nodes(node) if port in written)


def _may_have_gaps(value: object) -> bool:
    """Return whether a copy of a value may be laid out otherwise, since the value's memory may have gaps.

    Walks up through views of all elements. True at an input or a weight, a part, or an expanded view; False at an op
    that makes a dense tensor of its own.
    """
    while isinstance(value, Node) and (facts := facts_of(notes(value).op.name)).view:
        source = value.args[0]
        if isinstance(source, Node) and source.op == "call_function" and isinstance(notes(source).dtype, tuple):
            if not facts_of(notes(source).op.name).view and not isinstance(source.target, HigherOrderOperator):
                return False  # one of several results, each a tensor of its own: of ``max(1)``, not of ``chunk``
        if facts.repeats or not (facts.whole or notes(value).op.name == "to"):
            return True
        value = source
    return isinstance(value, Node) and value.op in ("placeholder", "get_attr")


def _takes_out(node: Node) -> bool:
    """Return whether a call of NumPy's may have been given an array for its result: ``np.add(a, b, a)``."""
    return "out" in node.kwargs or any(port not in (0, 1) for port, _ in arg_nodes(node))


def written_roots(graph: Graph, roots: Mapping[Node, Node]) -> set[Node]:
    """Return the roots of memory that somebody writes to."""
    return {roots[target] for node in graph.nodes for target in written_by(node)}


def written_memory(
    graph: Graph, sources: Callable[[Node], Iterable[Node]] | None = None
) -> tuple[dict[Node, Node], set[Node]]:
    """Return node -> the root of its memory, and the written roots, for those who ask what a write makes stale.

    Most graphs write nowhere: then nothing becomes stale, whoever shares memory, and each node is its own root.

    Args:
        sources: as for ``alias_roots``.
    """
    calls = ((node, noted.op) for node, noted in annotated(graph) if node.op.startswith("call"))
    targets = [target for node, op in calls for target in _written_by(node, op)]
    if not targets:
        return {node: node for node in graph.nodes}, set()
    roots = alias_roots(graph, sources)
    return roots, {roots[target] for target in targets}


def outside_writes(gm: GraphModule) -> set[Node]:
    """Return the inputs, parameters and buffers whose memory the graph may write to."""
    roots, written = written_memory(gm.graph)
    return {node for node, root in roots.items() if root in written and node.op in ("placeholder", "get_attr")}


def _operands(node: Node) -> Iterator[tuple[Node, bool, bool]]:
    """Yield each operand of a higher-order op, whether a body writes to it, and whether one may give it back."""
    bodies = {source: body for source in node.all_input_nodes if (body := body_of(source)) is not None}
    operands = [source for _, source in arg_nodes(node) if source not in bodies]
    for body in bodies.values():
        roots = alias_roots(body.graph)
        written = written_roots(body.graph, roots)
        returned = {roots[source] for source in body.graph.output_node().all_input_nodes}
        inputs = body.graph.find_nodes(op="placeholder")
        fits = len(inputs) <= len(operands)  # they are the last of the operands
        for number, operand in enumerate(operands):
            inside = [roots[inputs[number - len(operands)]]] if fits and number >= len(operands) - len(inputs) else []
            if not fits:
                inside = [roots[each] for each in inputs]
            yield operand, not written.isdisjoint(inside), not returned.isdisjoint(inside)


def _overload(target: object) -> OpOverload | None:
    """Return the op of a call, where its target says it; of a packet the first, since overloads write alike."""
    if isinstance(target, OpOverloadPacket):
        overloads = target.overloads()
        return getattr(target, overloads[0]) if overloads else None
    return target if isinstance(target, OpOverload) else None
