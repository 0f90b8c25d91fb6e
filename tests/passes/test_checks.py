"""Assertions, checks of sizes and whatever else gives no tensor: they compute nothing, and stay in no dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.passes.graph.annotations import notes

_LIBRARY = torch.library.Library("fxprec_checks", "DEF")
_LIBRARY.define("count(SymInt number) -> ()")
_LIBRARY.define("number(SymInt number) -> SymInt")
_LIBRARY.define("shift_(Tensor(a!) x) -> ()")
_LIBRARY.impl("count", lambda number: None, "CompositeExplicitAutograd")
_LIBRARY.impl("number", lambda number: number, "CompositeExplicitAutograd")
_LIBRARY.impl("shift_", lambda x: None, "CompositeExplicitAutograd")


def by_assert(x: Tensor) -> None:
    torch._assert(x.shape[0] > 1, "too few")


def by_value(x: Tensor) -> None:
    torch._assert_async(x.sum() > -1e9)


def by_check(x: Tensor) -> None:
    torch._check(x.shape[0] > 1)


def by_profiler(x: Tensor) -> None:
    with torch.profiler.record_function("here"):
        pass


def by_operator(x: Tensor) -> None:
    torch.ops.fxprec_checks.count(x.shape[0])


def by_number(x: Tensor) -> None:
    torch._check(torch.ops.fxprec_checks.number(x.shape[0]) > 1)


class Checking(nn.Module):
    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.check, self.first, self.second = check, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.check(hidden)
        return self.second(hidden)


@pytest.mark.parametrize("placement", ["mincut", "autocast"])
@pytest.mark.parametrize("how", [{}, {"capture": "dynamo"}, {"example_inputs": (torch.randn(4, 8),)}])
@pytest.mark.parametrize("check", [by_assert, by_value, by_check, by_profiler, by_operator, by_number])
def test_what_gives_no_tensor_stays_in_no_dtype(check: Callable[[Tensor], None], how: Any, placement: Any) -> None:
    torch._dynamo.reset()
    model = fxprec.convert(Checking(check), dtype=torch.bfloat16, placement=placement, **how).module
    for batch in (4, 6):  # the second one makes dynamo's sizes symbolic
        model(torch.randn(batch, 8))
    report = fxprec.report(model)
    stays = {op for stay in report.headline.stays for op in stay.ops}
    assert stays <= {"sum"}, stays
    for row in (row for graph in report.graphs for row in graph.rows if "unknown op" in row.why):
        raise AssertionError(f"{row.op} computes {row.compute}: {row.why}")


def test_an_exported_program_guards_itself() -> None:
    batch = {0: torch.export.Dim("batch", min=2)}
    program = torch.export.export(Checking(by_check), (torch.randn(4, 8),), dynamic_shapes=(batch,), strict=False)
    converted = fxprec.convert(program, dtype=torch.bfloat16).module
    report = fxprec.report(converted)
    assert not report.headline.stays and "metadata_hook" not in str(report.nodes)
    assert converted(torch.randn(5, 8)).dtype is torch.float32


def test_an_unknown_op_that_writes_a_float_still_stays_where_it_is() -> None:
    """It gives nothing, and does compute: it takes the original dtype, and the report says so."""

    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x) * 2
            torch.ops.fxprec_checks.shift_(hidden)
            return hidden

    model = fxprec.convert(Shifting(), (torch.randn(4, 8),), dtype=torch.bfloat16).module
    assert any("fxprec_checks::shift" in stay.ops for stay in fxprec.report(model).headline.stays)


def test_a_check_reads_the_original_dtype() -> None:
    """An assertion about a dtype holds, as it does in the original."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            torch.ops.aten._assert_tensor_metadata(hidden, None, None, torch.float32)
            return self.second(hidden)

    model = fxprec.convert(Typed(), (torch.randn(4, 8),), dtype=torch.bfloat16).module
    model(torch.randn(4, 8))
    (gm,) = fxprec.graphs(model)
    (check,) = [node for node in gm.graph.nodes if notes(node).op.name == "assert_tensor_metadata"]
    assert notes(check).precision.output is None and notes(check.args[0]).precision.output is torch.float32
