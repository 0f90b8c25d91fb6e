"""From what a backward kernel stores to a gradient for each input, in its shape and dtype.

Sums over rows end here: column partials of the kernel's programs are added up, and what varies along some of several
row dimensions is summed over the others. ``eager_backward`` is the whole backward in ops that autograd knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxprec.kernels.rows.evaluate import evaluate
from fxprec.kernels.rows.layout import Layout
from fxprec.kernels.rows.row_program import Backward, Port
from fxprec.kernels.rows.spec import Spec

if TYPE_CHECKING:
    from fxprec.kernels.rows.plan import Plan

__all__ = ["Finish", "eager_backward", "finished", "finishes", "laid_out", "partial_widths"]


@dataclass(frozen=True, slots=True)
class Finish:
    """One input's gradient.

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
        """The gradient in the input's shape."""
        if self.summed:
            x = x.sum(self.summed, keepdim=True, dtype=torch.float32)
        elif self.shape is not None:
            x = x.reshape(self.shape).permute(self.order)
        return x.reshape(self.spec.shape)


def partial_widths(bw: Backward) -> tuple[int, ...]:
    """How many columns each column sum has."""
    return tuple(bw.program.columns if store.columns else 1 for store in bw.program.stores if store.partial)


def finishes(
    bw: Backward, inputs: Sequence[Spec], gradients: Sequence[Spec | None], layout: Layout
) -> tuple[Finish, ...]:
    """Of each wanted input. ``gradients``: as the kernel stores them, for each of its stores."""
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
    """Columns lie in the layout's order, which may be another than that of the input's dimensions."""
    missing = len(layout.shape) - len(spec.shape)
    dims = [d for d in layout.column_dims if d >= missing and spec.shape[d - missing] != 1]
    if dims == sorted(dims):
        return None, ()
    return tuple(layout.shape[d] for d in dims), tuple(sorted(range(len(dims)), key=dims.__getitem__))


def finished(plan: Plan, made: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each wanted input, in its shape and dtype, from what ``Plan.backward`` gave."""
    sums: Sequence[Tensor] = ()
    if plan.backward_launch.partials is not None:
        partials = made[-1]
        total = partials.sum(0) if len(partials) > 1 else partials.view(-1)
        sums = total.split_with_sizes(plan.partial_widths)
    found = []
    for each in plan.finishes:
        gradient = sums[each.stored] if each.partial else made[each.stored]
        if not each.plain:
            gradient = each.shaped(gradient)
        dtype = each.spec.dtype
        found.append(gradient if gradient.dtype is dtype else gradient.to(dtype))
    return found


def laid_out(plan: Plan, cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the outputs that have one, in the outputs' strides, as the kernel walks them.

    :param cotangents: for each output; copied where it lies otherwise.
    """
    return [_laid(cotangents[n], plan.outputs[n]) for n in plan.backward_program.cotangents]


def _laid(x: Tensor, spec: Spec) -> Tensor:
    if x.stride() == spec.strides and x.dtype is spec.dtype:
        return x
    return spec.empty(x.device).copy_(x)


def eager_backward(
    plan: Plan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """The backward in plain torch ops on the saved inputs and outputs, which autograd can differentiate.

    Statistics are computed again from these: as saved they have no history.

    :param cotangents: for each output.
    :param dtype: to compute in. Gradients come in those of the inputs, except in float64: then they stay in it.
    """
    bw, layout = plan.backward_program, plan.layout
    loads, tensors = [], []
    values = [value for value, _ in bw.program.loads[: len(bw.saved)]] + [value for value, _ in bw.also]
    for value, (kind, n), tensor in zip(values, plan.keeps, saved, strict=True):
        if kind != "statistic":
            spec = (plan.inputs if kind == "input" else plan.outputs)[n]
            loads.append((value, Port(spec.dtype, True, True)))
            tensors.append(_padded(tensor, spec))
    loads += bw.program.loads[len(bw.saved) :]
    tensors += [_padded(cotangents[n], plan.outputs[n]) for n in bw.cotangents]
    found = evaluate(replace(bw.program, loads=tuple(loads)), layout, tensors, seeds, seed, dtype)
    gradients = []
    for n, slot, finish in zip(bw.wanted, bw.stored_in, plan.finishes, strict=True):
        spec, gradient, store = plan.inputs[n], found[slot], bw.program.stores[slot]
        if store.partial:
            gradient = finish.shaped(gradient.reshape(-1))
        else:
            rows, columns = layout.rows, layout.columns if store.columns else 1
            gradient = layout.torch_shaped(gradient.expand(rows, columns), store.columns).sum_to_size(spec.shape)
        gradients.append(gradient.to(spec.dtype) if dtype is torch.float32 else gradient)
    return gradients


def _padded(x: Tensor, spec: Spec) -> Tensor:
    """With the dimensions that a reduction took."""
    return x.reshape(x.shape + (1,) * spec.dropped) if spec.dropped else x
