"""Updates parameters by our Triton kernels: all tensors of a group and their shadows in one launch."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxprec.kernels.optim import adam as multi_tensor_adam
from fxprec.kernels.optim import sgd as multi_tensor_sgd
from fxprec.kernels.optim.adam import AdamSettings
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import MultiTensorPlan
from fxprec.optim.parts import StepInputs, UpdatePart, scalar
from fxprec.optim.rounding import Rounding


class Plans:
    """Cache of the launch tables of one optimizer, valid while its tensors are the same."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, MultiTensorPlan] = {}

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        """Return an empty cache for copies and pickles: tables hold addresses."""
        return Plans, ()

    def kept(self) -> tuple[MultiTensorPlan, ...]:
        """Return the current plans. A CUDA graph holds those that it was captured with, since it reads their tables."""
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
        """Return the plan of these tensors, a new one if ``key`` had others."""
        plan = self._plans.get(key)
        # Compared by identity: a plan's tables hold the addresses of these very tensors.
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


def adam_launch(
    plans: Plans, part: UpdatePart, group: Mapping[str, Any], step: StepInputs, rounding: Rounding | None
) -> None:
    """Update by Adam or AdamW; arguments as for ``TorchUpdates.adam``."""
    lists, shadows = part.lists, step.copies.for_kernel(part.owners)
    moments = [tensors for name, tensors in lists.items() if name not in ("params", "grads", "step")]
    # Random bits depend on a parameter's number in the optimizer, not on its place in this launch.
    places = None if rounding is None else rounding.places_of(part.owners)
    key = ("adam", id(group), *part.key)
    plan = plans.plan(key, lists["params"], moments, lists["step"], _some(shadows), places)
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
    scalars = {"lr": group["lr"], "grad_scale": step.divisor, "found_inf": step.found_inf}
    multi_tensor_adam.launch(plan.bind(lists["grads"]), settings, **scalars)


def sgd_launch(plans: Plans, part: UpdatePart, group: Mapping[str, Any], step: StepInputs, first: bool) -> None:
    """Update by SGD; arguments as for ``TorchUpdates.sgd``."""
    lists, shadows = part.lists, step.copies.for_kernel(part.owners)
    buffers = [lists["momentum_buffer"]] if "momentum_buffer" in lists else []
    plan = plans.plan(("sgd", first, id(group), *part.key), lists["params"], buffers, None, _some(shadows))
    names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
    settings = SgdSettings(**{name: scalar(group[name]) for name in names})
    scalars = {"lr": group["lr"], "grad_scale": step.divisor, "found_inf": step.found_inf}
    multi_tensor_sgd.launch(plan.bind(lists["grads"]), settings, first=first, **scalars)


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(map(operator.is_, old, new))


def _some(shadows: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
    # Without shadows the kernel is compiled without that store.
    return None if all(shadow is None for shadow in shadows) else shadows
