"""What a kernel reads in FP32 and was cast from a low value, as the low value: through views of the cast as well.

Before::

    %wide: float32 = to(%linear, torch.float32)              # the user's .float(), which is returned as well
    %shifted: float32 = getitem(%wide, (..., slice(-1), ...))
    %rows: float32 = view(%shifted, -1, 50257)
    %loss: float32 = cross_entropy(%rows, %labels)

After::

    %wide: float32 = to(%linear, torch.float32)
    %shifted_1: bfloat16 = getitem(%linear, (..., slice(-1), ...))
    %rows_1: bfloat16 = view(%shifted_1, -1, 50257)
    %loss: float32 = cross_entropy(%rows_1, %labels)         # a kernel, which computes in FP32

The values are the same; a kernel rounds the gradient of what it reads, which the cast's backward did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch.fx import Node

from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.ops.table import facts_of

_LOW: Final = (torch.float16, torch.bfloat16)


def cast_below(node: object) -> list[Node]:
    """A node that reads as FP32 what is low, and what lies between: the views, last first, and the cast to FP32.

    Empty where there is no such cast.
    """
    chain: list[Node] = []
    while isinstance(node, Node):
        chain.append(node)
        if (node.target in CASTS or notes(node).op.name == "to") and _of_low(node):
            return chain
        if not _moves_only(node):
            break
        node = node.args[0]
    return []


def read_low(chain: list[Node]) -> Node | None:
    """The node that has the low values of ``chain[0]``, of views made anew; None where gradients would flow elsewhere.

    Args:
        chain: what ``cast_below`` gives, of which nobody writes to anything in place.
    """
    *views, last = chain
    source = last.args[0]
    assert isinstance(source, Node)
    if len({mode for node, mode in grad_mode_at_nodes(last.graph, True).items() if node in chain}) > 1:
        return None  # the cast ends a gradient that the views would not
    for view in reversed(views):
        with view.graph.inserting_after(view):
            made = view.graph.node_copy(view, lambda each, view=view, new=source: new if each is view.args[0] else each)
        decided, low = notes(view).precision, notes(source).precision.output
        reads, compute = (low if each is torch.float32 else each for each in (decided.reads, decided.compute))
        notes(made).precision = replace(decided, reads=reads, compute=compute, output=low)
        source = made
    return source


def remove_unread(chain: list[Node]) -> None:
    """Erase the views and the cast, as far as nobody else reads them."""
    for node in chain:
        if node.users:
            break
        node.graph.erase_node(node)


def _of_low(cast: Node) -> bool:
    source, to = cast.args[0], cast.args[1] if cast.target in CASTS else cast_target(cast)
    return to is torch.float32 and isinstance(source, Node) and notes(source).precision.output in _LOW


def _moves_only(node: Node) -> bool:
    facts = facts_of(notes(node).op.name)
    return (
        node.op in ("call_function", "call_method")
        and facts.view
        and facts.rule is Rule.FOLLOW
        and not facts.random
        and dtype_argument(node) is None
        and not notes(node).op.in_place
    )
