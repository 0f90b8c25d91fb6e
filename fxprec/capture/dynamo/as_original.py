"""Frames that dynamo has to trace without the autocast of the net, as the original program runs.

dynamo traces under the net, where the result of a linear has the low dtype. A frame in which that shows is traced once
more from its start, with autocast as it is outside of the net; nothing of it ran yet, and its guards still are those of
a call under the net. So are traced frames that

- read bits: ``h.view(torch.int32)`` would have another shape, and an ``h.dtype`` that takes the bits back would name
  the low dtype; both are baked into the graph;
- enter ``torch.autocast`` by themselves: what they compute there has the dtypes that the user's own autocast gives it;
- ask for autocast's state, in the user's code: ``torch.is_autocast_enabled("cpu")``. (Installed packages may ask
  because their kernels take what arrives, which is low: they see the net.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.capture.dynamo.tensor_dtypes import tensor_dtypes_followed
from fxprec.capture.tripwires import replaced
from fxprec.capture.trusted import is_torchs
from fxprec.capture.user_code import is_installed
from fxprec.passes.ops.names import canonical_name, dtype_among
from fxprec.passes.ops.table import facts_of
from fxprec.passes.torch_internals import enter_autocast, wrap_with_autocast
from fxprec.torch_internals import dynamo_classes

#: Functions of torch that tell autocast's state.
_QUESTIONS: Final = frozenset({
    "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled",
    "get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype",
})  # fmt: skip


class _NetShows(BaseException):
    """Ends a trace. dynamo would take an ``Exception`` for a failure of its own, and leave the frame."""


def traced(
    trace: Callable[[], Any], without_net: Callable[[], contextlib.AbstractContextManager[Any]], first: bool
) -> Any:
    """Let dynamo trace a frame, and once more without the net if the frame shows whether it is there.

    Args:
        first: the frame is the method's own.
    """
    classes = dynamo_classes()
    create_node, run, call = classes.graph.create_node, classes.frame.run, classes.torch_function.call_function

    def looking(tracer: Any, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any) -> Any:
        if op.startswith("call") and (_enters_autocast(target, args, kwargs) or _reads_low(op, target, args, kwargs)):
            raise _NetShows
        return create_node(tracer, op, target, args, kwargs, *rest)

    def listening(variable: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(variable.value, "__name__", "") in _QUESTIONS and is_torchs(variable.value):
            if not is_installed(frame.f_code.co_filename):
                raise _NetShows
        return call(variable, frame, *args, **kwargs)

    def run_without_net(frame: Any) -> None:
        with without_net():
            try:
                run(frame)
            finally:
                frame.output.call_cleanup_hooks()  # they leave the regions that the trace is in

    def naming(tracer: Any, op: str, target: Any, args: Any = None, *rest: Any, **more: Any) -> Any:
        if target is enter_autocast and args[1] is None:  # it is entered already, and the net has another default
            args = (args[0], torch.get_autocast_dtype(args[0]), *args[2:])
        return create_node(tracer, op, target, args, *rest, **more)

    try:
        with (
            replaced([(classes.graph, "create_node", looking), (classes.torch_function, "call_function", listening)]),
            tensor_dtypes_followed(first),
        ):
            return trace()
    except _NetShows:
        with replaced([(classes.graph, "create_node", naming), (classes.frame, "run", run_without_net)]):
            return trace()


def _enters_autocast(target: Any, args: Any, kwargs: Any) -> bool:
    if target is not enter_autocast and target is not wrap_with_autocast:
        return False
    return bool(args[2] if len(args) > 2 else (kwargs or {}).get("enabled", True))


def _reads_low(op: str, target: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call reads bits from, or makes them into, the dtype of the autocast that is on."""
    if not args or not isinstance(args[0], Node):
        return False
    named = canonical_name(target, op)
    if named is None or not facts_of(named.name).bits:
        return False
    value, dtype = args[0].meta.get("example_value"), dtype_among((*args, *(kwargs or {}).values()))
    device = value.device.type if isinstance(value, torch.Tensor) else ""
    if dtype is None or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return torch.get_autocast_dtype(device) in (dtype, value.dtype)
