"""Which tensors outside of a graph share memory: marked on it before the passes run, looked at again at each call.

A graph that writes to an input, a parameter or a buffer is right only for tensors that share memory as they did when it
was rewritten: a cast made before such a write is stale behind it, whatever the tensor is called::

    def forward(self, a, b):
        h = self.l(b)                # reads a cast of b
        a.mul_(2)
        return self.l(b) - h         # another one, if a shares memory with b

Other graphs are right for all, and are not asked. Tensors share memory where their storages overlap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from torch import Tensor
from torch.fx import GraphModule, Node

from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.subgraphs import attributes_in, every_graph

#: Where memory starts and ends.
_Span = tuple[int, int]
_NOWHERE: Final[_Span] = (0, 0)

_pointer = Tensor.data_ptr


def mark_shared(gm: GraphModule, inputs: Mapping[Node, Any]) -> None:
    """Note (``notes(node).memory``) which inputs and attributes of a captured graph share memory: a number for each.

    Args:
        inputs: placeholder -> its value, as far as there is a call.
    """
    values = {node: value for node, value in (*inputs.items(), *attributes_in(gm).items()) if isinstance(value, Tensor)}
    pattern = _pattern([*map(_span, values.values())])
    shared = {first for position, first in enumerate(pattern) if position != first}
    for node, first in zip(values, pattern, strict=True):
        if first in shared:
            notes(node).memory = first


def mark_all_shared(gm: GraphModule) -> None:
    """Mark everything outside as if it shared one memory: right for any tensors, at the price of more casts."""
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            notes(node).memory = 0


def constants_of(gm: GraphModule) -> list[Tensor]:
    """Return the tensors that a graph holds itself, and those of the bodies that it calls."""
    return [value for each in every_graph(gm) for value in attributes_in(each).values() if isinstance(value, Tensor)]


class SharedMemory:
    """Pattern of shared memory among what a program reads from outside, and the test of others against it.

    Args:
        weights: parameters and buffers, which mostly stay where they are from call to call.
        constants: what the graph holds itself.
        inputs: those of the call; None: there is no call yet, and none is expected to share memory with anything.
    """

    def __init__(self, weights: Sequence[Tensor], constants: Iterable[Tensor], inputs: Sequence[Any] | None) -> None:
        self._constants = [*map(_span, constants)]
        self._layout = self._expected = _Layout(weights, self._constants)
        inputs = () if inputs is None else inputs
        # None: the inputs share no memory with anything. Then only the weights' own pattern is compared, and whether
        # inputs still lie apart.
        apart = self._expected.has_none_of([*map(_span, inputs)])
        self._pattern = None if apart else self._expected.pattern_with(inputs)

    def holds(self, weights: Sequence[Tensor], inputs: Sequence[Any]) -> bool:
        """Return whether these share memory with each other as those did that the program was rewritten for."""
        layout = self._layout
        # Weights mostly stay where they are, and their layout is known then.
        if layout.pointers != _pointers(weights):
            self._layout = layout = _Layout(weights, self._constants)
        if self._pattern is not None:
            return layout.pattern_with(inputs) == self._pattern
        same = layout is self._expected or layout.pattern == self._expected.pattern
        return same and layout.has_none_of([*map(_span, inputs)])


class _Layout:
    """Layout of weights and constants in memory.

    Attributes:
        pointers: of the weights.
        pattern: for each the position of the first that shares memory with it.
    """

    def __init__(self, weights: Sequence[Tensor], constants: Sequence[_Span]) -> None:
        self.pointers = _pointers(weights)
        self._spans = [*map(_span, weights), *constants]
        self.pattern = _pattern(self._spans)
        # An empty stretch at 0, so that there is one before each address.
        self._starts, self._ends = [0], [0]
        # Neighbours that overlap are one stretch, so that a bisection finds whatever lies there.
        for start, end in sorted(span for span in self._spans if span != _NOWHERE):
            if start < self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def has_none_of(self, spans: Sequence[_Span]) -> bool:
        """Return whether these share no memory, neither with each other nor with what lies here."""
        # Neighbours in the order of memory tell whether any two overlap.
        if len(spans) > 1:
            spans = sorted(span for span in spans if span != _NOWHERE)
            if any(end > start for (_, end), (start, _) in pairwise(spans)):
                return False
        starts, ends = self._starts, self._ends
        for start, end in spans:
            before = bisect_right(starts, start)
            if start < end and (ends[before - 1] > start or (before < len(starts) and starts[before] < end)):
                return False
        return True

    def pattern_with(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the pattern of what lies here and of these."""
        return _pattern([*self._spans, *map(_span, inputs)])


def _pattern(spans: Sequence[_Span]) -> tuple[int, ...]:
    """Return for each span the position of the first one that it overlaps with, perhaps by way of others."""
    pattern = [*range(len(spans))]
    # In the order of memory a span overlaps with the group before it, or begins one.
    groups: list[list[int]] = []
    end = 0
    for position in sorted((each for each in pattern if spans[each] != _NOWHERE), key=spans.__getitem__):
        if spans[position][0] >= end:
            groups.append([])
        groups[-1].append(position)
        end = max(end, spans[position][1])
    for group in groups:
        first = min(group)
        for position in group:
            pattern[position] = first
    return tuple(pattern)


def _span(value: Any) -> _Span:
    """Return where a tensor's storage lies; nowhere for no tensor, an empty one, or one without memory of its own."""
    try:
        storage = value.untyped_storage()
        start = storage.data_ptr()
        return (start, start + storage.nbytes()) if start else _NOWHERE
    except (AttributeError, RuntimeError, NotImplementedError):
        return _NOWHERE


def _pointers(weights: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_pointer, weights)]
    except (RuntimeError, NotImplementedError):  # under a transform of torch.func
        return [_span(weight)[0] for weight in weights]
