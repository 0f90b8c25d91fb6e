"""Report what a conversion did, to people and programs: ``print(fxprec.report(model))``, ``report(model).to_dict()``.

It prints short, as the headline; ``print(fxprec.report(model).nodes)`` lists every node.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxprec.inspection.figures import (
    REGION_COLUMNS,
    Activations,
    RegionReport,
    Weights,
    activations,
    bytes_of,
    count,
    region_cells,
    region_line,
    regions_of,
    size_text,
    weights,
)
from fxprec.inspection.headline import Headline, Stay, risks_of
from fxprec.inspection.measured import Measured, Subject, add_measured, settings_line, told
from fxprec.inspection.nodes import (
    NamedNode,
    computes,
    is_inserted,
    is_shadow,
    moves_data,
    op_name,
    original,
    places,
    reason,
    short_paths,
    source_line,
)
from fxprec.inspection.prices import UNKNOWN, Prices
from fxprec.inspection.rehearsal import HeldMemory, Rehearsal, rehearse
from fxprec.inspection.text import (
    Printed,
    RenderableType,
    columns,
    in_one,
    stacked,
    table,
    titled,
    without_advice,
    without_figures,
)
from fxprec.inspection.unnamed import Unnamed, unnamed_methods
from fxprec.model.captured import Captured, in_present_mode, of_last_call
from fxprec.model.conversion import Conversion, conversion_of, is_converted
from fxprec.model.graphs import captured_of, known_graphs
from fxprec.page import framed, render
from fxprec.passes.graph.annotations import Rule, graph_notes, module_path, notes, weight_path
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.graph.text import dtype_name, shown_dtype
from fxprec.passes.ops.table import facts_of

#: Names of guarded values that are printed; ``GraphReport.guarded`` has all.
_SHOWN: Final = 12
_LOW: Final = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Node of a report.

    ``kind``: "op", "cast" (inserted, at every call), "shadow" (inserted cast of a weight), "absorbed" (an inserted cast
    within a fused region, where it costs nothing), "region" or "input". ``region``: the fused region that it is in.
    ``served``: by which kernel of fxprec. ``original``: the dtype of its output there, where it is another one.
    ``reads``: names of nodes, and paths of weights. ``bytes``: of its results, -1 where nobody knows their shape.
    ``seconds``: that it takes in a step, by the costs of the device; -1 where they or the sizes are unknown.
    """

    node: str
    kind: str
    module: str
    op: str
    compute: str
    output: str
    rule: str
    why: str
    source: str
    region: str = ""
    served: str = ""
    original: str = ""
    reads: tuple[str, ...] = ()
    bytes: int = -1
    seconds: float = field(default=UNKNOWN, compare=False)


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Rewritten graph of a report.

    Attributes:
        inputs: names of its placeholders.
        method: what it is of; "" for a bare graph.
        mode: of the method's module when it was captured, "training" or "eval"; "" for a bare graph.
        counts: the headline counts it: it is of the mode that the module is in now, or no graph is; and the last call
            in that mode ran it.
        other_mode: it is of the other mode.
        guarded: attributes, globals and the like that the traced code read: once one of them has changed, another graph
            is made. Empty for a graph of dynamo, which keeps guards of its own, and for a bare graph.
    """

    inputs: tuple[str, ...]
    rows: tuple[NodeRow, ...]
    activations: Activations
    declined: tuple[str, ...]
    regions: tuple[RegionReport, ...] = ()
    method: str = ""
    mode: str = ""
    counts: bool = True
    other_mode: bool = False
    guarded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Report(Printed):
    """Result of ``report``: ``print`` it, or read ``headline`` and ``graphs[0].rows``."""

    headline: Headline
    graphs: tuple[GraphReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, ready for json."""

        # ``dataclasses.asdict`` copies all that a dataclass holds, three times as slowly.
        def fields(part: Any) -> dict[str, Any]:
            return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}

        found = json.loads(json.dumps(self, default=fields))
        found["headline"]["verdict"] = self.headline.verdict()
        return found

    def to_html(
        self,
        path: str | Path,
        *,
        ledger: Measured | None = None,
        ranges: Measured | None = None,
        before: Report | None = None,
    ) -> None:
        """Write a page to look into: one file, which needs nothing else and asks nobody.

        Args:
            path: of the file; an older one is overwritten.
            ledger: of ``fxprec.numerics.audit``: each node's part in the error of the loss.
            ranges: of ``fxprec.numerics.ranges``: how large each node's values and gradients are.
            before: another report, of another policy or level: the nodes that differ.

        Raises:
            TypeError: the ledger or the ranges are something else.
            ValueError: they were measured on another model, or under another policy, or are folded.
        """
        Path(path).write_text(self._page(ledger, ranges, before), encoding="utf-8")

    def _repr_html_(self) -> str:
        return framed(self._page())

    def _page(self, ledger: Measured | None = None, ranges: Measured | None = None, old: Report | None = None) -> str:
        data = self.to_dict()
        more = add_measured(data["graphs"], self.subject, ledger, ranges)
        return render(data, [*self.headline.lines(), *more], old and old.to_dict())

    @property
    def subject(self) -> Subject:
        """Conversion that the report is of."""
        graphs = tuple({row.node: told(row.compute, row.output) for row in graph.rows} for graph in self.graphs)
        headline = self.headline
        return Subject("report", headline.model, headline.settings, headline.weights.parameters, graphs)

    def __rich__(self) -> RenderableType:
        return self.headline

    @property
    def nodes(self) -> NodeTable:
        """Table with a line a node, to print or to search: none is ever wrapped."""
        return NodeTable(self)


@dataclass(frozen=True, slots=True, repr=False)
class NodeTable(Printed):
    """Table of every node of the graphs, a line each; prints as columns."""

    report: Report

    def __rich__(self) -> RenderableType:
        headline, graphs = self.report.headline, self.report.graphs
        names = ("node", "module", "op", "computes", "output", "rule", "why", "source")
        cells = {name: attrgetter("compute" if name == "computes" else name) for name in names}
        parts: list[RenderableType] = []
        for number, graph in enumerate(graphs, 1):
            method = graph.method if headline.methods else ""
            mode = f" ({graph.mode})" if headline.other_mode else ""
            title = f"graph {number} of {len(graphs)}{mode}: {method}({', '.join(graph.inputs)})"
            if graph.guarded:
                more = f", {left} more" if (left := len(graph.guarded) - _SHOWN) > 0 else ""
                title += f"\nguarded: {', '.join(graph.guarded[:_SHOWN])}{more}"
            # Shadows and absorbed casts cost nothing in a call, and would hide what does.
            rows = (row for row in graph.rows if row.kind not in ("shadow", "absorbed"))
            # A line a node is never wrapped, so that grep finds it.
            parts.append(titled(title, table(cells, rows)))
            if graph.regions:
                parts.append(titled("\nfused regions", columns(REGION_COLUMNS, map(region_cells, graph.regions))))
        return stacked(parts)


def report(model: nn.Module) -> Report:
    """Return the figures of a conversion, and every node of its graphs with dtypes, rule and reason.

    ``print`` gives 10 to 40 lines: a verdict, what stays FP32 and why, casts and memory beside eager autocast's, what
    runs outside of the graphs, risks. ``print(report(model).nodes)`` gives a line a node.

    Args:
        model: a converted module, or a GraphModule that ``fxprec.graph_module`` returned.

    Raises:
        NotCapturedError: the model is captured at its first call, which did not happen yet.
        ConversionError: it is not converted.
    """
    conversion = conversion_of(model) if is_converted(model) else None
    graphs, sections, found = _sections(model, conversion)
    return Report(_headline(model, conversion, graphs, weights(model, graphs, found), sections), tuple(sections))


def graph_reports(model: nn.Module) -> list[GraphReport]:
    """Return the graphs of ``report(model)``, without the headline, which takes longer.

    Raises:
        ConversionError, NotCapturedError: as for ``report``.
    """
    return _sections(model, conversion_of(model) if is_converted(model) else None)[1]


def outside_of(conversion: Conversion | None) -> dict[str, str]:
    """Return where -> why of what runs outside the graphs."""
    net = conversion.net if conversion is not None else {}
    return {short_paths(where): _reason_line(why) for where, why in net.items()}


def _reason_line(why: str) -> str:
    """Return a reason as one plain line, whatever error of torch's it holds."""
    return without_advice(short_paths(why))


def _sections(
    model: nn.Module, conversion: Conversion | None
) -> tuple[tuple[GraphModule, ...], list[GraphReport], list[NamedNode]]:
    graphs = known_graphs(model)
    sections: list[GraphReport] = []
    found: list[NamedNode] = []
    # Only graphs that the last call ran tell of what runs: others are listed, and no figure counts them.
    captured = captured_of(model)
    entries = conversion.entries() if conversion else []
    present = in_present_mode(captured.values(), entries) if conversion else []
    counted = of_last_call(present, {entry.number for entry in entries if entry.by_dynamo})
    for number, gm in enumerate(graphs):
        own = list(places(number, gm))
        found += own
        inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
        # A bare graph has no conversion: nothing is known of its mode, guards or costs.
        known = captured.get(gm)
        prices = Prices(conversion.settings, known.training) if conversion is not None and known is not None else None
        rows = tuple(_row(place, prices) for place in own if place.node.op not in ("get_attr", "output"))
        # A reason may hold an error of torch's, of many lines and with paths of this machine.
        declined = tuple(_reason_line(text) for text in graph_notes(gm).declined)
        activity = activations(place.node for place in own)
        about: dict[str, Any] = {}
        if known is not None:
            guarded = known.guards.read_by_user if known.guards is not None else ()
            about = {"method": known.method, "mode": "training" if known.training else "eval", "guarded": guarded}
            about |= {"counts": known in counted, "other_mode": known not in present}
        sections.append(GraphReport(inputs, rows, activity, declined, regions_of(gm), **about))
    return graphs, sections, found


def _headline(
    model: nn.Module, conversion: Conversion | None, graphs: tuple[GraphModule, ...], held: Weights,
    sections: list[GraphReport],
) -> Headline:  # fmt: skip
    # Graphs of the other mode, or that the last call did not run, would count an op twice.
    graphs = tuple(gm for gm, section in zip(graphs, sections, strict=True) if section.counts)
    other_mode = sum(section.other_mode for section in sections)
    other_calls = len(sections) - len(graphs) - other_mode
    sections = [section for section in sections if section.counts]
    rows = [row for section in sections for row in section.rows]
    kinds = Counter(row.kind for row in rows)
    computing = [row for row in rows if row.compute != "-"]
    captured = [each for gm, each in captured_of(model).items() if gm in graphs]
    net, low = outside_of(conversion), dtype_name(conversion.settings.dtype) if conversion else ""
    lowered = [row.op for row in computing if row.compute == low]
    return Headline(
        model=conversion.original_class.__name__ if conversion else type(model).__name__,
        settings=settings_line(conversion),
        low=low,
        products=_by_dtype(row for row in computing if facts_of(row.op).rule is Rule.LOW),
        computes=_by_dtype(row for row in computing if not moves_data(row.op)),
        views=_by_dtype(row for row in computing if moves_data(row.op)),
        stays=_stays(section.rows for section in sections),
        casts=kinds["cast"],
        absorbed=kinds["absorbed"],
        costs=_cost_line(graphs, rows),
        regions=region_line([region for section in sections for region in section.regions]),
        shadow_casts=kinds["shadow"],
        on_path=sum(bool(notes(node).returns) for gm in graphs for node in gm.graph.nodes),
        folded=sum(graph_notes(each).folded for gm in graphs for each in every_graph(gm)),
        activations=sum((section.activations for section in sections), Activations()),
        weights=held,
        rehearsal=_rehearsal(conversion, captured, held),
        captures=conversion.captures if conversion else 1,
        graphs=len(graphs),
        breaks=sum("graph break" in why for why in net.values()),
        net=net,
        not_static=tuple(dict.fromkeys(_reason_line(why) for why in (conversion.declined if conversion else ()))),
        declined=tuple(dict.fromkeys(what for section in sections for what in section.declined)),
        methods=conversion.settings.methods if conversion else (),
        not_named=tuple(map(str, _not_named(model, conversion))) if conversion else (),
        risks=tuple(risks_of(conversion, lowered, graphs)) if conversion else (),
        other_mode=other_mode,
        other_calls=other_calls,
        packed=_packed(conversion, graphs) if conversion else "",
        slow=conversion.settings.why_slow.partition(". ")[0] if conversion and lowered else "",
    )


def _rehearsal(conversion: Conversion | None, captured: Sequence[Captured], held: Weights) -> Rehearsal:
    """Rehearse a call, beside eager autocast on the parameters as they were: O3 and ``freeze`` made FP32 ones low."""
    if conversion is None:
        return Rehearsal(unknown="unknown for a graph without its model")
    settings = conversion.settings
    lowered = settings.policy.lowers_parameters or conversion.frozen is not None
    own = sum(held.parameters.values())
    # Autocast would run on the FP32 weights, which O3 and ``freeze`` halved.
    widened = held.parameters.get(dtype_name(settings.dtype), 0) if lowered else 0  # as many bytes again make it FP32
    packed = 0 if conversion.packed is None else conversion.packed.nbytes
    stays = HeldMemory(own, held.shadow_bytes + packed)
    return rehearse(captured, settings.device, settings.dtype, stays, own + widened, lowered)


def _not_named(model: nn.Module, conversion: Conversion) -> list[Unnamed]:
    """Return methods that run products in FP32 which graphs lower: none at O0, and none on weights that are low."""
    # Where all is FP32, or the weights themselves are low, no method runs in another dtype than a graph.
    policy = conversion.settings.policy
    if policy.level == "O0" or policy.lowers_parameters or conversion.frozen is not None:
        return []
    modules = dict(model.named_modules())
    in_fp32 = (torch.float32, Rule.FULL, Rule.KEEP)
    return unnamed_methods(model, conversion.methods, lambda path: policy.of_module(path, modules) in in_fp32)


def _packed(conversion: Conversion, graphs: Iterable[GraphModule]) -> str:
    if conversion.packed is None:
        return ""
    # The notes are the pass's: what it packed, with the ops that oneDNN runs in the same kernel.
    products = [joined for gm in graphs for joined in graph_notes(gm).packed.values()]
    # What oneDNN takes into a product's kernel has no kernel of its own any more.
    joined = [count(number, op) for op, number in Counter(itertools.chain(*products)).most_common()]
    held = conversion.packed.nbytes
    return (
        f"{count(len(products), 'product')} on weights that oneDNN packed once"
        + (f", with {', '.join(joined)} in the same kernels" if joined else "")
        + (f"; {size_text(held)} beside the weights" if held else "; packed at the first call")
    )


def _by_dtype(rows: Iterable[NodeRow]) -> dict[str, int]:
    return dict(Counter(row.compute for row in rows).most_common())


def _stays(graphs: Iterable[Sequence[NodeRow]]) -> tuple[Stay, ...]:
    """Return what computes in FP32: the ops of a reason together, those first that a rule keeps there."""
    # Grouped by rule, reason and what is low around: a line of the report for each, however many layers there are.
    reasons: dict[tuple[str, str, str], list[NodeRow]] = {}
    for rows in graphs:
        outputs = {row.node: row.output for row in rows}
        for row in rows:
            if row.compute == "float32" and not moves_data(row.op):
                # Reasons that differ in sizes or times alone are one reason for a reader.
                key = row.rule, without_figures(_stem(row)), _low_around(row, outputs)
                reasons.setdefault(key, []).append(row)
    ordered = sorted(reasons.items(), key=lambda item: [*Rule].index(Rule(item[0][0])))
    return tuple(_stay(rows, around) for (_, _, around), rows in ordered)


def _stem(row: NodeRow) -> str:
    """Return a row's reason without what it says of other nodes."""
    return row.why.partition("; ")[0]


def _low_around(row: NodeRow, outputs: Mapping[str, str]) -> str:
    """Write what of an op's values is low, weights apart: "reads and writes bfloat16"."""
    # Weights are not in ``outputs``: their dtype says nothing of the traffic of activations.
    read = {outputs[name] for name in row.reads if name in outputs}
    reads, writes = bool(read) and read <= _LOW, row.output in _LOW
    verbs = [verb for verb, low in (("reads", reads), ("writes", writes)) if low]
    return f"{' and '.join(verbs)} {row.output if writes else read.pop()}" if verbs else ""


def _stay(rows: Sequence[NodeRow], around: str) -> Stay:
    ops = dict(Counter(row.op for row in rows).most_common())
    modules = {op: tuple(dict.fromkeys(row.module for row in rows if row.op == op)) for op in ops}
    return Stay(in_one([*map(_stem, rows)]), ops, modules, around)


def _cost_line(graphs: tuple[GraphModule, ...], rows: list[NodeRow]) -> str:
    # An op that pays nowhere is FULL by measurement, and says so first in its reason.
    stay = sum(row.rule == Rule.FULL and row.why.startswith("pays:") for row in rows)
    known = dict.fromkeys(costs for gm in graphs if (costs := graph_notes(gm).costs))
    return f"{'; '.join(known)}: {count(stay, 'op')} not worth lowering" if known else ""


def _row(place: NamedNode, prices: Prices | None) -> NodeRow:
    node = place.node
    rule, why = reason(node)
    # Names of a body's nodes begin with that of the body, and so must those of what they read.
    prefix = place.name.removesuffix(node.name)
    compute = computes(node)
    return NodeRow(
        node=place.name,
        kind=_kind(node),
        module=module_path(node),
        op=op_name(node),
        compute=compute,
        output=shown_dtype(node),
        rule=rule if compute != "-" else "-",
        why=why,
        source=source_line(node),
        region=notes(node).region,
        served=notes(node).fused,
        original=original(node),
        reads=tuple(
            weight_path(source) if source.op == "get_attr" else prefix + source.name
            for source in dict.fromkeys(node.all_input_nodes)
        ),
        bytes=bytes_of(node),
        seconds=UNKNOWN if prices is None else prices.seconds(node),
    )


def _kind(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "call_module":
        return "region"
    if is_inserted(node):
        return "absorbed" if notes(node).state("in_region") else "shadow" if is_shadow(node) else "cast"
    return "op"
