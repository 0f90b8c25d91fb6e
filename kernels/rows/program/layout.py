"""Finds the layout of a region: one iteration space of rows x columns, and the strides of each tensor in it.

The space has the region's broadcast shape. Its dimensions are ordered as the first tensor of that shape has them in
memory, so that channels_last runs along channels; an expanded tensor gives the order only if all are expanded. With
reductions the columns are the reduced, last dimensions; without, they are the innermost dimensions that every tensor
walks with one stride, which for equal dense tensors is all of them: then there is one row, and the program is *flat*.

    shape (8, 512, 768), x contiguous, bias (768,), reduced 0   ->  4096 rows x 768 columns; bias varies along columns
    shape (8, 64, 32, 32), x channels_last, bias (64, 1, 1)     ->  8192 rows x 64 columns
    shape (8, 12, 512, 512), mask (8, 1, 1, 512), reduced 1     ->  rows (8, 6144) x 512 columns; mask strides (512, 0)

The sizes of the rows are those after ``merged``: before it they have a size for each of the region's dimensions.

A tensor's shape, strides and dtype, without its values, are a ``Spec``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fxprec.kernels.rows.program.values import Declined


@dataclass(frozen=True, slots=True)
class Spec:
    """Metadata of a tensor.

    Attributes:
        wanted: it wants a gradient.
        dropped: how many trailing dimensions a reduction took from it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = False
    dropped: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape, strides and dtype."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def spec_of(x: Tensor) -> Spec:
    """Return the metadata of a tensor."""
    return Spec(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


@dataclass(frozen=True, slots=True)
class Layout:
    """Iteration space of a region: which of its dimensions are rows, and which columns.

    Attributes:
        shape: of the region, as torch has it.
        row_dims: dimensions that the rows run over, outermost in memory first.
        column_dims: those of the columns, likewise.
        flat: there is one row, and nothing is ever reduced: the program runs along the columns alone.
    """

    shape: tuple[int, ...]
    row_dims: tuple[int, ...]
    column_dims: tuple[int, ...]
    flat: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[d] for d in self.row_dims)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return math.prod(self.shape[d] for d in self.column_dims)

    def two_dimensional(self, x: Tensor) -> Tensor:
        """Return a tensor that broadcasts to the shape as rows x columns, size 1 where it does not vary. May copy."""
        rank = len(self.shape)
        x = x.reshape((1,) * (rank - x.dim()) + x.shape)

        def extent(dims: tuple[int, ...]) -> int:
            return math.prod(self.shape[d] for d in dims) if any(x.shape[d] != 1 for d in dims) else 1

        # A tensor that varies along some of the row dimensions is expanded along all: only then can they become one.
        shape = [1] * rank
        for dims in (self.row_dims, self.column_dims):
            if any(x.shape[d] != 1 for d in dims):
                for d in dims:
                    shape[d] = self.shape[d]
        # Dimensions of size 1 are in neither list, and may stand anywhere.
        order = [d for d in range(rank) if d not in self.row_dims and d not in self.column_dims]
        order += [*self.row_dims, *self.column_dims]
        return x.expand(shape).permute(order).reshape(extent(self.row_dims), extent(self.column_dims))

    def torch_shaped(self, x: Tensor, columns: bool = True) -> Tensor:
        """Return rows x columns as a tensor of the region's shape; without ``columns`` those dimensions have size 1."""
        shape = [size if columns or d not in self.column_dims else 1 for d, size in enumerate(self.shape)]
        order = [d for d in range(len(shape)) if d not in self.row_dims and d not in self.column_dims]
        order += [*self.row_dims, *self.column_dims]
        back = sorted(range(len(shape)), key=lambda i: order[i])
        return x.reshape([shape[d] for d in order]).permute(back)


#: Strides of one tensor in the space, along each row dimension and along the columns; 0: does not vary.
Placed: TypeAlias = tuple[list[int], int]


def find_layout(
    shape: Sequence[int], tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], reduced: int
) -> Layout:
    """Return the iteration space for a broadcast shape.

    Args:
        tensors: (shape, strides) of each. The first one of the region's own shape orders the dimensions.
        reduced: how many trailing dimensions the region reduces over; 0: the columns are chosen here.

    Raises:
        Declined: reduced dimensions that are not innermost in memory.
    """
    shape = tuple(shape)
    rank = len(shape)
    strides = [_broadcast_strides(own, stride, shape) for own, stride in tensors]
    # Strides of 0, of an expanded tensor, say nothing of the order in memory: a tensor without them leads.
    whole = [s for (own, _), s in zip(tensors, strides, strict=True) if own == shape]
    leading = next((s for s in whole if all(s[d] for d in range(rank) if shape[d] != 1)), whole[0] if whole else None)
    order = [d for d in range(rank) if shape[d] != 1]
    if leading is not None:
        order.sort(key=lambda d: -leading[d])
    if reduced:
        columns = tuple(d for d in order if d >= rank - reduced)
        if leading is not None and columns and leading[columns[-1]] not in (0, 1):
            raise Declined("the reduced dimension is not the innermost in memory")
        rows = tuple(d for d in order if d < rank - reduced)
        return Layout(shape, rows, columns)
    # Columns grow outwards for as long as one stride still serves every tensor.
    take = 1
    while take < len(order) and all(_one_stride(s, order[-take - 1], order[-take], shape) for s in strides):
        take += 1
    return Layout(shape, tuple(order[:-take]), tuple(order[-take:]), flat=take >= len(order))


def place(layout: Layout, shape: Sequence[int], strides: Sequence[int]) -> Placed:
    """Return the strides of a tensor along each row dimension, and along the columns.

    Raises:
        Declined: columns of several dimensions that this tensor does not walk with one stride.
    """
    own = _broadcast_strides(tuple(shape), tuple(strides), layout.shape)
    # The kernel walks all columns by one stride, whatever dimensions they are.
    columns = layout.column_dims
    for outer, inner in itertools.pairwise(columns):
        if not _one_stride(own, outer, inner, layout.shape):
            raise Declined("a tensor whose columns are not evenly spaced in memory")
    return [own[d] for d in layout.row_dims], own[columns[-1]] if columns else 0


def merged(layout: Layout, places: Sequence[Placed]) -> tuple[tuple[int, ...], list[Placed]]:
    """Merge row dimensions that every tensor walks with one stride; return their sizes and the tensors' strides.

    Each dimension that stays costs a kernel a division and a remainder a row.
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in places]
    for i, dim in enumerate(layout.row_dims):
        size = layout.shape[dim]
        # Walking the outer dimension must equal walking past the end of this one, for every tensor.
        if sizes and all(own[-1] == size * rows[i] for own, (rows, _) in zip(kept, places, strict=True)):
            sizes[-1] *= size
            for own, (rows, _) in zip(kept, places, strict=True):
                own[-1] = rows[i]
        else:
            sizes.append(size)
            for own, (rows, _) in zip(kept, places, strict=True):
                own.append(rows[i])
    return tuple(sizes), [(own, column) for own, (_, column) in zip(kept, places, strict=True)]


def dense_strides(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dimensions lie in the layout's order."""
    # Dimensions that the layout does not order have size 1: their strides are read by nobody.
    offset = len(layout.shape) - len(shape)
    order = [d - offset for d in (*layout.row_dims, *layout.column_dims) if d >= offset]
    order = [d for d in range(len(shape)) if d not in order] + order
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _broadcast_strides(own: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's strides in the region's shape: 0 where it has size 1 or lacks the dimension."""
    missing = len(shape) - len(own)
    return (0,) * missing + tuple(stride if size != 1 else 0 for size, stride in zip(own, strides, strict=True))


def _one_stride(strides: tuple[int, ...], outer: int, inner: int, shape: tuple[int, ...]) -> bool:
    """Return whether walking both dimensions, the inner one to its end each time, is walking with one stride."""
    return strides[outer] == shape[inner] * strides[inner]
