"""Low gradients for torch's fused kernels, which take them in the parameters' dtype: cast slice by slice.

Cast at once they would take as much memory as FP32 gradients, and be written and read again; a slice stays in a cache.
So does what the update has written, from which the slice of a shadow is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["cast_slices"]

Lists = Mapping[str, list[Any]]

#: Elements of a slice: on a CPU 2 MB in FP32, which its cache holds; elsewhere few launches count more.
_AT_ONCE: Final = {"cpu": 1 << 19}
_ELSEWHERE: Final = 1 << 24

_SHADOWS: Final = "shadows"
_dtype = operator.attrgetter("dtype")


def cast_slices(lists: Lists, shadows: Callable[[], Sequence[Tensor | None]] = list) -> Iterator[Lists]:
    """``lists`` as they are, or slice by slice with gradients in the parameters' dtype, good until the next one.

    Args:
        lists: "params", "grads" and states, of one device, each parameter's tensors in one memory order. A state of no
            dimension ("step") is that of all slices of its parameter.
        shadows: called where there are slices: a tensor for each parameter, or None, that is given the parameter's new
            values once a slice was updated.
    """
    params = lists["params"]
    device, dtype = params[0].device, params[0].dtype
    if {*map(_dtype, lists["grads"])} == {dtype}:
        yield lists
        return
    lists = {**lists, _SHADOWS: [*shadows()] or [None] * len(params)}
    limit = _AT_ONCE.get(device.type, _ELSEWHERE)
    buffer = torch.empty(min(limit, sum(map(Tensor.numel, params))), dtype=dtype, device=device)
    for some in _slices(lists, limit):
        sizes = [gradient.numel() for gradient in some["grads"]]
        if sum(sizes) > limit:  # one that cannot be cut
            yield {**some, "grads": [gradient.to(dtype) for gradient in some["grads"]]}
            _write_shadows(some)
            continue
        places = buffer[: sum(sizes)].split(sizes)
        targets: Any = [place.as_strided(g.shape, g.stride()) for place, g in zip(places, some["grads"], strict=True)]
        torch._foreach_copy_(targets, some["grads"])  # pyright: ignore[reportPrivateImportUsage]
        yield {**some, "grads": targets}
        _write_shadows(some)


def _write_shadows(some: Lists) -> None:
    pairs = [(shadow, p) for shadow, p in zip(some[_SHADOWS], some["params"], strict=True) if shadow is not None]
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _slices(lists: Lists, limit: int) -> Iterator[dict[str, list[Any]]]:
    """Small parameters together, large ones in parts."""
    together: list[int] = []
    held = 0
    for i, param in enumerate(lists["params"]):
        tensors = {name: tensors[i] for name, tensors in lists.items() if tensors[i] is not None}
        if param.numel() <= limit or not all(tensor.is_contiguous() for tensor in tensors.values()):
            if together and held + param.numel() > limit:
                yield _of(lists, together)
                together, held = [], 0
            together.append(i)
            held += param.numel()
            continue
        cut = {name: tensor.view(-1).split(limit) for name, tensor in tensors.items() if tensor.dim()}
        for j in range(len(cut["params"])):
            yield {name: [cut[name][j] if name in cut else tensors.get(name)] for name in lists}
    if together:
        yield _of(lists, together)


def _of(lists: Lists, places: list[int]) -> dict[str, list[Any]]:
    return {name: [tensors[i] for i in places] for name, tensors in lists.items()}
