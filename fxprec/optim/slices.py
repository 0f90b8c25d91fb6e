"""Low gradients for torch's fused kernels, slice by slice: what belongs to a slice is done while a cache holds it.

Those kernels take gradients in the parameters' dtype. Low ones that are cast at once take as much memory as FP32
gradients, and are written and read again; those of a slice are not, and neither are the new values, from which the
slice of a shadow is made::

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

#: Elements of a slice: on a CPU 2 MB in FP32, which its cache holds; elsewhere few launches count more.
_AT_ONCE: Final = {"cpu": 1 << 19}
_ELSEWHERE: Final = 1 << 24

_SHADOWS: Final = "shadows"
_dtype = operator.attrgetter("dtype")


def slices(lists: Lists, shadows: Callable[[], Sequence[Tensor | None]] = list) -> Iterator[Lists]:
    """``lists`` as they are, or slice by slice; gradients are in the parameters' dtype, good until the next one.

    Args:
        lists: "params", "grads" and states, of one device, each parameter's tensors in one memory order. A state of no
            dimension ("step") is that of all slices of its parameter.
        shadows: called where there are slices: a tensor for each parameter, or None, that is given the parameter's
            new values once a slice was updated.
    """
    params = lists["params"]
    if {*map(_dtype, lists["grads"])} == {params[0].dtype}:  # shadows alone are copied at once as fast
        yield lists
        return
    limit = _AT_ONCE.get(params[0].device.type, _ELSEWHERE)
    room = params[0].new_empty(min(limit, sum(map(Tensor.numel, params))))
    for some in _cut({**lists, _SHADOWS: [*shadows()] or [None] * len(params)}, limit):
        written = some.pop(_SHADOWS)
        some["grads"] = _cast(some["grads"], room)
        yield some
        _write(written, some["params"])


def _cut(lists: Lists, limit: int) -> Iterator[dict[str, list[Any]]]:
    """Small parameters together, large ones in parts."""
    together: list[int] = []
    held = 0
    for i, param in enumerate(lists["params"]):
        size = param.numel()
        tensors = {name: of_name[i] for name, of_name in lists.items()} if size > limit else {}
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
    """In ``room``, with the gradients' strides; or anew, where one is too large and could not be cut."""
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
