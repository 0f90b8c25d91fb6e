"""Torch's products on a CPU give memory of the right shape and strides, and no numbers: for who asks for none."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["skip_products"]

_PRODUCTS: Final = (
    "mm addmm bmm baddbmm convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward"
).split()
#: Those that write where they are told.
_INTO: Final = ("mm", "addmm", "bmm", "baddbmm")


def skip_products() -> torch.library.Library:
    """As long as what it returns is there."""
    library = torch.library.Library("aten", "IMPL")
    for name in _PRODUCTS:
        library.impl(name, _shaped(getattr(torch.ops.aten, name).default), "CPU", allow_override=True)
    for name in _INTO:
        library.impl(f"{name}.out", lambda *_, out, **__: out, "CPU", allow_override=True)
    return library


def _shaped(op: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, _without_memory, (args, kwargs))
        return pytree.tree_map_only(Tensor, _with_memory, op(*args, **kwargs))

    return run


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _with_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
