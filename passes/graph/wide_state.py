"""Recurrent ops whose products are low and whose state is FP32, as eager autocast runs them on a CPU.

A state that is carried over hundreds of steps drifts where each step rounds it. Autocast's lists do not name these ops
on a CPU: it lowers the products inside, while the state, which gates scale and add to, stays FP32. A kernel that takes
one dtype for all (cuDNN's) gets it, as it does under autocast there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import torch

from fxprec.kernels.launch.graph_call import graph_call
from fxprec.passes.torch_internals import tree_map


@graph_call
def gru(x: Any, *args: Any, state: torch.dtype, **kwargs: Any) -> Any:
    """Run ``torch.gru`` of a low ``x`` and low weights, with a state, and results, in that dtype."""
    return _apart(torch.gru, x, args, kwargs, state)


@graph_call
def gru_cell(x: Any, *args: Any, state: torch.dtype, **kwargs: Any) -> Any:
    """Run ``torch.gru_cell``, likewise."""
    return _apart(torch.gru_cell, x, args, kwargs, state)


@graph_call
def lstm_cell(x: Any, *args: Any, state: torch.dtype, **kwargs: Any) -> Any:
    """Run ``torch.lstm_cell``, likewise."""
    return _apart(torch.lstm_cell, x, args, kwargs, state)


def _apart(
    op: Callable[..., Any], x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], state: torch.dtype
) -> Any:
    """Call the op: on a CPU under autocast, with the state in its dtype; elsewhere, where one kernel does all, in low.

    The results have the dtype of the state.
    """
    if x.device.type == "cpu":
        # Of packed sequences the sizes of the batch stand before the state.
        state_at = 1 if args and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point() else 0
        args = tuple(tree_map(lambda each: _in(each, state), a) if i == state_at else a for i, a in enumerate(args))
        kwargs = {name: tree_map(lambda each: _in(each, state), a) if name == "hx" else a for name, a in kwargs.items()}
        with torch.autocast("cpu", x.dtype, cache_enabled=False):
            return op(x, *args, **kwargs)
    args, kwargs = tree_map(lambda each: _in(each, x.dtype), (args, kwargs))
    return tree_map(lambda each: _in(each, state), op(x, *args, **kwargs))


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


#: By the name in the op table.
WITH_WIDE_STATE: Final = MappingProxyType({"gru": gru, "gru_cell": gru_cell, "lstm_cell": lstm_cell})
