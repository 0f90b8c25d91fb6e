"""Wraps the launches of regions in torch ops, which dispatch modes and fake tensors can see.

A plan is named by its number, which holds in this process only: compilers and exporters get a region's own ops instead.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_PLANS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number(plan: Any) -> int:
    """Return the number that stands for a ``RegionPlan`` in calls of the ops, for as long as the plan is alive."""
    _PLANS[id(plan)] = plan
    return id(plan)


def plan_of(number: int) -> Any:
    """Return the ``RegionPlan`` that a number stands for."""
    return _PLANS[number]


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
