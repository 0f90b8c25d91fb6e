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
from fxprec.kernels.rows.row_program import Port
from fxprec.kernels.rows.spec import Spec

if TYPE_CHECKING:
    from fxprec.kernels.rows.plan import Plan

__all__ = ["Finish", "eager_backward", "finished", "finishes", "laid_out"]


@dataclass(frozen=True, slots=True)
class Finish:
    """One input's gradient.

    Attributes:
        stored: number of the tensor that the kernel stored it in; -1: it is among the column sums.
        columns: (first, how many) of these.
        shape: that the columns have in the layout's order; None where that is the input's own.
        order: how these dimensions lie in the input.
        summed: dimensions to sum over.
    """

    spec: Spec
    stored: int
    columns: tuple[int, int] = (0, 0)
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()


def finishes(plan: Plan) -> tuple[Finish, ...]:
    """Of each wanted input."""
    bw = plan.backward_program
    found, offset, number = [], 0, 0
    slots: list[tuple[int, tuple[int, int]]] = []
    for store in bw.program.stores:
        width = bw.program.columns if store.columns else 1
        slots.append((-1, (offset, width)) if store.partial else (number, (0, 0)))
        offset, number = offset + width * store.partial, number + (not store.partial)
    for n, slot in zip(bw.wanted, bw.stored_in, strict=True):
        spec, (stored, columns) = plan.inputs[n], slots[slot]
        given = plan.gradients[slot]
        if given is None:
            shape, order = _columns_of(plan, spec)
            found.append(Finish(spec, stored, columns, shape, order))
        else:
            missing = len(given.shape) - len(spec.shape)
            padded = (1,) * missing + spec.shape
            dims = [d for d, size in enumerate(given.shape) if d < missing or padded[d] == 1 != size]
            found.append(Finish(spec, stored, summed=tuple(dims) if given.shape != spec.shape else ()))
    return tuple(found)


def _columns_of(plan: Plan, spec: Spec) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Columns lie in the layout's order, which may be another than that of the input's dimensions."""
    layout, missing = plan.layout, len(plan.layout.shape) - len(spec.shape)
    dims = [d for d in layout.column_dims if d >= missing and spec.shape[d - missing] != 1]
    if dims == sorted(dims):
        return None, ()
    return tuple(layout.shape[d] for d in dims), tuple(sorted(range(len(dims)), key=dims.__getitem__))


def finished(plan: Plan, made: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each wanted input, in its shape and dtype, from what ``Plan.backward`` gave."""
    partials = plan.backward_launch.partials
    sums = made[-1] if partials is None else made[-1].sum(0) if partials[0] > 1 else made[-1][0]
    found = []
    for each in plan.finishes:
        spec = each.spec
        if each.stored < 0:
            gradient = _shaped(sums.narrow(0, *each.columns), each)
        elif each.summed:
            gradient = made[each.stored].sum(each.summed, keepdim=True, dtype=torch.float32).reshape(spec.shape)
        else:
            gradient = made[each.stored]
        found.append(gradient if gradient.dtype is spec.dtype else gradient.to(spec.dtype))
    return found


def _shaped(columns: Tensor, finish: Finish) -> Tensor:
    if finish.shape is not None:
        columns = columns.reshape(finish.shape).permute(finish.order)
    return columns.reshape(finish.spec.shape)


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
            gradient = _shaped(gradient.reshape(-1), finish)
        else:
            rows, columns = layout.rows, layout.columns if store.columns else 1
            gradient = layout.torch_shaped(gradient.expand(rows, columns), store.columns).sum_to_size(spec.shape)
        gradients.append(gradient.to(spec.dtype) if dtype is torch.float32 else gradient)
    return gradients


def _padded(x: Tensor, spec: Spec) -> Tensor:
    """With the dimensions that a reduction took."""
    return x.reshape(x.shape + (1,) * spec.dropped) if spec.dropped else x
