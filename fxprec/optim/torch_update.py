"""Updates by torch's own fused kernels: on CPUs, and wherever Triton is not.

They take FP32 gradients and states in the parameters' dtype; others go through temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxprec.optim.rounding import Rounding
from fxprec.scaling.gradients import local

__all__ = ["adam_update", "scalar", "sgd_update"]

Lists = dict[str, list[Tensor]]


def adam_update(
    group: Mapping[str, Any],
    lists: Lists,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    rounding: Rounding | None,
    places: list[int],
) -> None:
    """Adam or AdamW, in place.

    Args:
        group: hyper-parameters.
        lists: "params", "grads", "step" and the moments by their names, in one order.
        divisor: gradients are divided by it; 0-dim FP32, or None.
        found_inf: above 0: nothing changes; 0-dim FP32, or None.
        rounding: how moments of a lower dtype are rounded.
        places: what tells the tensors apart there.
    """
    beta1, beta2 = map(scalar, group["betas"])
    update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_  # pyright: ignore
    for chosen, part in _by_device_and_dtype(lists):
        device = part["params"][0].device
        moments = {name: part[name] for name in part if name not in ("params", "grads", "step")}
        wide = {name: [t.to(part["params"][0].dtype) for t in tensors] for name, tensors in moments.items()}
        flag = None if found_inf is None else found_inf.to(device, non_blocking=True)
        torch._foreach_add_(part["step"], 1)  # pyright: ignore
        update(
            part["params"],
            part["grads"],
            wide["exp_avg"],
            wide["exp_avg_sq"],
            wide.get("max_exp_avg_sq", []),
            part["step"],
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None if divisor is None else divisor.to(device, non_blocking=True),
            found_inf=flag,
        )
        if flag is not None:  # the kernel did nothing: neither did this step
            torch._foreach_sub_(part["step"], [flag] * len(part["step"]))  # pyright: ignore
        if rounding is not None:
            rounding.write(moments, wide, part["step"], [places[i] for i in chosen])


def sgd_update(
    group: Mapping[str, Any],
    lists: Lists,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    first: bool,
) -> None:
    """SGD, in place; ``first``: the momentum buffers have no value yet. Otherwise as ``adam_update``."""
    for _, part in _by_device_and_dtype(lists):
        device = part["params"][0].device
        torch._fused_sgd_(  # pyright: ignore
            part["params"],
            part["grads"],
            part.get("momentum_buffer", []),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=first,
            grad_scale=None if divisor is None else divisor.to(device, non_blocking=True),
            found_inf=None if found_inf is None else found_inf.to(device, non_blocking=True),
        )


def scalar(value: Any) -> float:
    """A hyper-parameter that may be a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def _by_device_and_dtype(lists: Lists) -> list[tuple[list[int], Lists]]:
    """Positions and lists of local tensors, for one call of a fused kernel each; gradients in the parameters' dtype."""
    parts: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    params = [*map(local, lists["params"])]
    for i, param in enumerate(params):
        parts.setdefault((param.device, param.dtype), []).append(i)
    split: list[tuple[list[int], Lists]] = []
    for (_, dtype), chosen in parts.items():
        part = {name: [local(tensors[i]) for i in chosen] for name, tensors in lists.items()}
        part["grads"] = [grad.to(dtype) for grad in part["grads"]]
        split.append((chosen, part))
    return split
