"""Fused regions in an audit: kernels have a reference, columns add up, and a region opens into its ops and a rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.kernels.rows.run.plan import number
from fxprec.model.conversion import conversion_of
from fxprec.numerics import Ledger, audit
from fxprec.tape.exact_ops import region_backward, region_forward
from kernel_tools import DEVICES, run_in_the_interpreter

cases = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Norms(nn.Module):
    """A bias and a gelu to a residual, a layer norm, and a part that no region has."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 5), nn.LayerNorm(8)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.drop(F.gelu(self.up(x))) + x))


class Broadcasts(nn.Module):
    """Values that vary along rows only, along columns only, and along one of two row dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x.view(3, -1, 8)) * self.gain + self.shift
        return (h - h.amax(-1, keepdim=True)).exp().mean(1) * h.sum((1, 2))[:, None]


class Scaled(nn.Module):
    """A backward that starts from nothing that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x.view(3, 8, 2, 2)) * 3).mean((2, 3)))


MODELS: dict[str, Any] = {
    "norms": Norms,
    "dropout": lambda: Norms(0.4),
    "broadcasts": Broadcasts,
    "scaled": Scaled,
}


def audited(
    name: str, device: str, gradients: bool = False, reference: torch.dtype | None = None
) -> tuple[nn.Module, Ledger]:
    torch.manual_seed(0)
    model, _ = fxprec.convert(MODELS[name]().to(device), dtype=torch.bfloat16, fuse=True)
    x, y = (
        torch.randn(12, 8, device=device),
        torch.randint(5, (3 if name in ("broadcasts", "scaled") else 12,), device=device),
    )
    return model, audit(model, [(x, y)], F.cross_entropy, gradients=gradients, reference=reference)


@cases
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("reference", "digits"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_columns_add_up_with_kernels(
    device: str, name: str, gradients: bool, reference: torch.dtype, digits: float
) -> None:
    """To the digits of the reference.

    FP32 rounds an adjoint, by 2^-24 of it, each time another reader's part is added to it: what an op pulls back and
    what the adjoints of its inputs get of that differ by so much. Sixteen such roundings are 1e-6, the six digits of
    docs/numerics_mathematics.md.
    """
    model, ledger = audited(name, device, gradients, reference)
    (sample,) = ledger.samples
    assert {region.path for region in fxprec.report(model).graphs[0].regions} == {"triton"}
    regions = [row for row in ledger.rows if row.op == "fused_region"]
    assert regions and any(row.rounding for row in regions)
    assert sample.measured and abs(sample.explained - sample.measured) <= digits * abs(sample.measured)
    assert all(row.local_error < 2**-6 for row in regions), "its reference is the same function"
    assert not ledger.remarks and all(abs(row.bend) < 0.01 * abs(sample.measured) for row in ledger.rows)


@cases
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_of_a_kernel_belongs_to_its_region(device: str, name: str) -> None:
    _, ledger = audited(name, device, gradients=True)
    backward = [row for row in ledger.rows if row.backward]
    assert any(row.op == "fused_region" and row.graph == 0 and row.source for row in backward)
    assert not any(row.node.startswith("_Run") for row in backward)


@cases
def test_a_region_opens(device: str) -> None:
    _, ledger = audited("norms", device)
    (region,) = (row for row in ledger.rows if row.op == "fused_region")
    parts = {part.op: part.rounding for part in region.parts}
    assert {"gelu", "add", "layer_norm", "kernel, rest"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(region.rounding, rel=1e-9)
    assert all(parts[name] for name in ("gelu", "kernel, rest")), (
        "op by op the gelu is rounded, in the kernel it is not"
    )
    _, ledger = audited("dropout", device)
    (region,) = (row for row in ledger.rows if row.op == "fused_region")
    assert region.parts == (), "ops would draw other random numbers"


@cases
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_what_the_kernels_compute(device: str, name: str) -> None:
    """In FP32, where the kernels round nothing: forward with statistics, and gradients."""
    torch.manual_seed(0)
    model, _ = fxprec.convert(MODELS[name]().to(device), dtype=torch.bfloat16, fuse=True)
    model(torch.randn(12, 8, device=device))
    gm = conversion_of(model).captured[0].gm
    regions = [module for module in gm.modules() if isinstance(getattr(module, "plans", None), tuple)]
    assert regions
    for region in regions:
        for plan in region.plans:
            inputs = [torch.randn(spec.shape, device=device).to(spec.dtype) for spec in plan.inputs]
            seeds = torch.randint(2**31, (8,), device=device) if region.draws else None
            made = plan.forward(inputs, seeds, region.seed, True)
            exact = region_forward([x.double() for x in inputs], seeds, region.seed, True, number(plan))
            assert [x.shape for x in made] == [x.shape for x in exact]
            for own, reference in zip(made, exact, strict=True):
                torch.testing.assert_close(own.double(), reference, rtol=2**-7, atol=2**-7)
            saved = [(*inputs, *made)[place] for place in plan.saved_positions]
            given = [torch.randn(spec.shape, device=device).to(spec.dtype) for spec in plan.outputs]
            given = [given[number] for number in plan.backward_program.cotangents]
            found = plan.finished(plan.backward(saved, given, seeds, region.seed))
            wide = [x.double() if x.is_floating_point() else x for x in saved]
            stored = region_backward(wide, [x.double() for x in given], seeds, region.seed, number(plan))
            for own, reference in zip(found, plan.finished(stored), strict=True):
                torch.testing.assert_close(own.double(), reference.double(), rtol=2**-6, atol=2**-6)
