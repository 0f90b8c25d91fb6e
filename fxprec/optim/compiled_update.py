"""Updates parameters on a CPU by compiled loops, in place of torch's fused kernels.

Those read gradients in the parameters' dtype and write no shadow, so low ones take a cast before and a copy after
(``slices``). A compiled loop reads and writes every tensor once, 28 bytes a parameter with low gradients::

    before   cast gradients -> buffer;  update;  copy parameters -> shadows        slice by slice, in a cache
    after    gradient, parameter, moments -> parameter, moments, shadow            in registers
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fxprec.optim.compiled_loop import Loop, compiled
from fxprec.optim.parts import Formula, StepInputs, UpdatePart
from fxprec.optim.shadow_copies import ShadowCopies
from fxprec.optim.torch_update import Counters, in_one_order
from fxprec.torch_internals import foreach_add_


class CompiledUpdates:
    """Updates of one optimizer by compiled loops, with the counters cached from step to step."""

    def __init__(self) -> None:
        self._counters = Counters()

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place by loops that are compiled when a step first needs them.

        Raises:
            RuntimeError: as ``_launch``; nothing of this part has changed.
        """
        # Everything is on a CPU, where reading the flag costs nothing.
        if step.found_inf is not None and step.found_inf.item():
            return
        group = formula.group
        # Counts are mostly equal, so their scalars are computed once for each distinct one.
        scalars = functools.cache(partial(formula.scalars, _scale(group, step.divisor)))
        with in_one_order(part.lists) as lists, _launch(lists, part.owners, step.copies, formula.loop()) as launch:
            counts = [0.0] * len(lists["params"])
            if "step" in lists:
                foreach_add_(self._counters.of((id(group), *part.key), lists["step"]), 1)
                counts = [count.item() for count in lists["step"]]
            launch([*map(scalars, counts)])


def _scale(group: Mapping[str, Any], divisor: Tensor | None) -> float:
    """Return the factor of the gradients: 1 / divisor, negative to maximize."""
    scale = 1.0 if divisor is None else divisor.reciprocal().item()  # inf for 0, as in torch's kernels
    return -scale if group["maximize"] else scale


@contextlib.contextmanager
def _launch(
    lists: Mapping[str, list[Tensor]], owners: Sequence[Tensor], copies: ShadowCopies, loop: Callable[..., Loop]
) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Yield a function that updates all parameters, given the scalars of each; then copy the remaining shadows.

    All loops are compiled before the first runs, so that an error leaves every parameter unchanged.

    Raises:
        RuntimeError: a loop cannot be compiled, or a state has another device, size or dtype: loops use raw addresses.
    """
    params = lists["params"]
    tensors: dict[str, Sequence[Any]] = {name: of_name for name, of_name in lists.items() if name != "step"}
    sizes = [*map(Tensor.numel, params)]
    # Checked by a few C loops; which tensor is at fault is found only for the message.
    fit = all(map(_is_on_host, chain.from_iterable(tensors.values()))) and all(
        [*map(Tensor.numel, of_name)] == sizes and (name == "grads" or {*map(_dtype, of_name)} == {torch.float32})
        for name, of_name in tensors.items()
    )
    if not fit:
        raise RuntimeError(next(filter(None, map(partial(_unfit, tensors), range(len(params))))))
    shadows = [*copies.for_kernel(owners)]
    if any(shadow is not None for shadow in shadows):
        # A shadow of another order of memory is copied afterwards: the loop walks all tensors alike.
        tensors["shadow"] = [
            shadow if shadow is not None and shadow.is_cpu and shadow.stride() == param.stride() else None
            for shadow, param in zip(shadows, params, strict=True)
        ]
    # One loop for each pair of dtypes of gradient and shadow.
    alike: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (gradient, shadow) in enumerate(zip(tensors["grads"], tensors.get("shadow", repeat(None)), strict=False)):
        alike.setdefault((gradient.dtype, None if shadow is None else shadow.dtype), []).append(i)
    states = "max_exp_avg_sq" in tensors, "momentum_buffer" in tensors
    launches = [(compiled(loop(*dtypes, *states)), dtypes[1] is not None, places) for dtypes, places in alike.items()]

    def launch(scalars: Sequence[Tensor]) -> None:
        for run, shadowed, places in launches:
            found = {name: of for name, of in tensors.items() if shadowed or name != "shadow"} | {"scalars": scalars}
            whole = len(places) == len(params)
            run(found if whole else {name: [of_name[i] for i in places] for name, of_name in found.items()})

    yield launch
    written = tensors.get("shadow", repeat(None))
    for shadow, param, own in zip(shadows, params, written, strict=False):
        if shadow is not None and own is None:
            shadow.copy_(param)


_is_on_host, _dtype = operator.attrgetter("is_cpu"), operator.attrgetter("dtype")


def _unfit(tensors: Mapping[str, Sequence[Tensor]], i: int) -> str:
    """Return a message if tensors of a parameter are not on the CPU, of its size or, states, in FP32; else ""."""
    own = {name: of_name[i] for name, of_name in tensors.items()}
    found = [f"{name} on {x.device}" for name, x in own.items() if not x.is_cpu]
    found += [f"{name} of {x.numel()} elements" for name, x in own.items() if x.numel() != own["params"].numel()]
    found += [f"{name} in {x.dtype}" for name, x in own.items() if name != "grads" and x.dtype is not torch.float32]
    if not found:
        return ""
    return (
        f"parameter of shape {tuple(own['params'].shape)} on cpu, {', '.join(found)}: move the "
        "optimizer's state with the model (load_state_dict of its own state_dict does)"
    )
