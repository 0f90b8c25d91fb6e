"""The launches of regions as torch ops, for dispatch modes and fake tensors to see; otherwise the launches themselves.

A plan is named by its number, which holds in this process only: compilers and exporters get a region's own ops instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.kernels.rows.plan import Plan

__all__ = ["launch_backward", "launch_forward"]

_PLANS: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


def launch_forward(plan: Plan, inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, keep: bool) -> list[Tensor]:
    """Outputs of a plan, and with ``keep`` its statistics."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return torch.ops.fxprec.region_forward(list(inputs), seeds, seed, keep, _number(plan))
    return plan.forward(inputs, seeds, seed, keep)


def launch_backward(
    plan: Plan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int
) -> list[Tensor]:
    """What the backward kernel of a plan stores."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return torch.ops.fxprec.region_backward(list(saved), list(cotangents), seeds, seed, _number(plan))
    return plan.backward(saved, cotangents, seeds, seed)


def _number(plan: Plan) -> int:
    _PLANS[id(plan)] = plan
    return id(plan)


@torch.library.custom_op("fxprec::region_forward", mutates_args=())
def _forward(inputs: list[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    return _PLANS[plan].forward(inputs, seeds, seed, keep)


@_forward.register_fake
def _(inputs: list[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    known = _PLANS[plan]
    return [spec.empty(known.device) for spec in (*known.outputs, *(known.statistics if keep else ()))]


@torch.library.custom_op("fxprec::region_backward", mutates_args=())
def _backward(
    saved: list[Tensor], cotangents: list[Tensor], seeds: Tensor | None, seed: int, plan: int
) -> list[Tensor]:
    return _PLANS[plan].backward(saved, cotangents, seeds, seed)


@_backward.register_fake
def _(saved: list[Tensor], cotangents: list[Tensor], seeds: Tensor | None, seed: int, plan: int) -> list[Tensor]:
    return _PLANS[plan].empty_gradients()
