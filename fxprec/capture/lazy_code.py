"""Graphs that have no Python source yet: writing and compiling it costs about as much as tracing.

A captured graph is rewritten, and what runs is the program lifted from it: its own source is of use to nobody but who
asks for the graph. ``torch.fx`` calls such a module lazy: it writes its source when it is called or printed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxprec.capture.state_names import attribute_path
from fxprec.passes.graph.annotations import graph_notes, notes
from fxprec.passes.graph.exact_graph import LazyGraphModule, make_exact
from fxprec.passes.graph.subgraphs import every_graph


def holding(tensors: Mapping[str, Tensor], graph: Graph, name: str) -> GraphModule:
    """A graph module of this name that reads these tensors, and writes its source when it is needed.

    Parameters and modules are in the order of the mapping, at paths that a graph module can have.
    """
    gm = LazyGraphModule({}, Graph(), name)
    targets = {path: attribute_path(path) for path in tensors}
    for path, tensor in tensors.items():
        attach(gm, targets[path], tensor)
    for node in graph.find_nodes(op="get_attr", sort=False):
        path = str(node.target)
        if targets[path] != path:
            node.target, notes(node).path = targets[path], path
    gm.graph = graph
    return gm


def attach(root: nn.Module, path: str, value: Tensor) -> None:
    """Make ``root.a.b.weight`` be ``value`` itself, with bare modules on the way."""
    *parts, leaf = path.split(".")
    for part in parts:
        if part not in root._modules:
            root._modules[part] = nn.Module()
        root = root._modules[part]  # type: ignore[assignment]
    # Past register_parameter, which asks whether the module has such an attribute, and calls hooks of the user's.
    kind = root._parameters if isinstance(value, nn.Parameter) else root._buffers
    kind[leaf] = value  # type: ignore[assignment]


def with_code(gm: GraphModule) -> None:
    """Make it, and the bodies that it calls, exact in place for its user; ``recompile`` is no longer for later."""
    for each in (*every_graph(gm),):
        if not graph_notes(each).region:
            make_exact(each)
