"""Finds where autograd records in a graph, and which tensors the user sees of it.

dynamo writes ``with torch.no_grad():`` as two calls::

    %_ = _set_grad_enabled(False)
    %a: bfloat16 = linear(%x_bf16, %w_bf16)     # not recorded: nor is a cast made here
    %_ = _set_grad_enabled(True)
    %b: bfloat16 = linear(%x_bf16_1, %w_bf16)   # reads a cast of its own, else %x would get no gradient

A pass that shares or leaves out a cast asks here: one that is not recorded ends the gradient.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from fxprec.passes.graph.casts import cast_if_float
from fxprec.passes.torch_internals import (
    HigherOrderOperator,
    enter_inference_mode,
    exit_inference_mode,
    set_grad_enabled,
)


def grad_mode_at_nodes(graph: Graph, at_first: bool) -> dict[Node, bool]:
    """Map each node to whether grad mode is on where it runs. ``at_first``: the mode in which the graph is called."""
    found: dict[Node, bool] = {}
    now, around = at_first, []
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            now = node.args[0] is not False
        elif node.target is enter_inference_mode:
            around.append(now)
            # inference_mode(False) turns gradients on, also within no_grad.
            now = node.args[0] is False
        elif node.target is exit_inference_mode:
            now = around.pop()
        found[node] = now
    return found


def ever_records(graph: Graph, at_first: bool) -> bool:
    """Return whether autograd records anywhere: also in ``torch.enable_grad()`` of a call without gradients."""
    return at_first or any(grad_mode_at_nodes(graph, False).values())


def exposed_values(graph: Graph) -> list[Node]:
    """Return what the user sees of a graph, each once: what it returns, and tensors that get a hook of the user's.

    If it returns an object that a call of a class makes (a named tuple), the arguments of that call are seen, too. A
    hook gets the gradient of the very tensor, wherever in the graph it is registered.
    """
    found = dict.fromkeys(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook":
            found[node.args[0]] = None
    for node in list(found):
        made = node.args[0] if node.target is cast_if_float else node
        if isinstance(made, Node) and made.op == "call_function" and isinstance(made.target, type):
            found.update(dict.fromkeys(made.all_input_nodes))
    return list(found)


def exposed_with_gradient(graph: Graph, at_first: bool) -> set[Node]:
    """Return what the user sees of a graph where autograd records. ``at_first``: as of ``grad_mode_at_nodes``."""
    recorded = grad_mode_at_nodes(graph, at_first)
    return {node for node in exposed_values(graph) if recorded[node]}
