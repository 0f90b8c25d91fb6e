"""Keeps nodes as they are when a graph module is traced again: to pickle it, to split it, to fuse it.

A trace that goes on with a graph copies its nodes (``Copying``)::

    %w = get_attr[scale]                              %w = get_attr[scale]
    %cast = cast(%w, torch.bfloat16)           ->     %cast = cast(%w, torch.bfloat16)     # no constant
    %noise = randn(4)                                 %noise = randn(4)                    # no constant
    %add_ = add_(%count, 1)                           %write = write(%count, 'add_', 1)    # dead code to nobody
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import has_side_effect

from fxprec.kernels.launch.graph_call import graph_call
from fxprec.passes.graph.annotations import notes


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
        path = "" if tracer.root is gm else tracer.path_of_module(gm)
        self._prefix = path and f"{path}."

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
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
