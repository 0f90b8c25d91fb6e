"""Tell where a run went another way than the reference: by a number that Python read, or a decision that flipped.

::

    if h.sum() > 7:        # between two graphs: 7.06 in bfloat16, 7.05 in float64
        h = h * 2          # the ops of the run, which a reference beside it repeats

A reference that runs beside the model op by op takes the run's way through Python, and the numbers that Python read.
Where it would have read others, the model runs once more with those: what that gives is the true reference
(``own_way``).

Of a top-k, an argmax or a comparison that decided otherwise no row of an audit says why, as the bend of a route that
flipped has all of it. For that the forward runs again in the reference's dtype for each place that rounds, with that
rounding alone (``Routes``)::

    low     = topk(gate(h_low))                  the run: every op rounds
    exact   = topk(gate(h))                      no op rounds
    of h    = topk(gate(h + rounding of h))      what that rounding does alone

The rounding of an op is what it lost at the inputs that it had in the run: its result, less that in the reference's
dtype on the same inputs. Integers and masks are computed anew as well. So a replay tells which route each value takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from fxprec.model.warm_up import kept
from fxprec.numerics.ledger import Cause, Route
from fxprec.numerics.problem import gradients_of
from fxprec.passes.graph.annotations import module_path
from fxprec.tape.attribution import observe
from fxprec.tape.memory import TensorPlace, difference
from fxprec.tape.operation import Operation, OpOrigin, full_fp32
from fxprec.tape.recorder import OpRecorder, line_of, record


@dataclass(frozen=True, slots=True, eq=False)
class ReplayStep:
    """Operation of the forward, with what a replay of it needs.

    Attributes:
        operation: the op.
        roundings: of each of its outputs, what it lost; None where that is nothing.
        drawn: of an op that draws random numbers what it gave, else as ``Operation.drawn``.
        decided: number of an output -> what it decided in the run: floats came in, and indices, or a mask, came out.
    """

    operation: Operation
    roundings: tuple[Tensor | None, ...]
    drawn: tuple[Tensor, ...]
    decided: Mapping[int, Tensor]


class ForwardRecorder(OpRecorder):
    """Recorder that also keeps what a replay of the forward needs.

    Attributes:
        steps: of the forward.
    """

    def __init__(self, reference: torch.dtype, model: nn.Module) -> None:
        super().__init__(reference, model)
        self.steps: list[ReplayStep] = []

    def noted(self, operation: Operation) -> None:
        """Keep what the op lost and decided, before memory changes."""
        if operation.origin.backward:
            return
        low = [self.memory.low(place) for place in operation.outputs]
        if operation.draws:
            self.steps.append(ReplayStep(operation, (None,) * len(low), tuple(each.clone() for each in low), {}))
            return
        # Written places hold their new values by now: the op read the old ones.
        before = dict(zip(operation.outputs[len(operation.fresh) :], operation.before, strict=True))

        def read(place: TensorPlace, written: bool) -> Tensor:
            value = before[place][0] if place in before else self.memory.low(place)
            return value.to(self.memory.dtype_of(place), copy=written)

        # What an op lost is told at the inputs of the run: the reference's would add the errors of earlier ops.
        drawn = operation.drawn(self.memory.low)
        with torch.no_grad(), full_fp32():
            found = operation.run(read, self.memory.reference, drawn)
        roundings = tuple(
            _rounding(own, value) if place.is_float else None
            for place, own, value in zip(operation.outputs, low, found, strict=True)
        )
        reads_floats = any(isinstance(leaf, TensorPlace) and leaf.is_float for leaf in operation.leaves)
        decided = {n: own.clone() for n, own in enumerate(low) if reads_floats and not operation.outputs[n].is_float}
        self.steps.append(ReplayStep(operation, roundings, drawn, decided))


def _rounding(low: Tensor, exact: object) -> Tensor | None:
    if not isinstance(exact, Tensor) or exact.shape != low.shape:
        return None
    found = difference(low.to(exact.dtype), exact)
    return found if bool(found.any()) else None


class Replay:
    """Recorded forward that can be run again; its recorder's memory must be as the run left it."""

    def __init__(self, steps: ForwardRecorder) -> None:
        self._memory, self._steps = steps.memory, steps.steps
        self._first: dict[int, Tensor] = {}
        written = [
            (place, before)
            for operation in steps.operations
            for place, (before, _) in zip(operation.outputs[len(operation.fresh) :], operation.before, strict=True)
        ]
        # Undone from the last write to the first, memory is as it was before the run.
        for place, before in reversed(written):
            place.of(self._before(place)).copy_(before)

    def decided(self, rounds: Container[OpOrigin], last: int) -> tuple[dict[tuple[int, int], Tensor], OpOrigin | None]:
        """Return what the steps up to ``last`` decide, by step and output, where these places round and no others.

        And the place where it ended before: an op that does not run on shapes that are others than in the run, as of
        the elements that a mask chooses.
        """
        values = _ReplayMemory(self._before)
        found: dict[tuple[int, int], Tensor] = {}
        for number, step in enumerate(self._steps[: last + 1]):
            operation = step.operation
            try:
                results = self._run(step, values)
                for output, (place, result) in enumerate(zip(operation.outputs, results, strict=True)):
                    rounding = step.roundings[output] if operation.origin in rounds else None
                    value = result if rounding is None else result + rounding
                    values.write(place, value, output < len(operation.fresh))
                    if output in step.decided:
                        found[number, output] = result.clone()
            except Exception:  # of shapes that do not fit
                return found, operation.origin
        return found, None

    def _run(self, step: ReplayStep, values: _ReplayMemory) -> list[Tensor]:
        if step.operation.draws:
            return [*step.drawn]

        def read(place: TensorPlace, written: bool) -> Tensor:
            value = values.read(place)
            return value.clone() if written else value

        with torch.no_grad(), full_fp32():
            return step.operation.run(read, self._memory.reference, step.drawn)

    def _before(self, place: TensorPlace) -> Tensor:
        """Return a storage's elements from before the run, in the reference's dtype; complex ones as pairs."""
        if place.storage not in self._first:
            self._first[place.storage] = self._memory.elements(place)
        return self._first[place.storage]


class _ReplayMemory:
    """Memory of one replay.

    Args:
        before: gives the elements of a storage as they were before the run.
    """

    def __init__(self, before: Callable[[TensorPlace], Tensor]) -> None:
        self._before = before
        self._flat: dict[int, Tensor] = {}
        self._other: dict[int, tuple[TensorPlace, Tensor]] = {}  # results of another shape: where in the run, and what

    def read(self, place: TensorPlace) -> Tensor:
        """Return the tensor at a place of the run; in another shape, where what lies there has one."""
        if place.storage in self._other:
            return _viewed(place, *self._other[place.storage])
        if place.storage not in self._flat:
            self._flat[place.storage] = self._before(place).clone()
        return place.of(self._flat[place.storage])

    def write(self, place: TensorPlace, value: Tensor, fresh: bool) -> None:
        """Put a value at a place; ``fresh``: of new memory."""
        if fresh and tuple(value.shape) != place.size:
            self._other[place.storage] = place, value.contiguous()
            return
        if fresh:
            self._flat[place.storage] = torch.zeros_like(self._before(place))
        self.read(place).copy_(value)


def _viewed(place: TensorPlace, made: TensorPlace, value: Tensor) -> Tensor:
    """Return the view of a value of another shape that a place is of the value in the run.

    Raises:
        ValueError: it is none of the whole of some dimensions at one index of the others, or that cannot be told.
    """
    if any(size == 1 != other for size, other in zip(made.size, value.shape, strict=True)):
        raise ValueError(f"which dimension of {made} is longer here cannot be told in a view")
    sizes, strides, offset, left = [], [], 0, place.offset - made.offset
    known = {(size, stride): number for number, (size, stride) in enumerate(zip(made.size, made.stride, strict=True))}
    for size, stride in zip(place.size, place.stride, strict=True):
        number = known.get((size, stride))
        if number is None and size != 1:
            raise ValueError(f"{place} is no plain view of {made}")
        sizes.append(1 if number is None else value.shape[number])
        strides.append(1 if number is None else value.stride(number))
    for stride, number in sorted(((s, n) for (_, s), n in known.items()), reverse=True):
        steps, left = divmod(left, stride) if stride else (0, left)
        offset += steps * value.stride(number)
    return value.as_strided(sizes, strides, offset)


#: Runs that capture graphs of the other way, before that is given up.
_MOST_CAPTURES: Final = 8


@dataclass(slots=True)
class _Flips:
    """Flips of one decision, summed over batches."""

    flipped: int = 0
    count: int = 0
    by_none: int = 0
    causes: dict[OpOrigin, int] = field(default_factory=dict)


class Routes:
    """Decisions of a model that flip, while batches come in.

    Attributes:
        remarks: what is not looked into.
    """

    def __init__(self) -> None:
        self.remarks: dict[str, None] = {}
        self._found: dict[tuple[OpOrigin, str], _Flips] = defaultdict(_Flips)

    def add(self, model: nn.Module, run: Callable[[], object], reference: torch.dtype) -> None:
        """Run a batch, and where decisions flip once more for each place that rounds before the last of them."""
        done = False
        while not done:
            steps = ForwardRecorder(reference, model)
            with kept(model):
                done = observe(model, steps, run) is not None
                if done:
                    self._add(steps.steps, Replay(steps))

    def found(self) -> tuple[Route, ...]:
        """Return the decisions that flipped, in the order of running."""
        routes: list[Route] = []
        for (origin, op), flips in self._found.items():
            if flips.flipped:
                causes = sorted(flips.causes.items(), key=lambda cause: -cause[1])
                told = tuple(Cause(each.name, each.kind, each.graph, count) for each, count in causes if count)
                module = "" if origin.node is None else module_path(origin.node)
                where = origin.name, origin.graph, module, line_of(origin)
                routes.append(Route(*where, op, flips.flipped, flips.count, told, flips.by_none))
        return tuple(routes)

    def _add(self, steps: Sequence[ReplayStep], replay: Replay) -> None:
        low = {(number, output): each for number, step in enumerate(steps) for output, each in step.decided.items()}
        exact, stopped = replay.decided((), max((number for number, _ in low), default=-1))
        flipped = {key: low[key] != each for key, each in exact.items() if each.shape == low[key].shape}
        # Roundings behind the last flip cannot have caused one.
        last = max((number for (number, _), each in flipped.items() if bool(each.any())), default=-1)
        lossy = (step for step in steps[: last + 1] if any(each is not None for each in step.roundings))
        rounding = dict.fromkeys(step.operation.origin for step in lossy)
        alone: dict[OpOrigin, Mapping[tuple[int, int], Tensor]] = {}
        if stopped is not None:
            self.remarks[f"routes behind {stopped.name} are not known: shapes are others there"] = None
        ended: list[str] = []
        for origin in rounding:
            alone[origin], end = replay.decided((origin,), last)
            ended += [] if end is None else [origin.name]
        if ended:
            self.remarks[f"not known what the roundings of {', '.join(ended)} flip: in shapes of the run alone"] = None
        for key, each in flipped.items():
            operation = steps[key[0]].operation
            known = self._found[operation.origin, operation.name]
            known.count += each.numel()
            known.flipped += int(each.sum())
            # An element is left where no rounding alone gives the run's decision.
            left = each.clone()
            for origin, decided in alone.items() if bool(each.any()) else ():
                is_known = key in decided and decided[key].shape == each.shape
                same = each & (decided[key] == low[key]) if is_known else torch.zeros_like(each)
                left &= ~same if is_known else same
                known.causes[origin] = known.causes.get(origin, 0) + int(same.sum())
            known.by_none += int(left.sum())


@dataclass(frozen=True, slots=True)
class OwnWay:
    """Results of the reference by the numbers that it reads itself.

    Attributes:
        values: the loss, or else the outputs.
        gradients: path -> gradient of the parameter.
        ops: those that ran, by place and name.
    """

    values: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    ops: tuple[tuple[OpOrigin, str], ...]

    def parts_at(self, recorder: OpRecorder) -> str | None:
        """Return the line of the run's first op that the reference does not run; None where both run the same."""
        own = ops_of(recorder.operations)
        if own == self.ops:
            return None
        pairs = zip(own, self.ops, strict=False)
        origin = next((mine for (mine, a), (other, b) in pairs if (mine, a) != (other, b)), None)
        # One is the beginning of the other: the first op that only the longer one has.
        if origin is None:
            longer = max(own, self.ops, key=len)
            origin = longer[min(len(own), len(self.ops))][0]
        return line_of(origin)


def ops_of(operations: Sequence[Operation]) -> tuple[tuple[OpOrigin, str], ...]:
    """Return the ops of a run, by place and name."""
    return tuple((operation.origin, operation.name) for operation in operations)


def own_way(model: nn.Module, run: Callable[[], Tensor | list[Tensor]], reference: torch.dtype) -> OwnWay | None:
    """Run a converted model by the reference's own numbers; the model is left as it was.

    Args:
        model: converted.
        run: calls it, and gives the loss or outputs; gradients are those that parameters have then.
        reference: the dtype of the reference.

    Returns:
        None where each run captured another graph.
    """
    # Each other way may be code that was never captured; a model that branches on data would capture for ever.
    for _ in range(_MOST_CAPTURES):
        with kept(model):
            recorded = record(model, run, reference, decides=True)
            if recorded is None:
                continue
            recorder, value = recorded
            exact = {name: _exact(recorder, gradient) for name, gradient in gradients_of(model).items()}
            values = value if isinstance(value, list) else [value]
            return OwnWay(tuple(_exact(recorder, each) for each in values), exact, ops_of(recorder.operations))
    return None


def _exact(recorder: OpRecorder, tensor: Tensor) -> Tensor:
    return recorder.memory.exact(recorder.memory.place(tensor.detach())).clone()
