"""Lays images between convolutions on a CPU out with their channels last in memory, where sizes say that it pays.

Before::

    %x_bf16: bfloat16 = cast(%x, torch.bfloat16)                      # [8, 64, 56, 56], rows of pixels in memory
    %conv2d: bfloat16 = conv2d(%x_bf16, %w, ...)
    %relu: bfloat16 = relu(%conv2d)
    %flatten: bfloat16 = flatten(%relu, 1)

After::

    %x_bf16_last: bfloat16 = channels_last(%x_bf16)                   # channels next to each other
    %conv2d: bfloat16 = conv2d(%x_bf16_last, %w, ...)                 # takes over the layout of its input
    %relu: bfloat16 = relu(%conv2d)
    %relu_first: bfloat16 = contiguous(%relu)
    %flatten: bfloat16 = flatten(%relu_first, 1)

oneDNN multiplies channels, and brings an image that has rows of pixels into another order, and its result back, at each
call. Readers that are not known to give the same in either order (``OpRule.any_format``), and views, random draws and
outputs, get a copy in the original order, so that only the order of sums differs. Weights are brought into order at
each call in any case; where they have more elements than the images, nothing is gained.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.launch.graph_call import graph_call
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.dtypes.fake_results import fake_value
from fxprec.passes.graph.annotations import NON_TENSOR, Op, Precision, Rule, argument, notes
from fxprec.passes.ops.formats import first_lost_write, passes_format_on, values_in_channels_last
from fxprec.passes.ops.table import facts_of


@graph_call
def channels_last(x: Any) -> Any:
    """Return [N, C, H, W] with channels next to each other in memory, also where a size of 1 leaves the order open."""
    if x.dim() != 4 or min(x.shape[1:]) > 1:
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    # torch takes such a tensor for contiguous in either order and returns it: oneDNN would go by the strides it has.
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x.new_empty_strided(x.shape, strides).copy_(x)


@bodies_first
def lay_out_images(gm: GraphModule, context: Context) -> PassResult:
    """Give the low 2-D convolutions of a graph, and what runs between them, that layout."""
    if not context.channels_last:
        return PassResult(gm, False)
    return PassResult(gm, *_lay_out(gm.graph, context.low))


def _lay_out(graph: Graph, low: torch.dtype) -> tuple[bool, tuple[str, ...]]:
    """Lay out one graph. Return whether it changed; and "node: reason" where it does not pay, or nobody can tell."""
    convolutions = [node for node in graph.nodes if _is_convolution(node, low)]
    if not convolutions or any(node.target is channels_last for node in graph.nodes):
        return False, ()
    wrong = next(filter(_has_wrong_gradient, convolutions), None)
    if wrong is not None:
        return False, (f"{wrong.name}: with channels last oneDNN's gradient of grouped, dilated filters is undefined",)
    # Weights are brought into order at each call, images once: with larger weights nothing is gained.
    images, weights = 0, 0
    for node in convolutions:
        shapes = [_shape(argument(node, 0, "input")), _shape(argument(node, 1, "weight")), _shape(node)]
        if None in shapes:
            return False, (f"{node.name}: whether channels last pay is not known without sizes",)
        image, weight, result = (prod(shape) for shape in shapes if shape is not None)
        images, weights = images + image + result, weights + weight
    if images <= weights:
        return False, (f"{convolutions[0].name}: channels last do not pay, weights are larger than images",)
    # What runs between convolutions takes their layout over; copies stand at the borders only.
    inside = {node for node in values_in_channels_last(graph, {*convolutions}) if len(_shape(node) or ()) == 4}
    if (writer := first_lost_write(graph, inside)) is not None:
        return False, (f"{writer.name}: writes to what would be a copy with channels last",)
    for node in [*graph.nodes]:
        if node in inside:
            for source in _images(node):
                if source not in inside:
                    node.replace_input_with(source, _copy(graph, source, last=True))
        elif not _may_read_either(node):
            for source in node.all_input_nodes:
                if source in inside:
                    node.replace_input_with(source, _copy(graph, source, last=False))
    return True, ()


def _images(node: Node) -> list[Node]:
    """Return the operands whose layout counts: of a convolution not its weight."""
    if facts_of(notes(node).op.name).cost in ("convolution", "transposed convolution"):
        return [first] if isinstance(first := argument(node, 0, "input"), Node) else []
    return [source for source in node.all_input_nodes if len(_shape(source) or ()) == 4]


def _is_convolution(node: Node, low: torch.dtype) -> bool:
    facts, shape = facts_of(notes(node).op.name), _shape(node)
    images = shape is None or len(shape) == 4
    return facts.any_format and facts.cost == "convolution" and notes(node).precision.compute is low and images


def _has_wrong_gradient(node: Node) -> bool:
    """Return whether it has groups and a dilation: torch 2.10 to 2.14 leave bfloat16 gradients unwritten."""
    dilation, groups = argument(node, 5, "dilation", 1), argument(node, 6, "groups", 1)
    return groups != 1 and dilation not in (1, (1, 1), [1, 1])


def _may_read_either(node: Node) -> bool:
    """Return whether a reader gives something without a layout, the same for either: a size, a mean over pixels."""
    if notes(node).op.name == "getattr":
        return argument(node, 1, "name") in ("shape", "ndim", "dtype", "device")
    shape = _shape(node)
    return passes_format_on(node) and (notes(node).dtype is NON_TENSOR or (shape is not None and len(shape) != 4))


def _copy(graph: Graph, source: Node, last: bool) -> Node:
    """Make one copy of a value in the other layout, for all that read it from there on."""
    suffix = "last" if last else "first"
    name = f"{source.name}_{suffix}"
    known = next((user for user in source.users if user.name == name), None)
    if known is not None:
        return known
    kind, target = ("call_function", channels_last) if last else ("call_method", "contiguous")
    with graph.inserting_after(source):
        copy = graph.create_node(kind, target, (source,), name=name)
    kept = ("nn_module_stack", "stack_trace", "numel", "dtype", "val", "is_zero_dim")
    copy.meta = {key: source.meta[key] for key in kept if key in source.meta} | {"op": Op("contiguous")}
    why = "channels next to each other in memory" if last else "rows of pixels again, for what reads it"
    notes(copy).precision = Precision.arriving(None, notes(source).precision.output, Rule.FOLLOW, why)
    return copy


def _shape(node: Any) -> tuple[int, ...] | None:
    value = fake_value(node) if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)
