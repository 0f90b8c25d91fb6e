"""What is not free for the cut to choose: values that low precision cannot hold, and memory that is written in place.

Safety pins keep an op that would follow or promote in FP32::

    %a: float32 = masked_fill(%scores, %mask, -3.4e38)   # the low dtype cannot hold the number
    %b: float32 = add(%y, 1e-08)                         # nor this one: it would be zero in float16
    %c: float32 = add(%y, 1e-05)                         # sqrt(y + eps), x / (y + eps): eps would vanish beside y
    %d: float32 = mul(%exp, %scale)                      # between exp and the sum over it
    %e: float32 = mul(%y, %y)                            # float16 only: squares leave its range from 256 on
    %f: float32 = clamp(%y, max=0.9999999)               # a bound that is 1 in low: logit(%f) is infinite there
    %g: float32 = index_add(%zeros, 0, %ids, %y)         # a sum of many would stay at a few hundred in low

Written classes: a tensor, its views and its in-place users share memory, so that one of them in another dtype would be
a copy that misses the writes. ``written_classes`` finds them; a class without a write falls apart into ordinary ops.
Who inserts casts keeps to two rules: a cast of a member is good until the next write to its class (its mutation epoch),
and a member with ``meta["root_dtype"]`` (the root of a class that lives in another dtype than the root's kernel puts
out) is cast right after it is made, and only the cast is used from then on::

    %y: bfloat16 = linear(%x, %w)           # meta["root_dtype"] = float32
    %y_f32: float32 = cast(%y, torch.float32)
    %z: float32 = masked_fill_(%y_f32, %mask, -3.4e38)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import NO_OP, UNKNOWN, Rule, argument, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.aliases import shared_sources, written_memory
from fxprec.passes.ops.names import cast_target
from fxprec.passes.ops.rule import OpRule
from fxprec.passes.ops.spellings import VIEW_ATTRIBUTES
from fxprec.passes.ops.table import facts_at
from fxprec.passes.placement.sites import Site, assumed_original
from fxprec.passes.placement.squares import is_square


def commutes_with_rounding(site: Site) -> bool:
    """Return whether casting the input is as good as casting the result: then the smaller of the two may be cast."""
    view = site.facts.view and site.rule is Rule.FOLLOW
    return (view or site.facts.exact) and site.rule in (Rule.FOLLOW, Rule.PROMOTE) and site.dtype is None


def overflows(site: Site, low: torch.dtype) -> bool:
    """Return whether an op fills a tensor with a number that the low dtype cannot hold: torch raises then."""
    numbers = (a for a in (*site.node.args, *site.node.kwargs.values()) if type(a) in (int, float))
    largest = torch.finfo(low).max
    return site.facts.numbers == "fill" and any(largest < abs(number) < math.inf for number in numbers)  # type: ignore[arg-type]


def unsafe_number(site: Site, low: torch.dtype) -> str | None:
    """Return why an op cannot run low because of a number among its arguments; None where it can."""
    if site.facts.numbers == "aside":
        return None
    operands = site.facts.numbers is not None
    limits = torch.finfo(low)
    node = site.node
    for number in (*node.args, *node.kwargs.values()):
        kind = type(number)
        if kind is not float and (kind is not int or not operands):
            continue
        size = abs(number)  # type: ignore[arg-type]
        if size == 0 or math.isinf(size) or math.isnan(size):
            continue
        if size > limits.max:
            return f"{dtype_name(low)} cannot hold {number!r}"
        if size < limits.tiny:
            return f"{number!r} vanishes in {dtype_name(low)}"
        if (rounded := rounded_to_integer(site.facts, number, low)) is not None:
            return f"{number!r} is {rounded} in {dtype_name(low)}, which may be a pole"
        if size < limits.eps and operands and _guards(node):
            return f"{number!r} guards a division and would vanish beside the rest in {dtype_name(low)}"
    return None


def rounded_to_integer(facts: OpRule, number: object, low: torch.dtype) -> int | None:
    """Return the integer that a bound, or what stands in a value's place, is in the low dtype, if it is none itself.

    ``clamp(max=1 - eps)`` keeps away from a pole at 1; where the bound is 1 itself, it does not.
    """
    if facts.numbers not in ("compared", "fill") or type(number) is not float:
        return None
    if not math.isfinite(number) or number.is_integer():
        return None
    step = math.ldexp(torch.finfo(low).eps, math.frexp(number)[1] - 1)
    rounded = round(number / step) * step
    return int(rounded) if rounded.is_integer() else None


def stalls(site: Site, device: str) -> bool:
    """Return whether a call adds many values to one place, in the dtype of its data."""
    found = site.facts.stalls
    if found is None:
        return False
    value = argument(site.node, *found.option) if found.option else None
    return value in (found.cuda if device == "cuda" else found.cpu)


def _guards(node: Node) -> bool:
    """``x / node``, ``sqrt(node)`` and the like."""
    for user in node.users:
        singular = facts_at(user).singular
        if singular is not None and user.args[singular : singular + 1] == (node,):
            return True
    return False


def overflowing_square(site: Site, context: Context) -> str | None:
    """Return why an op is FULL though the table says otherwise: it squares a value in float16.

    None where it does not, where the policy says something of the op itself, and at O3, which lowers what is FULL.
    """
    if context.low is not torch.float16 or not site.data or context.policy.lowers_parameters:
        return None
    if not site.is_as_in_table:
        return None
    return "squares leave the range of float16 from 256 on" if is_square(site.node) else None


def exp_chains(graph: Graph) -> set[Node]:
    """The ops between an exponential and a reduction of it."""
    if not any(facts_at(node).exponential for node in graph.nodes):
        return set()
    after: set[Node] = set()
    for node in graph.nodes:
        if facts_at(node).rule in (Rule.FOLLOW, Rule.PROMOTE) and any(
            source in after or facts_at(source).exponential for source in node.all_input_nodes
        ):
            after.add(node)
    found: set[Node] = set()
    for node in reversed(graph.nodes) if after else ():
        if node in after and any(user in found or facts_at(user).sums for user in node.users):
            found.add(node)
    return found


def written_classes(graph: Graph) -> dict[Node, Node]:
    """Member -> root of every class of nodes that share memory which is written in place."""
    roots, written = written_memory(graph, _shares_memory_of)
    return {node: root for node, root in roots.items() if root in written}


def _shares_memory_of(node: Node) -> Iterator[Node]:
    """Yield what ``aliases.shared_sources`` yields, without what converts or copies."""
    op = notes(node).op
    if op is not NO_OP and not op.in_place:
        if op.name == "to":  # a cast to the dtype that the tensor has already gives the tensor itself
            target = cast_target(node)
            if target is not None and target != assumed_original(notes(node.all_input_nodes[0]).dtype):
                return
        if op.name == "getattr" and node.args[1] not in VIEW_ATTRIBUTES | {"real"}:
            return
        if op.name == "getitem" and picks_by_tensor(node.args[1]):
            return
    yield from shared_sources(node)


def picks_by_tensor(index: object, unknown: bool = False) -> bool:
    """Return whether indexing copies: by a list or a tensor (``unknown``: or what may be one), or with one."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or (isinstance(part, Node) and _is_tensor(part, unknown)) for part in parts)


def _is_tensor(node: Node, unknown: bool) -> bool:
    dtype = notes(node).dtype
    return isinstance(dtype, torch.dtype) or (unknown and dtype is UNKNOWN)
