"""The helpers of apex's ``fp16_utils``, for scripts that keep FP32 masters of a half model by hand.

::

    model_params, master_params = prep_param_lists(model)           # once
    model_grads_to_master_grads(model_params, master_params)        # after backward
    master_params_to_model_params(model_params, master_params)      # after the step

New code wants ``fxprec.convert``: there the parameters are FP32, and are the masters. What is half is float16 here, as
the names say; ``dtype=torch.bfloat16`` serves CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from fxprec.amp.fp16_optimizer import DynamicLossScaler, FP16_Optimizer
from fxprec.amp.fp16_optimizer import StaticLossScaler as LossScaler  # the name that apex gives it
from fxprec.torch_internals import BatchNorm, flatten_dense_tensors, unflatten_dense_tensors

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

Module = TypeVar("Module", bound=nn.Module)


class tofp16(nn.Module):
    """A module that casts its input to ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        return input.to(self.dtype)


class FP16Model(nn.Module):
    """The network in ``dtype``, its batch norms in FP32; floating-point inputs are cast."""

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.network = convert_network(network, dtype)
        self.dtype = dtype

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(each.to(self.dtype) if each.is_floating_point() else each for each in inputs))


def BN_convert_float(module: Module) -> Module:
    """Cast batch norms with parameters back to FP32, in place, and return the module."""
    for each in module.modules():
        if _is_kept(each):
            each.float()
    return module


def network_to_half(network: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Return the network in ``dtype``, its batch norms in FP32, behind a cast of its input."""
    return nn.Sequential(tofp16(dtype), BN_convert_float(network.to(dtype)))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters, gradients and buffers of ``module`` alone to ``dtype``, in place."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            gradient = parameter.grad
            parameter.grad = None  # it must have the parameter's dtype at every moment
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    # Through ``data``, so that parameters and buffers stay the objects that optimizers and other modules hold.
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Run ``convert_module`` with ``dtype`` on all of ``network`` but batch norms with parameters, and return it."""
    for module in network.modules():
        if not _is_kept(module):
            convert_module(module, dtype)
            # cuDNN wants an RNN's weights in one block, which the casts have taken apart.
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trainable parameters of a model, and their FP32 masters.

    Args:
        model: with low parameters.
        flat_master: one flat master for all, with a gradient of zeros; for parameters of one dtype.

    Raises:
        TypeError: ``flat_master`` and several dtypes.
    """
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return params, [parameter.detach().clone().float().requires_grad_() for parameter in params]
    # One flat tensor has one dtype, and the masters are copied back from it by views.
    dtypes = {parameter.dtype for parameter in params}
    if len(dtypes) != 1:
        raise TypeError(
            f"prep_param_lists: flat_master=True wants parameters of one dtype, these are {sorted(map(str, dtypes))}: "
            "use flat_master=False, or FP16_Optimizer"
        )
    master = nn.Parameter(flatten_dense_tensors([parameter.detach() for parameter in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters, in FP32.

    Args:
        model_params, master_params, flat_master: as ``prep_param_lists`` gave and got them.
    """
    with torch.no_grad():
        if flat_master:
            # Each gradient has its place in the flat one, so a missing one is zeros.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
            master_params[0].grad = flatten_dense_tensors(gradients).float()
            return
        for parameter, master in zip(model_params, master_params, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype, copy=True)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters to the parameters, rounded.

    Args:
        model_params, master_params, flat_master: as ``prep_param_lists`` gave and got them.
    """
    masters: Iterable[Tensor] = master_params
    if flat_master:
        masters = unflatten_dense_tensors(master_params[0].detach(), model_params)
    with torch.no_grad():
        for parameter, master in zip(model_params, masters, strict=True):
            parameter.copy_(master)


def to_python_float(value: Any) -> float:
    """Return the number in ``value``: a tensor of one element, or a sequence that begins with it."""
    return value.item() if hasattr(value, "item") else value[0]


def _is_kept(module: nn.Module) -> bool:
    """Return whether a module stays FP32: a batch norm with parameters, as in apex."""
    return isinstance(module, BatchNorm) and module.affine
