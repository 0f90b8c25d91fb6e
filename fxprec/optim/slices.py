"""Updates by torch's fused kernels slice by slice: what belongs to a slice is done while a cache holds it.

Those kernels take gradients in the parameters' dtype. Low ones that are cast at once take as much memory as FP32
gradients, and are written and read again; those of a slice are not, and neither are the new values, from which the
slice of a shadow is made::

    cast the gradients' slice -> a buffer        low gradients only
    update the parameters' slice
    copy it to the shadows' slice
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Lists", "Slices"]

Lists = Mapping[str, list[Any]]

#: Elements of a slice: on a CPU 2 MB in FP32, which its cache holds; elsewhere few launches count more.
_AT_ONCE: Final = {"cpu": 1 << 19}
_ELSEWHERE: Final = 1 << 24

_SHADOWS: Final = "shadows"
_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")


class Slices:
    """The slices of one optimizer's tensors, kept while these are the same: views take longer to make than to fill."""

    def __init__(self) -> None:
        self._cuts: dict[Hashable, _Cuts] = {}

    def of(self, key: Hashable, lists: Lists, shadows: Callable[[], Sequence[Tensor | None]] = list) -> Iterator[Lists]:
        """``lists`` as they are, or slice by slice; gradients are in the parameters' dtype, good until the next one.

        Args:
            key: says whose lists they are: the next ones with the same key are taken to be cut in the same way.
            lists: "params", "grads" and states, of one device, each parameter's tensors in one memory order. A state of
                no dimension ("step") is that of all slices of its parameter.
            shadows: called where there may be slices: a tensor for each parameter, or None, that is given the
                parameter's new values once a slice was updated.
        """
        params, grads = lists["params"], lists["grads"]
        limit = _AT_ONCE.get(params[0].device.type, _ELSEWHERE)
        total = sum(map(Tensor.numel, params))
        casts = {*map(_dtype, grads)} != {params[0].dtype}
        if not casts and (total <= limit or limit == _ELSEWHERE):  # one pass cannot be fewer
            yield lists
            return
        beside = [*shadows()] or [None] * len(params)
        if not casts and not any(shadow is not None for shadow in beside):
            yield lists
            return
        tensors = {name: of_name for name, of_name in lists.items() if name != "grads"} | {_SHADOWS: beside}
        if total <= limit or limit == _ELSEWHERE:  # next to nothing to keep, or a large buffer
            made = [*_slices(tensors, limit, casts)]
        else:
            made = self._kept(key, tensors, limit, casts)
        yield from _filled(made, grads, limit, casts)

    def _kept(self, key: Hashable, tensors: Lists, limit: int, casts: bool) -> list[_Slice]:
        signs = _signs(tensors)
        cuts = self._cuts.get(key)
        if cuts is None or cuts.casts is not casts or cuts.signs != signs:
            cuts = self._cuts[key] = _Cuts(tensors, signs, casts, [*_slices(tensors, limit, casts)])
        return cuts.made


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some parameters, or a part of one.

    Attributes:
        lists: all but gradients and shadows.
        places: of the parameters.
        part: which one, of the only parameter; None: it is whole.
        room: in the buffer, for each gradient to be cast; empty: none is, or they are too large and cannot be cut.
        shadows, updated: what to copy after the update, and from where.
    """

    lists: Lists
    places: Sequence[int]
    part: int | None
    room: list[Tensor]
    shadows: list[Tensor]
    updated: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Tensors, the signs that they are still the same, and their slices."""

    tensors: Lists
    signs: tuple[Any, ...]
    casts: bool
    made: list[_Slice]


def _filled(made: Sequence[_Slice], grads: Sequence[Tensor], limit: int, casts: bool) -> Iterator[Lists]:
    parts: tuple[Tensor, ...] = ()
    for each in made:
        if each.part is None:
            gradients = [grads[place] for place in each.places]
        else:
            if each.part == 0:
                parts = grads[each.places[0]].view(-1).split(limit)
            gradients = [parts[each.part]]
        if each.room:
            _copy(each.room, gradients)
            gradients = each.room
        elif casts:
            gradients = [gradient.to(each.lists["params"][0].dtype) for gradient in gradients]
        yield {**each.lists, "grads": gradients}
        if each.shadows:
            _copy(each.shadows, each.updated)


def _signs(tensors: Lists) -> tuple[Any, ...]:
    """What changes where a tensor has other memory, or lies there in another way; ``tensors`` keep theirs meanwhile."""
    every = [tensor for of_name in tensors.values() for tensor in of_name]
    held = [tensor for tensor in every if tensor is not None]
    missing = [tensor is None for tensor in every]
    return missing, [*map(Tensor.data_ptr, held)], [*map(_shape, held)], [*map(Tensor.stride, held)]


def _slices(tensors: Lists, limit: int, casts: bool) -> Iterator[_Slice]:
    """Small parameters together, large ones in parts."""
    params = tensors["params"]
    buffer = params[0].new_empty(min(limit, sum(map(Tensor.numel, params)))) if casts else None
    together: list[int] = []
    held = 0
    for i, param in enumerate(params):
        of_param = {name: of_name[i] for name, of_name in tensors.items() if of_name[i] is not None}
        if param.numel() <= limit or not all(tensor.is_contiguous() for tensor in of_param.values()):
            if together and held + param.numel() > limit:
                yield _whole(tensors, together, buffer)
                together, held = [], 0
            together.append(i)
            held += param.numel()
            continue
        cut = {name: tensor.view(-1).split(limit) for name, tensor in of_param.items() if tensor.dim()}
        for j in range(len(cut["params"])):
            part = {name: [cut[name][j] if name in cut else of_param.get(name)] for name in tensors}
            yield _slice(part, [i], j, [] if buffer is None else [buffer[: cut["params"][j].numel()]])
    if together:
        yield _whole(tensors, together, buffer)


def _whole(tensors: Lists, places: list[int], buffer: Tensor | None) -> _Slice:
    lists = {name: [of_name[i] for i in places] for name, of_name in tensors.items()}
    params: list[Tensor] = lists["params"]
    room: list[Tensor] = []
    sizes = [param.numel() for param in params]
    if buffer is not None and sum(sizes) <= buffer.numel():
        rooms = buffer[: sum(sizes)].split(sizes)
        room = [flat.as_strided(param.shape, param.stride()) for flat, param in zip(rooms, params, strict=True)]
    return _slice(lists, places, None, room)


def _slice(lists: dict[str, list[Any]], places: Sequence[int], part: int | None, room: list[Tensor]) -> _Slice:
    shadows = lists.pop(_SHADOWS)
    pairs = [(shadow, param) for shadow, param in zip(shadows, lists["params"], strict=True) if shadow is not None]
    return _Slice(lists, places, part, room, [shadow for shadow, _ in pairs], [param for _, param in pairs])


def _copy(targets: Any, sources: Any) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
