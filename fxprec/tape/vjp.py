"""Differentiate one op of a run: what it lost itself, what bends, and J^T m for the places that it reads.

J is taken at the midpoint of run and reference in general. Less is to be done where an op is

- a copy in another dtype: J is the identity;
- linear in what has an error: J is the same everywhere, and autograd gives it of the one run at low inputs. Where the
  op reads an index or a mask that the reference has otherwise, its bend is what that makes of it;
- a product, such as a matrix product or a convolution: J^T m is written down below, and autograd need not run it. For a
  quadratic function f(low) - f(reference) is J at the midpoint times the difference of the inputs, so that::

      rounding = <m, low result - reference's result> - <J^T m, low inputs - reference's inputs>

None of these has another bend, but for what ``memory`` rounds, 2^-24 of the error of a result.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxprec.tape.memory import Memory, TensorPlace, difference
from fxprec.tape.operation import Operation, Read
from fxprec.torch_internals import tree_unflatten

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
        # Only what the product itself lost asks for a run.
        with torch.no_grad():
            local = self._local(self._run(self._low))[0]
        own = difference(result.low, local)
        return Pulled(self._added(gradients), 0.0, inner(own, own), _size(local), gradients)

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
