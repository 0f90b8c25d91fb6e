"""Name the risks of a conversion: numbers in the user's code that low precision loses, and what else is worth a look.

Low ops read the same numbers as FP32 ones, but keep only 8 (bfloat16) or 11 (float16) bits of what they compute::

    y + 1e-3                          # bfloat16: gives y back wherever |y| is above 0.51
    y * 0.999                         # bfloat16: gives y back, always
    y.clamp(max=1 - 1e-4)             # bfloat16: the bound is 1.0, and log(1 - y) is infinite

What would become zero, or leaves the range, is no risk: the passes keep such an op in FP32 (``placement.pins``). So is
a bound that is an integer in low precision, but with ``placement="autocast"``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch.fx import GraphModule, Node

from fxprec.inspection.figures import count
from fxprec.inspection.nodes import NamedNode, op_name, places, source_line
from fxprec.inspection.text import few
from fxprec.model.conversion import Conversion
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.graph.text import dtype_name, shown_dtype
from fxprec.passes.ops.table import facts_at, facts_of

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
    found: dict[str, dict[str, None]] = {}
    for _, _, node in places:
        if node.op in ("placeholder", "get_attr", "output") or notes(node).inserted or not _is_low(node, low):
            continue
        if (loss := _LOSSES.get(facts_at(node).numbers)) is None:
            continue
        for number in _numbers(node):
            if what := loss(number, low):
                found.setdefault(f"{op_name(node)} with {number:g} in {dtype_name(low)}{what}", {})[
                    source_line(node)
                    # One text for a number however often it is written: its lines follow it.
                ] = None
    for text, lines in found.items():
        named = [line for line in lines if line]
        yield f"{text}: {few(named, _LINES)}" if named else text


def _is_low(node: Node, low: torch.dtype) -> bool:
    """Return whether a node computes in the low dtype; or reads it, if its result is no float, as a comparison's."""
    precision = notes(node).precision
    reads = precision.compute is None and any(shown_dtype(source) == dtype_name(low) for source in node.all_input_nodes)
    return reads or precision.compute is low


def _numbers(node: Node) -> Iterator[float]:
    """Yield the operands that are Python numbers: a factor (``alpha=``) is none, a tensor is FP32 and wins."""
    named = (node.kwargs.get(name) for name in ("other", "min", "max", "min_val", "max_val", "value", "fill_value"))
    for argument in (*node.args, *named):
        if type(argument) is float and math.isfinite(argument):
            yield argument


def _added(number: float, low: torch.dtype) -> str:
    eps = torch.finfo(low).eps
    lost = 0 < abs(number) < eps / 2
    return f" gives back what it was added to beyond {4 * abs(number) / eps:.2g}" if lost else ""


def _multiplied(number: float, low: torch.dtype) -> str:
    # Neighbours are at least a relative eps / 2 apart: a change below a half of that is rounded away.
    lost = 0 < abs(number - 1) < torch.finfo(low).eps / 4
    return " gives back what it multiplies" if lost else ""


def _compared(number: float, low: torch.dtype) -> str:
    rounded = torch.tensor(number).to(low).item()
    lost = number != rounded and rounded in (-1.0, 0.0, 1.0)  # where logarithms, roots and inverses have their poles
    return f" takes {rounded:g} for it" if lost else ""


#: By what the op table says that an op's numbers are: what low arithmetic makes of one, "" where nothing is lost.
_LOSSES: Final[Mapping[str | None, Callable[[float, torch.dtype], str]]] = {
    "added": _added,
    "factors": _multiplied,
    "compared": _compared,
    "fill": _compared,
}
