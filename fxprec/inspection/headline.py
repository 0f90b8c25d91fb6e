"""The report at a glance: a verdict in a line, and what is behind it in ten to thirty."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fxprec.inspection.figures import Activations, Weights, count, size_text
from fxprec.inspection.rehearsal import HeldMemory, Rehearsal, Traffic
from fxprec.inspection.text import columns, few, folded, plain, titled
from fxprec.model.net import RUNS_AS_TOLD, RUNS_FP32

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    places = [_place(name) for name in folded(modules)]
    return f"in {few(places, _PLACES)}"


@dataclass(frozen=True, slots=True, repr=False)
class Headline:
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

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
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
        if self.costs:
            yield "costs", self.costs
        if self.regions:
            yield "regions", self.regions
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
        how = " (runs as it is)" if self.settings.startswith("O0") else " (runs under torch.autocast)"
        outside = [
            f"{where}: {why}" + ("" if RUNS_FP32 in why or RUNS_AS_TOLD in why else how)
            for where, why in self.net.items()
        ]
        for what in _first("outside", outside):
            yield "outside", what
        for label, found in (
            ("not static", self.not_static),
            ("declined", self.declined),
            ("not named", self.not_named),
        ):
            for what in _first(label, found):
                yield label, what
        for what in (*self.risks, *([self.slow] if self.slow else [])):
            yield "risk", what

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


def _first(label: str, found: Sequence[object]) -> Iterable[str]:
    """Yield as many texts as are shown of a kind, and how many more there are."""
    most = _MOST[label]
    yield from map(str, found[:most])
    if len(found) > most:
        yield f"{len(found) - most} more, in to_dict()"
