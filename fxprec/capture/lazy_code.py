"""Graphs that have no Python source yet: writing and compiling it costs about as much as tracing.

A captured graph is rewritten, and what runs is the program lifted from it: its own source is of use to nobody but who
asks for the graph. ``torch.fx`` calls such a module lazy: it writes its source when it is called or printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["holding", "with_code", "without_code"]


def without_code(root: nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule") -> GraphModule:
    """``GraphModule(root, graph, name)``, which writes its source when it is needed."""
    return _LazyGraphModule(root, graph, name)


def holding(tensors: Mapping[str, Tensor], graph: Graph, name: str) -> GraphModule:
    """``without_code(tensors, graph, name)``, which fx would fill by walking down from the top for every tensor."""
    gm = _LazyGraphModule({}, Graph(), name)
    modules: dict[str, nn.Module] = {"": gm}
    for path, tensor in tensors.items():
        owner, _, leaf = path.rpartition(".")
        module = modules.get(owner) or _made(modules, owner)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)
    gm.graph = graph
    return gm


def _made(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """A new module at that path, those around it too."""
    outer, _, name = path.rpartition(".")
    around = modules.get(outer) or _made(modules, outer)
    modules[path] = made = nn.Module()
    around.add_module(name, made)
    return made


def with_code(gm: GraphModule) -> None:
    """Make it a plain GraphModule in place, for its user: one whose ``recompile`` is none for later."""
    if not isinstance(gm, _LazyGraphModule):
        return
    name = type(gm).__name__
    # fx gives each graph module a class of its own
    gm.__class__ = type(GraphModule.__new__(GraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()
