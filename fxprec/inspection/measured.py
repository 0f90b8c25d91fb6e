"""Lay measured numbers over a report's nodes, once they are known to be of the same model under the same policy.

Numbers are parts in an error (a ledger), and how large values are (ranges). A weight has no node of its own: what was
measured of it stands at the first node that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from torch import nn

from fxprec.inspection.figures import parameter_bytes
from fxprec.inspection.nodes import computes, places
from fxprec.model.conversion import Conversion, conversion_of
from fxprec.model.graphs import known_graphs
from fxprec.passes.graph.text import dtype_name, shown_dtype

#: In the order in which the script of the page reads them.
_SHARES: Final = ("zeros", "saturated", "flushed", "flushed_in_float16")


@dataclass(frozen=True, slots=True)
class Subject:
    """Conversion that numbers were measured on, as far as it says which node a number belongs to.

    Attributes:
        by: who looked at it.
        model: name of its class.
        settings: level, dtype and placement.
        parameters: dtype -> bytes.
        graphs: of each node -> what it computes in and puts out.
    """

    by: Literal["audit", "ranges", "report"]
    model: str
    settings: str
    parameters: Mapping[str, int]
    graphs: tuple[Mapping[str, str], ...]

    def differences(self, other: Subject) -> Iterator[str]:
        """Yield differences from the other conversion, as clauses; graphs that only the other one has do not count."""
        for what, own, there in (
            ("model", self.model, other.model),
            ("settings", self.settings, other.settings),
            ("bytes of parameters", dict(self.parameters), dict(other.parameters)),
        ):
            if own != there:
                yield f"{what}: {own} in the {self.by}, {there} in the {other.by}"
        # The other one may have captured more since: additional graphs move no node.
        if len(self.graphs) > len(other.graphs):
            yield f"graphs: {len(self.graphs)} in the {self.by}, {len(other.graphs)} in the {other.by}"
        for number, (own, there) in enumerate(zip(self.graphs, other.graphs, strict=False), 1):
            both = [node for node in own if node in there]
            for node in dict.fromkeys((*both, *own, *there)):  # a cast that is not there tells less
                here, beside = own.get(node, "is not there"), there.get(node, "is not there")
                if here != beside:
                    yield f"%{node} of graph {number} {here} in the {self.by}, {beside} in the {other.by}"


def subject_of(model: nn.Module, by: Literal["audit", "ranges"]) -> Subject:
    """Return the subject of a converted model, as it is now; its graphs become those that users are shown."""
    conversion = conversion_of(model)
    graphs = tuple(
        {
            place.name: told(computes(place.node), shown_dtype(place.node))
            for place in places(number, gm)
            if place.node.op not in ("get_attr", "output")
        }
        for number, gm in enumerate(known_graphs(model))
    )
    return Subject(by, conversion.name, settings_line(conversion), parameter_bytes(model), graphs)


def settings_line(conversion: Conversion | None) -> str:
    """Write level, dtype and placement; empty for a bare graph."""
    if conversion is None:
        return ""
    settings = conversion.settings
    return f"{settings.policy.level}, {dtype_name(settings.dtype)}, {settings.placement}"


def told(compute: str, output: str) -> str:
    """Write the dtypes of a node: ``computes float32, puts out bfloat16``."""
    return f"computes {compute}, puts out {output}" if compute != "-" else f"puts out {output}"


class Measured(Protocol):
    """Table of measured numbers: a ledger, or ranges."""

    @property
    def subject(self) -> Subject | None: ...

    @property
    def headline(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


def add_measured(
    graphs: Sequence[dict[str, Any]], report: Subject, ledger: Measured | None, ranges: Measured | None
) -> list[tuple[str, str]]:
    """Give the rows of a report's graphs "errors" and "ranges"; return label and text of lines above all of them.

    Raises:
        TypeError, ValueError: as of ``Report.to_html``.
    """
    lines = []
    if ledger is not None:
        # A page that lays numbers over nodes must say what it could not place.
        left = 1.0
        for place, measured in _placed(graphs, _rows(ledger, "audit", report)):
            place.setdefault("errors", []).append((_label(measured), measured["share"]))
            # Shares add up to 1 over all rows: what no node has is told, and not lost.
            left -= measured["share"]
        elsewhere = f"; {left:.1%} of it at no node, but in the loss or outside of the graphs" if left > 0.0005 else ""
        lines.append(("error", ledger.headline + elsewhere))
    if ranges is not None:
        for place, measured in _placed(graphs, _rows(ranges, "ranges", report)):
            place.setdefault("ranges", []).append((_label(measured), measured["dtype"], _figures(measured)))
        lines.append(("ranges", ranges.headline))
    return lines


def _rows(table: Measured, by: str, report: Subject) -> list[dict[str, Any]]:
    """Return the rows of a table, once it is known to be of what the report is of."""
    argument = "ledger" if by == "audit" else "ranges"
    wanted = f"{argument} must be what fxprec.numerics.{by} returns"
    if not hasattr(table, "subject"):
        raise TypeError(f"{wanted}, not a {type(table).__name__}")
    subject = table.subject
    if subject is None:
        raise ValueError(f"{wanted}, not folded: a folded row is of no single node")
    if subject.by != by:
        raise TypeError(f"{wanted}, not what fxprec.numerics.{subject.by} returns")
    for difference in subject.differences(report):
        raise ValueError(
            f"{argument} was measured on another conversion than the report is of: {difference}. Take both of one "
            f"model under one policy: first fxprec.numerics.{by}(model, ...), then fxprec.report(model)"
        )
    return table.to_dict()["rows"]


def _placed(
    graphs: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (row of the report, what was measured there), a node's own values before those of weights."""
    # Weights have no node: the first reader in the order of running stands for them.
    nodes = {(number, row["node"]): row for number, graph in enumerate(graphs) for row in graph["rows"]}
    readers: dict[str, dict[str, Any]] = {}
    for number in sorted({row["graph"] for row in measured if row["kind"] == "node"}):
        shadows: dict[str, str] = {}
        for row in graphs[number]["rows"]:
            # Shadows are not on the page: their reader stands for the weight.
            if row["kind"] == "shadow":
                shadows[row["node"]] = row["reads"][0]
            else:
                for name in row["reads"]:
                    readers.setdefault(shadows[name] if name in shadows else name, row)
    for row in sorted(measured, key=lambda row: (row["kind"] == "weight", _is_backward(row))):
        found = readers.get(row["node"]) if row["kind"] == "weight" else nodes.get((row["graph"], row["node"]))
        if found is not None and row["kind"] != "outside":
            yield found, row


def _is_backward(row: dict[str, Any]) -> bool:
    return row["phase"] == "backward" if "phase" in row else row["backward"]


def _label(row: dict[str, Any]) -> str:
    if row["kind"] == "weight":
        return f"{'gradient' if _is_backward(row) else 'low copy'} of {row['node']}"
    return "backward" if _is_backward(row) else "forward"


def _figures(row: dict[str, Any]) -> list[Any]:
    """Return lowest exponent, a digit for each (log of how many), headroom (None: all is 0), and the shares."""
    counts = {int(exponent): count for exponent, count in row["values"]["exponents"].items()}
    lowest, highest = min(counts, default=0), max(counts, default=-1)
    most = math.log1p(max(counts.values(), default=0))
    tall = [math.ceil(9 * math.log1p(counts.get(each, 0)) / most) for each in range(lowest, highest + 1)]
    headroom = None if row["headroom"] is None else round(row["headroom"], 1)
    shares = [None if row[name] is None else round(row[name], 5) for name in _SHARES]
    return [lowest, "".join(map(str, tall)), headroom, *shares]
