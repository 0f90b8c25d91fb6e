"""Counts the kernels of a plan and the bytes that they move, beside the fewest bytes that must be moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.spec import Spec

if TYPE_CHECKING:  # Triton is loaded when a plan is made
    from fxprec.kernels.rows.run.kernel import Launch
    from fxprec.kernels.rows.run.loops import Loops
    from fxprec.kernels.rows.run.plan import RegionPlan


def count_kernels(plan: RegionPlan) -> int:
    """Return the launches of a forward and a backward, with second stages of sums, without copies of gradients."""
    bw = plan.derived.backward
    if bw is None:
        return 1
    partials = plan.backward_launch.partials
    return 2 + int(partials is not None and partials[0] > 1) + len(_summed(plan))


def bytes_moved(plan: RegionPlan) -> tuple[int, int]:
    """Return (bytes moved, lower bound) of a forward and a backward.

    The bound reads each tensor once that the computation starts from and writes each result once. Above it are the row
    statistics, the partial sums, gradients in FP32 that are summed afterwards, and what longer rows read again.
    """
    bw = plan.derived.backward
    launch = plan.inference_launch if bw is None else plan.forward_launch
    moved = _moved(launch, plan.derived.forward, plan.inputs, (*plan.outputs, *plan.statistics))
    bound = sum(spec.bytes for spec in (*plan.inputs, *plan.outputs))
    if bw is not None:
        saved = [plan.saved(kind, n)[1] for kind, n in bw.saved]
        given = [plan.outputs[n] for n in bw.cotangents]
        written = [spec for spec in plan.gradients if spec is not None]
        moved += _moved(plan.backward_launch, bw.program, (*saved, *given), written)
        moved += sum(spec.bytes for slot in {*_summed(plan)} if (spec := plan.gradients[slot]) is not None)
        kept = [spec for spec, (kind, _) in zip(saved, bw.saved, strict=True) if kind != "statistic"]
        bound += sum(spec.bytes for spec in (*kept, *given, *(plan.inputs[n] for n in bw.wanted)))
    return moved, bound


def _summed(plan: RegionPlan) -> list[int]:
    """Return the number of the store of each input whose gradient is summed after the kernel."""
    bw = plan.derived.backward
    assert bw is not None
    pairs = [(plan.inputs[n], slot) for n, slot in zip(bw.wanted, bw.stored_in, strict=True)]
    stored = [(own, plan.gradients[slot], slot) for own, slot in pairs]
    return [slot for own, spec, slot in stored if spec is not None and spec.shape != own.shape]


def _moved(launch: Launch | Loops, program: RowProgram, read: Sequence[Spec], written: Sequence[Spec]) -> int:
    """Return the bytes that one launch moves.

    A broadcast tensor is read from the cache after the first time; a long row is read from memory in each pass.
    """
    ports = [port for _, port in program.loads]
    times = [launch.passes if port.rows and port.columns else 1 for port in ports]
    loaded = sum(spec.bytes * count for spec, count in zip(read, times, strict=True))
    return loaded + sum(spec.bytes for spec in written) + 2 * 4 * math.prod(launch.partials or (0,))
