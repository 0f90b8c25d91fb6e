"""Other forms of a fused region's kernels: which there are, how each is built without changing what fxprec builds.

::

    for case in cases(calls("GPT-2 small", make, setup), device):
        present, *others = launches(case)          # differ in rows, block, warps, stages, resident programs
        operands = Operands.of(case)
        operands.run(present)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.workloads.regions import Call
from fxprec.kernels.rows.emit.tiling import Tiling
from fxprec.kernels.rows.program.layout import Spec, spec_of
from fxprec.kernels.rows.program.values import Declined
from fxprec.kernels.rows.run import kernel
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.kernel import Launch
from fxprec.kernels.rows.run.plan import Derived, RegionPlan

__all__ = ["Case", "Direction", "Operands", "candidates", "cases", "launches"]

Direction: TypeAlias = Literal["forward", "backward"]

#: Elements of a thread; a form that exists may lie beyond.
_EACH: Final = (8, 32)
_LONGEST: Final = 16384
_STAGES: Final = (1, 3)


@dataclass(frozen=True)
class Case:
    """The forward or the backward kernel of a region at given shapes."""

    plan: RegionPlan
    direction: Direction

    @property
    def moved(self) -> int:
        """Bytes that it must move: each tensor that it reads or writes, once; statistics of a forward do not count."""
        plan = self.plan
        if self.direction == "forward":
            return sum(spec.bytes for spec in (*plan.inputs, *plan.outputs))
        program = plan.backward_program
        read = [plan.named_saved(kind, n)[1] for kind, n in program.saved] + [
            plan.outputs[n] for n in program.cotangents
        ]
        return sum(spec.bytes for spec in (*read, *plan.gradients) if spec is not None)

    def with_launch(self, launch: Launch) -> RegionPlan:
        """The plan, but that it runs this launch."""
        changed = copy.copy(self.plan)
        changed.__dict__[f"{self.direction}_launch"] = launch
        return changed

    def launch(self, form: Tiling | None = None) -> Launch:
        """As fxprec makes it, or in another form."""
        changed = copy.copy(self.plan)
        changed.__dict__.pop(f"{self.direction}_launch", None)
        # Row programs of its own: plans that share them run one compiled kernel, whatever their forms.
        changed.derived = Derived(self.plan.derived.forward, self.plan.derived.backward)
        with contextlib.nullcontext() if form is None else _formed(form):
            made = changed.forward_launch if self.direction == "forward" else changed.backward_launch
        assert isinstance(made, Launch)
        return made


def cases(found: Iterable[Call], device: torch.device) -> list[Case]:
    """Forward and backward of regions that were called; those that no kernel serves are left out."""
    made: list[Case] = []
    for region, given in found:
        count = len(region.graph_module.graph.find_nodes(op="placeholder"))
        specs = [spec_of(x) for x in given[:count]]  # without seeds
        try:
            plan = make_plan(region.name, region.graph_module, specs, device, {}, False)
            plan.launches()  # made now, since they may be declined as well
        except Declined:
            continue
        if plan.derived.backward is not None:
            made += [Case(plan, "forward"), Case(plan, "backward")]
    return made


def launches(case: Case) -> list[Launch]:
    """The present one first, then those of all candidates, none of them twice."""
    present = case.launch()
    found: dict[object, Launch] = {}
    for launch in (present, *(case.launch(form) for form in candidates(present.tiling, case.plan.layout.columns))):
        found.setdefault((launch.source, launch.tiling.warps, launch.grid), launch)
    return [*found.values()]


def candidates(present: Tiling, columns: int) -> Iterator[Tiling]:
    """Forms around one that serves, of the same kind: half and double tiles, a quarter to four times the warps."""
    widest = 1 << (columns - 1).bit_length()
    rows = (1,) if present.kind in ("flat", "loop") else _around(present.rows, 2)
    blocks = (present.block,) if present.kind == "tile" else _around(present.block, 2, widest)
    warps = _around(present.warps, 4, 32)
    stages = (present.stages,) if present.kind == "loop" or not present.persistent else _STAGES
    resident = _around(present.resident, 2) if present.persistent else (present.resident,)
    for row, block, warp, stage, each in itertools.product(rows, blocks, warps, stages, resident):
        if row * block <= _LONGEST and _EACH[0] <= row * block / (32 * warp) <= _EACH[1]:
            yield replace(present, rows=row, block=block, warps=warp, stages=stage, resident=each)


def _around(value: int, factor: int, most: int = _LONGEST) -> list[int]:
    """Powers of two times the value, at most ``factor`` from it; the value itself, whatever ``most`` is."""
    shifts = range(1 - factor.bit_length(), factor.bit_length())
    near = {value << shift if shift >= 0 else value >> -shift for shift in shifts}
    return sorted({each for each in near if 1 <= each <= most} | {value})


@contextlib.contextmanager
def _formed(form: Tiling) -> Iterator[None]:
    """Launches that are prepared within have this form, and as many resident programs as it says, however many rows."""
    with patch.object(kernel, "tiling_of", lambda *_: form), patch.object(kernel, "_resident", _resident):
        yield


def _resident(device: torch.device, rows: int, each: int) -> int:
    on_device = device.type == "cuda" and torch.cuda.is_available()
    return each * (torch.cuda.get_device_properties(device).multi_processor_count if on_device else 1)


@dataclass(frozen=True)
class Operands:
    """Random tensors for a case: of a forward the inputs, of a backward what was kept, and the cotangents."""

    case: Case
    read: Sequence[Tensor]
    cotangents: Sequence[Tensor]
    seeds: Tensor

    @classmethod
    def of(cls, case: Case) -> Operands:
        """Runs the forward where the case is a backward."""
        plan = case.plan
        inputs = [_random(spec, plan.device) for spec in plan.inputs]
        seeds = torch.zeros(8, dtype=torch.int64, device=plan.device)
        if case.direction == "forward":
            return cls(case, inputs, (), seeds)
        made = plan.forward(inputs, seeds, 0, True)
        cotangents = [_random(plan.outputs[n], plan.device) for n in plan.backward_program.cotangents]
        return cls(case, [[*inputs, *made][n] for n in plan.saved_positions], cotangents, seeds)

    def run(self, launch: Launch) -> list[Tensor]:
        """What the kernel stores."""
        plan = self.case.with_launch(launch)
        if self.case.direction == "forward":
            return plan.forward(self.read, self.seeds, 0, True)
        return plan.backward(self.read, self.cotangents, self.seeds, 0)

    def differs(self, launch: Launch, wanted: Sequence[Tensor]) -> str:
        """How a launch's results differ from others beyond rounding; "": they do not."""
        found = self.run(launch)
        partials = self.case.direction == "backward" and launch.partials is not None
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            last = partials and number == len(found) - 1
            one, other = (x.float().sum(0) if last else x.float() for x in (one, other))
            error = float((one - other).norm() / other.norm().clamp_min(1e-30))
            if not error <= torch.finfo(torch.bfloat16).eps:
                return f"result {number} is off by {error:.1e}"
        return ""


def _random(spec: Spec, device: torch.device) -> Tensor:
    x = spec.empty(device)
    return x.normal_() if spec.dtype.is_floating_point else x.zero_()
