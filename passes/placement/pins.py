"""Find what is not free for the cut to choose: values that low precision cannot hold.

Safety pins keep an op that would follow or promote in FP32::

    %a: float32 = masked_fill(%scores, %mask, -3.4e38)   # the low dtype cannot hold the number
    %b: float32 = add(%y, 1e-08)                         # nor this one: it would be zero in float16
    %c: float32 = add(%y, 1e-05)                         # sqrt(y + eps), x / (y + eps): eps would vanish beside y
    %d: float32 = mul(%exp, %scale)                      # between exp and the sum over it
    %e: float32 = mul(%y, %y)                            # float16 only: squares leave its range from 256 on
    %f: float32 = clamp(%y, max=0.9999999)               # a bound that is 1 in low: logit(%f) is infinite there
    %g: float32 = index_add(%zeros, 0, %ids, %y)         # a sum of many would stay at a few hundred in low
    %h: float32 = sigmoid(%y)                            # from here to the logarithm, before which it would be 1
    %i: float32 = rsub(%h, 1)
    %log: float32 = log(%i)

A sigmoid of 7 is 0.999; in bfloat16 it is 1, its ``log(1 - p)`` is infinite and its gradient 0. So the ops from what
*saturates* to the pole are pinned, and the op that saturates reads FP32, too (``saturating_chains``):

- The chain goes on through ops that follow or promote, and through a cast that rounds nothing in the original program
  (``%p.to(%h.dtype)``), which is written as FP32.
- It ends at a matrix product, or where a weight or another low value goes in: a softmax that weighs values (attention)
  and a sigmoid that gates them reach no pole. A constant made like a low value (``ones_like(%h)``) does not end it: it
  reads no values. It stays as it was; one that is filled with other numbers than 0 and 1 is FP32 where its reader is.
- It is pinned where it reaches a pole. Where nothing but a saturated value is in it, it is pinned as well if the module
  returns it (its loss is taken outside, and it is cast to FP32 anyway), if it is written into other memory, or if it
  goes into another body or comes out of one.

Two walks find that out. The first, forwards, says of each value what it is (``_Values``); the second, backwards, hands
the reason for FP32 from a pole up its chain::

    %h = linear(%x, %w)      low
    %p = sigmoid(%h)         saturated: it saturates              FP32, as %q is
    %o = ones_like(%h)       constant                             as it was: ones are the same in any dtype
    %q = sub(%o, %p)         saturated: of a saturated value      FP32: before the pole of %log
    %log = log(%q)           none of these: a FULL op             FP32 by its rule
    %gate = mul(%p, %h)      low: a low value goes in             as it was: no reason comes from here
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.fx import Graph, Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import UNKNOWN, Annotations, Rule, annotated, arg_nodes, argument, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.rule import OpRule
from fxprec.passes.ops.table import facts_at, facts_of
from fxprec.passes.placement.products import is_square
from fxprec.passes.placement.sites import Site, base_of, carries_float
from fxprec.passes.torch_internals import HigherOrderOperator

#: Why a value that is handed to others is FP32. What saturates before a pole has a reason of its own.
_HANDED_OUT: Final = "saturates in low precision, and who gets it may take its logarithm"


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
    """Return the integer to which the low dtype rounds a number of a call: 1 of 0.9999999.

    None where it stays apart from the integer, or is one itself; and of numbers that are no bound ("compared") and fill
    nothing. ``clamp(max=1 - eps)`` keeps away from a pole at 1; where the bound becomes 1 itself, it does not.
    """
    if facts.numbers not in ("compared", "fill") or type(number) is not float:
        return None
    if not math.isfinite(number) or number.is_integer():
        return None
    step = math.ldexp(torch.finfo(low).eps, math.frexp(number)[1] - 1)
    rounded = round(number / step) * step
    return int(rounded) if rounded.is_integer() else None


def sums_low(site: Site, device: str) -> bool:
    """Return whether a call adds many values to one place, in the dtype of its data."""
    found = site.facts.sums_low
    if found is None:
        return False
    value = argument(site.node, *found.option) if found.option else None
    return value in (found.cuda if device == "cuda" else found.cpu)


def _guards(node: Node) -> bool:
    """Return whether a reader has a pole at 0: ``x / node``, ``sqrt(node)`` and the like."""
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
    """Return the ops between an exponential and a reduction of it."""
    rows = {node: facts_of(noted.op.name) for node, noted in annotated(graph)}
    exponential = {node for node, row in rows.items() if row.exponential}
    if not exponential:
        return set()
    after: set[Node] = set()
    for node, row in rows.items():
        if row.rule in (Rule.FOLLOW, Rule.PROMOTE) and any(
            source in after or source in exponential for source in node.all_input_nodes
        ):
            after.add(node)
    found: set[Node] = set()
    for node in reversed(graph.nodes) if after else ():
        if node in after and any(user in found or rows[user].contains_sum for user in node.users):
            found.add(node)
    return found


@dataclass(frozen=True, slots=True)
class _Values:
    """Sets of the float values of a graph, on the way from what saturates to a pole: each is in one at most.

    In none are values that are FP32 whatever is decided here (inputs, results of FULL ops), and made of such.

    Attributes:
        saturated: comes close to an integer, or is made of such a value without anything low.
        low: a weight, the result of a product, or made of such; it may be low.
        constants: reads no values (``zeros_like(h)``), or is made of such alone.
    """

    saturated: set[Node] = field(default_factory=set)
    low: set[Node] = field(default_factory=set)
    constants: set[Node] = field(default_factory=set)


def saturating_chains(graph: Graph, returns: bool, low_dtype: torch.dtype) -> dict[Node, str]:
    """Return the values from one that saturates to a pole, each with the reason why it is FP32.

    Args:
        returns: whether the graph's output counts as a reader that may take a logarithm: the caller gets it in its
            original dtype, or another graph of ours does.
        low_dtype: float16 or bfloat16.
    """
    starts = {node for node, noted in annotated(graph) if _saturates(node, noted, low_dtype)}
    if not starts:
        return {}
    values = _Values()
    for node in graph.nodes:
        row = facts_at(node)
        sources = {*_floats(node)}
        if node in starts or _stays_saturated(node, row, values):
            values.saturated.add(node)
        elif row.rule is Rule.LOW or notes(node).kind == "parameter":
            values.low.add(node)
        elif row.rule in (Rule.FOLLOW, Rule.PROMOTE) and (sources or row.example):
            if sources <= values.constants:
                values.constants.add(node)
            elif not values.low.isdisjoint(sources):
                values.low.add(node)
        # A constant that a saturated value is written into holds that value from here on.
        if notes(node).op.in_place and not values.saturated.isdisjoint(sources):
            written = {*_written_constants(node, values.constants)}
            values.saturated.update(written)
            values.constants.difference_update(written)
    reasons: dict[Node, str] = {}
    for node in reversed(graph.nodes):
        if node in values.saturated or node in values.constants:
            found = (_reason(node, user, reasons, values, returns) for user in node.users)
            reason = next(filter(None, found), None)
            if reason is not None:
                reasons[node] = reason
    return reasons


def promoting_near_poles(site: Site, near_poles: set[Node]) -> Site:
    """Return the call of an op that level O3 lowers: as one that promotes, where it reads a value of ``near_poles``.

    If a sigmoid is FP32 and the log behind it low, the log reads exactly 1 where the sigmoid is not quite 1: its
    gradient is infinite there, the sigmoid's is tiny but not 0, and their product infinite. If the log promotes, both
    have one dtype.
    """
    lowered = site.lowered and site.rule is Rule.LOW and site.dtype is None
    if not lowered or near_poles.isdisjoint(site.data):
        return site
    return site._replace(rule=Rule.PROMOTE, why="reads what saturates in low precision: as wide as that arrives")


def _saturates(node: Node, annotations: Annotations, low: torch.dtype) -> bool:
    """Return whether a value comes so close to an integer that it may be that number in low precision.

    An earlier piece of the method may hand over anything, and a clamp whose bound is 1 in low was to keep away from 1.
    """
    row = facts_of(annotations.op.name)
    numbers = (*node.args, *node.kwargs.values()) if row.numbers is not None else ()
    if row.saturates or any(rounded_to_integer(row, each, low) is not None for each in numbers):
        return True
    return annotations.handed_over and not annotations.kind and carries_float(annotations.dtype)


def _stays_saturated(node: Node, row: OpRule, values: _Values) -> bool:
    """Return whether an op makes another saturated value of one: nothing low and no weight goes in beside it."""
    sources = [*_floats(node)]
    # A float on another port than the data is a weight (a norm's), and ends the chain.
    if row.ports is not None and any(port not in row.ports for port, each in arg_nodes(node) if each in sources):
        return False
    saturated, low = (not each.isdisjoint(sources) for each in (values.saturated, values.low))
    return _may_keep_closeness(node, row) and saturated and not low


def _written_constants(node: Node, constants: set[Node]) -> Iterator[Node]:
    """Yield the constant that an op writes into, and the views through which it does: ``p = zeros_like(h); p[0] = q``.

    What is written into another value is left: the memory holds that value, too.
    """
    while (base := base_of(node)) in constants and base is not node:
        yield base
        node = base


def _may_keep_closeness(node: Node, row: OpRule) -> bool:
    """Return whether the result may be as close to an integer as what goes in.

    So it may of ops that follow or promote, a sum or mean, a power without a pole, and a cast that in the original
    program is one to FP32 or float64.
    """
    if notes(node).op.name == "to":
        return notes(node).dtype in (UNKNOWN, torch.float32, torch.float64)
    return row.rule in (Rule.FOLLOW, Rule.PROMOTE) or row.reduces or (row.squares == "power" and not _is_pole(node))


def _reason(node: Node, user: Node, reasons: dict[Node, str], values: _Values, returns: bool) -> str | None:
    """Return why a saturated value, or a constant, is FP32 because of one who reads it; None where it does not mind."""
    row = facts_at(user)
    if node not in {*_floats(user)}:
        return None
    # Zeros and ones are the same in any dtype. A constant that is filled with other numbers, or computed with some
    # (``numbers`` says that its op takes such), is FP32 where its reader is.
    if node in values.constants:
        return reasons.get(user) if facts_at(node).numbers is not None else None
    written = notes(user).op.in_place and user.args[0] is not node and row.rule is not Rule.KEEP
    if (user.op == "output" and returns) or written or isinstance(user.target, HigherOrderOperator):
        return _HANDED_OUT
    if any(source is node and port in row.poles for port, source in arg_nodes(user)) and _is_pole(user):
        return f"saturates in low precision before the pole of %{user.name}"
    reason = reasons.get(user) if user in values.saturated else None
    if reason != _HANDED_OUT:
        return reason
    # Whether what is handed out meets a pole nobody knows. So this reason goes up only where nothing else is in it:
    # through views, ops that move values, and ops of which the value is the only float operand, constants apart.
    alone = row.view or row.exact or len({*_floats(user)} - values.constants) == 1
    return reason if alone else None


def _is_pole(node: Node) -> bool:
    """Return whether an op has its poles; a power only with an exponent below 1."""
    if facts_at(node).squares != "power":
        return True
    exponent = argument(node, 1, "exponent", 2)
    return not isinstance(exponent, int | float) or exponent < 1


def _floats(node: Node) -> Iterator[Node]:
    """Yield the floats whose values an op reads: no example of a shape or a dtype."""
    row = facts_at(node)
    for port, source in arg_nodes(node):
        dtype = notes(source).dtype
        example = port != 0 if notes(node).op.name == "to" else row.example and port in (0, "input", "self")
        if (carries_float(dtype) or dtype is torch.float64) and not example:
            yield source
