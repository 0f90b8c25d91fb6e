"""Tell whether a ledger and a report are of one model under one policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fxprec.inspection.figures import parameter_bytes
from fxprec.inspection.nodes import computes, known_graphs, places
from fxprec.model.conversion import Conversion
from fxprec.model.module import conversion_of
from fxprec.passes.graph.text import dtype_name, shown_dtype


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
