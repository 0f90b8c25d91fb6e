"""Graphs that have no Python source yet: writing and compiling it costs about as much as tracing.

A captured graph is rewritten, and what runs is the program lifted from it: its own source is of use to nobody but who
asks for the graph. ``torch.fx`` calls such a module lazy: it writes its source when it is called or printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxprec.errors import ConversionError
from fxprec.torch_internals import LazyGraphModule

__all__ = ["holding", "refuse_names", "with_code", "without_code"]

#: Attributes that graph modules have beyond those of any module.
_OF_GRAPHS: Final = frozenset(dir(LazyGraphModule({}, Graph()))) - frozenset(dir(nn.Module()))


def without_code(root: nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule") -> GraphModule:
    """``GraphModule(root, graph, name)``, which writes its source when it is needed."""
    return LazyGraphModule(root, graph, name)


def refuse_names(paths: Iterable[str]) -> None:
    """Raise ConversionError for weights of a model that have no place in a graph module, such as ``meta.weight``."""
    for path in paths:
        attribute = path.partition(".")[0]
        if attribute in _OF_GRAPHS:
            raise ConversionError(
                f"the model's weight '{path}' cannot be part of a graph: torch.fx.GraphModule needs the name "
                f"{attribute!r} for itself. Rename that attribute, or convert a module of yours that calls the model"
            )


def holding(tensors: Mapping[str, Tensor], graph: Graph, name: str) -> GraphModule:
    """``without_code(tensors, graph, name)``, where fx would walk down from the top for every tensor.

    Parameters and modules are in the order of the mapping.

    Raises:
        ConversionError: a path begins with an attribute of graph modules.
    """
    refuse_names(tensors)
    gm = LazyGraphModule({}, Graph(), name)
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
    if not isinstance(gm, LazyGraphModule):
        return
    name = type(gm).__name__
    # fx gives each graph module a class of its own
    gm.__class__ = type(GraphModule.__new__(GraphModule))  # type: ignore[assignment]
    gm.__class__.__name__ = name
    gm.recompile()
