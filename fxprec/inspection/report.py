"""What a conversion did, for people and for programs: ``print(fxprec.report(model))``, ``report(model).to_dict()``."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.fx import GraphModule, Node

from fxprec.errors import NotCapturedError
from fxprec.inspection.figures import Activations, Weights, activations, count, weights
from fxprec.inspection.nodes import (
    Place,
    captured_of,
    is_inserted,
    is_shadow,
    op_name,
    places,
    reason,
    rewritten_graphs,
    short_paths,
    source_line,
)
from fxprec.inspection.regions import REGION_COLUMNS, RegionReport, region_cells, region_line, regions_of
from fxprec.inspection.text import columns, plain, stacked, titled
from fxprec.inspection.unnamed import unnamed_methods
from fxprec.model.conversion import Conversion
from fxprec.model.module import conversion_of, is_converted
from fxprec.passes.graph.annotations import Rule, module_path, notes
from fxprec.passes.graph.text import dtype_name, shown_dtype

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Names of guarded values that are printed; ``GraphReport.guarded`` has all.
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One node.

    ``kind``: "op", "cast" (inserted, at every call), "shadow" (inserted cast of a weight), "absorbed" (an inserted cast
    within a fused region, where it costs nothing), "region" or "input". ``region``: the fused region that it is in.
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


@dataclass(frozen=True, slots=True, repr=False)
class Headline:
    """The figures of a conversion; prints as a few lines.

    Attributes:
        settings: level, dtype and placement; empty for a bare graph.
        computes: compute dtype -> nodes.
        casts: inserted casts that run at every call.
        absorbed: inserted casts within fused regions, which cost nothing.
        costs: which costs of the device ``lower="pays"`` went by, and how many ops stay FP32; "" for "always".
        regions: what fused regions there are and how they run.
        shadow_casts: inserted casts of weights, in whose place shadows are read.
        folded: casts removed again.
        captures, graphs, breaks: how often a forward was captured, what came of it, and the graph breaks between.
        other_mode: graphs captured while the module was in the other mode (training or not): no figure counts them.
        net: where -> why of what runs outside the graphs, under torch.autocast.
        not_static: why static capture was declined.
        methods: those converted besides forward.
        not_named: those that call submodules and run in FP32 by themselves, with the argument that converts them.
        declined: what passes declined, "pass: node: reason".
    """

    model: str
    settings: str
    computes: Mapping[str, int]
    casts: int
    absorbed: int
    shadow_casts: int
    folded: int
    costs: str
    regions: str
    activations: Activations
    weights: Weights
    captures: int
    graphs: int
    breaks: int
    net: Mapping[str, str]
    not_static: tuple[str, ...]
    declined: tuple[str, ...]
    methods: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    other_mode: int = 0

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        title = f"{self.model}: {self.settings}" if self.settings else self.model
        return titled(title, columns(("", ""), self._lines()))

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "computing", ", ".join(f"{number} in {dtype}" for dtype, number in self.computes.items()) or "no floats"
        yield (
            "casts",
            f"{self.casts} inserted, {self.shadow_casts} of weights read as shadows instead, {self.folded} folded"
            + (f", {self.absorbed} within regions" if self.absorbed else ""),
        )
        if self.costs:
            yield "costs", self.costs
        if self.regions:
            yield "regions", self.regions
        yield "activations", str(self.activations) + (f" (all {self.graphs} graphs)" if self.graphs > 1 else "")
        yield "weights", str(self.weights)
        if self.methods:
            yield "methods", ", ".join(("forward", *self.methods))
        apart = f"; {self.other_mode} of the other mode apart" if self.other_mode else ""
        yield (
            "graphs",
            f"{self.graphs} from {count(self.captures, 'capture')}, {count(self.breaks, 'graph break')}{apart}",
        )
        for where, why in self.net.items():
            how = "as it is" if self.settings.startswith("O0") else "under torch.autocast"
            yield "outside", f"{where}: {why} (runs {how})"
        for why in self.not_static:
            yield "not static", why
        for what in self.declined:
            yield "declined", what
        for what in self.not_named:
            yield "not named", what


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One rewritten graph.

    Attributes:
        inputs: names of its placeholders.
        method: what it is of; "" for a bare graph.
        mode: of the method's module when it was captured, "training" or "eval"; "" for a bare graph.
        counts: the headline counts it: it is of the mode that the module is in now, or no graph is.
        guarded: attributes, globals and the like that the traced code read: once one of them has changed, another graph
            is made. Empty for a graph of dynamo, which keeps guards of its own, and for a bare graph.
    """

    inputs: tuple[str, ...]
    rows: tuple[Row, ...]
    activations: Activations
    declined: tuple[str, ...]
    regions: tuple[RegionReport, ...] = ()
    method: str = ""
    mode: str = ""
    counts: bool = True
    guarded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What ``report`` returns: ``print`` it, or read ``headline`` and ``graphs[0].rows``."""

    headline: Headline
    graphs: tuple[GraphReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for json."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self.headline]
        names = ("node", "module", "op", "computes", "output", "rule", "why", "source")
        for number, graph in enumerate(self.graphs, 1):
            method = graph.method if self.headline.methods else ""
            mode = f" ({graph.mode})" if self.headline.other_mode else ""
            title = f"\ngraph {number} of {len(self.graphs)}{mode}: {method}({', '.join(graph.inputs)})"
            if graph.guarded:
                more = len(graph.guarded) - _SHOWN
                shown = [*graph.guarded[:_SHOWN], *([f"{more} more"] if more > 0 else [])]
                title += f"\nguarded: {', '.join(shown)}"
            rows = (
                (row.node, row.module, row.op, row.compute, row.output, row.rule, row.why, row.source)
                for row in graph.rows
                if row.kind not in ("shadow", "absorbed")
            )
            parts.append(titled(title, columns(names, rows)))
            if graph.regions:
                parts.append(titled("\nfused regions", columns(REGION_COLUMNS, map(region_cells, graph.regions))))
        return stacked(parts)


def report(model: nn.Module) -> Report:
    """Every node of the rewritten graphs with its dtypes, rule and reason, and the figures of the whole.

    Args:
        model: a converted module, or a GraphModule that ``fxprec.graph_module`` returned.

    Raises:
        NotCapturedError: the model is captured at its first call, which did not happen yet.
        ConversionError: it is not converted.
    """
    conversion = conversion_of(model) if is_converted(model) else None
    try:
        graphs = rewritten_graphs(model)
    except NotCapturedError:
        if conversion is None or not conversion.ran_in_net:
            raise
        graphs = ()  # what there is to say is why
    sections = []
    found: list[Place] = []
    captured = captured_of(model)
    counted = conversion.in_present_mode(captured.values()) if conversion else ()
    for number, gm in enumerate(graphs):
        own = list(places(number, gm))
        found += own
        inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
        rows = tuple(_row(place) for place in own if place.node.op not in ("get_attr", "output"))
        declined = tuple(short_paths(text) for text in gm.meta.get("declined", ()))
        activity = activations(place.node for place in own)
        known = captured.get(gm)
        about: dict[str, Any] = {}
        if known is not None:
            guarded = known.guards.read_by_user if known.guards is not None else ()
            about = {"method": known.method, "mode": "training" if known.training else "eval", "guarded": guarded}
            about["counts"] = known in counted
        sections.append(GraphReport(inputs, rows, activity, declined, regions_of(gm), **about))
    held = weights(model, graphs, found)
    return Report(_headline(model, conversion, graphs, held, sections), tuple(sections))


def _headline(
    model: nn.Module,
    conversion: Conversion | None,
    graphs: tuple[GraphModule, ...],
    held: Weights,
    sections: list[GraphReport],
) -> Headline:
    graphs = tuple(gm for gm, section in zip(graphs, sections, strict=True) if section.counts)
    apart, sections = len(sections) - len(graphs), [section for section in sections if section.counts]
    rows = [row for section in sections for row in section.rows]
    kinds = Counter(row.kind for row in rows)
    settings = conversion.settings if conversion else None
    net = {short_paths(where): short_paths(why) for where, why in (conversion.net if conversion else {}).items()}
    return Headline(
        model=conversion.original_class.__name__ if conversion else type(model).__name__,
        settings=f"{settings.policy.level}, {dtype_name(settings.dtype)}, {settings.placement}" if settings else "",
        computes=dict(Counter(row.compute for row in rows if row.compute != "-").most_common()),
        casts=kinds["cast"],
        absorbed=kinds["absorbed"],
        costs=_cost_line(graphs, rows),
        regions=region_line([region for section in sections for region in section.regions]),
        shadow_casts=kinds["shadow"],
        folded=sum(gm.meta.get("folded", 0) for gm in graphs),
        activations=sum((section.activations for section in sections), Activations()),
        weights=held,
        captures=conversion.captures if conversion else 1,
        graphs=len(graphs),
        breaks=sum("graph break" in why for why in net.values()),
        net=net,
        not_static=tuple(dict.fromkeys(short_paths(why) for why in (conversion.declined if conversion else ()))),
        declined=tuple(dict.fromkeys(what for section in sections for what in section.declined)),
        methods=conversion.settings.methods if conversion else (),
        not_named=tuple(map(str, unnamed_methods(model, conversion.methods))) if conversion else (),
        other_mode=apart,
    )


def _cost_line(graphs: tuple[GraphModule, ...], rows: list[Row]) -> str:
    stay = sum(row.rule == Rule.FULL and row.why.startswith("pays:") for row in rows)
    known = dict.fromkeys(gm.meta["costs"] for gm in graphs if "costs" in gm.meta)
    return f"{'; '.join(known)}: {count(stay, 'op')} not worth lowering" if known else ""


def _row(place: Place) -> Row:
    node = place.node
    precision = notes(node).precision
    rule, why = reason(node)
    computes = not is_inserted(node) and node.op != "placeholder"
    return Row(
        node=place.name,
        kind=_kind(node),
        module=module_path(node),
        op=op_name(node),
        compute=dtype_name(precision.compute) if computes else "-",
        output=shown_dtype(node),
        rule=rule if computes else "-",
        why=why,
        source=source_line(node),
        region=notes(node).region,
    )


def _kind(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "call_module":
        return "region"
    if is_inserted(node):
        return "absorbed" if notes(node).state("in_region") else "shadow" if is_shadow(node) else "cast"
    return "op"
