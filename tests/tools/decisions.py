"""What a region's two kernels decide of the same values: masks of a forward, and those that its backward makes again.

A backward starts from what is in memory and computes the rest once more. A comparison that it comes to on the way, a
ReLU's sign, the columns that hold a maximum, must fall as it fell in the forward, though the compiler may have rounded
otherwise there. To look at them, both kernels are made with these comparisons among their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.rows.program.layout import Spec, dense_strides
from fxprec.kernels.rows.program.row_program import RowProgram, Store
from fxprec.kernels.rows.program.values import COMPARISONS, DECIDING, REDUCTIONS, Value, walk
from fxprec.kernels.rows.run.kernel import Launch
from fxprec.kernels.rows.run.plan import RegionPlan

#: Results of these are bool; of the rest few, and small: bfloat16 holds them.
_TRUTHS: Final = COMPARISONS | {"keep"}
_JUMPS: Final = (DECIDING | {"keep"}) - REDUCTIONS - {"maximum", "minimum"}


def made_again(plan: RegionPlan) -> list[Value]:
    """What the backward decides of the forward's inputs alone; dropouts are among it."""
    inputs = {value for value, _ in plan.derived.forward.loads}
    return [
        value
        for value in plan.backward_program.program.values
        if value.op in _JUMPS and value.rows and {v for v in walk([value]) if v.op == "load"} <= inputs
    ]


def decided(
    plan: RegionPlan, inputs: Sequence[Tensor], seeds: Tensor | None,
    forward: AbstractContextManager[Any], backward: AbstractContextManager[Any], **changes: Any,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """What each kernel decided, of each of ``made_again``, each launched within a context of its own.

    Args:
        changes: of both launches, such as ``contracts=True``.
    """
    values = made_again(plan)
    specs = [_spec(plan, value) for value in values]
    with forward:
        made = plan.empty_results(with_statistics=True)
        firsts = [spec.empty(plan.device) for spec in specs]
        launch = _launch(plan, False, values, specs, changes)
        launch([*inputs, *made, *firsts], seeds, 0, None)
    kept = [[*inputs, *made][place] for place in plan.saved_positions]
    bw = plan.backward_program
    cotangents = [torch.randn_like(made[n]) for n in bw.cotangents]
    with backward:
        gradients = [spec.empty(plan.device) for spec in plan.gradients if spec is not None]
        seconds = [spec.empty(plan.device) for spec in specs]
        launch = _launch(plan, True, values, specs, changes)
        partials = torch.empty(launch.partials, dtype=torch.float32) if launch.partials else None
        launch([*kept[: len(bw.saved)], *cotangents, *gradients, *seconds], seeds, 0, partials)
    return firsts, seconds


def _spec(plan: RegionPlan, value: Value) -> Spec:
    columns = plan.layout.column_dims
    sizes = tuple(1 if d in columns and not value.columns else size for d, size in enumerate(plan.layout.shape))
    dtype = torch.bool if value.op in _TRUTHS else torch.bfloat16
    return Spec(sizes, dense_strides(plan.layout, sizes), dtype)


def _launch(
    plan: RegionPlan, backward: bool, values: Sequence[Value], specs: Sequence[Spec], changes: dict[str, Any]
) -> Launch:
    """The plan's own launch, with more results."""
    stores = [Store(v, spec.dtype, True, v.columns) for v, spec in zip(values, specs, strict=True)]
    names = [(f"decided_{n}", spec) for n, spec in enumerate(specs)]

    def more(program: RowProgram) -> RowProgram:
        return replace(program, stores=(*program.stores, *stores))

    write: list[tuple[str, Spec | None]]
    if backward:
        bw = plan.backward_program
        read = [plan.named_saved(kind, n) for kind, n in bw.saved]
        read += [(f"grad_{n}", plan.outputs[n]) for n in bw.cotangents]
        write = [(f"gradient_{n}", spec) for n, spec in enumerate(plan.gradients)]
        launch = plan._prepared("decided again", "decided_again", more(bw.program), read, [*write, *names])
    else:
        read = [*zip(plan.input_names, plan.inputs, strict=True)]
        write = [(f"made_{n}", spec) for n, spec in enumerate((*plan.outputs, *plan.statistics))]
        launch = plan._prepared("decided", "decided", more(plan.derived.forward), read, [*write, *names])
    assert isinstance(launch, Launch)
    return replace(launch, **changes)
