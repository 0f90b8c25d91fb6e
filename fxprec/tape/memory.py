"""The memory of a run, twice: as the run has it, and as it would be in the reference's dtype; and the ops on it.

A tensor is a place in a storage: views of it are other places in the same one, so that views, slices and writes in
place need no treatment of their own. Every storage of floats has a copy in the reference's dtype with as many elements,
and a place reads the same elements in both::

    storage of 6 bfloat16    [1.0078, 2.0000, ...]        place (size (2, 3), stride (3, 1), offset 0)
    its copy, 6 float64      [1.0081, 1.9994, ...]        the same place

A float64 copy would be most of what there is to keep. So a storage that was written as a whole keeps its error instead,
in FP32: the run's values less the reference's. That tells the reference's to 2^-24 of the error, and what it loses is a
part of the op's rounding. Before a write the copy is made from it.

What is no float (indices, masks) has a copy only once the reference decides otherwise than the run did.

An op of the run (``Operation``) has places for arguments and results, and so it can run in the reference's dtype. A
user may allow TF32 or bfloat16 for FP32 products; a reference does not (``full_fp32``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.passes.torch_internals import schema_of
from fxprec.tape.exact_ops import DRAWN, EXACT, draws
from fxprec.torch_internals import (
    aten_to_copy,
    decomposition_of,
    negated,
    storage_key,
    tree_leaves,
    tree_unflatten,
)

#: In which the errors of storages are kept.
_ERRORS: Final = torch.float32


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a tensor, and whether gradients flow through it."""

    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, value: object) -> Size | None:
        """Return the size of a tensor; None for anything else."""
        return cls(tuple(value.shape), value.requires_grad) if isinstance(value, Tensor) else None


class TensorPlace(NamedTuple):
    """Storage of a tensor, with its elements and their order; conjugated or negated as it is read."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @property
    def is_float(self) -> bool:
        """Flag of dtypes in which the reference has values of its own."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def overlaps(self) -> bool:
        """Flag of places where two elements may be one in memory (``expand``, ``unfold``)."""
        reach = 1
        # Strides in rising order must each step over all that the smaller ones reach.
        for stride, size in sorted((t, s) for s, t in zip(self.size, self.stride, strict=True) if s > 1):
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
        return False

    def as_real(self) -> TensorPlace:
        """Return the place of ``torch.view_as_real`` of a complex tensor."""
        strides = (*(2 * stride for stride in self.stride), 1)
        return TensorPlace(self.storage, self.dtype.to_real(), (*self.size, 2), strides, 2 * self.offset)

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor at this place of a storage, given as a vector."""
        if self.dtype.is_complex and not flat.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        # Bits for conjugation and sign are no part of memory: a view has them lazily.
        tensor = flat.as_strided(self.size, self.stride, self.offset)
        return tensor.conj() if self.conjugate else negated(tensor) if self.negative else tensor


class Memory:
    """Storages and their reference copies, by key. Those that are known here live on, so that a key means one of them.

    A copy is made where the reference has other values than the run. What it took over as it is has none of its own:
    weights and inputs are read where they lie, and what is only cast shares the values of what it was cast from.

    Args:
        reference: the dtype of the copies.
    """

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        # Storages are held: a freed one's key could be given to a new one.
        self._storages: dict[int, Any] = {}
        self._copies: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}  # instead of a copy
        self._casts: dict[int, TensorPlace] = {}  # storage -> where its values of the reference are

    def place(self, tensor: Tensor) -> TensorPlace:
        """Return the place of a strided tensor."""
        key = storage_key(tensor)
        self._storages.setdefault(key, tensor.untyped_storage())
        return TensorPlace(
            key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()),
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def knows(self, tensor: Tensor) -> bool:
        """Return whether some place of a tensor's storage was asked for before."""
        return storage_key(tensor) in self._storages

    def low(self, place: TensorPlace) -> Tensor:
        """Return the tensor of the run."""
        return place.of(self._flat(place))

    def exact(self, place: TensorPlace) -> Tensor:
        """Return the tensor of the reference, not to be written to; the run's own, where it has no other values."""
        if (source := self._casts.get(place.storage)) is not None:
            place = place._replace(storage=source.storage, dtype=source.dtype)
        if (error := self._errors.get(place.storage)) is not None:
            return self.low(place).to(self.reference) - place.of(error)
        copy = self._copies.get(place.storage)
        if not place.is_float:
            return self.low(place) if copy is None or copy.dtype is not place.dtype else place.of(copy)
        if copy is None or not copy.is_floating_point():
            return self.low(place).to(self.dtype_of(place))
        return place.of(copy)

    def error(self, place: TensorPlace) -> Tensor:
        """Return the run's floats less the reference's, in its dtype; 0 where that is no number (``difference``)."""
        if place.storage in self._errors and place.storage not in self._casts:
            return place.of(self._errors[place.storage]).to(self.reference)
        exact = self.exact(place)
        return difference(self.low(place).to(exact.dtype), exact)

    def dtype_of(self, place: TensorPlace) -> torch.dtype:
        """Return the dtype of the reference's values at a place."""
        if not place.is_float:
            return place.dtype
        return self.reference.to_complex() if place.dtype.is_complex else self.reference

    def prepare_write(self, place: TensorPlace) -> None:
        """Give memory of its own to what the reference took over from a place, before the run writes there."""
        for storage, source in [*self._casts.items()]:
            if place.storage in (storage, source.storage):
                whole = self.exact(source._replace(size=(math.prod(source.size),), stride=(1,)))
                self._copies[storage] = (torch.view_as_real(whole) if whole.is_complex() else whole).flatten().clone()
                del self._casts[storage]
        if place.is_float:
            self._copy_of(place)

    def share(self, place: TensorPlace, source: TensorPlace) -> bool:
        """Let a new storage have the reference's values at ``source``; return False if its elements lie otherwise."""
        # Shared only where element n of one storage is element n of the other: else a view of one would read another's.
        same = source._replace(storage=place.storage, dtype=place.dtype) == place and place.offset == 0
        source = self._casts.get(source.storage, source)
        flat, other = self._flat(place), self._flat(source)
        alike = same and len(flat) == len(other) == math.prod(place.size) and flat.device == other.device
        if alike:
            self._casts[place.storage] = source
        return alike

    def write_exact(self, place: TensorPlace, value: Any, fresh: bool = False) -> bool:
        """Give the reference these values at a place; return False where they do not fit there, and the run's stay.

        Args:
            place: where.
            value: a tensor; anything else does not fit.
            fresh: the place is a new storage, and the value nobody else's: it may become the copy as it is.
        """
        if not isinstance(value, Tensor) or tuple(value.shape) != place.size:
            return False
        if place.is_float:
            # In this order, as an error takes half of a copy's memory, and to adopt a value takes no time.
            if not self._keep_error(place, value) and not (fresh and self._adopt(place, value)):
                place.of(self._copy_of(place)).copy_(value)
            return True
        # Integers that are as in the run need no memory: most never differ.
        if place.storage not in self._copies:
            low = self.low(place)
            if value.dtype is not low.dtype or torch.equal(value, low):
                return value.dtype is low.dtype
            self._copies[place.storage] = self._flat(place).clone()
        self.exact(place).copy_(value)
        return True

    def forget(self, place: TensorPlace) -> None:
        """Let a storage and its copy go: nobody asks for a place in it any more."""
        self._storages.pop(place.storage, None)
        self._copies.pop(place.storage, None)
        self._errors.pop(place.storage, None)
        self._casts.pop(place.storage, None)

    def adjoint(self, place: TensorPlace) -> Tensor:
        """Return an empty vector of the reference's dtype with as many elements as a storage of floats has."""
        flat = self._flat(place)
        return torch.empty(len(flat), dtype=self.reference, device=flat.device)

    def elements(self, place: TensorPlace) -> Tensor:
        """Return all elements of the run's storage: floats copied to the reference's dtype, complex ones as pairs."""
        flat = self._flat(place)
        # Copies of complex storages are pairs, as adjoints are: one dtype serves for all floats.
        flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
        return flat.to(self.reference if place.is_float else flat.dtype, copy=True)

    def _keep_error(self, place: TensorPlace, value: Tensor) -> bool:
        """Keep the run's error in FP32 in place of a value, where it is finite and tells the value."""
        flat = self._flat(place)
        # An FP32 error saves nothing beside an FP32 reference, and would not tell a float64 run's.
        wide = self.reference.itemsize <= _ERRORS.itemsize or place.dtype.itemsize > _ERRORS.itemsize
        wide |= place.dtype.is_complex
        if wide or math.prod(place.size) != len(flat) or place.overlaps:
            return False
        # Where it overflows or is nan (a mask), the value could not be got back from it.
        error = torch.empty(len(flat), dtype=_ERRORS, device=flat.device)
        place.of(error).copy_(place.of(flat).to(self.reference).sub_(value))
        if not math.isfinite(float(error.sum())):
            return False
        self._errors[place.storage] = error
        self._copies.pop(place.storage, None)
        return True

    def _adopt(self, place: TensorPlace, value: Tensor) -> bool:
        """Let a value be the copy, where its elements lie as the run's do."""
        alike = value.stride() == place.stride and value.storage_offset() == place.offset == 0
        count = len(self._flat(place))
        whole = value.numel() == count and value.untyped_storage().nbytes() == count * self.reference.itemsize
        if not (alike and whole and value.dtype is self.reference and place.storage not in self._copies):
            return False
        self._copies[place.storage] = value.as_strided((count,), (1,))
        return True

    def _copy_of(self, place: TensorPlace) -> Tensor:
        copy = self._copies.get(place.storage)
        if copy is None or not copy.is_floating_point():
            copy = self._copies[place.storage] = self.elements(place)
            if (error := self._errors.pop(place.storage, None)) is not None:
                copy -= error
        return copy

    def _flat(self, place: TensorPlace) -> Tensor:
        storage = self._storages[place.storage]
        return torch.empty(0, dtype=place.dtype, device=storage.device).set_(storage)


def difference(low: Tensor, exact: Tensor) -> Tensor:
    """Return low - exact; 0 where that is no finite number.

    Both are -inf in a mask. Where the run alone is inf, what reads it makes the error: its bend has all of it.
    """
    found = low - exact
    return found if bool(found.sum().isfinite()) else torch.where(found.isfinite(), found, 0.0)


# -- ops on it ---------------------------------------------------------------------------------------------------------

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
#: What has a precision of its own for FP32, https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul, _cudnn.conv, _cudnn.rnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
)  # fmt: skip
#: "none": a backend's own, which is that of FP32.
_FULL: Final = ("ieee", "none")
_COPIES: Final = (aten_to_copy, torch.ops.aten.clone.default)
#: Given a place, and whether the op writes there: the tensor to call the op with.
Read = Callable[[TensorPlace, bool], Tensor]


@dataclass(frozen=True, slots=True)
class OpOrigin:
    """Owner of an op. Two of them are equal where they mean the same place of the model.

    Attributes:
        kind: "node" of a graph; "weight": the making of a low copy of one; "outside" of the graphs: in Python code
            between them, the loss among it.
        name: of the node ("body.relu" in the body of a higher-order op); the path of the weight; the op.
        graph: the position of the graph, -1 outside of them.
        backward: it computes gradients of what that place computes.
        source: ``model.py:12``, where it is known.
        node: of the graph.
    """

    kind: Literal["node", "weight", "outside"]
    name: str
    graph: int = -1
    backward: bool = False
    source: str = ""
    node: Node | None = field(default=None, compare=False, repr=False)


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Compute matrix products, convolutions and RNNs of FP32 tensors in FP32 while the context lasts, on all devices.

    Set is the newer of torch's two ways, which kernels ask; by the older one a user may ask for TF32 as well.
    """
    changed = [(each, each.fp32_precision) for each in _BACKENDS if each.fp32_precision not in _FULL]
    for backend, _ in changed:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in changed:
            backend.fp32_precision = precision


def is_place(leaf: object) -> bool:
    """Return whether a leaf of arguments stands for a tensor."""
    return isinstance(leaf, TensorPlace)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Call of a torch op.

    Attributes:
        function: the overload.
        leaves: of its arguments, places where they are tensors; ``spec`` puts them together.
        fresh: which leaves of its results are new memory.
        written: which of ``leaves`` it writes to.
        outputs: the places of the former, then of the latter.
        before: of each written place what stood there before: in the run, and in the reference.
        origin: whom it belongs to.
        why_inexact: why the reference runs it in the dtypes of the run; "" where it has its own.
        inputs: of the places that it reads, those that were handed to its node -> at which position.
    """

    function: Any
    leaves: tuple[Any, ...]
    spec: Any
    fresh: tuple[int, ...]
    written: tuple[int, ...]
    outputs: tuple[TensorPlace, ...]
    before: tuple[tuple[Tensor, Tensor], ...]
    origin: OpOrigin
    why_inexact: str = ""
    inputs: Mapping[TensorPlace, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the op, ``aten::mm``."""
        return self.function.name().partition(".")[0]

    def argument(self, place: TensorPlace) -> str:
        """Return the name of the first argument that is, or holds, the tensor at a place."""
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        given = [*zip([each.name for each in schema_of(self.function).arguments], args, strict=False), *kwargs.items()]
        return next(name for name, value in given if place in tree_leaves(value, is_leaf=is_place))

    @property
    def draws(self) -> bool:
        """Flag of ops whose results are random numbers, which the reference takes from the run."""
        return draws(self.function, *tree_unflatten(list(self.leaves), self.spec))

    @property
    def keeps_values(self) -> bool:
        """Flag of casts and clones of the first argument: the reference has the same values there."""
        place = self.leaves[0] if self.fresh == (0,) and self.function in _COPIES else None
        if not isinstance(place, TensorPlace) or not (place.is_float and self.outputs[0].is_float):
            return False
        return place.dtype.is_complex == self.outputs[0].dtype.is_complex

    def drawn(self, low: Callable[[TensorPlace], Tensor]) -> tuple[Tensor, ...]:
        """Return copies of the run's results if the op computes on numbers that it draws; ``low``: of the memory."""
        return tuple(low(place).clone() for place in self.outputs) if self.name in DRAWN else ()

    def run(
        self, read: Read, reference: torch.dtype, drawn: Sequence[Tensor] = (), decomposed: bool = False
    ) -> list[Any]:
        """Run the op on other tensors, and return what it gives at ``outputs``.

        Args:
            read: gives the arguments; what the op writes to must be its own.
            reference: the dtype that every float dtype among the arguments becomes. An inexact op runs as it ran.
            drawn: as ``drawn`` gives it.
            decomposed: in terms of other ops, where torch has such a form.
        """
        leaves = [
            read(leaf, number in self.written) if isinstance(leaf, TensorPlace) else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        function: Any = self.function
        if self.why_inexact:
            # Without a kernel for the reference's dtype the op runs as it ran, on the reference's values rounded.
            dtypes = [leaf.dtype if isinstance(leaf, TensorPlace) else None for leaf in self.leaves]
            leaves = [x if dtype is None else x.to(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        else:
            leaves = [reference if isinstance(x, torch.dtype) and x.is_floating_point else x for x in leaves]
            function = EXACT.get(self.name, function)
            if decomposed:
                function = decomposition_of(function) or function
            if drawn:
                function = functools.partial(DRAWN[self.name], drawn)
        args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_leaves(function(*args, **kwargs))
        return [*(results[number] for number in self.fresh), *(leaves[number] for number in self.written)]
