"""Keeps calls and nodes as they are when a graph module is traced again: to pickle it, to split it, to fuse it.

A function of ours that asks whether its argument is a tensor gets a ``Proxy`` then. It must record itself as one call,
and not answer "no"::

    def cast_if_float(x, dtype):
        if isinstance(x, Proxy):
            return leaf(cast_if_float, x, dtype)
        ...

``torch.fx.wrap`` would do so within one process only: it patches the module that the call stands in, and the source of
an unpickled graph stands in none.

A trace that goes on with a graph copies its nodes (``Copying``)::

    %w = get_attr[scale]                              %w = get_attr[scale]
    %cast = cast(%w, torch.bfloat16)           ->     %cast = cast(%w, torch.bfloat16)     # no constant
    %noise = randn(4)                                 %noise = randn(4)                    # no constant
    %add_ = add_(%count, 1)                           %write = write(%count, 'add_', 1)    # dead code to nobody
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node, Proxy
from torch.fx.node import has_side_effect

from fxprec.passes.graph.annotations import CASTABLE, notes


def leaf(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record ``function(*args, **kwargs)`` as one node of the trace that its first traced argument belongs to."""
    return tracer_of((args, kwargs)).create_proxy("call_function", function, args, kwargs)


def tracer_of(value: Any) -> Any:
    """The tracer of a proxy, or of the first one in a container; None where there is none: outside of a trace."""
    if isinstance(value, Proxy):
        return value.tracer
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    for part in value:  # dynamo of torch 2.11, in whose captures a graph module may be, cannot run `next((... := ...))`
        tracer = tracer_of(part)
        if tracer is not None:
            return tracer
    return None


def is_served(x: Tensor) -> bool:
    """Return whether a kernel takes this tensor; compilers and exporters get torch's own ops."""
    if torch.compiler.is_compiling() or x.dtype not in CASTABLE:
        return False
    from fxprec.kernels.launch.triton_support import can_launch  # which loads Triton

    return can_launch(x.device)


def write(x: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call an in-place method for its effect alone: ``write(x, "add_", 1)``.

    torch.fx's ``eliminate_dead_code`` would drop a plain ``x.add_(1)`` whose result nobody reads, and keeps this call.
    """
    if isinstance(x, Proxy):
        return leaf(write, x, method, *args, **kwargs)
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
    """A result without torch.fx's immutable lists and dicts, as the source would give it."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [plain(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
