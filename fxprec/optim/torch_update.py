"""Updates by torch's own fused kernels: on CPUs, and wherever Triton is not.

They take FP32 gradients and states in the parameters' dtype; others go through temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxprec.optim.parts import Part
from fxprec.optim.rounding import Rounding
from fxprec.optim.scalars import scalar

__all__ = ["adam_update", "sgd_update"]


def adam_update(
    part: Part,
    group: Mapping[str, Any],
    divisor: Tensor | None,
    found_inf: Tensor | None,
    rounding: Rounding | None,
    places: Sequence[int],
) -> None:
    """Adam or AdamW, in place.

    Args:
        part: "params", "grads", "step" and the moments by their names.
        group: hyper-parameters.
        divisor: gradients are divided by it; 0-dim FP32, or None.
        found_inf: above 0: nothing changes; 0-dim FP32, or None.
        rounding: how moments of a lower dtype are rounded.
        places: what tells the tensors apart there.
    """
    lists = part.lists
    params, steps = lists["params"], lists["step"]
    moments = {name: lists[name] for name in lists if name not in ("params", "grads", "step")}
    wide = {name: [tensor.to(params[0].dtype) for tensor in tensors] for name, tensors in moments.items()}
    beta1, beta2 = map(scalar, group["betas"])
    update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_  # pyright: ignore
    torch._foreach_add_(steps, 1)  # pyright: ignore
    update(
        params,
        lists["grads"],
        wide["exp_avg"],
        wide["exp_avg_sq"],
        wide.get("max_exp_avg_sq", []),
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=divisor,
        found_inf=found_inf,
    )
    if found_inf is not None:  # the kernel did nothing: neither did this step
        torch._foreach_sub_(steps, [found_inf] * len(steps))  # pyright: ignore
    if rounding is not None:
        rounding.write(moments, wide, steps, places)


def sgd_update(
    part: Part, group: Mapping[str, Any], divisor: Tensor | None, found_inf: Tensor | None, first: bool
) -> None:
    """SGD, in place; ``first``: the momentum buffers have no value yet. Otherwise as ``adam_update``."""
    torch._fused_sgd_(  # pyright: ignore
        part.lists["params"],
        part.lists["grads"],
        part.lists.get("momentum_buffer", []),
        weight_decay=scalar(group["weight_decay"]),
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=first,
        grad_scale=divisor,
        found_inf=found_inf,
    )
