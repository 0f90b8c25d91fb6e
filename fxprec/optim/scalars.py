"""Hyper-parameters that may be tensors."""

from typing import Any

from torch import Tensor

__all__ = ["scalar"]


def scalar(value: Any) -> Any:
    """The number of a hyper-parameter that may be a tensor of one element."""
    return value.item() if isinstance(value, Tensor) else value
