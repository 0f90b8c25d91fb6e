"""Imports the private names of torch that the kernels use, each under a plain name, and checks that they exist.

A name that a version of torch has moved is told by name. Without a needed one the import fails; without an optional one
something is slower, and ``MISSING`` keeps what. ``tests/house/test_torch_internals.py`` finds private names in other
files, and tests what is relied on of each of these.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import _symbolic_trace

#: The releases of torch that the tests were run with.
TESTED_TORCH: Final = ("2.10.0", "2.11.0", "2.13.0", "2.14.1")

#: Optional private names that this torch lacks -> the consequence.
MISSING: Final[dict[str, str]] = {}


class _Needed:
    """Context manager around required imports: its ImportError says which torch moved a name, and what to do."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, ImportError | AttributeError):
            raise ImportError(
                f"torch {torch.__version__} has moved a private name that fxprec needs: {error}. fxprec was tested "
                f"with torch {', '.join(TESTED_TORCH)}: install one of these, or a newer fxprec"
            ) from error


needed: Final = _Needed()


def optional(path: str, without: str) -> Any:
    """Return the object at a dotted path, or None and a note in ``MISSING``.

    Args:
        path: ``package.module.name.name``.
        without: consequence of its absence.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        MISSING[f"{module}.{name}"] = without
        return None
    return found


with needed:
    from torch._C import _get_dispatch_mode as current_dispatch_mode  # of a key; None: not on
    from torch._C import _get_tracing_state as jit_tracing_state  # None outside of torch.jit.trace
    from torch._C import _len_torch_dispatch_stack as dispatch_modes  # how many are on
    from torch._C import _TorchDispatchModeKey as DispatchModeKey  # FAKE, PROXY, FUNCTIONAL
    from torch._C._functorch import is_legacy_batchedtensor as is_batched  # by autograd.grad(is_grads_batched=True)
    from torch._C._functorch import maybe_current_level as function_transform_level  # None outside of torch.func's
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # a context
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    #: (query, key, value, mask, dropout, causal, enable_gqa=): which kernel torch would take; 0: none, but plain ops.
    attention_choice = getattr(torch, "_fused_sdp_choice")  # noqa: B009 (the stubs lack it)
    #: (gradient, probabilities, dim, dtype, grad_input=)
    softmax_backward = getattr(torch, "_softmax_backward_data")  # noqa: B009 (the stubs lack it)
    #: (tensor, dim, level) and (tensor, level, size, dim), of the vmap of ``autograd.grad(is_grads_batched=True)``
    add_batch_dim = getattr(torch, "_add_batch_dim")  # noqa: B009 (the stubs hide it)
    remove_batch_dim = getattr(torch, "_remove_batch_dim")  # noqa: B009
    version_of: Final[Any] = Tensor._version.__get__  # type: ignore[attr-defined]  # how often it was written to
    set_jit_tracing_state = getattr(torch._C, "_set_tracing_state")  # noqa: B009 (None pauses; the stubs lack it)
    forward_ad._current_level  # noqa: B018
    # torch 2.14 made the flag of the process one of the thread.
    if not hasattr(_symbolic_trace, "_get_is_fx_tracing"):
        _symbolic_trace._is_fx_tracing_flag  # noqa: B018

_keeps_graph = optional(
    "torch._C:_autograd._get_current_graph_task_keep_graph", "gradients made in a forward are copied in its backward"
)
_use_count = optional("torch._C:_storage_Use_Count", "gradients made in a forward are copied in its backward")
_fx_tracing = getattr(_symbolic_trace, "_get_is_fx_tracing", None)

#: oneDNN's products on weights in the layout that its kernels read: what makes such a weight, and what takes it.
_NO_PACKING: Final = "frozen models run on weights as they are, which oneDNN reorders at each call"
reorder_linear_weight: Final[Any] = optional("torch:ops.mkldnn._reorder_linear_weight.default", _NO_PACKING)
linear_pointwise: Final[Any] = optional("torch:ops.mkldnn._linear_pointwise.default", _NO_PACKING)
reorder_conv_weight: Final[Any] = optional("torch:ops.mkldnn._reorder_convolution_weight.default", _NO_PACKING)
conv_pointwise: Final[Any] = optional("torch:ops.mkldnn._convolution_pointwise.default", _NO_PACKING)
conv_binary: Final[Any] = optional("torch:ops.mkldnn._convolution_pointwise.binary", _NO_PACKING)
conv_binary_: Final[Any] = optional("torch:ops.mkldnn._convolution_pointwise_.binary", _NO_PACKING)
reorder_transposed_weight: Final[Any] = optional(
    "torch:ops.mkldnn._reorder_convolution_transpose_weight.default", _NO_PACKING
)
transposed_pointwise: Final[Any] = optional("torch:ops.mkldnn._convolution_transpose_pointwise.default", _NO_PACKING)
has_bfloat16_kernels: Final[Any] = optional("torch:ops.mkldnn._is_mkldnn_bf16_supported.default", _NO_PACKING)

#: Returns the level of forward-mode differentiation, -1 outside of it. No function of ours: every kernel's call asks.
forward_ad_level: Final = partial(getattr, forward_ad, "_current_level")


def is_fx_tracing() -> bool:
    """Return whether torch.fx traces symbolically, in this thread, or before torch 2.14 in any."""
    return _symbolic_trace._is_fx_tracing_flag if _fx_tracing is None else _fx_tracing()


def keeps_graph() -> bool:
    """Return whether the running backward retains its graph; True if torch does not tell."""
    return True if _keeps_graph is None else _keeps_graph()


def storage_owners(tensor: Tensor) -> int | None:
    """Return the owners of a tensor's memory, with the storage object made to ask; None if torch does not tell."""
    return None if _use_count is None else _use_count(tensor.untyped_storage()._cdata)
