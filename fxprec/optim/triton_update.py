"""Updates and checks by our Triton kernels: on CUDA, every tensor of a group in one launch, shadows written with it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.operands import FLOATS
from fxprec.kernels.launch.triton_support import HAS_TRITON, interpreting
from fxprec.kernels.optim import adam as multi_tensor_adam
from fxprec.kernels.optim import norm as multi_tensor_norm
from fxprec.kernels.optim import sgd as multi_tensor_sgd
from fxprec.kernels.optim.adam import AdamSettings
from fxprec.kernels.optim.lists import is_dense
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import MultiTensorPlan
from fxprec.optim.rounding import Rounding
from fxprec.optim.scalars import scalar


def takes(param: Tensor, gradient: Tensor, state: torch.dtype | None = None) -> bool:
    """Whether the kernels serve a parameter, its gradient, both local, and a ``state`` of this dtype."""
    return why_not(param, gradient, state) is None


def why_not(param: Tensor, gradient: Tensor, state: torch.dtype | None = None) -> str | None:
    """Why torch's kernels take a parameter instead of ours; None: ours do."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if param.device.type != "cuda" and not interpreting():
        return f"on {param.device.type}"
    if param.dtype not in FLOATS or gradient.dtype not in FLOATS:
        return f"{param.dtype} with a gradient of {gradient.dtype}"
    if state is torch.float16:
        return "state in torch.float16"
    if gradient.layout is not torch.strided:
        return "sparse gradient"
    return None if is_dense(param) else "not dense in memory"


class Plans:
    """The tables of one optimizer's launches, kept while its tensors are the same."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, MultiTensorPlan] = {}

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        """Copies and pickles are empty: tables hold addresses."""
        return Plans, ()

    def kept(self) -> tuple[MultiTensorPlan, ...]:
        """All of them, now: a CUDA graph keeps those that it was captured with, since it reads their tables."""
        return tuple(self._plans.values())

    def plan(
        self,
        key: Hashable,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]] = (),
        steps: Sequence[Tensor] | None = None,
        shadows: Sequence[Tensor | None] | None = None,
        indices: Sequence[int] | None = None,
    ) -> MultiTensorPlan:
        """The plan of these tensors; a new one if ``key`` had others."""
        plan = self._plans.get(key)
        if plan is None or not (
            _same(plan.params, params)
            and len(plan.states) == len(states)
            and all(_same(old, new) for old, new in zip(plan.states, states, strict=True))
            and _same(plan.steps or (), steps or ())
            and _same(plan.shadows or (), shadows or ())
            and plan.indices == tuple(indices or range(len(params)))
        ):
            plan = MultiTensorPlan(params, states=states, steps=steps, shadows=shadows, indices=indices)
            self._plans[key] = plan
        return plan


def norm_launch(
    plans: Plans, key: Hashable, params: Sequence[Tensor], gradients: Sequence[Tensor], scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(flag for inf and nan, sum of squares after ``scale`` is taken out), both 0-dim FP32."""
    bound = plans.plan(("norm", key), params).bind(gradients)
    result = multi_tensor_norm.launch(bound, grad_scale=scale)
    return result.found_inf, result.sum_of_squares


def adam_launch(
    plans: Plans,
    key: Hashable,
    group: Mapping[str, Any],
    lists: Mapping[str, list[Tensor]],
    shadows: Sequence[Tensor | None],
    divisor: Tensor | None,
    found_inf: Tensor | None,
    rounding: Rounding | None,
    places: Sequence[int],
) -> None:
    """Adam or AdamW; arguments as for ``TorchUpdates.adam``, of one device and dtype each."""
    moments = [tensors for name, tensors in lists.items() if name not in ("params", "grads", "step")]
    plan = plans.plan(("adam", key), lists["params"], moments, lists["step"], _some(shadows), places or None)
    beta1, beta2 = map(scalar, group["betas"])
    settings = AdamSettings(
        betas=(beta1, beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        rounding_seed=None if rounding is None else rounding.seed,
    )
    multi_tensor_adam.launch(
        plan.bind(lists["grads"]), settings, lr=group["lr"], grad_scale=divisor, found_inf=found_inf
    )


def sgd_launch(
    plans: Plans,
    key: Hashable,
    group: Mapping[str, Any],
    lists: Mapping[str, list[Tensor]],
    shadows: Sequence[Tensor | None],
    divisor: Tensor | None,
    found_inf: Tensor | None,
    first: bool,
) -> None:
    """SGD; arguments as for ``TorchUpdates.sgd``, of one device and dtype each."""
    buffers = [lists["momentum_buffer"]] if "momentum_buffer" in lists else []
    plan = plans.plan(("sgd", first, key), lists["params"], buffers, None, _some(shadows))
    names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
    settings = SgdSettings(**{name: scalar(group[name]) for name in names})
    multi_tensor_sgd.launch(
        plan.bind(lists["grads"]), settings, lr=group["lr"], first=first, grad_scale=divisor, found_inf=found_inf
    )


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(map(lambda a, b: a is b, old, new))


def _some(shadows: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
    return None if all(shadow is None for shadow in shadows) else shadows
