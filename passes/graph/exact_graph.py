"""Graph modules that copy, pickle and trace again by their nodes, where torch.fx runs their source.

torch.fx pickles a graph module as source text, which is traced again when it is loaded, as by ``symbolic_trace``. What
no traced argument reaches runs right then: buffers and sums over them become constants, writes to them and grad modes
are gone, a random tensor is the same one ever after. Here every node is written down as it is::

    pickle, torch.save, copy       the nodes, with the annotations of the passes
    a trace from outside           each node once more, in the tracer's graph, under its name
    to_folder                      the source, with what it imports

A trace that wants to look into the graph's calls, as static capture does, says so (``looks_into_graphs``).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

from fxprec.passes.graph.leaves import tracer_of
from fxprec.passes.graph.retrace import Copying
from fxprec.passes.graph.saved_graph import SavedGraph, import_lines
from fxprec.passes.torch_internals import OF_GRAPH, LazyBase


class ExactGraphModule(GraphModule):
    """A graph module whose copies have the very same nodes."""

    def recompile(self) -> PythonCode:
        """As torch.fx does; the forward gives a tracer from outside the nodes themselves."""
        code = super().recompile()
        cls: Any = type(self)
        cls.forward = _open_to_tracers(cls.forward)
        return code

    def __copy__(self) -> GraphModule:
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
        state["meta"] = {name: value for name, value in self.meta.items() if isinstance(value, str | list)}
        return _empty, _kind(self), (state, SavedGraph.of(self.graph))

    def __setstate__(self, state: tuple[dict[str, Any], SavedGraph]) -> None:
        attributes, saved = state
        _fill(self, attributes, saved.graph())

    def __prepare_scriptable__(self) -> GraphModule:
        """For torch.jit.script, which compiles the source of the forward."""
        return GraphModule(self, copy.deepcopy(self.graph), type(self).__name__)

    def to_folder(self, folder: Any, module_name: str = "FxModule") -> None:
        """As torch.fx does, with imports of the functions that the source calls."""
        plain = GraphModule(self, copy.deepcopy(self.graph), type(self).__name__)  # all its buffers are saved
        plain.to_folder(folder, module_name)
        file = Path(folder) / "module.py"
        file.write_text(import_lines(plain.graph.python_code("self").globals) + file.read_text())


class LazyGraphModule(LazyBase, ExactGraphModule):  # type: ignore[misc]
    """One that writes its source when somebody calls it or asks for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ExactGraphModule.__reduce__(self)


def make_exact(gm: GraphModule) -> None:
    """Turn a graph module into an ``ExactGraphModule``, in place. A lazy one writes its source now."""
    if isinstance(gm, ExactGraphModule) and not isinstance(gm, LazyBase):
        return
    name = type(gm).__name__
    gm.__class__ = type(ExactGraphModule.__new__(ExactGraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()


def _state(gm: GraphModule) -> dict[str, Any]:
    return {name: value for name, value in vars(gm).items() if name not in OF_GRAPH}


def _kind(gm: GraphModule) -> tuple[type[ExactGraphModule], str]:
    """Class and name to make another one with: torch.fx gives each graph module a class of its own."""
    return LazyGraphModule if isinstance(gm, LazyBase) else ExactGraphModule, type(gm).__name__


def _empty(kind: type[ExactGraphModule], name: str) -> ExactGraphModule:
    return kind({}, Graph(), name)


def _fill(gm: ExactGraphModule, attributes: dict[str, Any], graph: Graph) -> ExactGraphModule:
    vars(gm).update(attributes)
    gm.graph = graph
    return gm


def _open_to_tracers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def opened(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        tracer = tracer_of((*args, *kwargs.values()))
        if tracer is None or getattr(tracer, "looks_into_graphs", False):
            return forward(self, *args, **kwargs)
        bound = inspect.signature(forward).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return Copying(self, tracer).run(*bound.args[1:])

    opened.__code__ = opened.__code__.replace()  # one of its own: dynamo counts recompilations of each
    return functools.update_wrapper(opened, forward)
