"""Explain a weight that an optimizer's step made inf or nan: the state it was made of, and what cures it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.numerics.births import dense, first_of
from fxprec.numerics.finding import Finding
from fxprec.passes.graph.text import dtype_name

#: State of which optimizers divide by the root, or by itself, and add ``eps``.
_DIVISORS: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
#: torch's own.
_EPS: Final = 1e-8


def fault_of_optimizer(
    name: str, parameter: Tensor, optimizer: Optimizer, step: int, reached: str, remarks: tuple[str, ...]
) -> Finding:
    """Return a finding about a weight that an optimizer's step made inf or nan.

    Args:
        name: path of the parameter, which is not finite and was.
        optimizer: that wrote it.
        step: in which.
        reached: what the parameter spoiled; "": nothing yet.
        remarks: of the finding.
    """
    bad = ~dense(parameter.detach()).isfinite()
    index = first_of(bad)
    state = _state(optimizer, parameter, index)
    overflows = bool(parameter.detach()[index].isinf()) or not all(map(math.isfinite, state.values()))
    info = torch.finfo(parameter.dtype)
    return Finding(
        phase="optimizer",
        kind="overflow" if overflows else "invalid",
        node=name,
        module=name.rpartition(".")[0],
        op=type(optimizer).__name__,
        dtype=dtype_name(parameter.dtype),
        source="",
        magnitude=math.nan,
        limit=info.max,
        share=float(bad.sum()) / bad.numel(),
        example=", ".join(f"{key} = {value:.4g}" for key, value in state.items()),
        reached=reached,
        fails_in_fp32=False,
        scale=1.0,
        cure=_cure(_group(optimizer, parameter), state, parameter.dtype, type(optimizer).__name__, step),
        remarks=remarks,
        index=index,
        step=step,
    )


def _group(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    return next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))


def _state(optimizer: Optimizer, parameter: Tensor, index: tuple[int, ...]) -> dict[str, float]:
    """Return what the optimizer keeps of the element."""
    state = optimizer.state.get(parameter, {})
    return {
        key: float(abs(value[index]) if value.is_complex() else value[index])
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }


def _cure(group: Mapping[str, Any], state: Mapping[str, float], dtype: torch.dtype, name: str, step: int) -> str:
    back = f"load weights and optimizer of before step {step}"
    eps = group.get("eps")
    divisor = next((key for key in _DIVISORS if state.get(key) == 0), None)
    if divisor is not None and isinstance(eps, int | float) and not torch.tensor(float(eps), dtype=dtype):
        enough = max(_EPS, torch.finfo(dtype).smallest_normal)
        zero = f"eps={eps:g}" + (f" is 0 in {dtype_name(dtype)}" if eps else "")
        return f"{name}(..., eps={enough:.2g}): where {divisor} is 0 it divides by 0, as {zero}; {back}"
    spoiled = [key for key, value in state.items() if not math.isfinite(value)]
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step"
    if spoiled:
        return f"{clips}, as {' and '.join(spoiled)} overflowed; {back}"
    return f"a smaller lr, which is {float(group.get('lr', math.nan)):g}, or {clips}; {back}"
