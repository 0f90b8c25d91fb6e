"""Run the row programs of fused regions in the reference's dtype, in which nothing is rounded.

A region's forward stores its outputs and the statistics that its backward starts from, the backward gradients and, of
what does not vary along rows, partial sums of its blocks: here the first block has the whole sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxprec.kernels.rows.run.evaluate import evaluate
from fxprec.kernels.rows.run.gradients import evaluated_backward
from fxprec.kernels.rows.run.ops import plan_of

if TYPE_CHECKING:  # Triton is loaded when a plan is made
    from fxprec.kernels.rows.program.layout import Layout, Spec
    from fxprec.kernels.rows.program.row_program import Store


def region_forward(inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    """Compute ``fxprec::region_forward`` in the dtype of its inputs."""
    known = plan_of(plan)
    specs = (*known.outputs, *(known.statistics if keep else ()))
    program = known.derived.forward
    values = evaluate(program, known.layout, inputs, seeds, seed, _dtype(inputs), rounds=False)
    return [_stored(*each, known.layout) for each in zip(values, program.stores, specs, strict=False)]


def region_backward(
    saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int, plan: int
) -> list[Tensor]:
    """Compute ``fxprec::region_backward`` in the dtype of what it reads."""
    known = plan_of(plan)
    dtype = _dtype((*saved, *cotangents))  # of a sum nothing is saved
    values = evaluated_backward(known, saved, cotangents, seeds, seed, dtype, rounds=False)
    stores, layout = known.backward_program.program.stores, known.layout
    made = [
        _stored(value, store, spec, layout)
        for value, store, spec in zip(values, stores, known.gradients, strict=True)
        if spec is not None
    ]
    sums = [value.reshape(-1) for value, store in zip(values, stores, strict=True) if store.partial]
    if not sums:
        return made
    first = torch.cat(sums)[None]
    blocks, width = known.backward_launch.partials
    return [*made, torch.cat([first, first.new_zeros(blocks - 1, width)])]


def _dtype(read: Sequence[Tensor]) -> torch.dtype:
    return next(x.dtype for x in read if x.is_floating_point())


def _stored(value: Tensor, store: Store, spec: Spec, layout: Layout) -> Tensor:
    """Return rows x columns as the tensor that the kernel stores: smaller where all along a dimension are the same."""
    whole = value.expand(layout.rows, layout.columns if store.columns else 1)
    shaped = layout.torch_shaped(whole, store.columns)
    for dimension, size in enumerate(_padded(spec, shaped.dim())):
        if size == 1:
            shaped = shaped.narrow(dimension, 0, 1)
    return shaped.reshape(spec.shape)


def _padded(spec: Spec, dimensions: int) -> Iterator[int]:
    shape = spec.shape + (1,) * spec.dropped
    return itertools.chain([1] * (dimensions - len(shape)), shape)
