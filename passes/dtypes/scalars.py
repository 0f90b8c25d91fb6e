"""Which values are 0-dim tensors: those do not take part in type promotion."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.passes.graph.annotations import notes
from fxprec.passes.ops.table import facts_of


def is_zero_dim(node: Node) -> bool:
    """Whether the value is known to be a 0-dim tensor; what nobody knows counts as dimensioned.

    Known is: what was captured with shapes, a 0-dim parameter or buffer, the result of a reduction over everything,
    and that of an elementwise op whose tensors are all 0-dim. ``propagate`` writes the answer to
    ``annotations.scalar``, so that a question never walks further than the node's own arguments.
    """
    annotations = notes(node)
    known = annotations.scalar
    if known is not None:
        return known
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    if node.op == "get_attr":
        return annotations.ndim == 0
    rank = facts_of(annotations.op.name).rank
    if rank == "reduced":
        return len(node.args) == 1 and not ({"dim", "axis"} & node.kwargs.keys())
    sources = node.all_input_nodes
    return rank == "kept" and bool(sources) and all(notes(source).scalar for source in sources)
