"""Graph modules that copy and trace again by their nodes, where torch.fx runs their source.

torch.fx runs a graph module's source to trace or to unpickle it. What no traced argument reaches runs right then:
buffers and sums over them become constants, writes to them and grad modes are gone, a random tensor is the same one
ever after. Here every node goes over as it is::

    copy                   the nodes, with the annotations of the passes
    a trace from outside   each node once more, in the tracer's graph, under its name
    pickle, torch.save     refused: a model pickles, and its copy captures again; ``torch.export`` saves a graph

A trace that wants to look into the graph's calls, as static capture does, says so (``looks_into_graphs``).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.graph import PythonCode
from torch.fx.node import has_side_effect

from fxprec.kernels.launch.graph_call import graph_call, tracer_of
from fxprec.passes.graph.annotations import notes
from fxprec.passes.torch_internals import (
    OF_GRAPH,
    LazyBase,
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
        return _fill(_empty(self), _state(self) | parts, copy.deepcopy(self.graph))

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        made = memo[id(self)] = _empty(self)
        _fill(made, copy.deepcopy(_state(self), memo), copy.deepcopy(self.graph))
        for hook in self._deepcopy_hooks:
            hook(made)
        return made

    def __reduce__(self) -> NoReturn:
        """Refuse to pickle, as torch.fx would write source here, whose trace is another graph now and then."""
        raise TypeError(
            "a graph of a converted model cannot be pickled: pickle that model, whose copy captures its graphs again, "
            "or save what torch.export.export(fxprec.graph_module(model), inputs) gives"
        )

    def __prepare_scriptable__(self) -> GraphModule:
        """Return a copy for torch.jit.script, which compiles the source of the forward, but no kernel of ours."""
        graph = copy.deepcopy(self.graph)
        for node in graph.nodes:
            node.target = getattr(node.target, "torchs", node.target)  # of a graph call the op of torch's in its place
        return GraphModule(self, graph, type(self).__name__)


class LazyGraphModule(LazyBase, ExactGraphModule):  # type: ignore[misc]
    """Graph module that writes its source when somebody calls it or asks for it."""

    def __reduce__(self) -> NoReturn:
        ExactGraphModule.__reduce__(self)


def make_exact(gm: GraphModule) -> None:
    """Turn a graph module into an ``ExactGraphModule``, in place. A lazy one writes its source now."""
    if isinstance(gm, ExactGraphModule) and not isinstance(gm, LazyBase):
        return
    name = type(gm).__name__
    # torch.fx gives each graph module a class of its own, which its code is written to: ``__new__`` makes one here.
    gm.__class__ = type(ExactGraphModule.__new__(ExactGraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()


def _state(gm: GraphModule) -> dict[str, Any]:
    return {name: value for name, value in vars(gm).items() if name not in OF_GRAPH}


def _empty(gm: GraphModule) -> ExactGraphModule:
    """Return a graph module of the same kind and name without nodes: torch.fx gives each one a class of its own."""
    kind = LazyGraphModule if isinstance(gm, LazyBase) else ExactGraphModule
    return kind({}, Graph(), type(gm).__name__)


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
