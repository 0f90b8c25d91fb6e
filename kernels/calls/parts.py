"""Calls what cuts a tensor into parts, or joins parts, so that on a GPU these and their gradients are copied fast.

Why, and what the kernels do: ``fxprec.kernels.nn.parts``. What is small, or watched by a compiler or a mode, or lies
otherwise in memory, is torch's own op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call
from fxprec.kernels.launch.observers import runs_unseen
from fxprec.kernels.launch.operands import PLAIN

#: The function that each op cuts by.
CUTS: Final[Mapping[str, Callable[..., Any]]] = {"unbind": Tensor.unbind, "chunk": Tensor.chunk, "split": Tensor.split}
#: Elements from which on a gradient's bytes take longer than the calls that move them.
FEWEST: Final = 1 << 20


@graph_call
def parts(x: Tensor, cut: str, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
    """Return ``x.unbind(...)``, ``x.chunk(...)`` or ``x.split(...)``, with a gradient that has x's layout."""
    if x.numel() >= FEWEST and _is_taken(x):
        from fxprec.kernels.nn.parts import parts as kernel

        return kernel(x, lambda y: CUTS[cut](y, *args, **kwargs))
    return CUTS[cut](x, *args, **kwargs)


@graph_call
def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return ``torch.cat(tensors, dim)``, with gradients that have the tensors' layouts."""
    if len(tensors) > 1 and sum(x.numel() for x in tensors) >= FEWEST and all(map(_is_taken, tensors)):
        from fxprec.kernels.nn.parts import join
        from fxprec.kernels.nn.parts import joins as can_join

        if can_join(tensors, dim):
            return join(tensors, dim)
    return torch.cat(tensors, dim)  # type: ignore[arg-type]


def _is_taken(x: Tensor) -> bool:
    return x.is_cuda and type(x) in PLAIN and runs_unseen()
