"""Explain why one part of a model runs as it does: ``print(fxprec.explain(model, "encoder.layer.3"))``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from torch import nn
from torch.fx import Node

from fxprec.inspection.figures import count
from fxprec.inspection.nodes import (
    NamedNode,
    is_inserted,
    is_shadow,
    op_name,
    original,
    places,
    reason,
    select,
    source_line,
)
from fxprec.inspection.text import fold, folded
from fxprec.model.graphs import captured_of, rewritten_graphs
from fxprec.passes.graph.annotations import arg_nodes, module_path, notes, weight_path
from fxprec.passes.graph.casts import cast_if_float
from fxprec.passes.graph.text import dtype_name, shown_dtype

_NODE: Final = re.compile(r"%([\w.]+)")
#: Nodes of other layers, whose names are left out.
_OUTSIDE: Final = re.compile(r"%(?:, %)*(?!\w)")


class Explanation(str):
    """A text that shows as itself at a prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(model: nn.Module, pattern: str) -> Explanation:
    """Explain what each node of a part of the model reads, computes and puts out, by which rule, why, with which casts.

    Layers that are alike are told once: ``blocks.0-11: 12 alike``. The pattern ``blocks.3`` tells of one of them.

    Args:
        model: a converted module, or a GraphModule that ``fxprec.graph_module`` returned.
        pattern: a module path (all below it too), or a node name; may hold ``*`` and ``?``; or ``op:softmax``.

    Raises:
        ValueError: the pattern names nothing; with the nearest names.
        NotCapturedError: the model is captured at its first call, which did not happen yet.
    """
    graphs = rewritten_graphs(model)
    # With several methods a heading says whose graph it is.
    methods = {gm: captured.method for gm, captured in captured_of(model).items()}
    found = [place for number, gm in enumerate(graphs) for place in places(number, gm)]
    chosen = select(found, pattern, [name for name, _ in model.named_modules() if name])
    lines: list[str] = []
    for number in range(len(graphs)):
        # The same pattern may match several graphs, of other shapes or modes: each gets a heading.
        own = [place for place in chosen if place.graph == number]
        ops = [place for place in own if place.node.op not in ("get_attr", "output") and not is_inserted(place.node)]
        if own:
            heading = f"{pattern} in graph {number + 1} of {len(graphs)}" if len(graphs) > 1 else pattern
            heading += f" ({methods[graphs[number]]})" if len({*methods.values()}) > 1 else ""
            lines.append(f"{heading}: {count(len(ops or own), 'node')}")
        # A cast shows at its readers; by itself only where it is all that was asked for.
        lines += _folded(ops or own, pattern)
    return Explanation("\n".join(lines))


def _folded(shown: list[NamedNode], pattern: str) -> Iterator[str]:
    """Yield the description of each node; of layers that are alike the first one's only."""
    layers = [(name, [*own]) for name, own in itertools.groupby(shown, lambda place: _layer(place, pattern))]
    likenesses = [_likeness(name, own) if name else (str(position),) for position, (name, own) in enumerate(layers)]
    alike: dict[tuple[str, ...], list[str]] = {}
    for likeness, (name, _) in zip(likenesses, layers, strict=True):
        alike.setdefault(likeness, []).append(name)
    for likeness, (name, own) in zip(likenesses, layers, strict=True):
        same = alike[likeness]
        if name != same[0]:
            continue
        if len(same) > 1:
            yield f"{', '.join(folded(same))}: {len(same)} alike, {count(len(own), 'node')} each; the first one's:"
        for place in own:
            yield from _describe(place)


def _layer(place: NamedNode, pattern: str) -> str:
    """Return the layer of a node, "blocks.3": up to the first number in its path that the pattern does not name."""
    parts = module_path(place.node).split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and position >= len(pattern.split(".")):
            return ".".join(parts[: position + 1])
    return ""


def _likeness(name: str, own: list[NamedNode]) -> tuple[str, ...]:
    """Return descriptions that are equal for layers that are alike: without their numbers and the names of nodes."""
    # Names become positions within the layer, so that the same wiring reads the same in each.
    names = {place.node.name: str(position) for position, place in enumerate(own)}
    lines = [
        _NODE.sub(lambda match: "%" + names.get(match[1], ""), line).replace(name, fold(name))
        for place in own
        for line in _describe(place)
    ]
    return tuple(_OUTSIDE.sub("%", line) for line in lines)  # one reader of a result more: the next layer's residual


def _describe(place: NamedNode) -> Iterator[str]:
    node = place.node
    where = ", ".join(filter(None, (module_path(node) and f"in {module_path(node)}", source_line(node))))
    yield f"%{place.name} = {op_name(node)}" + (f"  ({where})" if where else "")
    sources = list(dict.fromkeys(source for _, source in arg_nodes(node)))
    if sources:
        yield "    reads     " + ", ".join(map(_read, sources))
    precision = notes(node).precision
    if precision.compute is not None and not is_inserted(node):
        yield f"    computes  {dtype_name(precision.compute)}"
    if notes(node).fused:
        yield f"    served by {notes(node).fused}"
    yield "    puts out  " + _put_out(node)
    rule, why = reason(node)
    yield f"    because   {why}" if rule == "-" or is_inserted(node) else f"    because   {rule}: {why}"


def _read(source: Node) -> str:
    """Describe an argument, through the cast that was inserted for it."""
    if is_inserted(source) and isinstance(source.args[0], Node):
        origin = source.args[0]
        if is_shadow(source):
            return f"{weight_path(origin)} as its {shown_dtype(source)} shadow"
        name = weight_path(origin) if origin.op == "get_attr" else f"%{origin.name}"
        if _asks(source):
            return f"{name} as it comes, {shown_dtype(source)} if it is a float"
        return f"{name} cast from {shown_dtype(origin)} to {shown_dtype(source)}"
    name = weight_path(source) if source.op == "get_attr" else f"%{source.name}"
    return f"{name}: {shown_dtype(source)}"


def _put_out(node: Node) -> str:
    before = original(node)
    text = f"{shown_dtype(node)} ({before} in the original)" if before else shown_dtype(node)
    # Readers behind a cast of ours are told with the cast, which is what they see.
    direct = [user for user in node.users if not is_inserted(user)]
    parts = [f"to {_readers(direct)}"] if direct else []
    # Casts of the result are told here, and not as nodes: they are a part of how it is read.
    for cast in node.users:
        if is_inserted(cast):
            to = f"{shown_dtype(cast)} if it is a float" if _asks(cast) else shown_dtype(cast)
            parts.append(f"cast to {to} for {_readers(list(cast.users))}")
    return ", ".join([text, *parts])


def _asks(cast: Node) -> bool:
    """Return whether a cast tests at run time what arrives, and casts only floats: without inputs no one could know."""
    return cast.target is cast_if_float and shown_dtype(cast) == shown_dtype(cast.all_input_nodes[0])


def _readers(users: list[Node]) -> str:
    return ", ".join("the result" if user.op == "output" else f"%{user.name}" for user in users) or "nobody"
