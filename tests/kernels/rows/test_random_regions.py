"""Random regions against torch: as kernels in low precision, as plain torch in float64 to the second derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, reject, settings
from torch import Tensor

import kernel_tools
import random_regions as random
import region_tools as tools
from fxprec.kernels.launch.philox import draw_seeds
from fxprec.kernels.rows.program.values import Declined
from fxprec.kernels.rows.run.evaluate import eager_backward, evaluate

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*lossy conversion.*:UserWarning"),
]
_SETTINGS: Any = {
    "deadline": None, "derandomize": True, "database": None, "report_multiple_bugs": False,
    "suppress_health_check": [*HealthCheck], "phases": (Phase.generate, Phase.shrink),
}  # fmt: skip
#: Why a region may run as its ops.
_REASONS = (
    "not evenly spaced", "not the innermost", "vary along all the rows", "broadcast afterwards", "meets another",
    "do not show", "line up",
)  # fmt: skip


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@on_devices
@settings(max_examples=30, **_SETTINGS)
@given(made=random.regions(casts=True))
def test_kernels_are_as_exact_as_the_ops(device: str, made: Any) -> None:
    low = torch.float16
    note(f"{made.source}{made.inputs}")
    inputs = made.tensors(low, device)
    region = tools.region_of(made.function(random.dropped), made.draws)
    seeds = draw_seeds(made.draws, inputs[0].device) if made.draws else None
    extra = () if seeds is None else (seeds,)
    region(*inputs, *extra)
    if region.path == "aten":
        assert any(words in region.reason for words in _REASONS), region.reason
        return
    function = made.function(random.with_masks(region.plans[-1], seeds))
    torch.manual_seed(1)
    found, exact = tools.run_both(function, inputs, lambda *given: region(*given, *extra))
    torch.manual_seed(1)
    try:
        eager, _ = tools.run_both(function, inputs, function)
    except RuntimeError as error:  # layer_norm on CUDA refuses weights of another dtype than x's
        assert device == "cuda" and "expected scalar type" in str(error), error
        reject()
    tools.check_errors(found, eager, exact, low, 2.0**-9)


@pytest.mark.slow
@pytest.mark.skipif(kernel_tools.INTERPRETING, reason="runs once, outside of the interpreter")
@settings(max_examples=80, **_SETTINGS)
@given(made=random.regions(casts=False))
def test_programs_are_torchs_in_float64(made: Any) -> None:
    note(f"{made.source}{made.inputs}")
    inputs = made.tensors(torch.float32)
    try:
        plan = tools.plan_of(made.function(random.dropped), *inputs)
    except Declined as reason:
        assert any(words in str(reason) for words in _REASONS), str(reason)
        return
    seeds = draw_seeds(made.draws, tools.CPU) if made.draws else None
    function = made.function(random.with_masks(plan, seeds))
    given = tools.wide(inputs)
    exact = function(*given)
    values = evaluate(plan.derived.forward, plan.layout, inputs, seeds, 0, dtype=torch.float64)
    for value, store, right in zip(values, plan.derived.forward.stores, exact, strict=False):
        assert close(plan.layout.torch_shaped(value, store.columns).reshape(right.shape), right)
    wanted = [x for x in given if x.requires_grad]
    if plan.derived.backward is None:
        assert not wanted
        return
    cotangents = [torch.randn_like(right).requires_grad_() for right in exact]
    right = _gradients(exact, wanted, cotangents)
    saved = [{"input": given, "output": exact}.get(kind, [right[0]] * 99)[n] for kind, n in plan.saved_sources]
    own = eager_backward(plan, saved, cotangents, seeds, 0, dtype=torch.float64)
    for found, other in zip(own, right, strict=True):
        assert close(found, other)
    for found, other in zip(_second(own, [*wanted, *cotangents]), _second(right, [*wanted, *cotangents]), strict=True):
        assert close(found, other, 1e-8)


def _gradients(outputs: Any, inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Zero where nothing depends on an input."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    sources, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(sources, inputs, given, allow_unused=True, create_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def _second(gradients: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    weights = [torch.linspace(0.5, 1.5, g.numel(), dtype=g.dtype).reshape(g.shape) for g in gradients]
    return _gradients(gradients, inputs, weights)


def close(own: Tensor, right: Tensor, tolerance: float = 1e-10) -> bool:
    scale = max(float(right.detach().abs().max()), 1e-3)
    return own.shape == right.shape and float((own - right).detach().abs().max()) <= tolerance * scale
