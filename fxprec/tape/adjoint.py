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

Of one op (``pull``) J is taken at the midpoint of run and reference in general. Less is to be done where an op is

- a copy in another dtype: J is the identity;
- linear in what has an error: J is the same everywhere, and autograd gives it of the one run at low inputs. Where the
  op reads an index or a mask that the reference has otherwise, its bend is what that makes of it;
- a product, such as a matrix product or a convolution: J^T m is written down below, and no run is needed at all. For a
  quadratic function f(low) - f(reference) is J at the midpoint times the difference of the inputs, so that::

      rounding = <m, low result - reference's result> - <J^T m, low inputs - reference's inputs>

None of these has another bend, but for what ``memory`` rounds, 2^-24 of the error of a result.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.tape.attribution import NodeByNode
from fxprec.tape.exact_ops import EXACT
from fxprec.tape.memory import Memory, Operation, Read, TensorPlace, difference, full_fp32
from fxprec.tape.recorder import OpRecorder
from fxprec.torch_internals import tree_unflatten

#: The op that a region's forward kernel is for a dispatch mode.
_FORWARD: Final = "fxprec::region_forward"
REST: Final = "kernel, rest"


_aten = torch.ops.aten


class Inputs:
    """Values at places, in the reference's dtype; each is converted once."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.dtype = memory, memory.reference
        self._low: dict[TensorPlace, Tensor] = {}
        self._errors: dict[TensorPlace, Tensor] = {}

    def low(self, place: TensorPlace) -> Tensor:
        """Return the run's value; what is no float, as it is."""
        if place not in self._low:
            low = self._memory.low(place)
            self._low[place] = low.to(self._memory.dtype_of(place)) if place.is_float else low
        return self._low[place]

    def error(self, place: TensorPlace) -> Tensor:
        """Return the run's value, less the reference's."""
        if place not in self._errors:
            self._errors[place] = self._memory.error(place)
        return self._errors[place]

    def midpoint(self, place: TensorPlace, dtype: torch.dtype) -> Tensor:
        """Return the midpoint of both, in memory of its own; the reference's value where the run has inf or nan."""
        low = self.low(place) if dtype is self.dtype else self._memory.low(place)
        found = torch.sub(_in(dtype, low), _in(dtype, self.error(place)), alpha=0.5)
        if bool(found.sum().isfinite()):
            return found
        return torch.where(found.isfinite(), found, _in(dtype, self._memory.exact(place)))


class OpResult(NamedTuple):
    """Result of an op with a part in the target: its adjoint m, the run's values, those less the reference's."""

    weight: Tensor
    low: Tensor
    error: Tensor


class Pulled(NamedTuple):
    """Part of an op in the error of the target, with J^T m.

    Attributes:
        rounding, bend: see above.
        lost: sum of the squares of (low result - f(low inputs)), and ``size`` of f(low inputs).
        gradients: place that the op reads -> its part of J^T m.
        lacking: argument in which torch has no derivative, although the result depends on it -> what came in there,
            which is a part of the bend.
    """

    rounding: float
    bend: float
    lost: float
    size: float
    gradients: list[tuple[TensorPlace, Tensor]]
    lacking: Mapping[str, float] = MappingProxyType({})


def pull(
    operation: Operation, inputs: Inputs, results: Mapping[int, OpResult], drawn: Sequence[Tensor], made: Container[int]
) -> Pulled:
    """Return the part of one op.

    Nothing for a place in which torch has no derivative: then the bend has what came in there, and ``lacking`` says so.
    Norms have none in a mean and deviation of their own, which they take for functions of the input.

    Args:
        operation: the op.
        inputs: what it reads.
        results: by number.
        drawn: what the op drew in the run.
        made: storages that may have an error: places in others get nothing.
    """
    places = [leaf for leaf in operation.leaves if isinstance(leaf, TensorPlace) and leaf.is_float]
    reads = tuple(dict.fromkeys(place for place in places if place.storage in made))
    one = _OpPart(operation, inputs, results, drawn, reads)
    # The cheapest form that holds is tried first: identity, linear, product, then the midpoint in general.
    if operation.keeps_values:
        return one.of_copy()
    if not operation.why_inexact:
        if one.is_linear:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return one.of_linear()
        if operation.name in _PRODUCTS and [*results] == [0]:
            return one.of_product()
    return one.at_midpoint()


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _size(values: Tensor) -> float:
    """Return the sum of squares of what is finite."""
    found = inner(values, values)
    return found if math.isfinite(found) else inner(_finite(values), _finite(values))


def _finite(values: Tensor) -> Tensor:
    """Return values with 0 for inf and nan.

    Derivatives may be so: they are not finite where a row is masked as a whole, and the columns add up for any.
    """
    return values if bool(values.sum().isfinite()) else torch.where(values.isfinite(), values, 0.0)


def inner(weight: Tensor, value: Tensor) -> float:
    """Return <weight, value>; where one of both is 0 nothing counts, whatever the other is.

    Memory that nobody had written has no weight; a row that is masked everywhere has no error, and an adjoint of nan.
    """
    if weight.is_complex():
        weight, value = torch.view_as_real(weight.resolve_conj()), torch.view_as_real(value.resolve_conj())
    # A dot product needs one order in memory: both are read in that of their strides.
    if weight.stride() == value.stride() and not weight.is_contiguous():
        order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
        weight, value = weight.permute(order), value.permute(order)
    if weight.dtype is value.dtype is torch.float64 and weight.is_contiguous() and value.is_contiguous():
        found = float(torch.dot(weight.view(-1), value.view(-1)))
    else:
        found = float((weight * value).sum(dtype=torch.float64))
    return (
        found if math.isfinite(found) else float(torch.where((weight == 0) | (value == 0), 0.0, weight * value).sum())
    )


# -- linear ops -------------------------------------------------------------------------------------------------------

#: Linear in all their floats together.
_LINEAR: Final = frozenset({
    "aten::_adaptive_avg_pool2d", "aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c", "aten::_to_copy", "aten::add",
    "aten::add_", "aten::avg_pool2d", "aten::cat", "aten::clone", "aten::constant_pad_nd", "aten::copy",
    "aten::copy_", "aten::cumsum", "aten::embedding", "aten::embedding_dense_backward", "aten::flip",
    "aten::gather", "aten::index", "aten::index_select", "aten::masked_fill", "aten::masked_fill_", "aten::mean",
    "aten::neg", "aten::repeat", "aten::roll", "aten::select_backward", "aten::slice_backward", "aten::stack",
    "aten::sub", "aten::sub_", "aten::sum", "aten::tril", "aten::triu", "aten::upsample_nearest2d", "aten::where",
})  # fmt: skip
#: Linear in the first of their arguments.
_SCALINGS: Final = frozenset({"aten::div", "aten::div_", "aten::mul", "aten::mul_"})


# -- products ---------------------------------------------------------------------------------------------------------


def _mm(m: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Return gradients laid out in memory as what they belong to: a weight is read transposed."""
    m_t, a_t, b_t = (x.transpose(-2, -1) for x in (m, a, b))
    of_a = (b @ m_t).transpose(-2, -1) if _is_transposed(a) else m @ b_t
    of_b = (m_t @ a).transpose(-2, -1) if _is_transposed(b) else a_t @ m
    return of_a, of_b


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.stride(-2) < matrix.stride(-1)


def _addmm(m: Tensor, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> tuple[Tensor, ...]:
    of_a, of_b = _mm(m, a, b)
    return m.sum_to_size(bias.shape) * beta, of_a * alpha if alpha != 1 else of_a, of_b * alpha if alpha != 1 else of_b


def _convolution(m: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    sizes = None if bias is None else bias.shape
    return _aten.convolution_backward(m, x, weight, sizes, *options, (True, True, bias is not None))


#: Op -> (m, its arguments) -> J^T m of its tensors, which are its first arguments.
_PRODUCTS: Final[dict[str, Callable[..., tuple[Tensor, ...]]]] = {
    "aten::mm": _mm, "aten::bmm": _mm, "aten::addmm": _addmm, "aten::baddbmm": _addmm,
    "aten::convolution": _convolution,
}  # fmt: skip


#: What the local error of a product is estimated from: so many rows of a matrix, or images with so many pixels.
_ROWS: Final = 64
_PIXELS: Final = 16


def _sampled(operation: Operation, args: list[Any], kwargs: dict[str, Any], low: Tensor) -> tuple[float, float]:
    """Estimate ``lost`` and ``size`` of a product from some of its rows; ``args`` in the reference's dtype."""
    convolves = operation.name == "aten::convolution"
    position = 0 if convolves or len(args) == 2 else 1  # of what has these rows
    dimension = 0 if convolves else args[position].dim() - 2
    rows = low.shape[dimension]
    wanted = math.ceil(_PIXELS / max(1, math.prod(low.shape[2:]))) if convolves else _ROWS
    chosen = range(0, rows, max(1, rows // wanted))
    index = torch.tensor(chosen, device=low.device)
    args[position] = args[position].index_select(dimension, index)
    if position and args[0].dim() == low.dim() and args[0].shape[dimension] == rows:  # a matrix that is added
        args[0] = args[0].index_select(dimension, index)
    function: Any = EXACT.get(operation.name, operation.function)
    local = function(*args, **kwargs)
    own = difference(low.index_select(dimension, index), local)
    scale = rows / max(1, len(chosen))
    return inner(own, own) * scale, _size(local) * scale


# -- all others -------------------------------------------------------------------------------------------------------


class _Leaves:
    """Reader of an op's inputs as leaves of autograd's graph.

    Args:
        value: place -> what to read there.
        reads: the places whose gradients are wanted.
        only: which of the readings of floats, by number; None: all.
    """

    def __init__(
        self, value: Callable[[TensorPlace], Tensor], reads: Container[TensorPlace], only: Container[int] | None = None
    ) -> None:
        self._value, self._reads, self._only = value, reads, only
        self._numbers = itertools.count()
        self._places: list[TensorPlace] = []
        self._leaves: list[Tensor] = []

    def __call__(self, place: TensorPlace, written: bool) -> Tensor:
        # Each reading is a leaf of its own: x * x has two, whose gradients add up in the adjoint of x.
        value = self._value(place).detach()
        if not place.is_float:
            return value.clone() if written else value
        number = next(self._numbers)
        if place in self._reads and (self._only is None or number in self._only):
            self._places.append(place)
            self._leaves.append(value.requires_grad_())
        return value.clone() if written else value

    def gradients(self, found: Sequence[Any], results: Mapping[int, OpResult]) -> list[tuple[TensorPlace, Tensor]]:
        """Return J^T m; ``found``: what the op gave of these leaves."""
        # Results that do not depend on what has an error have no gradient, and torch would raise.
        through = [n for n in results if found[n].requires_grad]
        if not through or not self._leaves:
            return []
        given = [results[n].weight.to(found[n].dtype) for n in through]
        gradients = torch.autograd.grad([found[n] for n in through], self._leaves, given, allow_unused=True)
        pairs = zip(self._places, self._leaves, gradients, strict=True)
        return [(place, _finite(gradient.to(leaf.dtype))) for place, leaf, gradient in pairs if gradient is not None]


#: Of what an op adds to the target's error: bends of less are not looked into.
_NOTABLE: Final = 2**-6
#: What norms call statistics of their input.
_STATISTICS: Final = ("mean", "rstd", "spread", "statistics", "save_mean", "save_var", "save_invstd")


@dataclass(frozen=True, slots=True, eq=False)
class _OpPart:
    """Part of one op in the error of the target; see ``pull``. ``reads``: its places that may have an error."""

    operation: Operation
    inputs: Inputs
    results: Mapping[int, OpResult]
    drawn: Sequence[Tensor]
    reads: tuple[TensorPlace, ...]

    def of_copy(self) -> Pulled:
        """Return the part of a cast, whose J is the identity; it may go to another device."""
        place, result = self.operation.leaves[0], self.results[0]
        low = self.inputs.low(place)
        gradients = [(place, result.weight.to(low.device))] if place in self.reads else []
        return self._told({0: low.to(result.low.device)}, gradients)

    @property
    def is_linear(self) -> bool:
        """Flag of ops that are linear in all that has an error."""
        name, leaves, reads = self.operation.name, self.operation.leaves, self.reads
        # ``x * x`` is no scaling: x must be read once, and as what is scaled.
        scales = name in _SCALINGS and len(reads) == 1 and leaves[0] == reads[0] and leaves.count(reads[0]) == 1
        return name in _LINEAR or scales

    def of_linear(self) -> Pulled:
        """Return the part of a linear op, of one run at low inputs."""
        read = _Leaves(self.inputs.low, self.reads)
        with torch.enable_grad():
            found = self._run(read)
        return self._told(self._local(found), read.gradients(found, self.results))

    def of_product(self) -> Pulled:
        """Return the part of a product, by the formulas of its derivatives."""
        operation, inputs, result = self.operation, self.inputs, self.results[0]
        args, kwargs = tree_unflatten(list(operation.leaves), operation.spec)
        # FP32 errs 2^13 times less than what is explained, a low result's rounding, and the columns add up for any J.
        # The derivatives take twice the time of the product; and there are no fast convolutions in float64.
        dtype = torch.float32 if operation.outputs[0].dtype.itemsize < torch.float32.itemsize else inputs.dtype
        values = [inputs.midpoint(value, dtype) if isinstance(value, TensorPlace) else value for value in args]
        found = _PRODUCTS[operation.name](_in(dtype, result.weight), *values, **kwargs)
        gradients = [
            (place, _finite(_in(inputs.dtype, gradient)))
            for place, gradient in zip(args, found, strict=False)
            if isinstance(place, TensorPlace) and place in self.reads
        ]
        # The loss of the product itself is for show: some of its rows estimate it, at a part of its cost.
        low = [inputs.low(value) if isinstance(value, TensorPlace) else value for value in args]
        lost, size = _sampled(operation, low, kwargs, result.low)
        return Pulled(self._added(gradients), 0.0, lost, size, gradients)

    def at_midpoint(self) -> Pulled:
        """Return the part of any op, with J at the midpoint of run and reference."""
        with torch.no_grad():
            local = self._local(self._run(self._low))
        pulled = self._told(local, self._gradients_at_midpoint())
        if abs(pulled.bend) <= _NOTABLE * abs(self._gained()):
            return pulled
        # A large bend may be due to an input in which torch has no derivative: then it is named.
        return pulled._replace(lacking=self._lacking(local, {place for place, _ in pulled.gradients}))

    def _gradients_at_midpoint(self) -> list[tuple[TensorPlace, Tensor]]:
        inputs = self.inputs

        def value(place: TensorPlace) -> Tensor:
            return inputs.midpoint(place, inputs.dtype) if place.is_float else inputs.low(place)

        def gradients(decomposed: bool, only: Container[int] | None) -> list[tuple[TensorPlace, Tensor]]:
            read = _Leaves(value, self.reads, only)
            with torch.enable_grad():
                found = self._run(read, decomposed)
            return read.gradients(found, self.results)

        for decomposed in (False, True):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return gradients(decomposed, None)
        # Where one input has no derivative torch refuses all: each is tried alone.
        found: list[tuple[TensorPlace, Tensor]] = []
        for number in range(sum(isinstance(leaf, TensorPlace) and leaf.is_float for leaf in self.operation.leaves)):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                found += gradients(False, {number})
        return found

    def _lacking(self, local: Mapping[int, Tensor], known: Container[TensorPlace]) -> dict[str, float]:
        """Return, for places without a derivative, argument -> what the reference's value there would change."""
        inputs, found = self.inputs, dict[str, float]()
        for own in (place for place in self.reads if place not in known):
            name = self.operation.argument(own)
            if not bool(inputs.error(own).any()) or ("norm" in self.operation.name and name in _STATISTICS):
                continue

            def read(place: TensorPlace, written: bool, own: TensorPlace = own) -> Tensor:
                return inputs.low(place) - inputs.error(place) if place == own else self._low(place, written)

            with torch.no_grad():
                other = self._run(read)
            changes = [inner(each.weight, difference(local[n], other[n])) for n, each in self.results.items()]
            if any(changes):
                found[name] = found.get(name, 0.0) + sum(changes)
        return found

    def _run(self, read: Read, decomposed: bool = False) -> list[Any]:
        return self.operation.run(read, self.inputs.dtype, self.drawn, decomposed)

    def _low(self, place: TensorPlace, written: bool) -> Tensor:
        return self.inputs.low(place).clone() if written else self.inputs.low(place)

    def _local(self, found: Sequence[Any]) -> dict[int, Tensor]:
        """Return number of a result -> f(low inputs), as a run there gave it."""
        return {number: found[number].detach().to(result.weight.dtype) for number, result in self.results.items()}

    def _told(self, local: Mapping[int, Tensor], gradients: list[tuple[TensorPlace, Tensor]]) -> Pulled:
        """Split what the op adds: what it lost at its low inputs is rounding, and the rest is bend."""
        rounding = lost = size = 0.0
        for number, (weight, low, _) in self.results.items():
            own = difference(low, local[number])
            rounding += inner(weight, own)
            lost += inner(own, own)
            size += _size(local[number])
        return Pulled(rounding, self._added(gradients) - rounding, lost, size, gradients)

    def _gained(self) -> float:
        """Return the part of the op's results in the error of the target."""
        return sum(inner(weight, error) for weight, _, error in self.results.values())

    def _added(self, gradients: list[tuple[TensorPlace, Tensor]]) -> float:
        """Return what the op adds to the error of the target: that of its results, less that of what it reads."""
        return self._gained() - sum(inner(gradient, self.inputs.error(place)) for place, gradient in gradients)


# -- the walk ----------------------------------------------------------------------------------------------------------


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
