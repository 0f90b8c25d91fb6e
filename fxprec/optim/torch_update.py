"""Updates parameters by torch's own fused kernels: on CPUs, and wherever Triton does not run.

They take gradients and states in the parameters' dtype; others go through temporaries (``slices``). So do low
parameters of SGD on CPUs, of which torch's kernel there updates next to none (pytorch issue 191763, up to 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.optim.lists import is_dense
from fxprec.optim.counters import Counters
from fxprec.optim.parts import StepInputs, UpdatePart, scalar
from fxprec.optim.rounding import ParameterRounding, Rounding
from fxprec.optim.slices import slices
from fxprec.torch_internals import foreach_add_, foreach_copy_, foreach_sub_, fused_adam_, fused_adamw_, fused_sgd_


@contextlib.contextmanager
def in_one_order(lists: Mapping[str, list[Tensor]]) -> Iterator[Mapping[str, list[Tensor]]]:
    """Yield ``lists`` with every tensor dense and in its parameter's memory order; copy results back afterwards.

    Torch's fused kernels on CPUs ignore strides: they mix up the elements of a gradient or a moment whose
    strides are not the parameter's (a checkpoint from before ``channels_last``), and write into the gaps of a slice.
    """
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in lists.values()):
        yield lists  # the usual case, without a check of each stride
        return
    laid_out = {name: [*tensors] for name, tensors in lists.items()}
    moved: list[tuple[Tensor, Tensor]] = []
    for i, param in enumerate(lists["params"]):
        # A slice of a larger tensor has gaps, into which torch's kernel would write.
        like = param if is_dense(param) else param.contiguous()
        for name in lists:
            tensor = lists[name][i]
            if tensor.stride() != like.stride() and name != "step":
                laid_out[name][i] = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
                if name != "grads":
                    moved.append((tensor, laid_out[name][i]))
    yield laid_out
    for target, source in moved:
        target.copy_(source)


@contextlib.contextmanager
def in_fp32_on_a_cpu(lists: Mapping[str, list[Tensor]]) -> Iterator[Mapping[str, list[Tensor]]]:
    """Yield ``lists`` in FP32 if their parameters are low and on a CPU; copy values back, rounded once."""
    param = lists["params"][0]
    if param.device.type != "cpu" or param.dtype not in (torch.float16, torch.bfloat16):
        yield lists
        return
    wide = {name: [tensor.float() for tensor in tensors] for name, tensors in lists.items()}
    yield wide
    for name in lists.keys() - {"grads"}:
        foreach_copy_(lists[name], wide[name])


@contextlib.contextmanager
def _before_rounding(
    lists: Mapping[str, list[Tensor]],
    rounding: Rounding | None,
    of_parameters: ParameterRounding | None,
    owners: Sequence[Tensor],
) -> Iterator[Mapping[str, list[Tensor]]]:
    """Yield ``lists`` in FP32 or wider, then round moments and parameters; without a rounding as they are."""
    if rounding is None and of_parameters is None:
        yield lists
        return
    # float64 parameters keep their dtype.
    at_least_fp32 = torch.promote_types(lists["params"][0].dtype, torch.float32)
    wide = {
        name: tensors if name == "step" else [tensor.to(at_least_fp32) for tensor in tensors]
        for name, tensors in lists.items()
    }
    yield wide
    if of_parameters is not None:
        chosen = lists if rounding is None else {"params": lists["params"]}
        of_parameters.write(chosen, wide, owners)
    else:
        for target, param in zip(lists["params"], wide["params"], strict=True):
            if target is not param:
                target.copy_(param)
    if rounding is None:
        return
    moments = {name: lists[name] for name in lists if name not in ("params", "grads", "step")}
    rounding.write(moments, wide, lists["step"], owners)


def _sgd_lists(
    lists: Mapping[str, list[Tensor]], of_parameters: ParameterRounding | None, owners: Sequence[Tensor]
) -> contextlib.AbstractContextManager[Mapping[str, list[Tensor]]]:
    """Return a context with the lists that torch's kernel of SGD updates, in FP32 if they are rounded afterwards."""
    if of_parameters is None:
        return in_fp32_on_a_cpu(lists)
    return _before_rounding(lists, None, of_parameters, owners)


def _rate(lr: Any) -> Any:
    """Return a learning rate as torch's fused kernels take it: on an accelerator they read FP32."""
    return lr.to(torch.float32) if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr


class TorchUpdates:
    """Updates of one optimizer by torch's kernels, with the counters cached from step to step."""

    def __init__(self) -> None:
        self._counters = Counters()

    def adam(
        self,
        part: UpdatePart,
        group: Mapping[str, Any],
        step: StepInputs,
        rounding: Rounding | None,
        of_parameters: ParameterRounding | None = None,
    ) -> None:
        """Update by Adam or AdamW, in place.

        Args:
            part: "params", "grads", "step" and the moments by their names.
            group: hyper-parameters.
            step: inputs of the step, on this part's device.
            rounding: of moments in a lower dtype.
            of_parameters: rounding of low parameters; None: to nearest.
        """
        counters = self._counters.of((id(group), *part.key), part.lists["step"])
        # Values that are rounded afterwards are not final: their shadows are copied at the end of the step.
        shadows = partial(step.copies.for_kernel, part.owners) if rounding is None and of_parameters is None else list
        beta1, beta2 = map(scalar, group["betas"])
        settings: dict[str, Any] = {name: group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize")}
        settings |= {"lr": _rate(group["lr"]), "beta1": beta1, "beta2": beta2}
        settings |= {"grad_scale": step.divisor, "found_inf": step.found_inf}
        update = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
        with in_one_order(part.lists) as lists:
            foreach_add_(counters, 1)
            with _before_rounding(lists, rounding, of_parameters, part.owners) as wide:
                for some in slices(wide, shadows):
                    moments = some["exp_avg"], some["exp_avg_sq"], some.get("max_exp_avg_sq", [])
                    update(some["params"], some["grads"], *moments, some["step"], **settings)
        # The kernel skips an update with found_inf without a sync, so the counters are taken back on the device.
        if step.found_inf is not None:
            foreach_sub_(counters, [step.found_inf] * len(counters))

    def sgd(
        self,
        part: UpdatePart,
        group: Mapping[str, Any],
        step: StepInputs,
        first: bool,
        of_parameters: ParameterRounding | None = None,
    ) -> None:
        """Update by SGD, in place; ``first``: the momentum buffers have no value yet. Otherwise as ``adam``."""
        shadows = partial(step.copies.for_kernel, part.owners) if of_parameters is None else list
        settings: dict[str, Any] = {name: group[name] for name in ("momentum", "dampening", "nesterov", "maximize")}
        settings |= {"weight_decay": scalar(group["weight_decay"]), "lr": _rate(group["lr"]), "is_first_step": first}
        settings |= {"grad_scale": step.divisor, "found_inf": step.found_inf}
        with in_one_order(part.lists) as lists, _sgd_lists(lists, of_parameters, part.owners) as wide:
            for some in slices(wide, shadows):
                buffers = some.get("momentum_buffer", [])
                fused_sgd_(some["params"], some["grads"], buffers, **settings)
