"""Ask torch's registry about custom ops, named ``namespace::name`` (or ``namespace::name.overload``)."""

from __future__ import annotations

from typing import Any

import torch

from fxprec.passes.torch_internals import autocast_key, custom_op_autocast


def registered_autocast(op_name: str, device: str | None = None) -> torch.dtype | None:
    """Return the dtype that ``torch.library.register_autocast`` has for an op on a device type (None: any), or None.

    torch offers no way to ask: ``custom_op`` definitions keep it in an attribute, ops of a ``Library`` in the
    closure of their Python kernel. What a version of torch keeps elsewhere counts as not registered.
    """
    packet = registered(op_name)
    if packet is None:
        return None
    kernels = getattr(getattr(packet, op_name.partition(".")[2] or "default", None), "py_kernels", {})
    for device_type in ("cuda", "cpu", "xpu") if device is None else (device,):
        key = autocast_key(device_type)
        kernel = _closure(kernels.get(key))
        if kernel.get("device_type", device_type) != device_type:  # torch < 2.13 keeps one kernel under both keys
            kernel = {}
        dtype = custom_op_autocast(op_name.partition(".")[0], device_type) or kernel.get("cast_inputs")
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def registered(op_name: str) -> Any:
    """torch's op of this name (a packet of overloads), or None."""
    namespace, separator, name = op_name.partition("::")
    if not (separator and namespace and name):
        return None
    return getattr(getattr(torch.ops, namespace), name.partition(".")[0], None)


def _closure(function: Any) -> dict[str, object]:
    """Return the variables that a Python function closes over, by name."""
    if function is None or not function.__closure__:
        return {}
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))
