"""The tensors of one group, split for launches that take one device and one dtype of everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.optim.triton_update import takes
from fxprec.scaling.gradients import local

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """Lists in one order, of local tensors.

    Attributes:
        lists: "params", "grads", and the states by their names.
        owners: the parameters themselves (DTensors where they are).
        places: positions in the lists that were split.
        triton: whether our kernels take it; torch's do otherwise.
    """

    lists: dict[str, list[Tensor]]
    owners: list[Tensor]
    places: list[int]
    triton: bool

    @property
    def device(self) -> torch.device:
        return self.lists["params"][0].device

    @property
    def key(self) -> tuple[torch.device, torch.dtype, torch.dtype]:
        return self.device, self.lists["params"][0].dtype, self.lists["grads"][0].dtype


def parts_of(lists: dict[str, list[Tensor]]) -> list[Part]:
    """Split ``lists``, which hold "params" and "grads"; gradients in the parameter dtype for torch's kernels."""
    owners = lists["params"]
    held = {name: [*map(local, tensors)] for name, tensors in lists.items()}
    split: dict[tuple[torch.device, torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (param, gradient) in enumerate(zip(held["params"], held["grads"], strict=True)):
        key = param.device, param.dtype, gradient.dtype if takes(param, gradient) else None
        split.setdefault(key, []).append(i)
    parts: list[Part] = []
    for (_, dtype, low), places in split.items():
        part = {name: [tensors[i] for i in places] for name, tensors in held.items()}
        if low is None:
            part["grads"] = [gradient.to(dtype) for gradient in part["grads"]]
        parts.append(Part(part, [owners[i] for i in places], places, low is not None))
    return parts
