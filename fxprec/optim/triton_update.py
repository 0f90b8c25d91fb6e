"""Updates parameters by our Triton kernels: all tensors of a group and their shadows in one launch."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from fxprec.kernels.optim.tables import MultiTensorPlan
from fxprec.optim.parts import Formula, StepInputs, UpdatePart


class Plans:
    """Launches of one optimizer, with a cache of their tables, which are valid while its tensors are the same."""

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

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place by a launch of the formula's kernel."""
        shadows, rounding = step.copies.for_kernel(part.owners), formula.of_states
        # Random bits depend on a parameter's number in the optimizer, not on its place in this launch.
        places = None if rounding is None else rounding.places_of(part.owners)
        plan = self.plan(
            (formula.kind, formula.first, id(formula.group), *part.key),
            part.lists["params"],
            [*part.states.values()],
            part.lists.get("step"),
            # Without shadows the kernel is compiled without that store.
            None if all(shadow is None for shadow in shadows) else shadows,
            places,
        )
        gradients = plan.bind(part.lists["grads"])
        formula.by_triton(gradients, lr=formula.group["lr"], grad_scale=step.divisor, found_inf=step.found_inf)


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(map(operator.is_, old, new))
