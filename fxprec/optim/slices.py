"""Casts low gradients for torch's fused kernels slice by slice, so that a cache holds what a slice needs.

Those kernels take gradients in the parameters' dtype. A cast of all low gradients at once takes as much memory as FP32
gradients, which is written and read again. A slice stays in the cache, and so do its new values, from which its shadow
is written::

    cast the gradients' slice -> a buffer
    update the parameters' slice
    copy it to the shadows' slice
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from fxprec.torch_internals import foreach_copy_

Lists = Mapping[str, list[Any]]

#: Elements of a slice: on a CPU 2 MB in FP32, which its cache holds; on other devices few launches matter more.
_AT_ONCE: Final = {"cpu": 1 << 19}
_ELSEWHERE: Final = 1 << 24

_SHADOWS: Final = "shadows"
_dtype = operator.attrgetter("dtype")


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
