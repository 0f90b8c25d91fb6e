"""Graph modules that copy, pickle and trace again by their nodes, where torch.fx runs their source.

torch.fx pickles a graph module as source text, which is traced again when it is loaded, as by ``symbolic_trace``. What
no traced argument reaches runs right then: buffers and sums over them become constants, writes to them and grad modes
are gone, a random tensor is the same one ever after. Here every node is written down as it is::

    pickle, torch.save, copy       the nodes, with the annotations of the passes
    a trace from outside           each node once more, in the tracer's graph, under its name

A trace that wants to look into the graph's calls, as static capture does, says so (``looks_into_graphs``).
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.graph import PythonCode
from torch.fx.node import has_side_effect, map_aggregate

from fxprec.kernels.launch.graph_call import graph_call, tracer_of
from fxprec.passes.graph.annotations import Precision, notes
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.torch_internals import (
    OF_GRAPH,
    HigherOrderOperator,
    LazyBase,
    OpOverload,
    OpOverloadPacket,
    codegen_of,
)


@graph_call
def write(x: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call an in-place method for its effect alone: ``write(x, "add_", 1)``.

    torch.fx's ``eliminate_dead_code`` would drop a plain ``x.add_(1)`` whose result nobody reads, and keeps this call.
    """
    return getattr(x, method)(*args, **kwargs)


has_side_effect(write)


class Copying(Interpreter):
    """Runs a graph on another trace's values: each node becomes a node of that trace."""

    def __init__(self, gm: GraphModule, tracer: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._tracer = tracer
        # Attributes of the graph module are found below the root of that trace.
        path = "" if tracer.root is gm else tracer.path_of_module(gm)
        self._prefix = path and f"{path}."

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # Nobody reads it: dead code, but for what it writes.
        if n.op == "call_method" and notes(n).op.in_place and not n.users:
            args = (args[0], n.target, *args[1:])
            return self._tracer.create_proxy("call_function", write, args, kwargs, n.name, n.type)
        target = f"{self._prefix}{n.target}" if n.op in ("get_attr", "call_module") else n.target
        return self._tracer.create_proxy(n.op, target, args, kwargs, n.name, n.type)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(args[0])


def plain(value: Any) -> Any:
    """Return a result without torch.fx's immutable lists and dicts, as the source would give it."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [plain(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


class ExactGraphModule(GraphModule):
    """A graph module whose copies have the very same nodes."""

    def recompile(self) -> PythonCode:
        """Recompile as torch.fx does; the forward gives a tracer from outside the nodes themselves."""
        code = super().recompile()
        cls: Any = type(self)
        cls.forward = _open_to_tracers(cls.forward)
        return code

    def __copy__(self) -> GraphModule:
        # A shallow copy has the same tensors, in dicts of its own: what is registered on one is not on the other.
        parts = {name: dict(vars(self)[name]) for name in ("_parameters", "_buffers", "_modules")}
        return _fill(_empty(*_kind(self)), _state(self) | parts, copy.deepcopy(self.graph))

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        made = memo[id(self)] = _empty(*_kind(self))
        _fill(made, copy.deepcopy(_state(self), memo), copy.deepcopy(self.graph))
        for hook in self._deepcopy_hooks:
            hook(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in _state(self).items() if name not in ("shape_env", "meta")}
        # Notes of the passes are plain; the rest of it (fake tensors, shape environments) belongs to this process.
        state["meta"] = {name: value for name, value in self.meta.items() if isinstance(value, str | list)}
        return _empty, _kind(self), (state, SavedGraph.of(self.graph))

    def __setstate__(self, state: tuple[dict[str, Any], SavedGraph]) -> None:
        attributes, saved = state
        _fill(self, attributes, saved.graph())

    def __prepare_scriptable__(self) -> GraphModule:
        """Return a copy for torch.jit.script, which compiles the source of the forward, but no kernel of ours."""
        graph = copy.deepcopy(self.graph)
        for node in graph.nodes:
            node.target = getattr(node.target, "torchs", node.target)
        return GraphModule(self, graph, type(self).__name__)


class LazyGraphModule(LazyBase, ExactGraphModule):  # type: ignore[misc]
    """Graph module that writes its source when somebody calls it or asks for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ExactGraphModule.__reduce__(self)


def make_exact(gm: GraphModule) -> None:
    """Turn a graph module into an ``ExactGraphModule``, in place. A lazy one writes its source now."""
    if isinstance(gm, ExactGraphModule) and not isinstance(gm, LazyBase):
        return
    name = type(gm).__name__
    # torch.fx gives each graph module a class of its own, which its code is written to.
    gm.__class__ = type(ExactGraphModule.__new__(ExactGraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()


def _state(gm: GraphModule) -> dict[str, Any]:
    return {name: value for name, value in vars(gm).items() if name not in OF_GRAPH}


def _kind(gm: GraphModule) -> tuple[type[ExactGraphModule], str]:
    """Return class and name to make another one with: torch.fx gives each graph module a class of its own."""
    return LazyGraphModule if isinstance(gm, LazyBase) else ExactGraphModule, type(gm).__name__


def _empty(kind: type[ExactGraphModule], name: str) -> ExactGraphModule:
    return kind({}, Graph(), name)


def _fill(gm: ExactGraphModule, attributes: dict[str, Any], graph: Graph) -> ExactGraphModule:
    vars(gm).update(attributes)
    gm.graph = graph
    return gm


def _open_to_tracers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def opened(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        # Called by a trace from outside, its nodes go over as they are; the source would run in part.
        tracer = tracer_of((*args, *kwargs.values()))
        if tracer is None or getattr(tracer, "looks_into_graphs", False):
            return forward(self, *args, **kwargs)
        bound = inspect.signature(forward).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return Copying(self, tracer).run(*bound.args[1:])

    # One of its own: dynamo counts recompilations of each.
    opened.__code__ = opened.__code__.replace()
    return functools.update_wrapper(opened, forward)


@dataclass(frozen=True, slots=True)
class _Node:
    """Reference to one of the graph's nodes."""

    number: int


@dataclass(frozen=True, slots=True)
class _Named:
    """A function of torch's that pickle does not find, by its path below ``torch``.

    Operators, and functions that torch made within another and gave a name, such as ``max_pool2d``.

    Attributes:
        module: where torch defines an operator of higher order; "" for others.
    """

    path: str
    module: str = ""

    @classmethod
    def of(cls, function: Any) -> _Named | None:
        """Return the name of such a function, or None."""
        if isinstance(function, OpOverload | OpOverloadPacket | HigherOrderOperator):
            higher = isinstance(function, HigherOrderOperator)
            path = f"higher_order.{function.name()}" if higher else str(function)
            named = cls(f"ops.{path}", type(function).__module__ if higher else "")
            if named.function() is not function:
                raise pickle.PicklingError(f"the graph calls {function}, which is not what torch.{named.path} is")
            return named
        if "<locals>" in getattr(function, "__qualname__", ""):
            names = (name for name, known in vars(F).items() if known is function)
            return next((cls(f"nn.functional.{name}") for name in names), None)
        return None

    def function(self) -> Any:
        if self.module:
            importlib.import_module(self.module)  # where it is registered
        try:
            return attrgetter(self.path)(torch)
        except AttributeError:
            raise pickle.UnpicklingError(
                f"the graph calls torch.{self.path}, which is not registered in this process: "
                "import what registers it first"
            ) from None


class _SavedNode(NamedTuple):
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """A graph in a form that pickles: each node with what it calls by name, and its annotations.

    torch.fx's own ``Graph`` pickles from node to node, and beyond some hundreds of them ends in a RecursionError.

    Attributes:
        codegen: what writes its source, where that is not torch.fx's own.
    """

    nodes: tuple[_SavedNode, ...]
    codegen: Any

    @classmethod
    def of(cls, graph: Graph) -> SavedGraph:
        """Write down a graph."""
        # Flat, by number: torch.fx's own pickles recurse from node to node.
        numbers = {node: number for number, node in enumerate(graph.nodes)}

        def saved(value: Any) -> Any:
            return _Node(numbers[value]) if isinstance(value, Node) else _Named.of(value) or value

        nodes = []
        for n in graph.nodes:
            args, kwargs = map_aggregate(n.args, saved), map_aggregate(n.kwargs, saved)
            nodes.append(_SavedNode(n.op, saved(n.target), args, kwargs, n.name, n.type, _annotations(n)))
        return cls(tuple(nodes), codegen_of(graph))

    def graph(self) -> Graph:
        """Return the graph again."""
        graph = Graph()
        made: list[Node] = []

        def restored(value: Any) -> Any:
            if isinstance(value, _Node):
                return made[value.number]
            return value.function() if isinstance(value, _Named) else value

        for saved in self.nodes:
            args, kwargs = map_aggregate(saved.args, restored), map_aggregate(saved.kwargs, restored)
            node = new_node(graph, saved.op, restored(saved.target), args, kwargs, saved.name, saved.type)
            node.meta.update(saved.meta)
            made.append(node)
        if self.codegen is not None:
            graph.set_codegen(self.codegen)
        return graph


def _annotations(node: Node) -> dict[str, Any]:
    """Return what is plain of ``node.meta``, no fake tensors; modules' classes by name, as in exported programs."""
    kept = {key: value for key, value in node.meta.items() if _is_plain(value)}
    # Classes may be local to a function, where pickle finds none.
    stack = node.meta.get("nn_module_stack")
    if stack:
        kept["nn_module_stack"] = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in stack.items()
        }
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | Precision)
