"""Torch's own ops, counted and not computed: what each moves and multiplies, while memory stays as it is.

::

    with Uncomputed() as ops:
        step()
    ops.work                          # [Work("mm", "product", flops=..., bytes=...), ...]

What an op returns is memory that nobody has written, so that a step of a model runs in moments and in little memory:
pages that are never touched are no memory. Small results are computed, as a program may ask for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Kind", "Uncomputed", "Work", "bytes_of", "layout_of", "work_of"]

Kind = Literal["product", "attention", "convolution", "other"]


@dataclass(frozen=True)
class Work:
    """One op.

    Attributes:
        flops: 2 for each multiplication and addition of a product; other ops have none.
        bytes: of what it reads and writes, each once, unless the op is known to read it twice.
    """

    name: str
    kind: Kind
    flops: int
    bytes: int


#: Ops that compute nothing.
_FREE: Final = (
    "empty empty_strided empty_like new_empty new_empty_strided detach alias view _unsafe_view _reshape_alias "
    "lift_fresh is_same_size resize_ set_ _local_scalar_dense"
).split()
#: Ops that write all of what they are given to write into, and do not read it.
_OVERWRITES: Final = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
#: Ops that read as much of their first tensor as they return.
_GATHERS: Final = ("embedding", "index", "index_select", "gather")
#: Ops that read the largest of their tensors once more: for sums over a batch, then for what depends on these.
_TWICE: Final = {"native_batch_norm": 1, "native_batch_norm_backward": 2}
#: Bytes up to which ops are computed.
_SMALL: Final = 1 << 20


class Uncomputed(TorchDispatchMode):
    """While it is on, ops on tensors are counted.

    Args:
        meta: ops on meta tensors are counted, and no others.

    Attributes:
        work: of the ops, in the order of calls.
    """

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.work: list[Work] = []
        self._meta = meta

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise dynamo would run nothing of what it has captured."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        name = func.overloadpacket.__name__
        if name in _FREE or func.is_view or any(x.is_meta for x in given) is not self._meta or _fake(given):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if self._meta or not (_much(given) or (not given and _much(_tensors(_on_meta(func, args, kwargs))))):
            result = func(*args, **kwargs)
        else:
            result = _results(func, args, kwargs, written)
        # The pretended GPU sets new memory to 0 where it is small, which no device does.
        if (given or _tensors(result)) and not (name == "zero_" and not _much(given)):
            self.work.append(work_of(func, args, kwargs, result, written))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _fake(given: Sequence[Tensor]) -> bool:
    """Tensors of a tracer, whose ops are run by nobody."""
    return any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in given)


def _much(given: Sequence[Tensor]) -> bool:
    return sum(map(bytes_of, given)) > _SMALL


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, _without_memory, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    made = func(*args, **kwargs)
    name = func.overloadpacket.__name__
    if name == "convolution":
        return made.contiguous(memory_format=layout_of(*args[:2]))
    if name == "convolution_backward":  # whose results lie as images and weights do
        pairs = zip(made[:2], args[1:3], strict=True)
        return *(None if x is None else torch.empty_like(like) for x, like in pairs), made[2]
    return made


def layout_of(image: Tensor, weight: Tensor) -> torch.memory_format:
    """Of what a convolution returns, as cuDNN has it: with channels last where an operand has."""
    last = torch.channels_last
    if any(x.dim() == 4 and x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in (image, weight)):
        return last
    return torch.contiguous_format


def _results(func: Any, args: Any, kwargs: Any, written: Sequence[Any]) -> Any:
    """Memory as the op would return it; what it would write into stays as it is."""
    if written:
        count = len(func._schema.returns)
        return written[0] if count == 1 else tuple(written) if count else None
    return pytree.tree_map_only(Tensor, _with_memory, _on_meta(func, args, kwargs))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an op is given to write into."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [each for each in found if each is not None]


def work_of(func: Any, args: Any, kwargs: Any, result: Any, written: Sequence[Any] = ()) -> Work:
    """What an op does that returns ``result`` and writes into ``written``."""
    name = func.overloadpacket.__name__
    into = {id(x) for x in _tensors(written)}
    given = _tensors((args, kwargs))
    made = {id(x): x for x in _tensors((result, written))}
    out = sum(map(bytes_of, made.values()))
    own = name in _OVERWRITES or any(argument.is_out for argument in func._schema.arguments)
    read = [bytes_of(x) for x in given if not (own and id(x) in into)]
    if name in _GATHERS and read:
        read[0] = min(read[0], out)
    read += sorted(read)[len(read) - _TWICE.get(name, 0) :]
    flops = _attended(func, args, kwargs) if "attention" in name else 0
    if name.removeprefix("_") in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"):
        flops = flop_registry[func.overloadpacket](*args, **_without_out(kwargs), out_val=result)
    kind: Kind = "other"
    if flops:
        kind = "attention" if "attention" in name else "convolution" if "convolution" in name else "product"
    return Work(name, kind, flops, sum(read) + out)


def _without_out(kwargs: Any) -> Any:
    return {name: value for name, value in kwargs.items() if name != "out"}


def _attended(func: Any, args: Any, kwargs: Any) -> int:
    """Flops of attention: two products forward and five backward, of causal attention half of them."""
    named = {argument.name: x for argument, x in zip(func._schema.arguments, args, strict=False)} | kwargs
    batch, heads, length, width = named["query"].shape
    others, width_of_values = named["value"].shape[2:]
    products = 5 if "backward" in func.overloadpacket.__name__ else 2
    flops = products * batch * heads * length * others * (width + width_of_values)
    return flops // 2 if named.get("is_causal") else flops


def bytes_of(x: Tensor) -> int:
    """That are there: an element that several places of a view share, once."""
    return x.itemsize * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _with_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
