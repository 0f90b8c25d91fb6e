"""One read of all gradients: whether they hold inf or nan, and their global norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxprec.scaling.agreement import group_of_parameters, sum_over
from fxprec.scaling.gradients import dtensor_type, local

__all__ = ["GradientCheck", "check"]

#: As in ``torch.nn.utils.clip_grad_norm_``.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What one read gave.

    Attributes:
        found_inf: device -> 0-dim FP32, above 0 where a gradient on it holds inf or nan.
        norm: of all gradients as they are, scaled or not; 0-dim FP32; None: it was not asked for.
    """

    found_inf: dict[torch.device, Tensor]
    norm: Tensor | None

    def divisor(self, max_norm: float, scale: Tensor | None) -> Tensor:
        """What gradients are to be divided by, for a norm of at most ``max_norm`` after ``scale`` is taken out.

        0-dim FP32: scale x max(1, (norm / scale + 1e-6) / max_norm), as ``torch.nn.utils.clip_grad_norm_`` clips.
        """
        assert self.norm is not None, "the norm was not asked for"
        norm = self.norm if scale is None else self.norm / scale.to(self.norm.device)
        factor = ((norm + _EPSILON) / max_norm).clamp(min=1.0)
        return factor if scale is None else factor * scale.to(factor.device)


def check(parameters: Iterable[Tensor], scale: Tensor | None, norm: bool) -> GradientCheck:
    """Read the gradients of ``parameters`` once; ``norm``: compute their global norm too.

    Give all parameters: those without a gradient tell which ranks take part in the norm.

    A replica of a DTensor counts once over all ranks, and so does a plain tensor beside DTensors, which is taken to be
    the same everywhere.
    """
    owners = [*parameters]
    groups: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
    ranks = group_of_parameters(owners)
    for owner in owners:
        gradient = owner.grad
        if gradient is not None:
            held = _values(gradient)
            groups.setdefault((held.device, held.dtype, _share(owner, ranks)), []).append(held)
    found: dict[torch.device, Tensor] = {}
    squares: list[Tensor] = []
    for (device, _, share), tensors in groups.items():
        flag, square = _read(tensors, norm)
        found[device] = flag if device not in found else torch.maximum(found[device], flag)
        if square is not None:
            squares.append(square if share == 1 else square * share)
    if not norm:
        return GradientCheck(found, None)
    home = squares[0].device if squares else torch.device("cpu") if scale is None else scale.device
    total = torch.stack([s.to(home) for s in squares]).sum() if squares else torch.zeros((), device=home)
    if ranks is not None:
        total = sum_over(total, ranks)
    return GradientCheck(found, total.sqrt())


def _read(tensors: list[Tensor], norm: bool) -> tuple[Tensor, Tensor | None]:
    """A flag for inf and nan, and the sum of squares in FP32, of tensors on one device and of one dtype."""
    if tensors[0].device.type == "cuda" and (launch := _triton_norm()) is not None:
        return launch(tensors, norm)
    device = tensors[0].device
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=device), torch.zeros((), device=device) if norm else None
    if not norm:
        # The smallest and the largest: nan comes through as either, and it is the cheapest read that torch has.
        extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
        return (~torch.isfinite(torch.stack(extremes)).all()).float(), None
    wide = None if tensors[0].dtype is torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, 2, wide)  # pyright: ignore[reportPrivateImportUsage]
    square = torch.stack(norms).square().sum().float()
    if device.type == "cpu" and bool(torch.isfinite(square)):
        return torch.zeros(()), square
    flag, _ = _read(tensors, norm=False)  # squares of finite gradients overflow too
    return flag, square


def _triton_norm() -> Any:
    return None


def _values(gradient: Tensor) -> Tensor:
    held = local(gradient)
    return held.coalesce().values() if held.layout is torch.sparse_coo else held


def _share(owner: Any, ranks: Any) -> float:
    """The part of a gradient's squares that this rank adds to the sum over ``ranks``: 1 over its replicas."""
    if ranks is None:
        return 1.0
    dtensor = dtensor_type()
    if not isinstance(owner, dtensor):
        return 1 / ranks.size()
    mesh = owner.device_mesh
    sharded = [mesh.size(i) for i, placement in enumerate(owner.placements) if placement.is_shard()]
    return float(torch.tensor([1, *sharded]).prod()) / ranks.size()
