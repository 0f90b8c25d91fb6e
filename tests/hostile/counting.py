"""Which matrix products, convolutions and attentions really run, by dtype, without a mode that the model could notice.

The CPU kernels of those ops are wrapped for as long as a test runs. A dispatch mode would be seen: dynamo, and what
asks "who is watching", go other ways under one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_HEAVY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mkldnn_convolution",
    "_slow_conv2d_forward",
    "_scaled_dot_product_flash_attention_for_cpu",
)


@contextlib.contextmanager
def counted() -> Iterator[Counter[torch.dtype]]:
    """dtype -> how many of those ran meanwhile, in any thread of this process."""
    counts: Counter[torch.dtype] = Counter()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is what is wanted
        for name in _HEAVY:
            library.impl(name, _counting(name, counts), "CPU", with_keyset=True, allow_override=True)
    try:
        yield counts
    finally:
        library._destroy()


def _counting(name: str, counts: Counter[torch.dtype]) -> Any:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        counts[next(a.dtype for a in args if isinstance(a, Tensor))] += 1
        return kernel.call_boxed(keys, *args, **kwargs)

    return run
