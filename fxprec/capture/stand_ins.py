"""Copies of example inputs: a forward that writes to its inputs, or pops from them, leaves the user's as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def stand_ins(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies that a capture cannot tell from the inputs: sizes, strides, and which of them share memory are the same.

    What belongs to the model stays itself, and so does an argument that cannot be copied (a lock, a generator).
    """
    parts = (*model.modules(), *model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(part): part for part in parts}

    def copied(value: Any) -> Any:
        try:
            with _Copying():
                return copy.deepcopy(value, memo)
        except Exception:
            return value

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


class _Copying(TorchFunctionMode):
    """A tensor with a history, which torch refuses to copy, has another one in its copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_copied if func is Tensor.__deepcopy__ else func)(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    detached = tensor.detach()
    result = copy.deepcopy(detached, memo) if _has_memory_of_its_own(tensor) else detached.clone()
    if tensor.requires_grad:
        result.requires_grad_()
        if not tensor.is_leaf:  # which may be written in place
            with torch.enable_grad():
                result = result.clone()
    vars(result).update(vars(tensor))  # such as the sizes that torch._dynamo.mark_dynamic named
    return result


def _has_memory_of_its_own(tensor: Tensor) -> bool:
    """Return whether a copy of a tensor's storage copies it alone: a batch may be a view of a whole data set."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
