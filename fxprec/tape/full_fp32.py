"""Compute FP32 products in FP32: a user may allow TF32 or bfloat16, a reference does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
#: What has a precision of its own for FP32, https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul, _cudnn.conv, _cudnn.rnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
)  # fmt: skip
#: "none": a backend's own, which is that of FP32.
_FULL: Final = ("ieee", "none")


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Compute matrix products, convolutions and RNNs of FP32 tensors in FP32 while the context lasts, on all devices.

    Set is the newer of torch's two ways, which kernels ask; by the older one a user may ask for TF32 as well.
    """
    changed = [(each, each.fp32_precision) for each in _BACKENDS if each.fp32_precision not in _FULL]
    for backend, _ in changed:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in changed:
            backend.fp32_precision = precision
