"""Graphs that have no Python source yet: writing and compiling it costs about as much as tracing.

A captured graph is rewritten, and what runs is the program lifted from it: its own source is of use to nobody but who
asks for the graph. ``torch.fx`` calls such a module lazy: it writes its source when it is called or printed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["with_code", "without_code"]


def without_code(root: nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule") -> GraphModule:
    """``GraphModule(root, graph, name)``, which writes its source when it is needed."""
    return _LazyGraphModule(root, graph, name)


def with_code(gm: GraphModule) -> None:
    """Make it a plain GraphModule in place, for its user: one whose ``recompile`` is none for later."""
    if not isinstance(gm, _LazyGraphModule):
        return
    name = type(gm).__name__
    # fx gives each graph module a class of its own
    gm.__class__ = type(GraphModule.__new__(GraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()
