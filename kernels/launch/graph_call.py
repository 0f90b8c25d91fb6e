"""Makes functions that rewritten graphs call: each is one node of a graph, however often the graph is traced again.

A pass puts a function of ours in the place of torch's op, and the function decides when it runs whether a kernel
serves::

    @graph_call
    def max_pool2d(input, kernel_size, stride=None, padding=0):
        if serves(input):
            return kernel(input, kernel_size, stride, padding)
        return F.max_pool2d(input, kernel_size, stride, padding)

Where somebody traces the graph anew, to split it or to pickle a part of it, ``input`` is a ``Proxy``, and the body must
not answer its own questions about it. ``torch.fx.wrap`` would record the call within one process only: it patches the
module that the call stands in, and the source of an unpickled graph stands in none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import Proxy

from fxprec.kernels.launch.operands import FLOATS

P = ParamSpec("P")
R = TypeVar("R")

_MAY_HOLD_PROXIES: Final = (Proxy, tuple, list, dict)


def graph_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one node of each trace whose values it is called with."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for argument in (*args, *kwargs.values()) if kwargs else args:
            # Asked of each argument of each call: only what may hold a proxy is worth a function call.
            if isinstance(argument, _MAY_HOLD_PROXIES) and (tracer := tracer_of(argument)) is not None:
                return tracer.create_proxy("call_function", call, args, kwargs)
        return function(*args, **kwargs)

    call.is_graph_call = True  # type: ignore[attr-defined]
    return called_as(function)(call)


def called_as(other: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name what the compiled code of a program calls in place of a function: a graph call's body, a cast's method."""

    def name(function: Callable[P, R]) -> Callable[P, R]:
        function.called_as = other  # type: ignore[attr-defined]
        return function

    return name


def call_directly(forward: Any) -> None:
    """Let the compiled code of a graph that nobody traces call what its functions are ``called_as``.

    A program runs at each call of a model, where the question for proxies would take as long as a small kernel's check.
    """
    names = forward.__globals__
    names |= {name: each.called_as for name, each in names.items() if hasattr(each, "called_as")}


def stands_for(torchs: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name the function of torch that a graph call is, argument by argument.

    Passes may compute that in its place, and TorchScript, which compiles no code of ours, calls it.
    """

    def name(call: Callable[P, R]) -> Callable[P, R]:
        call.torchs = torchs  # type: ignore[attr-defined]
        return call

    return name


def is_op_of_torch(target: Any) -> bool:
    """Return whether what a node calls is an op of torch's, or a graph call that ``stands_for`` one.

    Any other graph call computes something besides the op whose name its node has, such as a relu behind a norm.
    """
    return not getattr(target, "is_graph_call", False) or hasattr(target, "torchs")


def tracer_of(value: Any) -> Any:
    """Return the tracer of a proxy, or of the first proxy in a container; None outside of a trace."""
    if isinstance(value, Proxy):
        return value.tracer
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    for part in value:  # dynamo of torch 2.11, in whose captures a graph module may be, cannot run `next((... := ...))`
        if isinstance(part, _MAY_HOLD_PROXIES):
            tracer = tracer_of(part)
            if tracer is not None:
                return tracer
    return None


def triton_serves(x: Tensor) -> bool:
    """Return whether Triton's kernels take this tensor; compilers and exporters get torch's own ops."""
    if torch.compiler.is_compiling() or x.dtype not in FLOATS:
        return False
    from fxprec.kernels.launch.triton_support import can_launch  # which loads Triton

    return can_launch(x.device)
