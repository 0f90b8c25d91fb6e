"""Describes the step from a backward kernel's stores to the gradient of each input.

Sums over rows end after the kernel: column partials of its programs are added up, and the gradient of an input that
varies along some of several row dimensions is summed over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.kernels.rows.program.layout import Layout
from fxprec.kernels.rows.program.row_program import Backward
from fxprec.kernels.rows.program.spec import Spec


@dataclass(frozen=True, slots=True)
class Finish:
    """Last step of one input's gradient, after the backward kernel.

    Attributes:
        partial: whether it is among the column sums.
        stored: its number there, or among the tensors that the kernel stored.
        plain: it has the input's shape.
        shape: that the columns have in the layout's order; None where that is the input's own.
        order: how these dimensions lie in the input.
        summed: dimensions to sum over.
    """

    spec: Spec
    partial: bool
    stored: int
    plain: bool
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()

    def shaped(self, x: Tensor) -> Tensor:
        """Return the gradient in the input's shape, summed over the dimensions that the input lacks."""
        if self.summed:
            x = x.sum(self.summed, keepdim=True, dtype=torch.float32)
        elif self.shape is not None:
            x = x.reshape(self.shape).permute(self.order)
        return x.reshape(self.spec.shape)


def finishes(
    bw: Backward, inputs: Sequence[Spec], gradients: Sequence[Spec | None], layout: Layout
) -> tuple[Finish, ...]:
    """Return the last step of each wanted input's gradient. ``gradients``: specs of the kernel's stores."""
    partial = [store.partial for store in bw.program.stores]
    numbers = [partial[:slot].count(own) for slot, own in enumerate(partial)]
    found = []
    for n, slot in zip(bw.wanted, bw.stored_in, strict=True):
        spec, given = inputs[n], gradients[slot]
        if given is None:
            shape, order = _order(spec, layout)
            plain = shape is None and len(spec.shape) == 1
            found.append(Finish(spec, True, numbers[slot], plain, shape, order))
        else:
            padded = (1,) * (len(given.shape) - len(spec.shape)) + spec.shape
            summed = tuple(d for d, size in enumerate(given.shape) if padded[d] == 1 != size)
            found.append(Finish(spec, False, numbers[slot], given.shape == spec.shape, summed=summed))
    return tuple(found)


def _order(spec: Spec, layout: Layout) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the sizes of the columns' dimensions as stored (None: in the input's order), and their permutation."""
    missing = len(layout.shape) - len(spec.shape)
    dims = [d for d in layout.column_dims if d >= missing and spec.shape[d - missing] != 1]
    if dims == sorted(dims):
        return None, ()
    return tuple(layout.shape[d] for d in dims), tuple(sorted(range(len(dims)), key=dims.__getitem__))
