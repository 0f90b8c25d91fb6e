"""Make FP32 masters for an optimizer of low parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.torch_internals import foreach_copy_


class MasterGroup(NamedTuple):
    """Masters of one param group: its trainable low parameters, their FP32 masters, and those that were FP32."""

    low: list[Tensor]
    masters: list[Tensor]
    fp32: list[Tensor]


def with_masters(optimizer: Optimizer) -> list[MasterGroup]:
    """Put FP32 masters in the places of the optimizer's low parameters; state that it has follows them.

    Raises:
        TypeError: a trainable parameter is neither low nor FP32; nothing was changed.
    """
    groups: list[MasterGroup] = []
    for number, group in enumerate(optimizer.param_groups):
        found = MasterGroup([], [], [])
        for position, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter.dtype in (torch.float16, torch.bfloat16):
                found.low.append(parameter)
                found.masters.append(parameter.detach().clone().float().requires_grad_())
            elif parameter.dtype is torch.float32:
                found.fp32.append(parameter)
            else:
                raise TypeError(
                    f"FP16_Optimizer: parameters must be float16, bfloat16 or float32; "
                    f"param_groups[{number}]['params'][{position}] is {parameter.dtype}"
                )
        groups.append(found)
    # Only now, when all parameters are known to fit, anything is changed.
    for group, found in zip(optimizer.param_groups, groups, strict=True):
        masters = {id(low): master for low, master in zip(found.low, found.masters, strict=True)}
        for low in found.low:
            # State is keyed by the parameter: the master takes it over.
            if low in optimizer.state:
                optimizer.state[masters[id(low)]] = optimizer.state.pop(low)
        group["params"][:] = [masters.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps this very list
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # casts per-parameter state to FP32
    return groups


def copy_masters(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write each master into its low parameter, rounded, all by one multi-tensor copy a device."""
    low, masters = [low for low, _ in pairs], [master for _, master in pairs]
    if low:
        with torch.no_grad():
            foreach_copy_(low, masters)


def saved_masters(saved: Any, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the masters of a saved state, one after the other.

    Raises:
        RuntimeError: they do not fit to ``groups``.
    """
    theirs = [[tuple(master.shape) for master in group] for group in saved]
    ours = [[tuple(master.shape) for master in group] for group in groups]
    if theirs != ours:
        raise RuntimeError(
            f"the saved masters have the shapes {theirs}, this FP16_Optimizer has {ours}: make model and optimizer as "
            "they were when the state was saved"
        )
    return [master for group in saved for master in group]
