"""Split the error of a run by ops: two columns that add up to it exactly.

For an op with low inputs and low result, and the reference's inputs and result::

    m         adjoint of its result: what the target gains by a unit of it
    rounding  <m, low result - f(low inputs)>              f: the op in the reference's dtype
    bend      <m, f(low inputs) - reference's result> - <J^T m, low inputs - reference's inputs>

J is the derivative of the op at the midpoint of both inputs, and the adjoint of a value is the sum of J^T m over its
readers. So the sum over all ops telescopes to the target's error: "rounding" is what an op itself lost at the inputs
that it had, "bend" what the linear picture leaves out, such as a maximum that went to another element. It holds for any
J; the midpoint makes bends small (third order). Kin: dual-weighted residuals of finite elements (Becker and Rannacher,
"An optimal control approach to a posteriori error estimation", Acta Numerica 2001).

The walk goes backwards through the ops. Writes are undone on the way, so that memory is at each op as it was then, and
what an op made is let go behind it.

A fused region is one op of the run: ``opened`` splits its kernel into what each op within would lose, were it done by
itself, and the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fxprec.inspection.nodes import NodeByNode
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.tape.memory import Memory, TensorPlace
from fxprec.tape.operation import Operation, full_fp32
from fxprec.tape.recorder import OpRecorder
from fxprec.tape.vjp import Inputs, OpResult, inner, pull
from fxprec.torch_internals import tree_unflatten

#: The op that a region's forward kernel is for a dispatch mode.
_FORWARD: Final = "fxprec::region_forward"
REST: Final = "kernel, rest"


@dataclass(frozen=True, slots=True)
class ErrorTerm:
    """Part of one op in the error of the target.

    Attributes:
        operation: the op.
        rounding, bend: see above.
        lost: sum of the squares of (low result - f(low inputs)).
        size: sum of the squares of f(low inputs).
        results: number of a result -> its m and values, as long as nobody asks for the next term.
        reads: where the recorder asks for it, position of its node's input -> <the part of that input's adjoint that
            comes through this op, the input's rounding>.
        lacking: as of ``Pulled``.
    """

    operation: Operation
    rounding: float
    bend: float
    lost: float
    size: float
    results: Mapping[int, OpResult]
    reads: Mapping[int, float] = field(default_factory=dict)
    lacking: Mapping[str, float] = field(default_factory=dict)


def measured(recorder: OpRecorder, targets: Sequence[tuple[TensorPlace, Tensor]]) -> float:
    """Return the error of the sum of <weight, value at place> over the targets: low minus reference."""
    inputs = Inputs(recorder.memory)
    return sum(inner(weight, inputs.error(place)) for place, weight in targets)


def terms(recorder: OpRecorder, targets: Sequence[tuple[TensorPlace, Tensor]]) -> Iterator[ErrorTerm]:
    """Yield the terms of all ops that have a part in the targets, last op first. They use up the recorder's memory.

    Args:
        recorder: of the run.
        targets: (place, weight in the reference's dtype): the target is the sum of <weight, value>.
    """
    walk = _AdjointWalk(recorder)
    for place, weight in targets:
        walk.add(place, weight)
    while recorder.operations:
        operation = recorder.operations.pop()
        if (term := walk.term(operation)) is not None:
            yield term
        walk.leave(operation)


class _AdjointWalk:
    """Backward walk over the ops: adjoints of storages, as vectors in the reference's dtype (complex as pairs)."""

    def __init__(self, recorder: OpRecorder) -> None:
        self._memory, self._rounded = recorder.memory, recorder.rounded
        self._adjoints: dict[int, Tensor] = {}
        # What no op has made has no error: nobody asks for its adjoint, unless it is what a node would read rounded.
        self._made = {place.storage for operation in recorder.operations for place in operation.outputs}
        self._made |= {place.storage for operation in recorder.operations for place in operation.inputs}

    def term(self, operation: Operation) -> ErrorTerm | None:
        """Return the term of one op, and undo its writes; None where it has no part in the target."""
        drawn = operation.drawn(self._memory.low)
        results = self._results(operation)
        if not results:
            return None
        # The reference has the run's random numbers: they are nobody's error.
        if operation.draws:
            return ErrorTerm(operation, 0.0, 0.0, 0.0, 0.0, results)
        # TF32 would round the products that explain roundings.
        with full_fp32():
            pulled = pull(operation, Inputs(self._memory), results, drawn, self._made)
        reads: dict[int, float] = {}
        for place, gradient in pulled.gradients:
            if self._rounded is not None and place in operation.inputs:
                position = operation.inputs[place]
                reads[position] = reads.get(position, 0.0) + inner(gradient, self._rounding(place, self._rounded))
            self.add(place, gradient)
        return ErrorTerm(operation, *pulled[:4], results, reads, pulled.lacking)

    def _rounding(self, place: TensorPlace, dtype: torch.dtype) -> Tensor:
        """Return what rounding loses of the reference's value in a dtype; what that cannot hold saturates."""
        exact, limits = self._memory.exact(place), torch.finfo(dtype)
        return exact.clamp(limits.min, limits.max).to(dtype).to(exact.dtype) - exact

    def leave(self, operation: Operation) -> None:
        """Drop what the op has made."""
        for place in operation.outputs[: len(operation.fresh)]:
            self._adjoints.pop(place.storage, None)
            self._memory.forget(place)

    def _results(self, operation: Operation) -> dict[int, OpResult]:
        memory, found = self._memory, {}
        fresh = len(operation.fresh)
        for number, place in enumerate(operation.outputs):
            if not place.is_float or place.storage not in self._adjoints:
                continue
            weight, low = place.of(self._adjoints[place.storage]), memory.low(place)
            # A write overwrites: the adjoint of what stood there before does not come through this op.
            if number >= fresh:
                adjoint, (weight, low) = weight, (weight.clone(), low.clone())
                adjoint.zero_()
            if bool(weight.any()):
                found[number] = OpResult(weight, low, memory.error(place))
        for place, (low_before, exact_before) in zip(operation.outputs[fresh:], operation.before, strict=True):
            memory.low(place).copy_(low_before)
            memory.write_exact(place, exact_before)
        return found

    def add(self, place: TensorPlace, gradient: Tensor) -> None:
        """Add to the adjoint of a place, of which several elements may be one in memory."""
        if place.conjugate or place.negative:
            gradient = gradient.conj() if place.conjugate else -gradient
            place = place._replace(conjugate=False, negative=False)
        if place.dtype.is_complex:
            place, gradient = place.as_real(), torch.view_as_real(gradient.resolve_conj())
        # One vector for a storage: views of it add into the same adjoint, as they lie in the same memory.
        flat = self._adjoints.get(place.storage)
        overlaps = place.overlaps
        if flat is None:
            flat = self._adjoints[place.storage] = self._memory.adjoint(place)
            if not overlaps and math.prod(place.size) == len(flat):
                place.of(flat).copy_(gradient)
                return
            flat.zero_()
        # An expanded dimension is one element in memory, which gets the sum.
        for dimension, (size, stride) in enumerate(zip(place.size, place.stride, strict=True)):
            if stride == 0 and size > 1:
                gradient = gradient.sum(dimension, keepdim=True)
                place = place._replace(size=(*place.size[:dimension], 1, *place.size[dimension + 1 :]))
        if overlaps and place.overlaps:
            index = place._replace(dtype=torch.int64).of(torch.arange(len(flat), device=flat.device))
            flat.index_add_(0, index.flatten(), gradient.flatten())
        else:
            place.of(flat).add_(gradient)


def opened(term: ErrorTerm, memory: Memory) -> dict[str, float] | None:
    """Return node of a region -> its part of the kernel's rounding, and the kernel's rest. They add up.

    The region's ops run one by one on the kernel's inputs, with the kernel's adjoints of the results. A kernel that
    keeps all in registers has a rest that takes most of that back.

    Args:
        term: the latest of a walk.
        memory: of its recorder.

    Returns:
        None where the op is no kernel of a region, or draws random numbers, which ops would draw anew.
    """
    operation = term.operation
    node = operation.origin.node
    if operation.name != _FORWARD or node is None or node.graph.owning_module is None:
        return None
    region = node.graph.owning_module.get_submodule(str(node.target))
    if not isinstance(region, FusedRegion) or region.draws:
        return None
    (inputs, *_), _ = tree_unflatten([*operation.leaves], operation.spec)
    given = [memory.low(each).clone() if isinstance(each, TensorPlace) else each for each in inputs]
    # A region's ops run anew on copies, since the run's memory is at the op before.
    recorder = OpRecorder(memory.reference)
    with recorder:
        made: list[Tensor] = [*NodeByNode(region.graph_module, recorder.look).run(*given)]
    known = ((made[number], result.weight) for number, result in term.results.items() if number < len(made))
    targets = [(recorder.memory.place(tensor), weight) for tensor, weight in known]
    parts: dict[str, float] = defaultdict(float)
    for part in terms(recorder, targets):
        parts[part.operation.origin.name] += part.rounding + part.bend
    # What a kernel keeps in registers it does not round: its rest takes that back.
    parts[REST] = term.rounding - sum(parts.values())
    return dict(parts)
