"""A rewritten graph as a function of its weights and inputs: what runs.

The graph that users see reads each parameter by ``get_attr`` and casts it, and stands on its own. The program made from
it takes the weights as arguments, low ones as their shadows, so that one call costs no attribute walks and no weight
casts, and works on whatever tensors stand in for the parameters (functional_call, parametrizations, DTensors)::

    %w = get_attr[fc.weight]                          %fc_weight_bf16 = placeholder    (a shadow)
    %w_bf16 = cast(%w, torch.bfloat16)       ->       %x = placeholder
    %linear = linear(%x, %w_bf16)                     %linear = linear(%x, %fc_weight_bf16)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.casts import cast

__all__ = ["Executor", "Program", "lift"]

Executor = Literal["eager", "inductor"]


@dataclass(frozen=True, slots=True)
class Program:
    """``function(*low, *plain, *inputs)``.

    Attributes:
        function: runs the graph.
        low: get_attr targets whose low-precision shadows come first, in order.
        plain: get_attr targets of the parameters and buffers that come next, as they are.
        gm: the lifted graph.
    """

    function: Callable[..., Any]
    low: tuple[str, ...]
    plain: tuple[str, ...]
    gm: GraphModule


def lift(gm: GraphModule, low: torch.dtype, executor: Executor = "eager") -> Program:
    """Make the program of a rewritten, self-contained graph. Constants and subgraphs stay attributes."""
    graph = Graph()
    values: dict[Node, Node] = {}
    graph.graph_copy(gm.graph, values)
    output = gm.graph.output_node()
    graph.output(torch.fx.node.map_arg(output.args[0], lambda node: values[node]))
    weights = [node for node in graph.nodes if node.op == "get_attr" and node.meta.get("kind") in ("parameter", "buffer")]
    shadowed: dict[str, Node] = {}
    plain: dict[str, Node] = {}
    first = next(iter(graph.nodes))
    for node in weights:
        for user in list(node.users):
            if node.meta["kind"] == "parameter" and user.target is cast and user.args[1] == low:
                _replace(user, shadowed, node.target, "_low", graph, first)
        if node.users:
            _replace(node, plain, node.target, "", graph, first)
        else:
            graph.erase_node(node)
    ordered = [*shadowed.values(), *plain.values()]
    for node in reversed(ordered):
        next(iter(graph.nodes)).prepend(node)
    _run_checkpoints(graph)
    graph._codegen = type(graph._codegen)()
    lifted = GraphModule(gm, graph, class_name="Program")
    function = lifted.forward if executor == "eager" else torch.compile(lifted, backend="inductor")
    return Program(function, tuple(shadowed), tuple(plain), lifted)


def _replace(node: Node, slots: dict[str, Node], target: Any, suffix: str, graph: Graph, first: Node) -> None:
    if target not in slots:
        with graph.inserting_before(first):
            slots[target] = graph.placeholder("p_" + target.replace(".", "_") + suffix)
        slots[target].meta = dict(node.meta)
    node.replace_all_uses_with(slots[target])
    graph.erase_node(node)


def _run_checkpoints(graph: Graph) -> None:
    """dynamo's operator for activation checkpointing only tags nodes for a later compiler: run a real checkpoint."""
    for node in graph.find_nodes(op="call_function", target=_tag_activation_checkpoint()):
        node.target = checkpointed


def _tag_activation_checkpoint() -> object:
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return tag_activation_checkpoint


def checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed region: activations are recomputed in the backward, with the same random numbers."""
    from torch.utils.checkpoint import checkpoint

    options = {"preserve_rng_state": kwargs.get("preserve_rng_state", True)}
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body.forward, *args, use_reentrant=False, **options)
