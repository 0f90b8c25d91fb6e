"""The memory of a run, twice: as the run has it, and as it would be in the reference's dtype.

A tensor is a place in a storage: views of it are other places in the same one, so that views, slices and writes in
place need no treatment of their own. Every storage of floats has a copy in the reference's dtype with as many elements,
and a place reads the same elements in both::

    storage of 6 bfloat16    [1.0078, 2.0000, ...]        place (size (2, 3), stride (3, 1), offset 0)
    its copy, 6 float64      [1.0081, 1.9994, ...]        the same place

A float64 copy would be most of what there is to keep. So a storage that was written as a whole keeps its error instead,
in FP32: the run's values less the reference's. That tells the reference's to 2^-24 of the error, and what it loses is a
part of the op's rounding. Before a write the copy is made from it.

What is no float (indices, masks) has a copy only once the reference decides otherwise than the run did.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxprec.torch_internals import negated, storage_key

#: In which the errors of storages are kept.
_ERRORS: Final = torch.float32


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
        for known in (self._storages, self._copies, self._errors, self._casts):
            known.pop(place.storage, None)

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
