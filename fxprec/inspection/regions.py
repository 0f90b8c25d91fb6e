"""Report on fused regions: what each holds, how it ran last and why, and what it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch.fx import GraphModule

from fxprec.kernels.rows.run.plan import bytes_moved, count_kernels
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.subgraphs import every_graph

REGION_COLUMNS: Final = ("region", "nodes", "path", "why", "kernels", "bytes moved", "x bound")


@dataclass(frozen=True, slots=True)
class RegionReport:
    """Fused region of a graph.

    Attributes:
        nodes: how many it holds.
        path: what ran last: "triton", "loops", "aten"; "" before the first call.
        reason: why that one.
        kernels: launches forward and backward, the second stages of column sums among them; 0 without kernels.
        moved: bytes that these read and write for the last inputs.
        bound: bytes if each input were read once and each output written once.
    """

    name: str
    nodes: int
    path: str
    reason: str
    kernels: int
    moved: int
    bound: int


def regions_of(gm: GraphModule) -> tuple[RegionReport, ...]:
    """Return the regions of a graph and of the bodies it calls."""
    found = []
    for graph in every_graph(gm):
        for node in graph.graph.find_nodes(op="call_module"):
            region = graph.get_submodule(str(node.target))
            if isinstance(region, FusedRegion):
                found.append(_report(region))
    return tuple(found)


def _report(region: FusedRegion) -> RegionReport:
    nodes = len([node for node in region.graph_module.graph.nodes if node.op not in ("placeholder", "output")])
    plan = region.plans[-1] if region.plans and region.path in ("triton", "loops") else None
    count, moved, bound = (count_kernels(plan), *bytes_moved(plan)) if plan is not None else (0, 0, 0)
    return RegionReport(region.name, nodes, region.path, region.reason, count, moved, bound)


def region_cells(region: RegionReport) -> tuple[str, ...]:
    """Return a row of the report's table."""
    ratio = f"{region.moved / region.bound:.2f}" if region.bound else "-"
    moved = f"{region.moved:,}" if region.moved else "-"
    why = region.reason or "-"
    return region.name, str(region.nodes), region.path or "-", why, str(region.kernels or "-"), moved, ratio


def region_line(regions: Sequence[RegionReport]) -> str:
    """Write a line on regions: ``5 fused: 4 triton, 1 aten (float64 values)``, on a CPU ``4 loops``; "" for none."""
    if not regions:
        return ""
    paths = Counter(region.path or "not called yet" for region in regions)
    reasons = dict.fromkeys(region.reason for region in regions if region.path == "aten")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{len(regions)} fused: " + ", ".join(f"{count} {path}" for path, count in paths.items()) + why
