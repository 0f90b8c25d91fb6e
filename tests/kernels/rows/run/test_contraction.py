"""What a backward decides again falls as in the forward: nothing is contracted there, nothing approximated."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_tools
import region_tools as tools
from fxprec.kernels.rows.program.layout import Spec
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


def test_what_decides_is_as_exact_in_both_kernels() -> None:
    """Only the forward stores FP32, for which it divides and exponentiates exactly; the maximum is one of these."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x.float()) / (y.float() + 9)
        return z.amax(-1, keepdim=True) * x, z

    plan = make_plan("fused", tools.graph_of(function), [X, X], tools.CPU, {})
    for launch, _ in plan.launches():
        assert re.search(r" = exp\(", launch.source) and not re.search(r"tl\.exp\(", launch.source)
        assert "tl.div_rn(exp_" in launch.source


def test_a_maximum_that_was_kept_decides_nothing() -> None:
    plan = make_plan("fused", tools.graph_of(lambda x, y: F.softmax(x * y, -1)), [X, X], tools.CPU, {})
    assert not plan.forward_launch.contracts and plan.backward_launch.contracts


@pytest.mark.parametrize("jump", [torch.floor, torch.ceil, torch.trunc, torch.sign])
def test_what_jumps_decides(jump: Any) -> None:
    plan = make_plan("fused", tools.graph_of(lambda x, y: jump(x * 1.3 + y) * y), [X, X], tools.CPU, {})
    assert not plan.forward_launch.contracts and not plan.backward_launch.contracts
