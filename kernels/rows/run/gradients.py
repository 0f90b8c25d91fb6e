"""Turns a backward kernel's stores into a gradient for each input, in its shape and dtype, as ``finish`` describes.

``eager_backward`` is the whole backward in ops that autograd can differentiate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxprec.kernels.rows.program.layout import Spec
from fxprec.kernels.rows.program.row_program import Port
from fxprec.kernels.rows.run.evaluate import evaluate

if TYPE_CHECKING:  # Triton is loaded when a plan is made
    from fxprec.kernels.rows.run.plan import RegionPlan


def finished(plan: RegionPlan, made: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient for each wanted input, in its shape and dtype, from the results of ``RegionPlan.backward``."""
    sums: Sequence[Tensor] = ()
    # Partials of all column sums lie in one tensor: one sum finishes them.
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


def laid_out(plan: RegionPlan, cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the outputs that have one, in the outputs' strides and dtypes, which the kernel expects.

    Args:
        cotangents: one for each output; copied if its strides or dtype differ.
    """
    return [_laid(cotangents[n], plan.outputs[n]) for n in plan.backward_program.cotangents]


def _laid(x: Tensor, spec: Spec) -> Tensor:
    if x.stride() == spec.strides and x.dtype is spec.dtype:
        return x
    return spec.empty(x.device).copy_(x)


def eager_backward(
    plan: RegionPlan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Run the backward in plain torch ops on the saved inputs and outputs, which autograd can differentiate.

    Args:
        cotangents: for each output.
        dtype: to compute in. Gradients come in those of the inputs, except in float64: then they stay in it.
    """
    bw, layout = plan.backward_program, plan.layout
    given = [cotangents[n] for n in bw.cotangents]
    found = evaluated_backward(plan, saved, given, seeds, seed, dtype)
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


def evaluated_backward(
    plan: RegionPlan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
    dtype: torch.dtype, rounds: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Evaluate the backward program (``evaluate``) from the saved inputs and outputs.

    Statistics are computed again from these: saved ones have no autograd history, and in another dtype than theirs a
    maximum would equal none of the values that it is compared with.

    Args:
        cotangents: of the outputs that have one.
    """
    bw = plan.backward_program
    loads, tensors = [], []
    values = [value for value, _ in bw.program.loads[: len(bw.saved)]] + [value for value, _ in bw.also]
    for value, (kind, n), tensor in zip(values, plan.keeps, saved, strict=True):
        if kind != "statistic":
            spec = (plan.inputs if kind == "input" else plan.outputs)[n]
            # ``evaluate`` broadcasts by shape, so the port tells the dtype alone.
            loads.append((value, Port(spec.dtype, True, True)))
            tensors.append(_padded(tensor, spec))
    loads += bw.program.loads[len(bw.saved) :]
    tensors += [_padded(x, plan.outputs[n]) for x, n in zip(cotangents, bw.cotangents, strict=True)]
    return evaluate(replace(bw.program, loads=tuple(loads)), plan.layout, tensors, seeds, seed, dtype, rounds)


def _padded(x: Tensor, spec: Spec) -> Tensor:
    """Return the tensor with the dimensions, of size 1, that a reduction removed."""
    return x.reshape(x.shape + (1,) * spec.dropped) if spec.dropped else x
