"""Frames that read the bits of a tensor, traced by dynamo without autocast.

dynamo traces under the autocast of the net, where the result of a linear has the low dtype. ``h.view(torch.int32)``
would have another shape there than in the original program, and an ``h.dtype`` that takes the bits back would name the
low dtype; both are baked into the graph. A frame in which that happens is traced once more from its start, with
autocast off: every dtype and shape in it is the original program's. Nothing of it ran yet, and its guards still are
those of a call under the net.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Proxy

from fxprec.capture.tripwires import replaced
from fxprec.passes.ops.names import canonical_name, dtype_among
from fxprec.passes.ops.table import facts_of
from fxprec.torch_internals import dynamo_classes


class _BitsMet(BaseException):
    """Ends a trace. dynamo would take an ``Exception`` for a failure of its own, and leave the frame."""


def traced_for_its_bits(trace: Callable[[], Any]) -> Any:
    """Let dynamo trace a frame, and once more without autocast if it reads bits that depend on it."""
    classes = dynamo_classes()
    create_proxy, run = classes.graph.create_proxy, classes.frame.run

    def looking(tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        if _reads_low_bits(kind, target, args, kwargs):
            raise _BitsMet
        return create_proxy(tracer, kind, target, args, kwargs, *rest, **more)

    def without_autocast(frame: Any) -> None:
        with _no_autocast():
            run(frame)

    try:
        with replaced([(classes.graph, "create_proxy", looking)]):
            return trace()
    except _BitsMet:
        with replaced([(classes.frame, "run", without_autocast)]):
            return trace()


def _reads_low_bits(kind: str, target: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call reads bits from, or makes them into, the dtype of the autocast that is on."""
    if not kind.startswith("call") or not args or not isinstance(args[0], Proxy):
        return False
    op = canonical_name(target, kind)
    if op is None or not facts_of(op.name).bits or (dtype := dtype_among((*args, *kwargs.values()))) is None:
        return False
    value = args[0].node.meta.get("example_value")
    device = value.device.type if isinstance(value, torch.Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return torch.get_autocast_dtype(device) in (dtype, value.dtype)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
