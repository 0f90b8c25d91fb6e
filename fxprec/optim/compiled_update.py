"""Updates on a CPU by loops that inductor compiles, in place of torch's fused kernels there.

Those read gradients in the parameters' dtype and write no shadow, so low ones take a cast before and a copy after
(``slices``). A compiled loop reads and writes every tensor once, 28 bytes a parameter with low gradients::

    before   cast gradients -> buffer;  update;  copy parameters -> shadows        slice by slice, in a cache
    after    gradient, parameter, moments -> parameter, moments, shadow            in registers

Small parameters stay with torch's kernels, which take many in one call.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxprec.optim.compiled_loop import Loop, compiled
from fxprec.optim.counters import Counters
from fxprec.optim.parts import Part, Step, scalar
from fxprec.optim.shadow_copies import ShadowCopies
from fxprec.optim.torch_update import in_one_order
from fxprec.torch_internals import foreach_add_


class CompiledUpdates:
    """The updates of one optimizer, and what they keep from step to step."""

    def __init__(self) -> None:
        self._counters = Counters()

    def adam(self, part: Part, group: Mapping[str, Any], step: Step) -> None:
        """Adam or AdamW, in place; arguments as for ``TorchUpdates.adam``.

        Raises:
            RuntimeError: as ``_calls``; of this part nothing has changed.
        """
        if step.found_inf is not None and step.found_inf.item():
            return
        scale, decay = _scale(group, step.divisor), scalar(group["weight_decay"])
        loop = partial(Loop, "adam", ("decoupled" if group["decoupled_weight_decay"] else "l2") if decay else "", False)
        with in_one_order(part.lists) as lists, _calls(lists, part.owners, step.copies, loop) as calls:
            foreach_add_(self._counters.of((id(group), *part.key), lists["step"]), 1)
            scalars = functools.cache(partial(_adam_scalars, group, scale))
            for call, count in zip(calls, lists["step"], strict=True):
                call(scalars(count.item()))

    def sgd(self, part: Part, group: Mapping[str, Any], step: Step, first: bool) -> None:
        """SGD, in place; ``first``: the momentum buffers have no value yet. Otherwise as ``adam``."""
        if step.found_inf is not None and step.found_inf.item():
            return
        scalars = _sgd_scalars(group, _scale(group, step.divisor), first)
        loop = partial(Loop, "sgd", "l2" if scalar(group["weight_decay"]) else "", group["nesterov"])
        with in_one_order(part.lists) as lists, _calls(lists, part.owners, step.copies, loop) as calls:
            for call in calls:
                call(scalars)


def _adam_scalars(group: Mapping[str, Any], scale: float, step: float) -> Tensor:
    lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(scalar, group["betas"])
    numbers = [
        scale,
        1 - lr * decay if group["decoupled_weight_decay"] else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
        lr / (1 - beta1**step),
    ]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _sgd_scalars(group: Mapping[str, Any], scale: float, first: bool) -> Tensor:
    share = 1.0 if first else 1 - group["dampening"]
    numbers = scale, group["weight_decay"], group["momentum"], share, group["lr"]
    return torch.tensor([*map(float, numbers)], dtype=torch.float32, device="cpu")


def _scale(group: Mapping[str, Any], divisor: Tensor | None) -> float:
    """What gradients are multiplied by."""
    scale = 1.0 if divisor is None else divisor.reciprocal().item()  # of 0 it is inf, as for torch's kernels
    return -scale if group["maximize"] else scale


@contextlib.contextmanager
def _calls(
    lists: Mapping[str, list[Tensor]],
    owners: Sequence[Tensor],
    copies: ShadowCopies,
    loop: Callable[..., Loop],
) -> Iterator[list[Callable[[Tensor], object]]]:
    """A call for each parameter, which takes the scalars. All are compiled before the first runs.

    Raises:
        RuntimeError: a loop cannot be compiled, or a state lies elsewhere: loops go by addresses.
    """
    threads = torch.get_num_threads()
    calls: list[Callable[[Tensor], object]] = []
    late: list[tuple[Tensor, Tensor]] = []
    for i, shadow in enumerate(copies.for_kernel(owners)):
        tensors = {name: of_name[i] for name, of_name in lists.items() if name != "step"}
        if shadow is not None and shadow.stride() == lists["params"][i].stride():
            tensors["shadow"] = shadow
        elif shadow is not None:
            late.append((shadow, lists["params"][i]))
        if elsewhere := [f"{name} on {tensor.device}" for name, tensor in tensors.items() if not tensor.is_cpu]:
            raise RuntimeError(
                f"parameter of shape {tuple(lists['params'][i].shape)} on cpu, {', '.join(elsewhere)}: move the "
                "optimizer's state with the model (load_state_dict of its own state_dict does)"
            )
        run = compiled(loop(tuple((name, tensor.dtype) for name, tensor in tensors.items())), threads)
        calls.append(partial(_run, run, [*map(_flat, tensors.values())]))
    yield calls
    for target, source in late:
        target.copy_(source)


def _run(run: Callable[..., object], tensors: list[Tensor], scalars: Tensor) -> None:
    run(scalars, *tensors)


def _flat(tensor: Tensor) -> Tensor:
    """Its elements as they lie in memory, with a version of their own: shadow stores count on steps that bump none."""
    tensor = tensor.data
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
