"""Kernels whose backward decides again what the forward decided are compiled without contracting products and sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_tools
import region_tools as tools
from fxprec.kernels.rows.program.spec import Spec
from fxprec.kernels.rows.run.derive import make_plan

X = Spec((64, 48), (48, 1), torch.bfloat16, True)


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return x.float() * 1.3 + y.float() * 0.7 + (x * y).float() * 0.1


CASES: dict[str, tuple[Any, bool]] = {
    "maximum of a row": (lambda x, y: mixed(x, y) - mixed(x, y).amax(-1, keepdim=True), False),
    "minimum of a row": (lambda x, y: mixed(x, y) - mixed(x, y).amin(-1, keepdim=True), False),
    "mask": (lambda x, y: F.relu(mixed(x, y)) * 2, False),
    "larger of two": (lambda x, y: torch.maximum(mixed(x, y), x.float()) * 2, False),
    "nothing decided": (lambda x, y: torch.tanh(mixed(x, y)) * 2, True),
}


@kernel_tools.compiles
@pytest.mark.parametrize("case", CASES)
def test_where_something_is_decided_no_product_is_contracted(case: str) -> None:
    function, contracts = CASES[case]
    plan = make_plan("fused", tools.graph_of(function), [X, X], tools.CPU, {})
    for launch, dtypes in plan.launches():
        assert launch.contracts is contracts
        ptx = kernel_tools.compiled_launch(launch, dtypes, 90).ptx
        assert ("fma.rn.f32" in ptx) is contracts, launch.name
