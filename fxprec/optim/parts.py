"""The tensors of one group, split for launches that take one device and one dtype of everything."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxprec.optim.triton_update import serves, takes
from fxprec.scaling.gradients import local

__all__ = ["Part", "parts_of"]

#: Bytes of gradients that torch's kernels get in another dtype, at one time.
_AT_ONCE: Final = 16 << 20
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


def parts_of(lists: dict[str, list[Tensor]]) -> Iterator[Part]:
    """Split ``lists``, which hold "params" and "grads"; gradients in the parameter dtype for torch's kernels."""
    owners = lists["params"]
    plain = _PLAIN.issuperset(map(type, owners))  # with them their gradients and states; else there are DTensors
    held = lists if plain else {name: [*map(local, tensors)] for name, tensors in lists.items()}
    split = _split(held)
    for (_, dtype, low), chosen in split.items():
        whole = len(split) == 1
        part = held if whole else _taken(held, chosen)
        part_owners = owners if whole else [owners[i] for i in chosen]
        if low is not None or {*map(_dtype, part["grads"])} == {dtype}:
            yield Part(part, part_owners, chosen, low is not None)
            continue
        for at in _bounded(part["params"]):  # one at a time: together they would be as large as the gradients
            some = {name: tensors[at] for name, tensors in part.items()}
            some["grads"] = [gradient.to(dtype) for gradient in some["grads"]]
            yield Part(some, part_owners[at], chosen[at], False)


def _taken(lists: dict[str, list[Tensor]], chosen: Sequence[int]) -> dict[str, list[Tensor]]:
    return {name: [tensors[i] for i in chosen] for name, tensors in lists.items()}


def _bounded(tensors: list[Tensor]) -> Iterator[slice]:
    """Slices of no more than ``_AT_ONCE`` bytes each, or of one tensor."""
    start = held = 0
    for i, tensor in enumerate(tensors):
        if held and held + tensor.nbytes > _AT_ONCE:
            yield slice(start, i)
            start, held = i, 0
        held += tensor.nbytes
    yield slice(start, len(tensors))


def _split(
    lists: dict[str, list[Tensor]],
) -> Mapping[tuple[torch.device, torch.dtype, torch.dtype | None], Sequence[int]]:
    """(device, dtype of the parameters, that of the gradients where our kernels run) -> positions."""
    params, grads = lists["params"], lists["grads"]
    places = [*map(_place, params)]
    distinct = {*places}
    served = {device for device, _ in distinct if serves(device)}
    if not served and len(distinct) == 1:  # on a CPU, without a look at each
        return {(*places[0], None): range(len(params))}
    states = next((tensors for name, tensors in lists.items() if name not in ("params", "grads", "step")), None)
    state_dtypes = [None] * len(params) if states is None else [*map(_dtype, states)]
    split: dict[tuple[torch.device, torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (device, dtype) in enumerate(places):
        ours = device in served and takes(params[i], grads[i], state_dtypes[i])
        split.setdefault((device, dtype, grads[i].dtype if ours else None), []).append(i)
    return split
