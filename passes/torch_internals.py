"""Private names of torch that the passes need, and nowhere else: each under a plain name, checked when imported.

See ``kernels/torch_internals.py``, whose names are not repeated here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import torch

from fxprec.kernels.torch_internals import needed, optional

with needed:
    from torch._C import _DisableAutocast as no_autocast  # a context: no op is cast by torch
    from torch._higher_order_ops.wrap import wrap_with_autocast  # runs a body under autocast
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.amp.autocast_mode import _enter_autocast as enter_autocast  # what dynamo writes for torch.autocast
    from torch.amp.autocast_mode import _exit_autocast as exit_autocast
    from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode  # and for inference_mode
    from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode
    from torch.fx._lazy_graph_module import _LazyGraphModule as LazyBase  # writes its source when it is called
    from torch.utils._pytree import tree_leaves, tree_map

    _CORE: Final[Any] = torch._C  # what is built in C++ has no stubs
    builtin_nn: Final[Any] = _CORE._nn
    builtins_of_torch: Final[Any] = _CORE._VariableFunctions
    set_grad_enabled: Final[Any] = _CORE._set_grad_enabled  # what dynamo writes for torch.no_grad and enable_grad

#: What dynamo writes for ``x.data``; None where torch has no such function.
data_of: Final[Any] = optional("torch._C:_autograd._get_data_attr", "x.data in a graph of dynamo is an unknown op")
_definitions: Final[Any] = optional(
    "torch._library.custom_ops:OPDEFS", "an autocast dtype registered for a torch.library.custom_op is not known"
)

#: Attributes that a graph module takes from its graph.
OF_GRAPH: Final = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec"})


def numpy_call(target: object) -> str | None:
    """Return the function of NumPy's that a node of dynamo's wraps; None: it is no such node.

    Where it reads an attribute of an array that is "attribute". NumPy is traced into ops of torch inside of the
    wrapper, of which the graph tells nothing.
    """
    kind = target if isinstance(target, FunctionType) else type(target)
    if kind.__module__ != "torch._dynamo.utils" or not kind.__name__.startswith("numpy_"):
        return None
    name = str(getattr(target, "__name__", ""))
    return "attribute" if kind is target else name.removeprefix("wrapped_")


def schema_of(op: OpOverload) -> Any:
    """Return its FunctionSchema: ``arguments``, ``returns``, ``is_mutable``."""
    return op._schema


def autocast_key(device_type: str) -> Any:
    """Return the dispatch key of autocast on a device type; None where there is none."""
    return getattr(_CORE.DispatchKey, f"Autocast{device_type.upper()}", None)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from logging, with its traceback, that an op failed on fake tensors: the caller tells what failed."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def custom_op_autocast(op_name: str, device_type: str) -> torch.dtype | None:
    """Return the dtype that ``register_autocast`` of a ``torch.library.custom_op`` was given, or None."""
    definition = None if _definitions is None else _definitions.get(op_name)
    by_device = getattr(definition, "_autocast_dtype", {})
    older = getattr(definition, f"_autocast_{device_type}_dtype", None)  # as earlier versions of torch have it
    return by_device.get(device_type) or older
