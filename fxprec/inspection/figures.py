"""Count what a rewritten graph takes: bytes of its values and weights against the original's, and its fused regions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxprec.inspection.nodes import NamedNode, is_inserted, is_shadow
from fxprec.kernels.rows.run.plan import bytes_moved, count_kernels
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.annotations import CASTABLE, NO_OP, UNKNOWN, leaves, notes
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import row_of

REGION_COLUMNS: Final = ("region", "nodes", "path", "why", "kernels", "bytes moved", "x bound")


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of float values that one run of the graphs writes to memory of their own (no views, no in-place ops).

    Attributes:
        original: in the original dtypes (at O3: those of the graph with low parameters, so that little seems saved).
        rewritten: in the dtypes now, casts included; what a cast inserted costs is in ``casts`` too.
        casts: bytes written by inserted casts, those of weights apart.
        values: how many values these are.
        unknown: values left out because nobody knows their shape.
    """

    original: int = 0
    rewritten: int = 0
    casts: int = 0
    values: int = 0
    unknown: int = 0

    def __add__(self, other: Activations) -> Activations:
        return Activations(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __str__(self) -> str:
        if not self.values:
            return "unknown without shapes: give convert(model, example_inputs=...)"
        saved = self.original - self.rewritten
        text = (
            f"{size_text(self.rewritten)} written, {size_text(self.original)} in the original: "
            f"{'saves' if saved >= 0 else 'costs'} {size_text(abs(saved))}, "
            f"{size_text(self.casts)} written by casts counted in"
        )
        return text + (f"; {self.unknown} values of unknown shape left out" if self.unknown else "")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the parameters as they are, by dtype, and of the low copies beside them (``shadows``: how many)."""

    parameters: Mapping[str, int]
    shadows: int
    shadow_bytes: int

    def __str__(self) -> str:
        own = ", ".join(f"{size_text(size)} {dtype}" for dtype, size in self.parameters.items()) or "none"
        if not self.shadows:
            return f"{own}; no shadows"
        return f"{own}, and on top {size_text(self.shadow_bytes)} for {count(self.shadows, 'shadow')}"


def activations(nodes: Iterable[Node]) -> Activations:
    """Return the bytes that one run of these nodes writes."""
    sums: Counter[str] = Counter()
    for node in nodes:
        op, row = notes(node).op, row_of(notes(node).op.name)
        # An in-place op writes to memory of others; a shadow's memory is counted with the weights.
        if op is NO_OP or op.in_place or is_shadow(node) or op.name == "fused_region":
            continue
        if row is not None and row.view and op.name != "to":
            continue
        now = notes(node).precision.output
        for info, numel in _values(notes(node).dtype, notes(node).numel):
            # A float of unknown dtype is what the model's FP32 inputs make: FP32, unless a caller gives others.
            before = torch.float32 if info is UNKNOWN else info
            if before not in CASTABLE:
                continue
            if numel is None:
                # Said in the report: a sum that left out unknown sizes would look too good.
                sums["unknown"] += 1
                continue
            # What stays in a fused region is in registers, and takes no memory.
            size = 0 if notes(node).in_region == "kept" else numel * (now or before).itemsize
            sums["values"] += 1
            sums["rewritten"] += size
            if is_inserted(node):
                sums["casts"] += size
            else:
                sums["original"] += numel * before.itemsize
    return Activations(**sums)


def bytes_of(node: Node) -> int:
    """Return the bytes of all results of a node in the rewritten graph's dtypes; -1 where their shape is not known."""
    now, size = notes(node).precision.output, 0
    for info, numel in _values(notes(node).dtype, notes(node).numel):
        dtype = now if now is not None and info in (UNKNOWN, *CASTABLE) else info
        if isinstance(dtype, torch.dtype):
            if numel is None:
                return -1
            size += numel * dtype.itemsize
    return size


def _values(info: Any, numel: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield (dtype, elements) of every value of a node, of which there may be several."""
    infos, counts = leaves(info), leaves(numel)
    for position, one in enumerate(infos):
        count = counts[position] if len(counts) == len(infos) else None
        yield one, count if isinstance(count, int) else None


def weights(model: nn.Module, graphs: Sequence[GraphModule], found: Iterable[NamedNode]) -> Weights:
    """Return the bytes of a model's parameters, and of the shadows that its graphs read."""
    shadows: dict[int, int] = {}
    for place in found:
        source = place.node.args[0] if is_shadow(place.node) else None
        if isinstance(source, Node) and "." not in place.name:
            weight = attrgetter(str(source.target))(graphs[place.graph])
            low = place.node.args[1]
            # torch.func.functional_call puts others in the places of parameters, cast anew at each call.
            if isinstance(low, torch.dtype) and isinstance(weight, nn.Parameter) and weight.dtype != low:
                shadows[id(weight)] = weight.numel() * low.itemsize
    return Weights(parameter_bytes(model), len(shadows), sum(shadows.values()))


def parameter_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the parameters as they are, by dtype."""
    found: Counter[str] = Counter()
    for value in model.parameters():
        found[dtype_name(value.dtype)] += value.numel() * value.element_size()
    return dict(found)


def size_text(size: int) -> str:
    """Write a size: ``225 kB``."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size} B"
        size = size / 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"


def count(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 cast``, ``2 casts``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
            if not isinstance(region, FusedRegion):
                continue
            nodes = len([each for each in region.graph_module.graph.nodes if each.op not in ("placeholder", "output")])
            # The last plan is that of the last inputs; op by op there is none.
            plan = region.plans[-1] if region.plans and region.path in ("triton", "loops") else None
            moved = (count_kernels(plan), *bytes_moved(plan)) if plan is not None else (0, 0, 0)
            found.append(RegionReport(region.name, nodes, region.path, region.reason, *moved))
    return tuple(found)


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
