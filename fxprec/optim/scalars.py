"""Hyper-parameters that may be tensors."""

from typing import Any

import torch
from torch import Tensor


def rate(lr: Any) -> Any:
    """A learning rate as torch's fused kernels take it: on an accelerator they read FP32."""
    return lr.to(torch.float32) if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr


def scalar(value: Any) -> Any:
    """The number of a hyper-parameter that may be a tensor of one element."""
    return value.item() if isinstance(value, Tensor) else value
