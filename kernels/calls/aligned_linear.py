"""Calls low-precision linears so that on a GPU each row of the output is a multiple of 16 bytes.

Where it is not (50257 classes), a GPU's fast kernels do not take the product: ours computes a few more outputs, and
returns a view without them. Why, and how: ``fxprec.kernels.nn.aligned_linear``. What is small, or watched by a compiler
or a mode, is torch's linear.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call
from fxprec.kernels.launch.observers import runs_unseen
from fxprec.kernels.launch.operands import LOW_DTYPES, PLAIN

#: Multiplications of a product from which on the slow kernel loses more than a call takes: 2 FLOP each at some 100
#: TFLOP/s in the place of 600 (measured on an H200).
FEWEST: Final = 1 << 30


@graph_call
def aligned_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, apart: bool = False) -> Tensor:
    """Return ``F.linear``, with outputs of whole 16 bytes where that pays.

    Args:
        apart: the caller takes a result whose rows have gaps between them: a view of the padded one.
    """
    # How many outputs are lacking is the kernel's to ask; of none it adds none.
    if (
        input.is_cuda
        and runs_unseen()
        and weight.dtype in LOW_DTYPES
        and type(input) is Tensor
        and type(weight) in PLAIN
        and input.numel() * len(weight) >= FEWEST
    ):
        from fxprec.kernels.nn.aligned_linear import aligned_linear as kernel

        y = kernel(input, weight, bias)
        return y if apart else y.contiguous()
    return F.linear(input, weight, bias)
