"""The tensors of one group, split for launches that take one device and one dtype of everything."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.optim.triton_update import serves, takes
from fxprec.scaling.gradients import local

__all__ = ["Part", "parts_of"]

_PLAIN = {Tensor, torch.nn.Parameter}
_dtype = operator.attrgetter("dtype")
_place = operator.attrgetter("device", "dtype")


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
    places: Sequence[int]
    triton: bool

    @property
    def device(self) -> torch.device:
        return self.lists["params"][0].device

    @property
    def key(self) -> tuple[torch.device, torch.dtype, torch.dtype]:
        return self.device, self.lists["params"][0].dtype, self.lists["grads"][0].dtype


def _held_here(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor, or of a DTensor what this rank holds."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [*map(local, tensors)]


def parts_of(lists: dict[str, list[Tensor]]) -> list[Part]:
    """Split ``lists``, which hold "params" and "grads"; gradients in the parameter dtype for torch's kernels."""
    owners = lists["params"]
    held = {name: _held_here(tensors) for name, tensors in lists.items()}
    params, grads = held["params"], held["grads"]
    states = next((tensors for name, tensors in held.items() if name not in ("params", "grads", "step")), None)
    state_dtypes = [None] * len(params) if states is None else [*map(_dtype, states)]
    places = [*map(_place, params)]
    served = {device for device in {device for device, _ in places} if serves(device)}
    split: dict[tuple[torch.device, torch.dtype, torch.dtype | None], Sequence[int]] = {}
    if not served and len({*places}) == 1:  # on a CPU, without a look at each
        split[*places[0], None] = range(len(params))
    else:
        by_kind: defaultdict[tuple[torch.device, torch.dtype, torch.dtype | None], list[int]] = defaultdict(list)
        for i, (device, dtype) in enumerate(places):
            ours = device in served and takes(params[i], grads[i], state_dtypes[i])
            by_kind[device, dtype, grads[i].dtype if ours else None].append(i)
        split = {**by_kind}
    parts: list[Part] = []
    for (_, dtype, low), chosen in split.items():
        whole = len(split) == 1
        part = held if whole else {name: [tensors[i] for i in chosen] for name, tensors in held.items()}
        if low is None and {*map(_dtype, part["grads"])} != {dtype}:
            part = {**part, "grads": [gradient.to(dtype) for gradient in part["grads"]]}
        parts.append(Part(part, owners if whole else [owners[i] for i in chosen], chosen, low is not None))
    return parts
