"""aten overloads that give more results than the function whose row of the op table they share. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: Name of the overload's op -> its results, in the words of ``OpRule.result``.
OVERLOAD_RESULTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "native_dropout": ("first", "bool"),
        "adaptive_max_pool1d": ("first", "int64"),
        "adaptive_max_pool2d": ("first", "int64"),
        "adaptive_max_pool3d": ("first", "int64"),
        "fractional_max_pool2d": ("first", "int64"),
        "fractional_max_pool3d": ("first", "int64"),
        # with the logsumexp of each row, seeds, and for the flash and cuDNN kernels lengths
        "_scaled_dot_product_flash_attention_for_cpu": ("first", "wide"),
        "_scaled_dot_product_efficient_attention": ("first", "float32", "int64", "int64"),
        "_scaled_dot_product_flash_attention":
            ("first", "float32", "none", "none", "none", "none", "uint64", "uint64", "first"),
        "_scaled_dot_product_cudnn_attention":
            ("first", "float32", "none", "none", "none", "none", "int64", "int64", "none"),
    }
)  # fmt: skip
