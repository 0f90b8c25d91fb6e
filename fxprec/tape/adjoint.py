"""The error of a run, told op by op: two columns that add up to it exactly.

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
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxprec.tape.memory import Memory, Place
from fxprec.tape.operation import Operation
from fxprec.tape.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Term:
    """What one op adds to the error of the target.

    Attributes:
        operation: the op.
        rounding, bend: see above.
        lost: sum of the squares of (low result - f(low inputs)).
        size: sum of the squares of f(low inputs).
    """

    operation: Operation
    rounding: float
    bend: float
    lost: float
    size: float


def measured(recorder: Recorder, targets: Sequence[tuple[Place, Tensor]]) -> float:
    """The error of the sum of <weight, value at place> over the targets: low minus reference."""
    memory = recorder.memory
    return sum(_inner(weight, _error(memory, place)) for place, weight in targets)


def terms(recorder: Recorder, targets: Sequence[tuple[Place, Tensor]]) -> Iterator[Term]:
    """The terms of all ops that have a part in the targets, last op first. They use up the recorder's memory.

    Args:
        recorder: of the run.
        targets: (place, weight in the reference's dtype): the target is the sum of <weight, value>.
    """
    memory = recorder.memory
    adjoints: dict[int, Tensor] = {}
    for place, weight in targets:
        _add(adjoints, memory, place, weight)
    while recorder.operations:
        operation = recorder.operations.pop()
        term = _term(operation, memory, adjoints)
        if term is not None:
            yield term
        for place in operation.outputs[: len(operation.fresh)]:
            adjoints.pop(place.storage, None)
            memory.forget(place)


def _term(operation: Operation, memory: Memory, adjoints: dict[int, Tensor]) -> Term | None:
    outputs = operation.outputs
    live = [n for n, place in enumerate(outputs) if place.is_float and place.storage in adjoints]
    weights = {n: outputs[n].of(adjoints[outputs[n].storage]).clone() for n in live}
    live = [n for n in live if bool(weights[n].count_nonzero())]
    low = {n: _wide(memory, outputs[n]) for n in live}
    drawn = operation.drawn(memory.low)
    exact = {n: memory.exact(outputs[n]).clone() for n in live}
    for place, (low_before, exact_before) in zip(outputs[len(operation.fresh) :], operation.before, strict=True):
        memory.low(place).copy_(low_before)
        memory.write_exact(place, exact_before)
    for n in live:
        outputs[n].of(adjoints[outputs[n].storage]).zero_()
    if not live:
        return None
    if operation.draws:
        return Term(operation, 0.0, 0.0, 0.0, 0.0)

    with torch.no_grad():
        found = operation.run(lambda place, written: _own(memory, place), memory.reference, drawn)
    local = {n: found[n].to(exact[n].dtype) for n in live}
    rounding = sum(_inner(weights[n], low[n] - local[n]) for n in live)
    bend = sum(_inner(weights[n], local[n] - exact[n]) for n in live)
    for place, gradient in _pulled_back(operation, memory, {n: weights[n] for n in live}, drawn):
        bend -= _inner(gradient, _error(memory, place))
        _add(adjoints, memory, place, gradient)
    lost = sum(_square(low[n] - local[n]) for n in live)
    return Term(operation, rounding, bend, lost, sum(map(_square, local.values())))


def _pulled_back(
    operation: Operation, memory: Memory, weights: Mapping[int, Tensor], drawn: Sequence[Tensor]
) -> Iterator[tuple[Place, Tensor]]:
    """J^T m at the midpoint, for the places that the op reads; ``weights``: number of an output -> its adjoint m.

    Nothing for a place in which torch has no derivative: then the bend has what came in there. Backwards of norms have
    none in the saved mean and deviation, which they take for functions of the input.
    """

    def at_midpoint(decomposed: bool, wanted: Container[int] | None) -> tuple[list[Place], list[Tensor], list[Any]]:
        read: list[Place] = []
        values: list[Tensor] = []
        numbers = itertools.count()

        def midpoint(place: Place, written: bool) -> Tensor:
            if not place.is_float:
                return memory.low(place).clone()
            value = (_wide(memory, place) + memory.exact(place)) / 2
            if wanted is None or next(numbers) in wanted:
                read.append(place)
                values.append(value.requires_grad_())
            return value.clone() if written else value

        with torch.enable_grad():
            return read, values, operation.run(midpoint, memory.reference, drawn, decomposed)

    def pulled_back(decomposed: bool, wanted: Container[int] | None) -> list[tuple[Place, Tensor]]:
        read, values, results = at_midpoint(decomposed, wanted)
        through = [n for n in weights if results[n].requires_grad]
        if not through or not read:
            return []
        given = [weights[n].to(results[n].dtype) for n in through]
        found = torch.autograd.grad([results[n] for n in through], values, given, allow_unused=True)
        return [
            (place, g.to(value.dtype)) for place, value, g in zip(read, values, found, strict=True) if g is not None
        ]

    for decomposed in (False, True):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            yield from pulled_back(decomposed, None)
            return
    for number in range(sum(isinstance(leaf, Place) and leaf.is_float for leaf in operation.leaves)):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            yield from pulled_back(False, {number})


def _wide(memory: Memory, place: Place) -> Tensor:
    """The run's value in the reference's dtype."""
    return memory.low(place).to(memory.exact(place).dtype)


def _own(memory: Memory, place: Place) -> Tensor:
    """The same, to be written to."""
    return _wide(memory, place).clone() if place.is_float else memory.low(place).clone()


def _error(memory: Memory, place: Place) -> Tensor:
    return _wide(memory, place) - memory.exact(place)


def _square(value: Tensor) -> float:
    return float(value.abs().square().sum(dtype=torch.float64))


def _inner(weight: Tensor, value: Tensor) -> float:
    """<weight, value>; where the weight is 0 nothing counts, whatever stands there (memory that nobody had written)."""
    if weight.is_complex():
        weight, value = torch.view_as_real(weight), torch.view_as_real(value.resolve_conj())
    product = torch.where(weight == 0, 0.0, weight * value)
    return float(product.sum(dtype=torch.float64))


def _add(adjoints: dict[int, Tensor], memory: Memory, place: Place, gradient: Tensor) -> None:
    """Add to the adjoint of a place, of which several elements may be one in memory (``expand``, ``unfold``)."""
    if place.storage not in adjoints:
        adjoints[place.storage] = memory.zeros(place)
    if place.conjugate or place.negative:
        gradient = gradient.conj() if place.conjugate else -gradient
        place = place._replace(conjugate=False, negative=False)
    if place.dtype.is_complex:
        place, gradient = place.as_real(), torch.view_as_real(gradient.resolve_conj())
    flat = adjoints[place.storage]
    for dimension, (size, stride) in enumerate(zip(place.size, place.stride, strict=True)):
        if stride == 0 and size > 1:
            gradient = gradient.sum(dimension, keepdim=True)
            place = place._replace(size=(*place.size[:dimension], 1, *place.size[dimension + 1 :]))
    if _overlaps(place):
        index = place._replace(dtype=torch.int64).of(torch.arange(len(flat), device=flat.device))
        flat.index_add_(0, index.flatten(), gradient.flatten())
    else:
        place.of(flat).add_(gradient)


def _overlaps(place: Place) -> bool:
    """Whether two elements may be one in memory."""
    reach = 1
    for stride, size in sorted((t, s) for s, t in zip(place.size, place.stride, strict=True) if s > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False
