"""Checks the operands of hand-written kernels: floating-point tensors on one device, computed with in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.kernels.torch_internals import FakeTensor

#: The dtypes that values are lowered to.
LOW_DTYPES: Final = (torch.float16, torch.bfloat16)
FLOATS: Final = (torch.float32, *LOW_DTYPES)
#: Types of plain tensors: any other subclass dispatches ops itself, and must see them.
PLAIN: Final = (Tensor, nn.Parameter)


def check_operands(kernel: str, **tensors: Any) -> None:
    """Raise TypeError for other dtypes, ValueError for a device other than the first tensor's.

    All but the first may be None.
    """
    first, x = next(iter(tensors.items()))
    device = getattr(x, "device", None)
    for name, tensor in tensors.items():
        if tensor is None and name != first:
            continue
        dtype = getattr(tensor, "dtype", type(tensor).__name__)
        if tensor is None or dtype not in FLOATS:
            raise TypeError(
                f"{kernel} takes {name} in float32, float16 or bfloat16, got {dtype}: it computes in float32. For "
                "float64 use torch's own."
            )
        if tensor.device != device:
            raise ValueError(
                f"{kernel} takes tensors of one device, got {first} on '{x.device}' and {name} on '{tensor.device}': "
                "move one of them."
            )


def check_looped(kernel: str, *tensors: Tensor) -> None:
    """Raise ValueError for tensors that the compiled loop of a kernel does not take."""
    for x in tensors:
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{kernel}(compiled=True) serves bfloat16 and float32 on a CPU, got {x.dtype} on '{x.device}'. Leave "
                "compiled out."
            )


def packed(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, for kernels that take no strides of it; None for None."""
    return None if tensor is None else tensor.contiguous()


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last, of images or volumes, if channels alone lie next to each other; or contiguous."""
    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    is_last = x.dim() in (4, 5) and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements neither share memory nor have gaps between them, in any order of dimensions."""
    step = 1
    for stride, size in sorted((t, s) for s, t in zip(shape, strides, strict=True) if s != 1):
        if stride != step:
            return False
        step *= size
    return True


def is_dense_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps, in any order of dimensions."""
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())


def suits_loops(*tensors: Tensor | None) -> bool:
    """Return whether hand-written C++ loops can read the tensors: plain bfloat16 or FP32 values in a CPU's memory.

    None, an operand that is left out, suits them.
    """
    for x in tensors:
        if x is not None and (
            x.device.type != "cpu"
            or (x.dtype is not torch.bfloat16 and x.dtype is not torch.float32)
            or (type(x) not in PLAIN and not isinstance(x, FakeTensor))
            or x.is_neg()
        ):
            return False
    return True
