"""The model of time beside what was measured: forms of regions' kernels that ``benchmarks.forms`` timed on a device.

A form that spills registers is left out, as the model knows nothing of local memory, and fxprec takes none that does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch

from benchmarks.measure.forms import Case, Operands, cases
from benchmarks.measure.results import RESULTS, load
from benchmarks.predict.compared import Compared
from benchmarks.predict.launches import launches_of
from benchmarks.predict.machines import Machine
from benchmarks.predict.model import predict
from benchmarks.workloads.problems import Setup
from benchmarks.workloads.regions import MODELS, calls, slug
from fxprec.kernels.rows.emit.tiling import Tiling

__all__ = ["compared", "forms_of"]

#: Forms of a kernel that are predicted, where more were measured: every so many, by their times.
_MOST: Final = 24


def forms_of(kernel: dict[str, Any]) -> list[tuple[float, Tiling]]:
    """Of a measured kernel times and forms, from the fastest to the slowest, the fastest and the slowest among them."""
    rows = sorted(kernel["forms"])
    if len(rows) > _MOST:
        rows = [rows[round(n * (len(rows) - 1) / (_MOST - 1))] for n in range(_MOST)]
    return [
        (us, Tiling(kernel["kind"], rows, block, warps, bool(resident), stages, resident or 4))
        for us, rows, block, warps, stages, resident, _ in rows
    ]


def compared(setup: Setup, machine: Machine, device: str, dtype: str, models: Sequence[str] = ()) -> list[Compared]:
    """Predict the forms of all kernels that a device's files hold, in a process that pretends the machine."""
    found = []
    for model in models or [name for name in MODELS if (RESULTS / device / f"{_file(name, dtype)}.json").is_file()]:
        made = cases(calls(model, MODELS[model], setup), setup.device)
        known = {(case.plan.name, case.direction): case for case in made}
        for kernel in load(_file(model, dtype), device)["kernels"]:
            case = known.get((kernel["region"], kernel["pass"]))
            if case is not None:
                times, spilled = _times(case, forms_of(kernel), machine)
                found.append(Compared(model, kernel["region"], kernel["pass"], times, spilled))
    return found


def _times(
    case: Case, forms: Sequence[tuple[float, Tiling]], machine: Machine
) -> tuple[tuple[tuple[float, float], ...], int]:
    """Measured and predicted microseconds of forms that spill nothing, and how many do."""
    from pretended_device import BadLaunchError

    operands, times = _operands(case), []
    for us, form in forms:
        launch = case.launch(form)
        try:
            (one, *_) = launches_of(functools.partial(operands.run, launch))
        except BadLaunchError:
            continue
        times.append((us, 1e6 * predict(one.kernel, machine).seconds))
    return tuple(times), len(forms) - len(times)


def _file(model: str, dtype: str) -> str:
    return f"forms-{dtype}-{slug(model)}"


def _operands(case: Case) -> Operands:
    """Of memory that nobody has written."""
    plan = case.plan
    inputs = [spec.empty(plan.device) for spec in plan.inputs]
    seeds = torch.zeros(8, dtype=torch.int64, device=plan.device)
    if case.direction == "forward":
        return Operands(case, inputs, (), seeds)
    made = plan.forward(inputs, seeds, 0, True)
    cotangents = [plan.outputs[n].empty(plan.device) for n in plan.backward_program.cotangents]
    return Operands(case, [[*inputs, *made][n] for n in plan.kept], cotangents, seeds)
