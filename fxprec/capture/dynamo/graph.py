"""What dynamo hands over, made into a graph that reads its weights by name and knows the model's module paths.

::

    %L_self_modules_fc_parameters_weight = placeholder        %p_fc_weight = get_attr[fc.weight]
    %s0 = placeholder                                   ->    %L_x_ = placeholder
    %L_x_ = placeholder                                       %size = size(%L_x_, 0)
    %linear = linear(%L_x_, %L_self_...)                      %linear = linear(%L_x_, %p_fc_weight)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxprec.capture.lazy_code import attach, attribute_path
from fxprec.passes.graph.annotations import clean_path, notes
from fxprec.passes.graph.exact_graph import LazyGraphModule
from fxprec.passes.graph.subgraphs import subgraph_of

#: Of a placeholder in our copy: where its value came from, as ``source_of`` writes it.
SOURCE: Final = "argument_source"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Positions among the arguments that dynamo passes at each call: of weights by dotted name, and of the inputs."""

    weights: dict[str, int]
    inputs: tuple[int, ...]


def own_graph(gm: GraphModule, inputs: Sequence[Any], model: nn.Module, path: str) -> tuple[GraphModule, Arguments]:
    """Return a copy to rewrite: dynamo still reads the placeholders of the graph that it handed over.

    Args:
        gm: dynamo's graph; its parameters and buffers are placeholders.
        inputs: example inputs, one a placeholder.
        model: what holds the weights.
        path: where in it is the module whose method was captured.
    """
    copied = own_copy(gm)
    weights, rest, frame = _name_weights(copied, inputs, model)
    _relocate(copied, model, path if frame is None else frame)
    return copied, Arguments(weights, _ask_sizes(copied, rest))


def own_copy(gm: GraphModule, made: dict[GraphModule, GraphModule] | None = None) -> GraphModule:
    """Return a copy of the graph and the bodies that it calls, to be changed; they hold the very same tensors.

    Args:
        made: bodies that were copied already: one that is called by two names stays one.
    """
    made = {} if made is None else made
    if gm in made:
        return made[gm]
    graph = Graph()
    values: dict[Node, Node] = {}
    graph.graph_copy(gm.graph, values)
    output = gm.graph.output_node()
    graph.output(map_arg(output.args[0], lambda node: values[node])).meta.update(output.meta)
    copied = made[gm] = LazyGraphModule(gm, graph)
    copied.meta.update(gm.meta)
    for node in graph.find_nodes(op="placeholder", sort=False):
        # dynamo's note of the argument refers weakly to the weight, which ``torch.utils.swap_tensors`` refuses.
        if (note := node.meta.pop("grapharg", None)) is not None:
            node.meta[SOURCE] = source_of(note)
    for node in graph.find_nodes(op="get_attr", sort=False):
        body = subgraph_of(gm, node)
        if body is not None:
            setattr(copied, str(node.target), own_copy(body, made))
    return copied


def _name_weights(
    gm: GraphModule, inputs: Sequence[Any], model: nn.Module
) -> tuple[dict[str, int], list[int], str | None]:
    """Turn the placeholders of weights back into get_attr nodes.

    Returns:
        positions of weights by name, and of the inputs; the path of the module whose frame was captured, or None if no
            weight tells.
    """
    # Of tied weights the first name counts, as in ``named_parameters``.
    names = {id(value): (name, "buffer") for name, value in model.named_buffers()}
    names |= {id(value): (name, "parameter") for name, value in model.named_parameters()}
    weights: dict[str, int] = {}
    rest: list[int] = []
    frame: str | None = None
    for position, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        known = names.get(id(value)) if isinstance(value, Tensor) else None
        source = node.meta.get(SOURCE)
        if isinstance(value, Tensor):
            notes(node).dtype = value.dtype
        if known is None:
            rest.append(position)
            continue
        name, kind = known
        target = attribute_path(name)
        # dynamo names a weight from its frame, the model from the root: the difference is where the frame's module is.
        frame = _path_of_frame(source, name) if frame is None else frame
        with gm.graph.inserting_before(node):
            weight = gm.graph.create_node("get_attr", target, name="p_" + name.replace(".", "_"))
        weight.meta = {**node.meta, "kind": kind, "sizes": tuple(value.shape)}
        if target != name:
            notes(weight).path = name
        attach(gm, target, value)
        node.replace_all_uses_with(weight)
        gm.graph.erase_node(node)
        weights[name] = position
    return weights, rest, frame


def _ask_sizes(gm: GraphModule, positions: Sequence[int]) -> tuple[int, ...]:
    """Ask the tensors for the sizes that dynamo passes beside them; the positions of the inputs that are left."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    # dynamo passes a size that may change beside the tensor that has it; a graph of ours takes tensors. Reversed: of
    # several dimensions of one size the first one of the first tensor counts.
    sizes = {
        size.node.expr: (node, dimension)
        for node in reversed(placeholders)
        if isinstance(value := node.meta.get("example_value"), Tensor)
        for dimension, size in reversed([*enumerate(value.shape)])
        if isinstance(size, torch.SymInt)
    }
    first = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
    left: list[int] = []
    for position, node in zip(positions, placeholders, strict=True):
        value = node.meta.get("example_value")
        asked = sizes.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        if asked is None:
            left.append(position)
            continue
        if not node.users:
            gm.graph.erase_node(node)
            continue
        with gm.graph.inserting_before(first):
            size = gm.graph.call_method("size", asked)
        # For the report the size belongs where it is read first.
        reader = next(iter(node.users), node)
        size.meta = {key: reader.meta[key] for key in ("stack_trace", "nn_module_stack") if key in reader.meta}
        size.meta["example_value"] = value
        node.replace_all_uses_with(size)
        gm.graph.erase_node(node)
    return tuple(left)


def source_of(note: Any) -> str | None:
    """Return where an argument came from, in the words of the frame that was captured."""
    source = getattr(getattr(note, "source", None), "name", None)
    text = source() if callable(source) else source
    return text if isinstance(text, str) else None


def _path_of_frame(source: str | None, name: str) -> str | None:
    """Return where the module of an inner frame sits in the model, told from one of its weights' two names.

    ``L['self']._modules['fc']._parameters['weight']`` is ``fc.weight`` in the frame, and ``encoder.fc.weight`` in the
    model: the module is ``encoder``.
    """
    if source is None:
        return None
    local = clean_path(source.replace("._parameters['", "._modules['").replace("._buffers['", "._modules['"))
    return name.removesuffix(local).strip(".") if local and name.endswith(local) else None


def _relocate(gm: GraphModule, model: nn.Module, frame: str) -> None:
    """Name modules from the model's root in every node's stack, and take shapes over as ``meta["val"]``.

    dynamo's stacks begin below the module whose frame it captured.
    """
    # The modules around the frame, outermost first, as a trace from the root would name them.
    parts = frame.split(".") if frame else []
    around = [".".join(parts[: length + 1]) for length in range(len(parts))]
    outer = {path: (path, type(model.get_submodule(path))) for path in around}
    for node in gm.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        stack = node.meta.get("nn_module_stack") or {}
        paths = [(".".join(filter(None, (frame, clean_path(str(path))))), kind) for path, kind in stack.values()]
        if paths or (outer and node.op != "placeholder"):
            node.meta["nn_module_stack"] = {**outer, **{path: (path, kind) for path, kind in paths}}
