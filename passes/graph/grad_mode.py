"""Where autograd records in a graph of dynamo, which writes ``with torch.no_grad():`` as two calls::

    %_ = _set_grad_enabled(False)
    %a: bfloat16 = linear(%x_bf16, %w_bf16)     # not recorded: nor is a cast made here
    %_ = _set_grad_enabled(True)
    %b: bfloat16 = linear(%x_bf16_1, %w_bf16)   # reads a cast of its own, else %x would get no gradient

Whoever shares or leaves out a cast asks here: one that is not recorded ends the gradient.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from fxprec.passes.torch_internals import enter_inference_mode, exit_inference_mode, set_grad_enabled


def grad_mode_at_nodes(graph: Graph, at_first: bool) -> dict[Node, bool]:
    """Node -> whether grad mode is on where it runs. ``at_first``: the mode in which the graph is called."""
    found: dict[Node, bool] = {}
    now, around = at_first, []
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            now = node.args[0] is not False
        elif node.target is enter_inference_mode:
            around.append(now)
            now = now and node.args[0] is False
        elif node.target is exit_inference_mode:
            now = around.pop()
        found[node] = now
    return found
