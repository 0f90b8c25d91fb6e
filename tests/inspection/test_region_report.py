"""Fused regions in the report."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.inspection.figures import REGION_COLUMNS, RegionReport, region_cells, region_line, regions_of

RUN = RegionReport("fused_add_relu", 3, "triton", "", 3, 2_200, 2_000)
FALLEN = RegionReport("fused_mul_tanh", 2, "aten", "float64 values", 0, 0, 0)
WAITING = RegionReport("fused_add_gelu", 2, "", "not called yet", 0, 0, 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(F.gelu(self.up(x)) * 2, self.up.weight).relu() + 1


def test_the_line_of_the_headline():
    assert region_line([]) == ""
    assert region_line([RUN, RUN]) == "2 fused: 2 triton"
    assert region_line([RUN, FALLEN, WAITING]) == "3 fused: 1 triton, 1 aten, 1 not called yet (float64 values)"


def test_a_row_of_the_table():
    assert region_cells(RUN) == ("fused_add_relu", "3", "triton", "-", "3", "2,200", "1.10")
    assert region_cells(FALLEN) == ("fused_mul_tanh", "2", "aten", "float64 values", "-", "-", "-")
    assert len(REGION_COLUMNS) == len(region_cells(WAITING)) and region_cells(WAITING)[2] == "-"


def test_the_regions_of_a_model():
    model, _ = fxprec.convert(Net(), fuse="aten")
    found = regions_of(fxprec.graph_module(model))
    assert [(region.name, region.path, region.reason) for region in found] == [
        ("fused_gelu_mul", "", "not called yet"),
        ("fused_relu_add", "", "not called yet"),
    ]
    model(torch.randn(4, 8))
    (graph,) = fxprec.report(model).graphs
    assert [(region.path, region.reason) for region in graph.regions] == [("aten", "fuse='aten'")] * 2
    assert [region.nodes for region in graph.regions] == [2, 3]  # with the cast of the output
    rows = {row.node: row for row in graph.rows}
    assert rows["add_f32"].kind == "absorbed" and rows["add_f32"].region == "fused_relu_add"
    assert fxprec.report(model).headline.regions == "2 fused: 2 aten (fuse='aten')"
    assert regions_of(fxprec.graph_module(fxprec.convert(Net()).module)) == ()
