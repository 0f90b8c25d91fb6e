"""Random regions as compiled loops on a CPU, in bfloat16 against float64: as exact as torch's ops one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, note, settings

import random_regions as random
import region_tools as tools
from fxprec.kernels.cpu import compiled_attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not()),
]
#: Why a region may run as its ops.
_REASONS = (
    "not evenly spaced", "not the innermost", "vary along all the rows", "broadcast afterwards", "meets another",
    "do not show", "line up", "whose random numbers are torch's", "a comparison of what libm computes",
)  # fmt: skip


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
    suppress_health_check=[*HealthCheck], phases=(Phase.generate, Phase.shrink),
)  # fmt: skip
@given(made=random.regions(casts=True))
def test_loops_are_as_exact_as_the_ops(made: Any) -> None:
    low = torch.bfloat16
    note(f"{made.source}{made.inputs}")
    inputs = made.tensors(low, "cpu")
    function = made.function(lambda x, number: F.dropout(x, random.P, True), low)
    region = tools.region_of(function, made.draws, kernels="loops")
    region(*inputs)
    if region.path == "aten":
        assert any(words in region.reason for words in _REASONS), region.reason
        return
    torch.manual_seed(1)
    found, exact = tools.run_both(function, inputs, region)
    torch.manual_seed(1)
    eager, _ = tools.run_both(function, inputs, function)
    tools.check_errors(found, eager, exact, low, 2.0**-8)
