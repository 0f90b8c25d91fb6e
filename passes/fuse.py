"""Makes one node of every run of row operations between matmuls: a ``FusedRegion``, which is one kernel.

Before::

    %linear: bfloat16 = linear(%x, %w, None)
    %low: bfloat16 = cast(%bias, torch.bfloat16)
    %add: bfloat16 = add(%linear, %low)
    %gelu: bfloat16 = gelu(%add)
    %linear_1: bfloat16 = linear(%gelu, %w1, None)

After::

    %linear: bfloat16 = linear(%x, %w, None)
    %fused_add_gelu: bfloat16 = fused_add_gelu(%linear, %bias)    # call_module; its graph holds cast, add and gelu
    %linear_1: bfloat16 = linear(%fused_add_gelu, %w1, None)

The kernel loads what it reads in its dtype, computes in FP32 and rounds once, so casts within it cost nothing. On a CPU
it is a compiled loop, where that gains (``regions``). A region with several outputs gives a tuple. Dropouts take their
seeds from one tensor, drawn once a call of the graph. What stays outside of regions keeps its native kernels
(``wide_sums``).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.calls import sizes
from fxprec.kernels.launch.graph_call import graph_call
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.dtypes.promotion import is_zero_dim
from fxprec.passes.fusion.effects import order_of_effects, sort
from fxprec.passes.fusion.regions import Region, elements_of, find_regions, gains, has_few_ops, saves, suits_loops
from fxprec.passes.fusion.row_operations import drops, is_row_operation
from fxprec.passes.fusion.split_bias import SplitBias, put_back, split_biases
from fxprec.passes.graph.annotations import Op, Precision, Rule, graph_notes, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.exact_graph import LazyGraphModule
from fxprec.passes.graph.grad_mode import exposed_with_gradient
from fxprec.passes.graph.subgraphs import every_graph


@graph_call
def draw_seeds_like(x: Tensor, count: int) -> Tensor:
    """Return int64 [count] on the device of ``x``, from torch's generator there."""
    from fxprec.kernels.launch.philox import draw_seeds  # which loads Triton

    return draw_seeds(count, x.device)


@bodies_first
def fuse(gm: GraphModule, context: Context) -> PassResult:
    """Form regions where the context asks for them."""
    graph, triton, loops = gm.graph, context.regions == "triton", context.regions == "loops"
    if not context.regions:
        return PassResult(gm, False)
    # A reader of a value that is returned with a gradient stays out of that value's region: between two results of one
    # kernel there is no path of gradients.
    returned = exposed_with_gradient(graph, context.gradients) if triton or loops else ()
    # Each bias becomes an addition of its own for now; ``_settle`` puts back those that join no region.
    splits = split_biases(graph) if triton else []
    order = order_of_effects(graph)
    suits = functools.partial(suits_loops, prices=context.loops)
    takes, judge = (suits, gains) if loops else (is_row_operation, None)
    found = find_regions(graph, order, takes, judge, returned)
    # Names come first, since the user's choice is by name; then biases that joined no region go back.
    names = _names(gm, found)
    chosen, declined = _chosen(gm, names, context)
    chosen = _settle(graph, splits, found, chosen)
    graph_notes(gm).region_names = [*names.values()]
    if not chosen:
        return PassResult(gm, bool(splits), tuple(declined))
    # A call stands where the last node of its region stood, which may be before what it must wait for: all nodes are
    # sorted by what they read and by effects, and else stay where they were.
    position = {node: number for number, node in enumerate(graph.nodes)}
    order = order_of_effects(graph)
    # Region that drops -> how many dropouts it has. A region's seeds begin where those of the one before end.
    draws: dict[Node, int] = {}
    for region in chosen:
        count = sum(map(drops, region.nodes))
        node = _replace(gm, region, names[region], count, sum(draws.values()), context)
        position[node] = position[region.nodes[-1]]
        if triton and count:
            draws[node] = count
    # Items of a region's tuple are new, and stand with their region.
    for node in graph.nodes:
        if node not in position:
            position[node] = position[node.args[0]]
    sort(graph, order, position)
    if draws:
        _draw_seeds(graph, draws)
    return PassResult(gm, True, tuple(declined))


def region_names(gm: GraphModule) -> list[str]:
    """Return the names of all regions that were found in a graph and the bodies it calls, fused or not."""
    return [name for graph in every_graph(gm) for name in graph_notes(graph).region_names]


def largest_left(gm: GraphModule) -> int | None:
    """Return the elements of the largest region that is left to torch for having few; None: there is none."""
    known = (graph_notes(graph).largest_left for graph in every_graph(gm))
    return max((each for each in known if each is not None), default=None)


def wants_sizes(gm: GraphModule) -> bool:
    """Return whether regions were fused that would be left to torch's ops if their few elements were known."""
    return any(graph_notes(graph).wants_sizes for graph in every_graph(gm))


def _chosen(gm: GraphModule, names: Mapping[Region, str], context: Context) -> tuple[list[Region], list[str]]:
    """Return the regions that are to be fused, and why others are not."""
    chosen: list[Region] = []
    declined: list[str] = []
    left: list[int] = []
    for region, name in names.items():
        choice = context.choice(name)
        elements = elements_of(region)
        by_size = context.by_size and choice is None and has_few_ops(region)
        if choice is False:
            declined.append(f"{name}: fuse says no")
        elif by_size and elements is not None and elements < sizes.FEWEST:
            left.append(elements)
            why = f"{elements:,} elements are few, and a GPU would wait for its host"
            declined.append(f"{name}: {why}; fuse=True fuses it, or its name with True")
        else:
            chosen.append(region)
            if by_size and elements is None and sizes.FEWEST:  # 0: no region is left for its size
                graph_notes(gm).wants_sizes = True
    if left:
        graph_notes(gm).largest_left = max(left)
    return chosen, declined


def _settle(graph: Graph, splits: list[SplitBias], found: list[Region], chosen: list[Region]) -> list[Region]:
    """Put back the biases that joined no region, and return the chosen regions that are worth a kernel without them.

    What was put back is gone from all regions that were found, since those that are not chosen are asked for, too.
    """
    home = {node: region for region in chosen for node in region.nodes}
    gone: set[Node] = set()
    for split in splits:
        region = home.get(split.add)
        if region is None or any(home.get(user) is not region for user in split.add.users):
            gone |= put_back(graph, split)
    for bias in dict.fromkeys(split.bias for split in splits):
        if bias.target in CASTS and not bias.users:
            graph.erase_node(bias)
    for region in found if gone else ():
        region.nodes = [node for node in region.nodes if node not in gone]
    return [region for region in chosen if saves(region)] if gone else chosen


def _replace(gm: GraphModule, region: Region, name: str, draws: int, seed: int, context: Context) -> Node:
    """Put a call of a FusedRegion in the place of a region's nodes.

    Args:
        draws: how many dropouts it has.
        seed: the number of the first one's seed.
    """
    graph, inputs, outputs = gm.graph, region.inputs, region.outputs
    inner = _graph_module(name, region, inputs, outputs)
    assert context.regions  # else there are none
    gm.add_submodule(name, FusedRegion(name, inner, draws, seed, context.regions, context.loops))
    with graph.inserting_before(region.nodes[-1]):
        call = graph.create_node("call_module", name, tuple(inputs), name=name)
        call.meta = _meta(outputs, region)
        inside = set(region.nodes)
        names: dict[Node, str] = {}
        for number, output in enumerate(outputs):
            result = call
            if len(outputs) > 1:
                result = graph.call_function(operator.getitem, (call, number))
                result.meta = _item_meta(output)
                names[result] = output.name
            output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region.nodes):
        graph.erase_node(node)
    for result, called in names.items():
        result.name = called
    return call


def _graph_module(name: str, region: Region, inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    # An input is a placeholder here, whatever made it: no op, no cast of ours, and no weight.
    for source in inputs:
        values[source] = graph.placeholder(source.name)
        values[source].meta = {
            key: value for key, value in source.meta.items() if key not in ("op", "inserted", "kind")
        }
    for node in region.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        # For reports: whether the kernel writes the value, or it never leaves the registers.
        values[node].meta |= {"in_region": "stored" if node in outputs else "kept", "region": name}
    end = graph.output(tuple(values[node] for node in outputs))
    notes(end).precision = Precision.arriving(None, None, Rule.FOLLOW, "read by the graph around")
    inner = LazyGraphModule({}, graph, "Region")  # where a kernel serves, nobody ever runs its code
    graph_notes(inner).region = name
    return inner


def _meta(outputs: Sequence[Node], region: Region) -> dict[str, Any]:
    first = outputs[0]
    kept = {
        key: region.nodes[-1].meta[key] for key in ("nn_module_stack", "stack_trace") if key in region.nodes[-1].meta
    }
    if len(outputs) == 1:
        kept |= {key: first.meta[key] for key in ("dtype", "numel", "val", "is_zero_dim") if key in first.meta}
        output = notes(first).precision.output
    else:
        kept["dtype"] = tuple(notes(node).dtype for node in outputs)
        kept["puts_out"] = tuple(notes(node).precision.output for node in outputs)
        kept["is_zero_dim"] = False
        output = None
    why = f"{len(region.nodes)} nodes in one kernel: FP32 in registers, rounded once"
    return kept | {
        "op": Op("fused_region"),
        "precision": Precision.arriving(torch.float32, output, Rule.FOLLOW, why),
    }


def _item_meta(output: Node) -> dict[str, Any]:
    kept = {key: value for key, value in output.meta.items() if key not in ("inserted", "in_registers")}
    precision = Precision.arriving(None, notes(output).precision.output, Rule.FOLLOW, "an output of the region")
    return kept | {"op": Op("getitem"), "precision": precision}


def _names(gm: GraphModule, regions: Sequence[Region]) -> dict[Region, str]:
    """Name each region; the second of one name is the same with a number, as torch.fx names nodes."""
    taken: set[str] = {name for name, _ in gm.named_children()} | {node.name for node in gm.graph.nodes}
    names = {}
    # The last number of each name: many regions of one name take one pass.
    tried: Counter[str] = Counter()
    for region in regions:
        name = base = region.name
        while name in taken or hasattr(gm, name):
            tried[base] += 1
            name = f"{base}_{tried[base]}"
        taken.add(name)
        names[region] = name
    return names


def _draw_seeds(graph: Graph, draws: Mapping[Node, int]) -> None:
    """Draw the seeds of all dropouts at once, before the first region that has some; nodes are sorted by now."""
    # One draw for all: a call of the generator for each dropout would cost the host as much as a kernel.
    first = min(draws)
    # Of the first region's inputs, one tells the device.
    like = next((each for each in first.args if _is_tensor(each)), first.args[0])
    with graph.inserting_before(first):
        seeds = graph.call_function(draw_seeds_like, (like, sum(draws.values())))
    seeds.meta = {
        "op": Op("draw_seeds"), "dtype": torch.int64, "is_zero_dim": False,
        "precision": Precision.arriving(None, None, Rule.KEEP, "seeds of the dropouts in fused regions"),
    }  # fmt: skip
    for call in draws:
        call.args = (*call.args, seeds)


def _is_tensor(argument: object) -> bool:
    """Return whether this is a tensor with dimensions: a 0-dim one may lie on another device."""
    return isinstance(argument, Node) and isinstance(notes(argument).dtype, torch.dtype) and not is_zero_dim(argument)
