"""Provides Triton if it is installed; without it kernel files still import, and no kernel is ever launched.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated: set it before the first import of a kernel file. Kernel
files take ``jit`` and ``tl`` from here and nothing from Triton itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

try:
    import triton
    import triton.language
    from triton import knobs

    from fxprec.kernels.launch.kept import KeptKernel
except ImportError:
    triton = knobs = KeptKernel = None

HAS_TRITON: Final = triton is not None

#: ``triton.language``; None without Triton, where no kernel body ever runs.
tl: Any = triton.language if triton is not None else None

#: Annotations of kernel arguments, which Triton reads by name: compiled in, and of that type whatever its value.
if TYPE_CHECKING or triton is None:
    constexpr: TypeAlias = Any
    int64: TypeAlias = Any
else:
    constexpr, int64 = tl.constexpr, tl.int64

_NAMES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``triton.jit(**options)`` for a ``KeptKernel``; without Triton the identity, as kernels never run."""
    if triton is None or KeptKernel is None:
        return lambda function: function
    return triton.jit(**options) if interpreting() else functools.partial(KeptKernel, **options)


def constant(value: int) -> Any:
    """Return a module's constant that kernels may read (Triton refuses plain globals)."""
    return triton.language.constexpr(value) if triton is not None else value


def triton_dtype(dtype: torch.dtype | None) -> Any:
    """Return Triton's dtype for float32, float16 or bfloat16; None for None: a kernel leaves that part out."""
    return None if dtype is None else getattr(tl, _NAMES[dtype])


@functools.cache
def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, also on CPU tensors. Fixed once a kernel is decorated."""
    return knobs is not None and bool(knobs.runtime.interpret)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that launches on this device; empty if it is current, since entering torch's costs time."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def can_launch(device: torch.device) -> bool:
    """Return whether kernels run on tensors of this device: CUDA with Triton, or any with Triton's interpreter."""
    return HAS_TRITON and (device.type == "cuda" or interpreting())


@functools.cache
def why_not(kind: str) -> str:
    """Return why no kernel runs on devices of this type, or "", after trying one."""
    device = torch.device(kind)
    if triton is None:
        return "Triton is not installed"
    if not can_launch(device):
        return f"Triton does not run on '{kind}'"
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    try:
        x = torch.zeros(1, device=device)
        _one_kernel[(1,)](x)
        return "" if x.item() == 1.0 else "a test kernel gave a wrong result"
    except Exception as error:  # no compiler, an unknown device, an old driver: any failure of Triton's counts
        return f"a test kernel failed: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"


@jit()
def _one_kernel(x):
    """Write 1 to x, fp32 [1]. Grid: one program."""
    tl.store(x, 1.0)
