"""The report at a glance: a verdict in a line, what is behind it in ten to thirty, and the risks.

A risk is a number in the user's code that low precision loses. Low ops read the same numbers as FP32 ones, but keep
only 8 (bfloat16) or 11 (float16) bits of what they compute::

    y + 1e-3                          # bfloat16: gives y back wherever |y| is above 0.51
    y * 0.999                         # bfloat16: gives y back, always
    y.clamp(max=1 - 1e-4)             # bfloat16: the bound is 1.0, and log(1 - y) is infinite

What would become zero, or leaves the range, is no risk: the passes keep such an op in FP32 (``placement.pins``). So is
a bound that is an integer in low precision, but with ``placement="autocast"``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.fx import GraphModule, Node

from fxprec.errors import few
from fxprec.inspection.figures import Activations, Weights, count, size_text
from fxprec.inspection.nodes import NamedNode, op_name, places, source_line
from fxprec.inspection.rehearsal import HeldMemory, Rehearsal, Traffic
from fxprec.inspection.text import Printed, RenderableType, columns, folded, titled
from fxprec.model.conversion import Conversion
from fxprec.model.net import RUNS_AS_TOLD, RUNS_FP32
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.graph.text import dtype_name, shown_dtype
from fxprec.passes.ops.table import facts_at, facts_of

#: Modules that are named for an op.
_PLACES: Final = 3
#: Lines of a kind that are shown; ``Headline`` has all.
_MOST: Final = {"stays": 8, "outside": 4, "not static": 2, "declined": 3, "not named": 8}


@dataclass(frozen=True, slots=True)
class Stay:
    """Ops that compute in FP32 for one reason.

    Attributes:
        ops: op -> how many.
        modules: op -> the modules that it is in, each once.
        around: what is low all the same: "reads and writes bfloat16"; "" where nothing is.
    """

    why: str
    ops: Mapping[str, int]
    modules: Mapping[str, tuple[str, ...]]
    around: str = ""

    @property
    def label(self) -> str:
        """Label in front of the line."""
        return "FP32 inside" if self.around else "stays FP32"

    def __str__(self) -> str:
        ops = [f"{number} {op}" for op, number in self.ops.items()]
        why = f"{self.why}; {self.around}" if self.around else self.why
        everywhere = [*dict.fromkeys(itertools.chain(*self.modules.values()))]
        # Few places are told once for all ops; with many, each op names its own.
        if len(ops) == 1 or len(folded(everywhere)) <= _PLACES:
            return f"{', '.join(ops)}: {why} ({_places(everywhere)})"
        each = (f"{what} ({_places(modules)})" for what, modules in zip(ops, self.modules.values(), strict=True))
        return f"{', '.join(each)}: {why}"


def _place(name: str) -> str:
    """Write a module's name so that a bare number is not taken for a count."""
    if name.strip("0123456789,-"):
        return name
    return f"module{'' if name.isdigit() else 's'} {name}" if name else "the model itself"


def _places(modules: Sequence[str]) -> str:
    """Write where modules are: ``in encoder.0-3.norm``."""
    return f"in {few([*map(_place, folded(modules))], _PLACES)}"


@dataclass(frozen=True, slots=True, repr=False)
class Headline(Printed):
    """The figures of a conversion; prints as a few lines.

    Attributes:
        settings: level, dtype and placement; empty for a bare graph.
        low: the low dtype, "bfloat16"; empty for a bare graph.
        products: matrix products, convolutions and attentions: compute dtype -> nodes.
        computes: compute dtype -> nodes, but for views and copies.
        views: compute dtype -> nodes that only move data: views, copies, casts of the user's.
        stays: what computes in FP32, by reason.
        casts: inserted casts that run at every call.
        on_path: those of them by which others read a returned value as it is returned, so that gradients go through it.
        absorbed: inserted casts within fused regions, which cost nothing.
        costs: which costs of the device ``lower="pays"`` went by, and how many ops stay FP32; "" for "always".
        regions: what fused regions there are and how they run.
        shadow_casts: inserted casts of weights, in whose place shadows are read.
        folded: casts removed again.
        rehearsal: casts, and the memory that a forward leaves held, beside eager autocast's.
        captures, graphs, breaks: how often a forward was captured, what came of it, and the graph breaks between.
        other_mode: graphs captured while the module was in the other mode (training or not): no figure counts them.
        other_calls: graphs of this mode that the last call did not run (other sizes, other arguments): likewise.
        net: where -> why of what runs outside the graphs, under torch.autocast.
        not_static: why static capture was declined.
        methods: those converted besides forward.
        not_named: those that call submodules and run in FP32 by themselves, with the argument that converts them.
        declined: what passes declined, "pass: node: reason".
        risks: what to look at, and what to do about it.
        packed: of a frozen model, what runs on packed weights, and what these hold; "" where nothing does.
        slow: why what is lowered is slow on this machine; "" where it is not.
    """

    model: str
    settings: str
    low: str
    products: Mapping[str, int]
    computes: Mapping[str, int]
    views: Mapping[str, int]
    stays: tuple[Stay, ...]
    casts: int
    on_path: int
    absorbed: int
    shadow_casts: int
    folded: int
    costs: str
    regions: str
    activations: Activations
    weights: Weights
    rehearsal: Rehearsal
    captures: int
    graphs: int
    breaks: int
    net: Mapping[str, str]
    not_static: tuple[str, ...]
    declined: tuple[str, ...]
    methods: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    other_mode: int = 0
    other_calls: int = 0
    packed: str = ""
    slow: str = ""

    def __rich__(self) -> RenderableType:
        # A bare graph has no settings to tell.
        title = f"{self.model}: {self.settings}" if self.settings else self.model
        return titled(f"{title}: {self.verdict()}", columns(("", ""), self.lines()))

    def verdict(self) -> str:
        """Write one line: ``all 49 matrix products in bfloat16, 12 casts a call, nothing outside the graphs``."""
        parts = [self._products()]
        if not self.rehearsal.unknown:
            parts.append(f"{count(self.rehearsal.ours.casts, 'cast')} a forward")
        outside = len(self.net)
        parts.append(
            f"{count(outside, 'piece')} of code outside the graphs" if outside else "nothing outside the graphs"
        )
        if risks := len(self.risks) + bool(self.slow):
            parts.append(count(risks, "risk"))
        return ", ".join(parts)

    def _products(self) -> str:
        total, lowered = sum(self.products.values()), self.products.get(self.low, 0)
        if not total:
            return "no matrix products"
        if not self.low or lowered == 0:
            return f"{count(total, 'matrix product')} in " + ", ".join(self.products)
        if lowered == total:
            return f"all {total} matrix products in {self.low}" if total > 1 else f"the matrix product in {self.low}"
        return f"{lowered} of {total} matrix products in {self.low}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield label and text of each line below the verdict."""
        yield "computing", _numbers(self.computes) + (f"; views: {_numbers(self.views)}" if self.views else "")
        shown = self.stays[: _MOST["stays"]]
        yield from ((stay.label, str(stay)) for stay in shown)
        if len(self.stays) > len(shown):
            yield "stays FP32", f"{len(self.stays) - len(shown)} more, in to_dict()"
        yield from self._traffic()
        yield from ((label, text) for label, text in (("costs", self.costs), ("regions", self.regions)) if text)
        yield "activations", str(self.activations) + (f" (all {self.graphs} graphs)" if self.graphs > 1 else "")
        yield "weights", str(self.weights)
        if self.packed:
            yield "packed", self.packed
        if self.methods:
            yield "methods", ", ".join(("forward", *self.methods))
        of = {"of the other mode": self.other_mode, "that the last call did not run": self.other_calls}
        apart = "".join(f"; {number} {which} apart" for which, number in of.items() if number)
        yield (
            "graphs",
            f"{self.graphs} from {count(self.captures, 'capture')}, {count(self.breaks, 'graph break')}{apart}",
        )
        level, *_ = self.settings.split(", ")
        how = " (runs as it is)" if level == "O0" else " (runs under torch.autocast)"
        outside = [
            f"{where}: {why}" + ("" if RUNS_FP32 in why or RUNS_AS_TOLD in why else how)
            for where, why in self.net.items()
        ]
        of_kinds = {"outside": outside, "not static": self.not_static, "declined": self.declined}
        for label, found in (of_kinds | {"not named": self.not_named}).items():
            yield from ((label, str(what)) for what in found[: _MOST[label]])
            if (more := len(found) - _MOST[label]) > 0:
                yield label, f"{more} more, in to_dict()"
        yield from (("risk", what) for what in (*self.risks, self.slow) if what)

    def _traffic(self) -> Iterator[tuple[str, str]]:
        # Inserted casts are counted in the graph; those that run come from the rehearsal, which regions and views
        # change.
        inserted = (
            f"{self.casts} inserted, {self.shadow_casts} of weights read as shadows instead, {self.folded} folded"
            + (f", {self.absorbed} within regions" if self.absorbed else "")
            + (f"; {self.on_path} of those inserted keep gradients on what is returned" if self.on_path else "")
        )
        known, ours, theirs = self.rehearsal, self.rehearsal.ours, self.rehearsal.autocast
        if known.unknown:
            yield "casts", f"{inserted}; how many run, and what memory they take, is {known.unknown}"
            return
        each = f" (one run of each of {self.graphs} graphs)" if self.graphs > 1 else ""
        yield "casts", inserted
        apart = f"; sizes that depend on data ({known.unsized}) are left out" if known.unsized else ""
        yield (
            "a forward",
            f"runs {self._casts(ours)}{self._refreshed()}; eager autocast {self._casts(theirs)}{each}{apart}",
        )
        if ours.casts > theirs.casts and (why := [*self._more_casts()]):
            yield "more casts", f"than eager autocast: {'; '.join(why)}"
        yield (
            "memory",
            f"at the end of a forward: {self._held(known.memory, names=True)}; eager autocast: "
            f"{self._held(known.autocast_memory)}{each}{apart}",
        )

    def _casts(self, traffic: Traffic) -> str:
        text = f"{count(traffic.casts, 'cast')} writing {size_text(traffic.cast_bytes)}"
        of_weights = f", and {traffic.weight_casts} of weights writing {size_text(traffic.weight_bytes)}"
        return text + (of_weights if traffic.weight_casts else "")

    def _refreshed(self) -> str:
        """Write what replaces autocast's casts of weights: a training forward writes the shadows."""
        if not self.rehearsal.training or not self.weights.shadows:
            return ""
        shadows = count(self.weights.shadows, "shadow")
        return f", and refreshes {shadows} in one call writing {size_text(self.weights.shadow_bytes)}"

    def _held(self, memory: HeldMemory, names: bool = False) -> str:
        sizes = {"of weights": memory.weights, "of low copies of them": memory.copies}
        if self.rehearsal.training:
            sizes["kept for the backward"] = memory.kept
        *first, last = (f"{size_text(size)} {name}" if names else size_text(size) for name, size in sizes.items())
        return f"{', '.join(first)} and {last}, {size_text(memory.total)} in all"

    def _more_casts(self) -> Iterator[str]:
        """Yield reasons for more casts than under eager autocast."""
        if number := self.rehearsal.results:
            gives = "gives a result its" if number == 1 else "give results their"
            yield f"{number} {gives} original dtype back (keep_output_dtype=False leaves them low)"
        if self.on_path:
            keeps = "keeps" if self.on_path == 1 else "keep"
            yield f"{self.on_path} {keeps} a returned value on the gradient's path (none in a graph made under no_grad)"
        if wider := self.rehearsal.wider:
            ops = ", ".join(f"{number} {op}" for op, number in wider.items())
            yield f"{ops} {'is' if sum(wider.values()) == 1 else 'are'} FP32 here and {self.low} there"


def _numbers(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{number} in {dtype}" for dtype, number in nodes.items()) or "no floats"


#: Graphs that were captured and did not serve for long: as many are called a risk.
_OFTEN: Final = 8
#: As many lines of the user's are named with one number.
_LINES: Final = 3


def risks_of(conversion: Conversion, lowered: Iterable[str], graphs: Iterable[GraphModule]) -> Iterator[str]:
    """Yield a line for each risk.

    Args:
        conversion: whose report it is.
        lowered: the op of each node that computes in low precision.
        graphs: those that the report counts.
    """
    nodes = (place for number, gm in enumerate(graphs) for place in places(number, gm))
    yield from lost_constants(nodes, conversion.settings.dtype)
    low = dtype_name(conversion.settings.dtype)
    for op, number in Counter(op for op in lowered if facts_of(op).rule is Rule.FULL).items():
        yield f"{count(number, op)} in {low}, which autocast keeps in FP32: fxprec.numerics.audit tells what that costs"
    left = len(conversion.captured)
    if conversion.captures - left >= _OFTEN:
        yield (
            f"captured {conversion.captures} times, {count(left, 'graph')} left: calls differ in what graphs are made "
            "for; print(report.nodes) tells what they are guarded by"
        )


def lost_constants(places: Iterable[NamedNode], low: torch.dtype) -> Iterator[str]:
    """Yield a line for each op and number of which low arithmetic loses something, with where it is written.

    Args:
        places: the nodes of the rewritten graphs.
        low: the low dtype; only ops that read or compute in it are looked at.
    """
    # One line for a number and an op, with the lines of code that it is in: layers repeat it.
    found: dict[str, dict[str, None]] = {}
    for node in (place.node for place in places):
        if node.op in ("placeholder", "get_attr", "output") or notes(node).inserted or not _is_low(node, low):
            continue
        if (loss := _LOSSES.get(facts_at(node).numbers)) is None:
            continue
        # A factor (``alpha=``) is no operand, and a tensor is FP32 and wins.
        named = (node.kwargs.get(name) for name in ("other", "min", "max", "min_val", "max_val", "value", "fill_value"))
        for number in (*node.args, *named):
            if type(number) is float and math.isfinite(number) and (what := loss(number, low)):
                # One text for a number however often it is written: its lines follow it.
                text = f"{op_name(node)} with {number:g} in {dtype_name(low)}{what}"
                found.setdefault(text, {})[source_line(node)] = None
    for text, lines in found.items():
        named = [line for line in lines if line]
        yield f"{text}: {few(named, _LINES)}" if named else text


def _is_low(node: Node, low: torch.dtype) -> bool:
    """Return whether a node computes in the low dtype; or reads it, if its result is no float, as a comparison's."""
    precision = notes(node).precision
    reads = precision.compute is None and any(shown_dtype(source) == dtype_name(low) for source in node.all_input_nodes)
    return reads or precision.compute is low


def _added(number: float, low: torch.dtype) -> str:
    eps = torch.finfo(low).eps
    return f" gives back what it was added to beyond {4 * abs(number) / eps:.2g}" if 0 < abs(number) < eps / 2 else ""


def _multiplied(number: float, low: torch.dtype) -> str:
    # Neighbours are at least a relative eps / 2 apart: a change below a half of that is rounded away.
    return " gives back what it multiplies" if 0 < abs(number - 1) < torch.finfo(low).eps / 4 else ""


def _compared(number: float, low: torch.dtype) -> str:
    rounded = torch.tensor(number).to(low).item()
    lost = number != rounded and rounded in (-1.0, 0.0, 1.0)  # where logarithms, roots and inverses have their poles
    return f" takes {rounded:g} for it" if lost else ""


#: By what the op table says that an op's numbers are: what low arithmetic makes of one, "" where nothing is lost.
_LOSSES: Final[Mapping[str | None, Callable[[float, torch.dtype], str]]] = {
    "added": _added, "factors": _multiplied, "compared": _compared, "fill": _compared,
}  # fmt: skip
