"""The origin of an op of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node


@dataclass(frozen=True, slots=True)
class OpOrigin:
    """Owner of an op. Two of them are equal where they mean the same place of the model.

    Attributes:
        kind: "node" of a graph; "weight": the making of a low copy of one; "outside" of the graphs: in Python code
            between them, the loss among it.
        name: of the node ("body.relu" in the body of a higher-order op); the path of the weight; the op.
        graph: the position of the graph, -1 outside of them.
        backward: it computes gradients of what that place computes.
        source: ``model.py:12``, where it is known.
        node: of the graph.
    """

    kind: Literal["node", "weight", "outside"]
    name: str
    graph: int = -1
    backward: bool = False
    source: str = ""
    node: Node | None = field(default=None, compare=False, repr=False)
