"""The tensors of one group, split for launches that take one device and one dtype of everything."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import can_launch
from fxprec.optim.compiled_loop import why_no_loop
from fxprec.optim.triton_update import takes
from fxprec.scaling.gradients import local

Kernel = Literal["triton", "compiled", "torch"]

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
        kernel: what updates it: our Triton kernels, a loop that inductor compiles, or torch's fused kernels.
    """

    lists: dict[str, list[Tensor]]
    owners: list[Tensor]
    places: Sequence[int]
    kernel: Kernel

    @property
    def device(self) -> torch.device:
        return self.lists["params"][0].device

    @property
    def key(self) -> tuple[torch.device, torch.dtype, torch.dtype]:
        return self.device, self.lists["params"][0].dtype, self.lists["grads"][0].dtype


def parts_of(lists: dict[str, list[Tensor]], compiled: bool = False) -> Iterator[Part]:
    """Split ``lists``, which hold "params" and "grads"; ``compiled``: compiled loops are asked for."""
    owners = lists["params"]
    plain = _PLAIN.issuperset(map(type, owners))  # with them their gradients and states; else there are DTensors
    held = lists if plain else {name: [*map(local, tensors)] for name, tensors in lists.items()}
    split = _split(held, compiled and not torch.compiler.is_compiling())
    for (*_, kernel), chosen in split.items():
        whole = len(split) == 1
        part = held if whole else _taken(held, chosen)
        part_owners = owners if whole else [owners[i] for i in chosen]
        yield Part(part, part_owners, chosen, kernel)


def _taken(lists: dict[str, list[Tensor]], chosen: Sequence[int]) -> dict[str, list[Tensor]]:
    return {name: [tensors[i] for i in chosen] for name, tensors in lists.items()}


def _split(
    lists: dict[str, list[Tensor]], compiled: bool
) -> Mapping[tuple[torch.device, torch.dtype, torch.dtype | None, Kernel], Sequence[int]]:
    """(device, dtype of the parameters, that of the gradients where our kernels run, what updates) -> positions."""
    params, grads = lists["params"], lists["grads"]
    places = [*map(_place, params)]
    distinct = {*places}
    served = {device for device, _ in distinct if can_launch(device)}
    if not served and not compiled and len(distinct) == 1:  # on a CPU, without a look at each
        return {(*places[0], None, "torch"): range(len(params))}
    states = next((tensors for name, tensors in lists.items() if name not in ("params", "grads", "step")), None)
    state_dtypes = [None] * len(params) if states is None else [*map(_dtype, states)]
    split: dict[tuple[torch.device, torch.dtype, torch.dtype | None, Kernel], list[int]] = {}
    for i, (device, dtype) in enumerate(places):
        kernel: Kernel = "torch"
        if device in served and takes(params[i], grads[i], state_dtypes[i]):
            kernel = "triton"
        elif compiled and why_no_loop(params[i], grads[i]) is None:
            kernel = "compiled"
        split.setdefault((device, dtype, grads[i].dtype if kernel == "triton" else None, kernel), []).append(i)
    return split
