"""What users get for a captured graph: a graph module that stands on its own, in every copy of it too.

It reads the model's own parameters and buffers, under the model's keys where a graph module can have them (see
``capture/state_names``), and casts explicitly. Regions that recompute their activations do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import dtype, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.capture.lazy_code import attach, with_code
from fxprec.capture.state_names import attribute_path, keep_model_keys
from fxprec.outputs import has_low_input, restore_dtypes
from fxprec.passes.canonicalize import every_graph
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.leaves import leaf, tracer_of
from fxprec.program import run_checkpoints
from fxprec.shapes import state_dtypes

__all__ = ["made_presentable", "restored"]


def made_presentable(gm: GraphModule, model: nn.Module, low: dtype | None = None) -> GraphModule:
    """Finish a graph of ``model`` in place for its users; returns it.

    Args:
        gm: the rewritten graph.
        model: whose graph it is.
        low: of its results, those of this dtype are to be FP32, as the model gives them.
    """
    state_dtypes(gm)
    if low is not None and "restored" not in gm.meta:
        gm.meta["restored"] = True
        _restore_results(gm, low)
    if "presented" not in gm.meta:
        gm.meta["presented"] = True
        for each in every_graph(gm):
            run_checkpoints(each.graph)
            for node in each.graph.nodes:  # the same as "val", by which split_module takes sizes for dynamo's inputs
                node.meta.pop("example_value", None)
        _take_over_state(gm, model)
        with_code(gm)
    return gm


def restored(output: Any, low: dtype, *inputs: Any) -> Any:
    """``output`` with every low tensor as FP32, unless an input is low: what the model does with a graph's results."""
    if tracer_of((output, inputs)) is not None:
        return leaf(restored, output, low, *inputs)
    return output if has_low_input(inputs, low) else restore_dtypes(output, low)


def _restore_results(gm: GraphModule, low: dtype) -> None:
    """Graphs captured with low weights, at O3 or frozen, take their results for what the program gave."""
    end, inputs = gm.graph.output_node(), gm.graph.find_nodes(op="placeholder")
    done: dict[Node, Node] = {}

    def widened(node: Node) -> Node:
        if node not in done:
            with gm.graph.inserting_before(end):
                done[node] = gm.graph.call_function(restored, (node, low, *inputs))
        return done[node]

    end.args = map_arg(end.args, lambda node: widened(node) if actual_dtype(node) in (low, None) else node)
    gm.recompile()


def _take_over_state(gm: GraphModule, model: nn.Module) -> None:
    """Keys as the model has them: both names of a tied weight, no buffer that the model does not save."""
    held = {id(tensor) for tensor in (*gm.parameters(), *gm.buffers())}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    targets = {path: attribute_path(path) for path, tensor in named if id(tensor) in held}
    for path, tensor in named:
        if path in targets:
            attach(gm, targets[path], tensor)
    saved = {targets.get(path) for path in _saved(model)}
    for prefix, module in gm.named_modules():
        for name in module._buffers:
            if (f"{prefix}.{name}" if prefix else name) not in saved:
                module._non_persistent_buffers_set.add(name)
    keep_model_keys(gm, {target: path for path, target in targets.items() if target != path})


def _saved(model: nn.Module) -> Iterator[str]:
    """Paths of the buffers that are in the model's state."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name
