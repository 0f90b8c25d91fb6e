"""One self-contained HTML file of a report's data: no request is made, and no text of the model is ever markup.

The data lie in the file as JSON, compressed and written in letters (gzip, base64), so that no name can end its element;
the script puts every text into the page as text. Texts that repeat are stored once: a node is a row of numbers.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Final

#: A node that a reason names.
_NAME: Final = re.compile(r"(?:%|for )([\w.]+)")
#: Fields of a node that are texts, in the order in which the script reads them.
_TEXTS: Final = (
    "node", "kind", "module", "op", "compute", "output", "rule", "why", "source", "region", "served", "original",
)  # fmt: skip


def render(report: Mapping[str, Any], lines: Sequence[tuple[str, str]], other: Mapping[str, Any] | None = None) -> str:
    """Return the text of the page as one file.

    Args:
        report: ``Report.to_dict()``; its rows may have what ``add_measured`` gives them.
        lines: label and text of the lines at a glance.
        other: another report to compare with, likewise.
    """
    strings: dict[str, int] = {}
    headline = report["headline"]
    data = {
        "title": headline["model"],
        "verdict": _verdict(headline),
        "lines": lines,
        "nodes": _nodes(report, strings),
        "graphs": [f"{graph['method']}({', '.join(graph['inputs'])})" for graph in report["graphs"]],
        "other": None if other is None else {"verdict": _verdict(other["headline"]), "nodes": _nodes(other, strings)},
        "strings": [*strings],
    }
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)  # equal reports, equal files
    page = _asset("page.html")
    parts = {
        "TITLE": html.escape(f"{headline['model']}: fxprec"),
        "STYLE": _asset("page.css"),
        "LAYOUT": _asset("dagre.min.js"),
        "SCRIPT": _asset("page.js"),
        "DATA": base64.b64encode(packed).decode(),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda place: parts[place[1]], page)  # at once: a part may hold "@@DATA@@" itself


def framed(page: str) -> str:
    """Return a page for a notebook, in a frame of its own, whose styles and scripts touch nothing else."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="fxprec report" '
        'style="width: 100%; height: 640px; border: 0"></iframe>'
    )


def _nodes(report: Mapping[str, Any], strings: dict[str, int]) -> list[list[Any]]:
    """Return a row a node: texts as numbers, the node that its reason names, the graph, bytes, ns, reads, measurements.

    Casts of weights are no rows: shadows are read in their place, and their readers say so.
    """
    rows: list[list[Any]] = []

    def number_of(text: str) -> int:
        return strings.setdefault(text, len(strings))

    for number, graph in enumerate(report["graphs"]):
        shadows = {row["node"]: row for row in graph["rows"] if row["kind"] == "shadow"}
        shown = [row for row in graph["rows"] if row["kind"] != "shadow"]
        places = {row["node"]: len(rows) + position for position, row in enumerate(shown)}
        for row in shown:
            reads = []
            for name in row["reads"]:
                if name in shadows:
                    name = f"{', '.join(shadows[name]['reads'])} as its {shadows[name]['output']} shadow"
                reads.append(places[name] if name in places else -1 - number_of(name))
            why, named = _reason(row["why"], places)
            texts = [number_of(why if field == "why" else row[field]) for field in _TEXTS]
            # More digits than anybody reads would only make the file larger.
            errors = [(number_of(label), float(f"{share:.4g}")) for label, share in row.get("errors", ())]
            spans = [(number_of(label), number_of(dtype), *more) for label, dtype, more in row.get("ranges", ())]
            nanoseconds = round(row["seconds"] * 1e9) if row["seconds"] >= 0 else -1
            about = (number, row["bytes"], nanoseconds, reads, *([errors, spans] if errors or spans else []))
            rows.append([*texts, number_of(named), *about])
    return rows


def _verdict(headline: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (headline["settings"], headline["verdict"])))


def _reason(why: str, places: Mapping[str, int]) -> tuple[str, str]:
    """Return a reason with ``@`` for the node that it names, and that name: like reasons are one text."""
    for found in _NAME.finditer(why):
        if found[1] in places:
            return f"{why[: found.start(1)]}@{why[found.end(1) :]}", found[1]
    return why, ""


def _asset(name: str) -> str:
    return resources.files("fxprec.page").joinpath("assets", name).read_text(encoding="utf-8")
