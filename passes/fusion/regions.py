"""Find the regions of a graph: groups of row operations that can become one kernel each.

Every node gets a level: the highest level of its inputs, plus one where it cannot be in one region with that input. Row
operations that are connected and have one level form a region. A path that leaves a region never comes back, since
levels only rise along it: regions are convex, so that no cycle arises when each becomes one node. It takes one walk.

Nor does a node join a value that it reads if that is returned and gradients are recorded: autograd knows no path from
one result of a kernel to another, and a user may ask for the gradient of what was returned.

    %linear = linear(...)             level 0
    %dropout = dropout(%linear)       level 1  |
    %add = add(%x, %dropout)          level 1  |  one region: fused_dropout_add_layer_norm
    %norm = layer_norm(%add)          level 1  |
    %low = cast(%norm, bfloat16)      level 1  |
    %linear_1 = linear(%low)          level 2
    %add_1 = add(%add, %linear_1)     level 3     the next region, which reads %add

Whether a region is worth a kernel goes by its sizes on a GPU, where one of few elements is left to torch
(``kernels/calls/sizes.py`` says why), and by its ops on a CPU. Compiled loops take row operations that torch runs in
several kernels; a call, whose sizes are known, prices its region and decides (``kernels/rows/program/prices.py``). What
follows a convolution or a batch norm, or a sum of it, is not taken: at ``freeze`` oneDNN takes sums and activations
into its convolutions, and in training norms stand between. A dropout is not taken either, since its random numbers are
torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isqrt, prod
from typing import Any, Final, TypeAlias

import torch
from torch.fx import Graph, Node

from fxprec.kernels.calls import sizes
from fxprec.kernels.rows.program.prices import LoopPrices, count_aten_kernels, is_faster_by_torch, may_gain_alone
from fxprec.passes.fusion.effects import memory_of, segments
from fxprec.passes.fusion.row_operations import drops, is_row_operation, reduced_dimensions
from fxprec.passes.graph.annotations import arg_nodes, notes
from fxprec.passes.ops.table import facts_of

#: Nodes of a region. Larger kernels run out of registers.
_MOST: Final = 64
#: Ops in a region's name.
_NAMED: Final = 5
#: Ops from which one kernel is less work for the host, too: forward and backward together, as many calls of torch.
_FEWEST_OPS: Final = 5


#: Sizes; of a graph that serves several of them in the words of the symbol that stands for one.
Shape: TypeAlias = tuple[int | str, ...]


@dataclass(slots=True, eq=False)
class Region:
    """Nodes that become one kernel, in the order of the graph.

    Attributes:
        nodes: of the region.
        reduced: how many trailing dimensions its reductions run over; 0 without any.
        shape: that its values broadcast to; None where that of one of them is not known.
        segment: of the graph in which all of them lie (``effects.segments``).
    """

    nodes: list[Node] = field(default_factory=list)
    reduced: int = 0
    shape: Shape | None = None
    segment: int = 0

    @property
    def name(self) -> str:
        """Name like ``fused_dropout_add_layer_norm``: its ops without casts, each once, the first of them."""
        ops = ("bias" if notes(node).state("bias_of") else notes(node).op.name for node in self.nodes)
        names = dict.fromkeys(name for name in ops if name != "to")
        return "_".join(["fused", *[*names][:_NAMED], *(["more"] if len(names) > _NAMED else [])])

    @property
    def inputs(self) -> list[Node]:
        """Values that the region reads, in the order of reading."""
        inside = set(self.nodes)
        return [*dict.fromkeys(s for node in self.nodes for _, s in arg_nodes(node) if s not in inside)]

    @property
    def outputs(self) -> list[Node]:
        """Nodes of the region that others read."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]


def find_regions(
    graph: Graph,
    order: Mapping[Node, Sequence[Node]],
    takes: Callable[[Node], bool] = is_row_operation,
    judge: Callable[[Region], bool] | None = None,
    returned: Collection[Node] = (),
) -> list[Region]:
    """Return the regions of a graph that save memory traffic, in the order of their first nodes.

    Args:
        order: node -> nodes that must stay before it though it does not read them (``effects.order_of_effects``).
        takes: whether a node may be in a region.
        judge: whether a region is to be one; None: as ``saves`` says.
        returned: what the graph returns while gradients are recorded: who reads such a value is not in its region,
            since the results of one kernel are not on each other's path of gradients.
    """
    judge = judge or saves
    # A row operation on memory that is written to has an order that no argument shows: it stays outside.
    roots, written = memory_of(graph)
    segment = segments(graph)
    level: dict[Node, int] = {}
    region: dict[Node, Region] = {}
    for node in graph.nodes:
        sources = [*node.all_input_nodes, *order.get(node, ())]
        joins = takes(node) and not any(roots[each] in written for each in (node, *sources))
        # The node's level is what its inputs allow; one that is in no region only ends those that it reads.
        own = Region([node], max(0, reduced_dimensions(node)), _shape(node), segment[node]) if joins else None
        level[node] = max(
            (level[source] + 1 if source in returned else _after(source, own, level, region) for source in sources),
            default=0,
        )
        if own is None:
            continue
        # The regions of its level that it reads become one with it: the largest takes the others in, whose members are
        # told so. If they cannot all be one, the node starts a region of its own, one level up.
        parts = dict.fromkeys(region[s] for s in sources if s in region and level[s] == level[node])
        joined = _merged([*parts, own])
        if joined is None:
            level[node] += 1
            region[node] = own
            continue
        region[node] = joined
        for part in parts:
            if part is not joined:
                region.update(dict.fromkeys(part.nodes, joined))
    # A node alone saves nothing, as a cast that another region reads: there it costs nothing.
    for node in reversed(graph.nodes):
        if node in region and len(region[node].nodes) == 1:
            _sink(node, region)
    found = dict.fromkeys(region[node] for node in graph.nodes if node in region)
    for each in found:
        each.nodes.sort()
    return [part for each in found for part in _parts(each) if judge(part)]


def _sink(node: Node, region: dict[Node, Region]) -> None:
    """Move a lone node into the only region that reads it.

    That makes no cycle: what the node reads has a lower level than the region, and cannot depend on it.
    """
    readers = {region.get(user): None for user in node.users}
    (reader,) = readers if len(readers) == 1 else (None,)
    if reader is None:
        return
    joined = _merged([reader, region[node]])
    if joined is not None:
        for member in (node, *reader.nodes):
            region[member] = joined


def _after(source: Node, own: Region | None, level: dict[Node, int], region: dict[Node, Region]) -> int:
    """Return the level of a node that comes after ``source``, for all that this edge says."""
    other = region.get(source)
    if own is None:
        return level[source] + (other is not None)
    return level[source] + (other is None or _together(other, own) is None)


def _merged(parts: list[Region]) -> Region | None:
    """Make one region of all, the largest of them, and return it; None where that cannot be."""
    reduced, shape, size = parts[0].reduced, parts[0].shape, len(parts[0].nodes)
    for each in parts[1:]:
        together = _together(Region([], reduced, shape, parts[0].segment), each)
        size += len(each.nodes)
        if together is None or size > _MOST:
            return None
        reduced, shape = together
    largest = max(parts, key=lambda each: len(each.nodes))
    for each in parts:
        if each is not largest:
            largest.nodes += each.nodes
    largest.reduced, largest.shape = reduced, shape
    return largest


def _together(a: Region, b: Region) -> tuple[int, Shape | None] | None:
    """Return what both would reduce, and their shape, as one region; None where that cannot be."""
    if (
        len(a.nodes) + len(b.nodes) > _MOST
        or a.segment != b.segment
        or (a.reduced and b.reduced and a.reduced != b.reduced)
    ):
        return None
    if a.shape is None or b.shape is None:
        return a.reduced or b.reduced, None
    shape = _broadcast(a.shape, b.shape)
    return (a.reduced or b.reduced, shape) if shape is not None and shape in (a.shape, b.shape) else None


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """Broadcast two shapes as torch does, where a symbol is no 1; None where they do not fit, or may not."""
    sizes = []
    for one, other in zip_longest(reversed(a), reversed(b), fillvalue=1):
        if one != other and 1 not in (one, other):
            return None
        sizes.append(other if one == 1 else one)
    return tuple(reversed(sizes))


def _shape(node: Node) -> Shape | None:
    """Return the shape that the node computes in, where it is known: of a reduction that of its input."""
    value = node.meta.get("val")
    if reduced_dimensions(node):
        source = node.args[0]
        value = source.meta.get("val") if isinstance(source, Node) else None
    return _sizes(value)


def _sizes(value: Any) -> Shape | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _parts(region: Region) -> list[Region]:
    """Return the region or, where kernels cannot store all its outputs with its shape, the regions it is split into.

    One has those outputs and all that they are computed from; as a region of its own it has a shape of its own. The
    other has the rest. Both are convex as well: nothing that the first needs is in the second. Each is split again.
    """
    apart = {node for node in region.outputs if not _stored(node, region)}
    if not apart:
        return [region]
    for node in reversed(region.nodes):
        if not apart.isdisjoint(node.users):
            apart.add(node)
    if len(apart) == len(region.nodes):
        return []
    first = [node for node in region.nodes if node in apart]
    rest = [node for node in region.nodes if node not in apart]
    return [part for nodes in (first, rest) for part in _parts(_region(nodes, region.segment))]


def _region(nodes: list[Node], segment: int) -> Region:
    reduced = max(0, *map(reduced_dimensions, nodes)) if nodes else 0
    shape: Shape | None = ()
    for each in map(_shape, nodes):
        shape = None if shape is None or each is None else _broadcast(shape, each)
    return Region(nodes, reduced, shape, segment)


def saves(region: Region) -> bool:
    """Return whether something that was written and read again stays in registers."""
    return len(region.nodes) > 1 and bool(region.outputs) and any(notes(node).op.name != "to" for node in region.nodes)


def _stored(node: Node, region: Region) -> bool:
    """Return whether a kernel may store the node as an output.

    It is no view of what others made, and spans all the rows: it has the region's shape, or what a reduction leaves of
    it.
    """
    if _gives_its_input(node) and node.args[0] not in region.nodes:
        return False
    shape = _sizes(node.meta.get("val"))
    if region.shape is None or shape is None:
        return True
    rows = region.shape[: len(region.shape) - region.reduced]
    return shape == region.shape or (bool(region.reduced) and shape in (rows, rows + (1,) * region.reduced))


def _gives_its_input(node: Node) -> bool:
    """Return whether the result may be the argument itself: ``contiguous``, or a dropout that drops nothing."""
    op = notes(node).op
    return facts_of(op.name).view and op.name != "to" and not drops(node)


def has_few_ops(region: Region) -> bool:
    """Return whether a kernel is more work for the host than torch's ops. A bias is none: its product adds it."""
    return sum(notes(node).op.name != "to" and not notes(node).state("bias_of") for node in region.nodes) < _FEWEST_OPS


def elements_of(region: Region) -> int | None:
    """Return the elements of a region's values, broadcast; None where its sizes are not known, or vary."""
    sizes = [size for size in region.shape or () if isinstance(size, int)]
    return None if region.shape is None or len(sizes) < len(region.shape) else prod(sizes)


def grows_to(given: int, largest: int) -> int:
    """Return how large an input of ``given`` elements may grow before a region may reach ``sizes.FEWEST`` elements.

    Args:
        largest: elements of the largest region, fewer than those. A region grows at most as the square of an input, as
            the scores of a sequence do: hence the root.
    """
    return given * isqrt(sizes.FEWEST // max(1, largest))


def suits_loops(node: Node, prices: LoopPrices | None) -> bool:
    """Return whether a loop may hold the node. ``prices`` tell where torch's kernel takes less time; None: nowhere."""
    if not is_row_operation(node) or drops(node) or (prices is not None and is_faster_by_torch(node, prices)):
        return False
    sources = [*node.all_input_nodes]
    sources += [each for source in sources if notes(source).op.name == "add" for each in source.all_input_nodes]
    return not any(map(_makes_images, sources))


def _makes_images(node: Node) -> bool:
    name = notes(node).op.name
    return name == "batch_norm" or facts_of(name).cost in ("convolution", "transposed convolution")


def gains(region: Region) -> bool:
    """Return whether torch runs more than one kernel for a region, or one that is slow, be it for one node."""
    worth = count_aten_kernels(region.nodes) > 1 or any(map(may_gain_alone, region.nodes))
    return worth and bool(region.outputs) and (saves(region) or len(region.nodes) == 1)
