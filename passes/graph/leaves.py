"""Functions of ours that a graph calls stay calls of them, whoever traces the graph again.

``torch.fx`` runs a graph module's source to pickle it, to split it, to extract features from it. A function that asks
whether its argument is a tensor gets a ``Proxy`` then, and must say so instead of answering "no"::

    def cast_if_float(x, dtype):
        if isinstance(x, Proxy):
            return leaf(cast_if_float, x, dtype)
        ...

``torch.fx.wrap`` would do within one process only: it patches the module that the call stands in, and the source of an
unpickled graph stands in none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from fxprec.passes.graph.annotations import CASTABLE


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
