"""Updates parameters by torch's own fused kernels: on CPUs, and wherever Triton does not run.

They take gradients and states in the parameters' dtype, and ignore strides; so the tensors are laid out for them first:

    in_one_order   every tensor in its parameter's memory order
    _wide          FP32 copies of what is rounded when it is stored. Among it low parameters of SGD on CPUs, of which
                   torch's kernel there updates next to none (pytorch issue 191763, up to 2.13)
    slices         low gradients in the parameters' dtype, as much of them at a time as a cache holds

A cast of all low gradients at once takes as much memory as FP32 gradients, which is written and read again. A slice
stays in the cache, and so do its new values, from which its shadow is written.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.operands import is_dense_tensor
from fxprec.optim.parts import Formula, StepInputs, UpdatePart
from fxprec.optim.rounding import Rounding, is_low
from fxprec.torch_internals import foreach_add_, foreach_copy_, foreach_sub_

Lists = Mapping[str, list[Any]]

#: Elements of a slice: on a CPU 2 MB in FP32, which its cache holds; on other devices few launches matter more.
_AT_ONCE: Final = {"cpu": 1 << 19}
_ELSEWHERE: Final = 1 << 24

_SHADOWS: Final = "shadows"
_dtype = operator.attrgetter("dtype")


class TorchUpdates:
    """Updates of one optimizer by torch's kernels, with the counters cached from step to step."""

    def __init__(self) -> None:
        self._counters = Counters()

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place by the formula's fused kernel."""
        owners, group = part.owners, formula.group
        rounding = formula.of_parameters if is_low(part.lists["params"][0]) else None
        # Values that are rounded afterwards are not final: their shadows are copied at the end of the step.
        shadows = partial(step.copies.for_kernel, owners) if rounding is None and formula.of_states is None else list
        counted = "step" in part.lists
        counters = self._counters.of((id(group), *part.key), part.lists["step"]) if counted else []
        lr = group["lr"]
        # On an accelerator torch's fused kernels read a learning rate in FP32.
        lr = lr.to(torch.float32) if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr
        inputs = {"lr": lr, "grad_scale": step.divisor, "found_inf": step.found_inf}
        with in_one_order(part.lists) as lists:
            if counted:
                foreach_add_(counters, 1)
            with _wide(lists, formula, rounding, owners) as wide:
                for some in slices(wide, shadows):
                    formula.by_torch(some, **inputs)
        # The kernel skips an update with found_inf without a sync, so the counters are taken back on the device.
        if counted and step.found_inf is not None:
            foreach_sub_(counters, [step.found_inf] * len(counters))


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
        like = param if is_dense_tensor(param) else param.contiguous()
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
def _wide(lists: Lists, formula: Formula, of_parameters: Rounding | None, owners: Sequence[Tensor]) -> Iterator[Lists]:
    """Yield ``lists`` in FP32 or wider where values are rounded afterwards, and store them; else as they are."""
    param, of_states = lists["params"][0], formula.of_states
    on_a_cpu = formula.low_in_fp32 and is_low(param) and param.device.type == "cpu"
    if of_states is None and of_parameters is None and not on_a_cpu:
        yield lists
        return
    # float64 parameters keep their dtype.
    at_least_fp32 = torch.promote_types(param.dtype, torch.float32)
    wide = {
        name: tensors if name == "step" else [tensor.to(at_least_fp32) for tensor in tensors]
        for name, tensors in lists.items()
    }
    yield wide
    states = {name: lists[name] for name in lists if name not in ("params", "grads", "step")}
    # States that have a rounding of their own are written by it.
    stored = {"params": lists["params"]} if of_states is not None else {**states, "params": lists["params"]}
    if of_parameters is not None:
        of_parameters.write(stored, wide, owners)
    else:
        pairs = [pair for name in stored for pair in zip(stored[name], wide[name], strict=True)]
        # What was wide already is written already.
        if pairs := [(target, value) for target, value in pairs if target is not value]:
            foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
    if of_states is not None:
        of_states.write(states, wide, owners, lists["step"])


def slices(lists: Lists, shadows: Callable[[], Sequence[Tensor | None]] = list) -> Iterator[Lists]:
    """Yield ``lists``, whole or slice by slice, with gradients in the parameters' dtype, valid until the next slice.

    Args:
        lists: "params", "grads" and states, of one device, each parameter's tensors in one memory order. A 0-dim state
            ("step") belongs to all slices of its parameter.
        shadows: called if there are slices; returns a tensor for each parameter, or None, to which the new values are
            copied after each slice.
    """
    params = lists["params"]
    if {*map(_dtype, lists["grads"])} == {params[0].dtype}:  # copying shadows alone is as fast at once
        yield lists
        return
    limit = _AT_ONCE.get(params[0].device.type, _ELSEWHERE)
    # One buffer for all slices: a new one each time would not be in the cache.
    room = params[0].new_empty(min(limit, sum(map(Tensor.numel, params))))
    for some in _cut({**lists, _SHADOWS: [*shadows()] or [None] * len(params)}, limit):
        written = some.pop(_SHADOWS)
        some["grads"] = _cast(some["grads"], room)
        yield some
        _write(written, some["params"])


def _cut(lists: Lists, limit: int) -> Iterator[dict[str, list[Any]]]:
    """Yield slices of at most ``limit`` elements: small parameters together, large dense ones cut."""
    together: list[int] = []
    held = 0
    for i, param in enumerate(lists["params"]):
        size = param.numel()
        tensors = {name: of_name[i] for name, of_name in lists.items()} if size > limit else {}
        # A tensor that is not contiguous has no flat view to cut.
        if size <= limit or not all(tensor.is_contiguous() for tensor in tensors.values() if tensor is not None):
            if together and held + size > limit:
                yield {name: [of_name[j] for j in together] for name, of_name in lists.items()}
                together, held = [], 0
            together.append(i)
            held += size
            continue
        parts = -(-size // limit)
        cut = [
            tensor.view(-1).split(limit) if tensor is not None and tensor.dim() else (tensor,) * parts
            for tensor in tensors.values()
        ]
        for part in zip(*cut, strict=True):
            yield {name: [tensor] for name, tensor in zip(tensors, part, strict=True)}
    if together:
        yield {name: [of_name[j] for j in together] for name, of_name in lists.items()}


def _cast(gradients: list[Tensor], room: Tensor) -> list[Tensor]:
    """Cast gradients into ``room`` with their strides, or into new memory if they exceed it (one that was not cut)."""
    sizes = [*map(Tensor.numel, gradients)]
    if sum(sizes) > room.numel():
        return [gradient.to(room.dtype) for gradient in gradients]
    if len(gradients) == 1 and gradients[0].dim() == 1:
        targets = [room if sizes[0] == room.numel() else room[: sizes[0]]]
    else:
        places = room[: sum(sizes)].split(sizes)
        targets = [flat.as_strided(g.shape, g.stride()) for flat, g in zip(places, gradients, strict=True)]
    foreach_copy_(targets, gradients)
    return targets


def _write(shadows: list[Tensor | None], params: list[Tensor]) -> None:
    pairs = [(shadow, param) for shadow, param in zip(shadows, params, strict=True) if shadow is not None]
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        foreach_copy_(targets, sources)


class Counters:
    """Step counters of one optimizer's states, moved into one tensor, so that one addition counts all of them.

    ``state["step"]`` stays a 0-dim tensor for each parameter, as torch's optimizers and checkpoints expect. On a CPU
    ``torch._foreach_add_`` takes 1 to 3 µs for each, which for small parameters is as much as the update itself::

        before   step, step, step        three allocations, three additions
        after    [step, step, step]      three views of one tensor, one addition
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor, list[int]]] = {}

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        """Return an empty cache for copies and pickles: it holds addresses."""
        return Counters, ()

    def of(self, key: Hashable, steps: list[Tensor]) -> list[Tensor]:
        """Return the tensors to add to in place of ``steps``: one [number of steps] that holds all of them, in order.

        Return ``steps`` themselves if they must not be moved: on devices other than a CPU, whose kernels take many at
        once; in memory shared between processes; and if one occurs twice, which counts twice.

        Args:
            key: of the cache; the next steps with the same key mostly have the same addresses.
            steps: 0-dim, of one dtype and device. They stay the same objects, and their memory moves once.
        """
        if steps[0].device.type != "cpu" or torch.compiler.is_compiling():
            return steps
        addresses = [*map(Tensor.data_ptr, steps)]
        kept = self._kept.get(key)
        if kept is not None and kept[1] == addresses:
            return [kept[0]]
        # Other processes would go on counting in the old memory.
        if any(map(Tensor.is_shared, steps)) or len({*addresses}) < len(addresses):
            return steps
        together = torch.stack([*steps])
        for step, place in zip(steps, together.unbind(), strict=True):
            # ``data`` moves the memory under the same tensor object, which states and checkpoints hold.
            step.data = place
        self._kept[key] = together, [*map(Tensor.data_ptr, steps)]
        return [together]
