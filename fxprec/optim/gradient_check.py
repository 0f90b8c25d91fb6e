"""Reads all gradients once, to flag inf and nan and to compute their global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxprec.host_reads import reading_waits
from fxprec.kernels.launch.triton_support import can_launch
from fxprec.kernels.optim import norm as multi_tensor_norm
from fxprec.optim.kernel_updates import Plans
from fxprec.optim.parts import why_not
from fxprec.scaling.gradients import dtensor_type, group_of_parameters, local, local_values, sum_over, summed
from fxprec.torch_internals import flatten_dense_tensors, foreach_norm

#: The epsilon of ``torch.nn.utils.clip_grad_norm_``.
_EPSILON = 1e-6

#: Largest tensor that is cheaper to concatenate with others than to read by a call of its own.
_SMALL = 4096


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Result of one read of all gradients.

    Attributes:
        found_inf: device -> 0-dim FP32, above 0 if a gradient on it holds inf or nan.
        norm: of all unscaled gradients, 0-dim FP32; None if it was not asked for.
    """

    found_inf: dict[torch.device, Tensor]
    norm: Tensor | None

    def divisor(self, max_norm: float, scale: Tensor | None) -> Tensor:
        """Return the divisor of the gradients that unscales them and clips their norm to ``max_norm``.

        0-dim FP32: scale x max(1, (norm + 1e-6) / max_norm), as ``torch.nn.utils.clip_grad_norm_`` clips.
        """
        assert self.norm is not None, "the norm was not asked for"
        factor = ((self.norm + _EPSILON) / max_norm).clamp(min=1.0)
        return factor if scale is None else factor * scale.to(factor.device)


@torch.no_grad()
def check(parameters: Iterable[Tensor], scale: Tensor | None, norm: bool, plans: Plans) -> GradientCheck:
    """Read the gradients of ``parameters`` once.

    A replica of a DTensor counts once over all ranks, and so does a plain tensor beside DTensors, which is assumed to
    be the same on all ranks.

    Args:
        parameters: all of them: those without a gradient tell which ranks take part in the norm.
        scale: the loss scale that gradients have; 0-dim FP32, or None.
        norm: compute their global norm too.
        plans: of the optimizer's launches.
    """
    owners = [*parameters]
    # The usual case on a CPU goes without grouping.
    if not norm and (plain := _on_cpu(owners)):
        # Sums take half the time of ``_read``; only if one is not finite, all are read again.
        wide = None if plain[0].dtype is torch.float64 else torch.float32
        sums = torch.stack([tensor.sum(dtype=wide) for tensor in _side_by_side(plain)]).tolist()
        flag = torch.zeros(()) if all(map(math.isfinite, sums)) else _read(plain, norm=False)[0]
        return GradientCheck({plain[0].device: flag}, None)
    groups: dict[tuple[torch.device, torch.dtype, float, bool], list[tuple[Tensor, Tensor]]] = {}
    ranks = group_of_parameters(owners)
    served: dict[torch.device, bool] = {}
    for owner in owners:
        held = owner.grad
        if held is not None:
            if type(held) is not Tensor:
                held = local(summed(owner, held))
            device = held.device
            if device not in served:
                served[device] = can_launch(device)
            # Replicas would count several times in the sum over ranks.
            share = 1.0 if ranks is None else _share(owner, ranks)
            key = device, held.dtype, share, served[device] and why_not(owner, held) is None
            groups.setdefault(key, []).append((owner, held))
    found: dict[torch.device, Tensor] = {}
    squares: list[Tensor] = []
    for (device, dtype, share, triton), pairs in groups.items():
        rate = None if scale is None else scale.to(device, non_blocking=True)
        if triton:
            params, gradients = [local(owner) for owner, _ in pairs], [gradient for _, gradient in pairs]
            plan = plans.plan(("norm", device, dtype, share), params)
            result = multi_tensor_norm.launch(plan.bind(gradients), grad_scale=rate)
            flag, square = result.found_inf, result.sum_of_squares
        else:
            flag, square = _read([local_values(gradient) for _, gradient in pairs], norm, rate)
        found[device] = flag if device not in found else torch.maximum(found[device], flag)
        if norm and square is not None:
            squares.append(square if share == 1 else square * share)
    if not norm:
        return GradientCheck(found, None)
    # Sums of several devices meet on one of them.
    target = squares[0].device if squares else torch.device("cpu") if scale is None else scale.device
    total = torch.stack([s.to(target) for s in squares]).sum() if squares else torch.zeros((), device=target)
    if ranks is not None:
        total = sum_over(total, ranks)
    return GradientCheck(found, total.sqrt())


def _on_cpu(owners: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients if all are plain tensors of one dtype on a CPU, which is read without a sync; else []."""
    gradients = [gradient for owner in owners if (gradient := owner.grad) is not None]
    kinds = {(type(gradient), gradient.dtype, gradient.layout, gradient.device.type) for gradient in gradients}
    (kind, _, *where), *others = kinds or {(None, None)}
    if kind is not Tensor or where != [torch.strided, "cpu"] or others or reading_waits(gradients[0].device):
        return []
    return gradients


def _side_by_side(tensors: list[Tensor]) -> list[Tensor]:
    """Concatenate the small tensors, whose calls would cost more than a copy."""
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    if len(small) < 2:
        return tensors
    return [flatten_dense_tensors(small), *(tensor for tensor in tensors if tensor.numel() > _SMALL)]


def _read(tensors: list[Tensor], norm: bool, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return a flag for inf and nan, and the FP32 sum of squares, of tensors of one device and dtype.

    The squares are those of the tensors divided by ``scale``.
    """
    device = tensors[0].device
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=device), torch.zeros((), device=device) if norm else None
    if not norm:
        # Extremes: a nan becomes both of them, and nothing overflows, as a sum may.
        extremes = [extreme for tensor in _side_by_side(tensors) for extreme in torch.aminmax(tensor)]
        return (~torch.isfinite(torch.stack(extremes)).all()).float(), None
    square = _squares(tensors, None if tensors[0].dtype is torch.float64 else torch.float32, scale)
    reads = not reading_waits(device)
    if reads and bool(torch.isfinite(square)):
        return torch.zeros(()), square
    flag, _ = _read(tensors, norm=False)  # squares of finite gradients may overflow
    if reads and scale is not None and not flag:
        square = _squares(tensors, torch.float64, scale)  # their unscaled squares may not
    return flag, square


def _squares(tensors: list[Tensor], wide: torch.dtype | None, scale: Tensor | None) -> Tensor:
    norms = torch.stack(foreach_norm(tensors, 2, wide))
    return (norms if scale is None else norms / scale).square().sum().float()


def _share(owner: Any, ranks: Any) -> float:
    """Return the share of a gradient's squares that this rank adds to the sum over ``ranks``: 1 / replicas."""
    if not isinstance(owner, dtensor_type()):
        return 1 / ranks.size()
    sharded = [owner.device_mesh.size(i) for i, placement in enumerate(owner.placements) if placement.is_shard()]
    return float(torch.tensor([1, *sharded]).prod()) / ranks.size()
