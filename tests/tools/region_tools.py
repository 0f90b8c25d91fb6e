"""What tests of fused regions share: a region made of a function, and its plan or its run compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from fxprec.kernels.rows.program.layout import spec_of
from fxprec.kernels.rows.program.prices import LoopPrices
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.evaluate import evaluate
from fxprec.kernels.rows.run.plan import RegionPlan
from fxprec.kernels.rows.run.region import FusedRegion, RegionKernels
from fxprec.passes.ops.names import canonical_op

CPU = torch.device("cpu")


def graph_of(function: Callable[..., Any]) -> GraphModule:
    """The graph of a function, as ``fuse`` would put it into a region: it returns a tuple."""
    gm = symbolic_trace(function)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.meta["op"] = canonical_op(node)
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
        gm.recompile()
    return gm


def region_of(
    function: Callable[..., Any], draws: int = 0, name: str = "fused", kernels: RegionKernels = "triton",
    prices: LoopPrices | None = None,
) -> FusedRegion:  # fmt: skip
    """A region that computes a function."""
    return FusedRegion(name, graph_of(function), draws, 0, kernels, prices)


def plan_of(function: Callable[..., Any], *inputs: Tensor, device: torch.device = CPU) -> RegionPlan:
    """What a region derives for these inputs; nothing runs."""
    return make_plan("fused", graph_of(function), [spec_of(x) for x in inputs], device, {})


def wide(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs in float64."""
    return [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]


def in_float64(plan: RegionPlan) -> Callable[..., list[Tensor]]:
    """The plan's forward program in plain torch without any rounding, for inputs in float64; to be differentiated."""
    program = replace(plan.derived.forward, stores=plan.derived.forward.stores[: len(plan.outputs)])

    def run(*inputs: Tensor) -> list[Tensor]:
        values = evaluate(program, plan.layout, inputs, None, 0, torch.float64, rounds=False)
        shaped = [plan.layout.torch_shaped(v, s.columns) for v, s in zip(values, program.stores, strict=True)]
        return [x.reshape(spec.shape) for x, spec in zip(shaped, plan.outputs, strict=True)]

    return run


def run_both(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    run: Callable[..., Any],
    reference: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of ``run`` on the inputs, and of the function on them in float64."""
    results = []
    cotangents: list[Tensor] = []
    for call, given in ((run, inputs), (function, reference or wide(inputs))):
        outputs = call(*given)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not cotangents:
            cotangents = [torch.randn_like(output) for output in outputs if output.requires_grad]
        wanted = [x for x in given if x.requires_grad]
        sources = [output for output in outputs if output.requires_grad]
        found: Sequence[Tensor | None] = ()
        if wanted and sources:
            typed = [c.to(o.dtype) for c, o in zip(cotangents, sources, strict=True)]
            found = torch.autograd.grad(sources, wanted, typed, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
        results.append([output.detach() for output in outputs] + gradients)
    return results[0], results[1]


def check_errors(
    found: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], low: torch.dtype, slack: float
) -> float:
    """Each result errs at most twice as much as torch's ops one by one, or by a rounding; see ``over_eager``.

    Args:
        slack: what results in ``low`` may err by at least, and what are near 0.

    Returns:
        the worst of them over eager's.
    """
    worst = 0.0
    for number, (own, other, right) in enumerate(zip(found, eager, exact, strict=True)):
        assert own.dtype == other.dtype and own.shape == other.shape
        least = slack if own.dtype is low or right.abs().max() < 1e-3 else 2.0**-17
        worst = max(worst, over := error(own, right) / max(error(other, right), least / 2))
        assert over <= 2, f"result {number}: {error(own, right)}, of eager {error(other, right)}"
    return worst


def error(found: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest exact value; NaN and infinities must be at the same places."""
    found, exact = found.double(), exact.double()
    assert found.shape == exact.shape, (found.shape, exact.shape)
    assert torch.equal(found.isnan(), exact.isnan()), "NaN elsewhere"
    finite = exact.isfinite()
    assert torch.equal(found[~finite].nan_to_num(), exact[~finite].nan_to_num()), "infinities elsewhere"
    if not finite.any():
        return 0.0
    scale = exact[finite].abs().max().clamp_min(1e-30)
    return float((found[finite] - exact[finite]).abs().max() / scale)
