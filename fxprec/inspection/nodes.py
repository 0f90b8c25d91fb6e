"""Find nodes of rewritten graphs by name, say where in the user's source each comes from, and run a graph node by node.

A pattern is a module path (it covers everything below), or else a node name; ``*``, ``?`` and ``[...]`` are wildcards,
and ``*`` crosses dots, as in a Policy. ``op:softmax``, ``node:softmax_1`` and ``module:encoder`` say which is meant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fxprec.errors import did_you_mean
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.annotations import NO_OP, module_path, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.exact_graph import plain
from fxprec.passes.graph.subgraphs import subgraph_of
from fxprec.passes.graph.text import dtype_name, shown_dtype
from fxprec.passes.ops.table import facts_of
from fxprec.passes.placement.sites import carries_float
from fxprec.programs.program import is_weight_cast

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_PATH: Final = re.compile(r"(?:[A-Za-z]:)?[/\\][^\s:\"'(),]*\.pyw?\b")
#: Besides views, and ops that take what arrives.
_MOVES: Final = frozenset({"setitem", "cast"})
_LIBRARIES: Final = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))


class NamedNode(NamedTuple):
    """Node of a model's graphs, with its place there.

    Attributes:
        graph: the position of its graph among ``fxprec.graphs(model)``.
        name: "body.relu" in the body of a higher-order op.
        node: its annotations are those of the graph that users see, also where it is of the program that runs.
        inputs: while it runs, the values of its ``inputs_of``.
    """

    graph: int
    name: str
    node: Node
    inputs: tuple[Any, ...] = ()


#: Runs a node by calling the function, and gives what that gives.
Look = Callable[[NamedNode, Callable[[], Any]], Any]


def places(graph: int, gm: GraphModule, prefix: str = "") -> Iterator[NamedNode]:
    """Yield every node of a graph and, where it is read, of each body that a higher-order op calls.

    The nodes of a fused region come before its own, under the names that they would have without it.
    """
    seen: set[int] = set()
    for node in gm.graph.nodes:
        # A body's nodes run where the body is read, once each, however many calls read it.
        body = subgraph_of(gm, node)
        if body is not None and node.op == "call_module":
            yield from (
                NamedNode(graph, prefix + inner.name, inner)
                for inner in body.graph.nodes
                if notes(inner).state("region")
            )
        yield NamedNode(graph, prefix + node.name, node)
        if body is not None and node.op == "get_attr" and id(body) not in seen:
            seen.add(id(body))
            yield from places(graph, body, f"{prefix}{node.target}.")


def select(found: Sequence[NamedNode], pattern: str, modules: Sequence[str] = ()) -> list[NamedNode]:
    """Return the nodes that a pattern names.

    Args:
        found: where to look.
        pattern: see the docstring of this module.
        modules: paths of all the model's modules, to tell one that made no node from one that does not exist.

    Raises:
        ValueError: it names nothing; with the nearest names.
    """
    kind, _, rest = pattern.partition(":")
    kinds = (kind,) if kind in ("op", "node", "module") else ("module", "node")
    wanted = rest if len(kinds) == 1 else pattern
    # Without a kind, a module's path goes before a node of the same name.
    known: set[str] = set()
    # The kinds are tried in turn: "encoder" means the module, although a node may be called so.
    for kind in kinds:
        names = [_names(place, kind) for place in found]
        known.update(*names)
        hits = {name for name in known if fnmatchcase(name, wanted)}
        chosen = [place for place, own in zip(found, names, strict=True) if not hits.isdisjoint(own)]
        if chosen:
            return chosen
    if "module" in kinds and any(fnmatchcase(name, wanted) for name in modules):
        raise ValueError(f"no node of the graphs belongs to module {wanted!r}: it was not called, or computes nothing")
    raise ValueError(
        f"{pattern!r} names no {' or '.join(kinds)} of the graphs{did_you_mean(wanted, known | set(modules))}; "
        "a pattern is a module path, a node name or 'op:softmax', and may hold * and ?. fxprec.report lists all"
    )


def _names(place: NamedNode, kind: str) -> tuple[str, ...]:
    if kind == "node":
        return (place.name,)
    if kind == "op":
        return (op_name(place.node),)
    parts = module_path(place.node).split(".")
    return tuple(".".join(parts[:length]) for length in range(len(parts) + 1))


def is_inserted(node: Node) -> bool:
    """Return whether a pass put this cast there."""
    return bool(notes(node).inserted)


def is_shadow(node: Node) -> bool:
    """Return whether a node is our cast of a parameter to a low dtype: at run time a shadow is read instead."""
    return any(is_weight_cast(node, low) for low in LOW_DTYPES)


def op_name(node: Node) -> str:
    """Return the canonical op, with the underscore of an in-place one; "cast" for those that we insert."""
    op = notes(node).op
    if node.target in CASTS:
        return "cast"
    if op is not NO_OP:
        return op.name
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else node.op


def moves_data(op: str) -> bool:
    """Return whether a canonical op computes nothing: views, copies, casts."""
    row = facts_of(op)
    return op in _MOVES or row.arrives or row.view


def computes(node: Node) -> str:
    """Return the dtype of a node's arithmetic; "-" where it has none."""
    return dtype_name(notes(node).precision.compute) if not is_inserted(node) and node.op != "placeholder" else "-"


def original(node: Node) -> str:
    """Return the dtype of a node's result in the original, where the rewritten one's is another; else ""."""
    before = dtype_name(notes(node).dtype)
    return "" if is_inserted(node) or before == shown_dtype(node) else before


def reason(node: Node) -> tuple[str, str]:
    """Return rule and why. A node without floats (sizes, indices) has neither, whatever its op's rule is."""
    precision = notes(node).precision
    if precision.compute is None and precision.output is None and not carries_float(notes(node).dtype):
        return "-", "no floats"
    instead_of = notes(node).instead_of
    return str(precision.rule), f"{precision.why}; {instead_of}" if instead_of else precision.why


def source_line(node: Node) -> str:
    """Return the innermost line of the user's own source that made the node, ``model.py:12``; "" if none is known."""
    # torch's own modules have frames too: the innermost of the user's says which layer it was.
    frames = _frames(node)
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    if not frames:
        return ""
    file, line = (own or frames)[-1]
    return f"{_short(file)}:{line}"


def is_own_code(node: Node) -> bool:
    """Return whether a line of the user's own source made the node, and not one of torch's alone."""
    return any(not file.startswith(_LIBRARIES) for file, _ in _frames(node))


def _frames(node: Node) -> list[tuple[str, str]]:
    """Return file and line of what made the node, without code that has no lines."""
    return [frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if frame[1] != "0"]


def short_paths(text: Any) -> str:
    """Return a text with every source path in it shortened as in ``source_line``."""
    return _PATH.sub(lambda match: _short(match[0]), str(text))


def _short(file: str) -> str:
    """Return a path relative to the working directory where it lies below; else its last two parts."""
    path = Path(file)
    # Paths below the working directory can be opened by a click; of others two parts say enough.
    here = Path.cwd()
    if path.is_relative_to(here) and here.parent != here and "site-packages" not in path.parts:
        return path.relative_to(here).as_posix()
    return "/".join(path.parts[-2:]) if path.is_absolute() else file


def inputs_of(node: Node) -> list[Node]:
    """Return the nodes among a call's arguments in their order, each as often as it is there.

    No pass changes it, but for casts that it puts in between: so a position means the same in every form of a graph.
    """
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


class NodeByNode(Interpreter):
    """Interpreter of a graph, and of the bodies of higher-order ops in it whose calls are plain."""

    def __init__(self, gm: GraphModule, look: Look, graph: int = 0, prefix: str = "", opened: bool = False) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.extra_traceback = False
        self._look, self._graph, self._prefix, self._opened = look, graph, prefix, opened

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        run = super().run_node
        inputs = tuple(self.env[each] for each in inputs_of(n))
        return self._look(NamedNode(self._graph, self._prefix + n.name, n, inputs), lambda: run(n))

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(super().output(target, args, kwargs))  # a loss may write to a dict that the model gives

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._body(target, value) if isinstance(value, GraphModule) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.fetch_attr(target)
        if not (self._opened and isinstance(region, FusedRegion)):
            return super().call_module(target, args, kwargs)
        return run_opened(region, NodeByNode(region.graph_module, self._look, self._graph, self._prefix), args)

    def _body(self, name: str, body: GraphModule) -> GraphModule:
        """Return a graph of one call, which runs the body node by node, however a higher-order op runs it."""
        # A higher-order op calls a GraphModule, in its own way (a checkpoint, a branch): this one of a single node.
        graph = Graph()
        inputs = [graph.placeholder(str(node.target)) for node in body.graph.find_nodes(op="placeholder")]
        within = NodeByNode(body, self._look, self._graph, f"{self._prefix}{name}.", self._opened)

        def run(*args: Any) -> Any:
            return within.run(*args)

        graph.output(graph.call_function(run, tuple(inputs)))
        gm = GraphModule({}, graph)
        gm.meta = body.meta
        return gm


def run_opened(region: FusedRegion, interpreter: Interpreter, args: Sequence[Any]) -> Any:
    """Run a fused region by an interpreter of its graph, on the arguments of its kernel."""
    reads = len(region.graph_module.graph.find_nodes(op="placeholder"))  # the seeds of dropouts come after them
    results = interpreter.run(*args[:reads])
    return results[0] if region.single else results
