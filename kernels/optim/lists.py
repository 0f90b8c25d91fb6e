"""Checks lists of tensors before a kernel reads them by raw addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from fxprec.kernels.launch import operands
from fxprec.kernels.torch_internals import is_traceable_wrapper_subclass


def check_operand(name: str, position: int, tensor: Tensor, param: Tensor | None = None) -> None:
    """Raise for a tensor whose memory a kernel cannot traverse in step with its parameter's.

    Raises:
        TypeError: not strided, a wrapper of other tensors (a DTensor), or neither float32, bfloat16 nor float16.
        ValueError: not dense; or not of the parameter's device, shape and strides.
    """
    where = f"{name}[{position}]"
    # The address of a wrapper is not that of its elements.
    if type(tensor) not in (Tensor, Parameter) and is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{where} is a {type(tensor).__name__}, which has no memory of its own: pass its local tensor.")
    if tensor.layout != torch.strided:
        raise TypeError(f"{where} has layout {tensor.layout}; the kernels take strided tensors: densify it first.")
    if tensor.dtype not in operands.FLOATS:
        raise TypeError(f"{where} is {tensor.dtype}; the kernels take float32, bfloat16 and float16.")
    if param is None:
        if not is_dense(tensor):
            raise ValueError(
                f"{where} of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself or has gaps; "
                "the kernels take dense tensors: use a contiguous copy."
            )
        return
    if tensor.device != param.device:
        raise ValueError(f"{where} is on '{tensor.device}', its parameter on '{param.device}'.")
    if tensor.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}.")
    if not _same_layout(tensor, param):
        raise ValueError(
            f"{where} has strides {tensor.stride()}, its parameter {param.stride()}: make it with torch.empty_like of "
            "the parameter, so that both lie in memory in the same order."
        )


def dense_like(position: int, gradient: Tensor, param: Tensor) -> Tensor:
    """Return the gradient if it has its parameter's memory layout, else a copy that has (one more pass over it)."""
    if gradient.device == param.device and gradient.shape == param.shape and gradient.layout == torch.strided:
        if not _same_layout(gradient, param):
            gradient = torch.empty_like(param, dtype=gradient.dtype, requires_grad=False).copy_(gradient.detach())
    check_operand("gradients", position, gradient, param)
    return gradient


def only_dtype(name: str, tensors: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the one dtype of a list, or None if it holds no tensor. A launch reads one: two raise ValueError."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) > 1:
        listed = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{name} mixes {listed}; one launch reads one dtype: make one plan for each.")
    return dtypes.pop() if dtypes else None


def check_scalar(name: str, scalar: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a scalar, or raise ValueError if a kernel cannot read it as one FP32 number on its device; None passes."""
    if scalar is None or (scalar.dtype == torch.float32 and scalar.numel() == 1 and scalar.device == device):
        return scalar
    raise ValueError(
        f"{name} must be one float32 number on '{device}', got {scalar.dtype} of shape {tuple(scalar.shape)} on "
        f"'{scalar.device}'."
    )


def device_rate(lr: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """Return the learning rate as a kernel takes it: a pointer, or None and a number. Reads no device tensor.

    Raises:
        ValueError: a tensor on another device than the CPU and the plan's, or not one float32 or float64.
    """
    if not isinstance(lr, Tensor):
        return None, float(lr)
    if lr.device == device and lr.dtype == torch.float64 and lr.numel() == 1:
        return lr, 0.0
    # A number on the CPU is read without a sync.
    if lr.device.type == "cpu" and not (lr.device == device and lr.dtype == torch.float32):
        return None, float(lr.item())
    return check_scalar("lr", lr, device), 0.0


def _same_layout(tensor: Tensor, param: Tensor) -> bool:
    # Strides of dimensions of size 1 mean nothing, and autograd fills them in differently.
    if tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous()):
        return True
    return all(size == 1 or a == b for size, a, b in zip(param.shape, tensor.stride(), param.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps, in any order of dimensions."""
    return tensor.is_contiguous() or operands.is_dense(tensor.shape, tensor.stride())
