"""Find floats that hold whole numbers (positions, timesteps, multiples): made of integers and constants alone.

Such values *count*. Low precision counts to 256 (bfloat16) or 2048 (float16), and a rounded position gives another
angle. So they stay FP32, whatever dtype the program takes for them from a low tensor, until a periodic function, a
weight or another learned value takes them::

    %h: bfloat16 = linear(%x, %w)
    %t: float32 = to(%ids, torch.float32)          # was %ids.type_as(%h), or .to(%h.dtype)
    %angles: float32 = matmul(%inv_freq, %t)       # a product with a constant: FULL
    %sin: float32 = sin(%angles)                   # bounded: free from here on
    %y: bfloat16 = linear(%t_bf16, %v)             # a weight takes them as it takes everything

Kinds of values are told apart in one walk forwards (``Origin``). An integer is a count; a bool or a number of eight
bits (pixels, quantized weights) is none, as low precision has it exactly. Of float constants those count that hold
integers alone, or are filled with one that is larger (``full_like(%h, 999.0)``). An input of which nobody knows whether
it is an integer counts where the program casts it; where low values are made of it without a cast, integers get another
graph, which knows (``taken_for_floats``).

A cast to the dtype of a low tensor is FP32 only where its digits matter: where somebody computes with the counts alone,
compares them with each other, computes in FP32, or returns them. A mask that a learned value is multiplied with stays
as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Final

import torch
from torch.fx import Graph, Node

from fxprec.kernels.launch.observers import TRANSFORM, unwatched, watcher
from fxprec.kernels.launch.operands import PLAIN
from fxprec.passes.graph.annotations import (
    NON_TENSOR,
    UNKNOWN,
    Annotations,
    Rule,
    annotated,
    arg_nodes,
    is_castable,
    leaves,
    notes,
)
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.ops.rule import OpRule
from fxprec.passes.ops.table import facts_at, row_of
from fxprec.passes.torch_internals import HigherOrderOperator

#: Why a value that counts is FP32.
COUNTS: Final = "counts in integers beyond those of low precision: FP32 until a weight or a periodic function takes it"

#: Dtypes of integers of which every low dtype holds each.
_HELD_BY_LOW: Final = (torch.bool, torch.int8, torch.uint8)


class Origin(IntEnum):
    """Origin of a value: what it is made of; of several operands the highest decides."""

    #: Buffers, created tensors, bools as numbers, results of periodic functions: they leave a count what it is.
    CONSTANT = 0
    #: An input of unknown dtype, and what is made of it with constants.
    INPUT = 1
    #: Integers, and what is made of them with constants.
    COUNT = 2
    #: Weights, float inputs, and what is made of them: they end a count.
    OTHER = 3


class Origins:
    """The origins of the values of a graph and of the bodies that it calls.

    Placement asks three questions:

    - ``counts``, of an op that computes: then it stays FP32;
    - ``needs_digits``, of a call that names the dtype of a low tensor: then it names FP32. A value needs its digits if
      it is a count, or goes into one, and a reader's result depends on more digits than low precision has;
    - ``may_count``, of an input of unknown dtype: whether it is an integer is found out at run time.

    ::

                                            origin       counts    needs_digits
        %t = to(%ids, %h.dtype)             COUNT        yes       yes: %angles computes with it
        %angles = mul(%t, 0.3)              COUNT        yes       yes, since sin is periodic
        %sin = sin(%angles)                 CONSTANT     no        no
        %m = to(%ids, %h.dtype)             COUNT        yes       no: it goes into a learned value alone
        %y = mul(%h, %m)                    OTHER        no        no
        %f = full_like(%h, 999.0)           COUNT        no        no, unless a reader's result depends on it
    """

    def __init__(self) -> None:
        self._known: dict[Node, Origin] = {}
        self._digits_needed: set[Node] = set()
        self._created: set[Node] = set()  # made of numbers alone: ones(3), full_like(h, 999.0)
        self._filled: set[Node] = set()  # those of them that are made with a number that counts

    def enter(self, graph: Graph, operands: Mapping[Node, Node]) -> None:
        """Look at a graph. ``operands``: placeholder of a body that runs as part of its caller -> what it is given."""
        for node, noted in annotated(graph):
            self._known[node] = self._origin(node, noted, operands)
        if Origin.COUNT not in self._known.values():  # no integers at all: nobody needs digits
            return
        # Backwards: what its readers need, a value needs.
        for node in reversed(graph.nodes):
            origin = self._known[node]
            if self._compares(node):
                self._digits_needed.add(node)
            elif origin is Origin.COUNT or (origin is Origin.CONSTANT and is_castable(notes(node).dtype)):
                if any(self._wants_digits(user, origin) for user in node.users):
                    self._digits_needed.add(node)

    def counts(self, node: Node) -> bool:
        """Return whether what a node computes is a count, or a constant that goes into one.

        A constant that is filled with a count, a number or a value (``full_like(h, n)``), is one only if it needs its
        digits.
        """
        counted = self._known.get(node) is Origin.COUNT and node not in self._filled and not facts_at(node).example
        return counted or node in self._digits_needed

    def may_count(self, node: Node) -> bool:
        """Return whether a value is made of an input of unknown dtype, and of constants."""
        return self._known.get(node) is Origin.INPUT

    def needs_digits(self, node: Node) -> bool:
        """Return whether a value is a count, or goes into one, and somebody needs its digits."""
        return node in self._digits_needed

    def _origin(self, node: Node, annotations: Annotations, operands: Mapping[Node, Node]) -> Origin:
        info = annotations.dtype
        if annotations.kind == "parameter":
            return Origin.OTHER
        if isinstance(info, torch.dtype) and not (info.is_floating_point or info.is_complex):
            return Origin.CONSTANT if info in _HELD_BY_LOW else Origin.COUNT
        if info is NON_TENSOR:
            return Origin.CONSTANT
        if node in operands:
            return self._known.get(operands[node], Origin.OTHER)
        if node.op in ("placeholder", "get_attr"):
            return self._from_outside(node)
        row = row_of(annotations.op.name)
        if row is None or row.random or isinstance(node.target, HigherOrderOperator):
            return Origin.OTHER
        sources = [self._known.get(source, Origin.OTHER) for source in _values(node, row)]
        origin = max(sources, default=Origin.CONSTANT)
        if (origin is Origin.CONSTANT and not sources) or (row.view and self._created.issuperset(_values(node, row))):
            self._created.add(node)
        if origin is Origin.CONSTANT and self._is_filled_with_count(node, row):
            self._filled.add(node)
            return Origin.COUNT
        # A product takes no integers: what it reads is a float input.
        if row.rule is Rule.LOW and Origin.INPUT in sources:
            return Origin.OTHER
        if origin is not Origin.OTHER and (row.counts or (origin is Origin.INPUT and annotations.op.name == "to")):
            return Origin.COUNT
        periodic = row.periodic or (isinstance(info, torch.dtype) and info.is_complex)
        return Origin.CONSTANT if periodic and origin is not Origin.OTHER else origin

    def _is_filled_with_count(self, node: Node, row: OpRule) -> bool:
        """Return whether a constant is made with an integer that bfloat16 may not hold, and FP32 does.

        In one step (``full((4,), -301)``) of any sign. In two (``ones(4) * 301``) only if it is positive: products and
        sums of a constant with a negative number (``ones(4) * -1e4``) are taken for masks.
        """
        if row.numbers == "fill" and node in self._created:
            written = row.example or notes(node).op.name == "full"  # behind an example, or a shape
            return any(_is_count(abs(number)) for number in _numbers(node, 1 if written else 0))
        created = row.numbers in ("added", "factors") and self._created.issuperset(_values(node, row))
        return created and any(map(_is_count, _numbers(node, 0)))

    def _from_outside(self, node: Node) -> Origin:
        annotations = notes(node)
        if annotations.kind not in ("buffer", "constant"):
            return Origin.INPUT if annotations.dtype is UNKNOWN and not annotations.kind else Origin.OTHER
        is_read = any(node in _values(user, facts_at(user)) for user in node.users)  # no running statistic
        constant = attribute_of(node) if node.op == "get_attr" and is_read else None
        return Origin.COUNT if _holds_counts(constant) else Origin.CONSTANT

    def _wants_digits(self, user: Node, of: Origin) -> bool:
        """Return whether the result of a reader of a count, or of a constant, depends on more digits than low has.

        ``of``: which of the two it reads. A constant needs digits only for a count, or if its reader does.
        """
        row = facts_at(user)
        if self._known.get(user) is Origin.COUNT:
            moves = row.view or row.exact or row.same or user in self._filled
            return user in self._digits_needed if moves else True
        if of is Origin.CONSTANT:
            return user in self._digits_needed
        if user.op == "output" or isinstance(user.target, HigherOrderOperator):
            return True
        wants = row.periodic or row.rule in (Rule.FULL, Rule.KEEP) or user in self._digits_needed
        return notes(user).dtype is not NON_TENSOR and wants

    def _compares(self, node: Node) -> bool:
        """Return whether an op compares floats that count with counts or constants alone."""
        row = facts_at(node)
        if row.result != "bool" or row.numbers != "compared":
            return False
        values = [*_values(node, row)]
        floats = any(is_castable(notes(each).dtype) for each in values)
        return floats and max(self._known.get(each, Origin.OTHER) for each in values) is Origin.COUNT


def taken_for_floats(graph: Graph, low: torch.dtype) -> set[Node]:
    """Return the inputs of unknown dtype of which something low is computed that is FP32 where they are integers.

    When the graph was decided their dtype was unknown. If an integer arrives, ``cast_if_float`` passes it on; but a
    float that an op makes of it (``ids * 0.5``) would be cast low, and should be FP32.
    """
    inputs = {node for node in graph.find_nodes(op="placeholder") if notes(node).dtype is UNKNOWN}
    if not inputs:
        return inputs
    origins = Origins()
    origins.enter(graph, {})
    read: set[Node] = set()  # as values, not as indices alone
    behind: set[Node] = set()
    for node in reversed(graph.nodes):
        if not origins.may_count(node):
            continue
        users = [user for user in node.users if user.op == "output" or node in {*_values(user, facts_at(user))}]
        if any(user in read or not origins.may_count(user) for user in users):
            read.add(node)
        row, precision = facts_at(node), notes(node).precision
        moves = node.op == "placeholder" or row.view or row.exact or row.same
        computed = node in read and not moves and low in (precision.reads, precision.output)
        if computed or not behind.isdisjoint(users):
            behind.add(node)
    return behind & inputs


def _values(node: Node, row: OpRule) -> list[Node]:
    """Return the tensors whose values go into the result: no index, no shape, no bool, no example of a dtype."""
    found = []
    for port, source in arg_nodes(node):
        info = notes(source).dtype
        reads = port == 0 if row.arrives else row.ports is None or port in row.ports
        reads = reads and not (row.example and port in (0, "input", "self"))
        if reads and port not in row.places and info is not NON_TENSOR and info is not torch.bool:
            found.append(source)
    return found


def _numbers(node: Node, position: int) -> Iterator[float]:
    """Yield the numbers among the arguments from a position on, and among the keywords."""
    given = (*node.args[position:], *node.kwargs.values())
    return (leaf for leaf in leaves(given) if type(leaf) in (int, float))


def _is_count(number: float) -> bool:
    return 256 < number <= 1 << 24 and number == int(number)


def _holds_counts(value: object) -> bool:
    """Return whether a float constant holds integers alone, and larger ones than a mask or a stencil does."""
    if type(value) not in PLAIN or watcher(TRANSFORM) is not None:
        return False
    assert isinstance(value, torch.Tensor)
    if not value.is_floating_point() or value.is_meta or not value.numel() or value.layout is not torch.strided:
        return False
    with unwatched():
        value = value.detach()
        return 2 < value.abs().max().item() < math.inf and bool((value == value.round()).all())
