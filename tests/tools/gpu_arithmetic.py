"""Arithmetic as a GPU may have it, in Triton's interpreter: fused multiply-adds, and approximations at their bounds.

::

    with computing_as(Arithmetic("first", "above")) as record:
        region(x)                                           # or any other kernel

The interpreter rounds each product and each sum, and divides and exponentiates exactly. A GPU does otherwise:

- **Contraction.** LLVM and ptxas may make one FMA, rounded once, of a product and the sum that takes it; which ones is
  their choice. Here it is none of them ("nothing") or all: each product whose use is a sum or a difference enters it
  unrounded, and where two meet, the "first" or the "second" one. It does so through broadcasts and reshapes, and into
  the sums of ``tl.sum``, of which a thread adds its elements one by one; not through ``tl.where``, as no compiler does.
  A launch with ``enable_fp_fusion=False`` contracts nothing. ``tl.fma`` always rounds once.
- **Approximations.** ``tl.exp``, ``tl.exp2``, ``/``, ``tl.sqrt`` and ``tl.rsqrt`` are instructions with an error,
  ``tl.log``, ``tl.log2`` and ``tl.erf`` functions with one: ``BOUNDS`` says how much. Here a result is the correctly
  rounded one ("exact"); or at its bound, "above", "below", or on either side ("mixed"), by a hash of the arguments:
  equal arguments give equal results in every kernel, as on a device.
- **Casts** to bfloat16 round to nearest even (the interpreter cuts).

FP32 alone is meant: FP64 stays the interpreter's. What it cannot show: a choice between these extremes (some products
contracted, errors below the bound), the order in which a GPU's threads add up, and what a compiler would do besides.
``tests/gpu/test_gpu_arithmetic.py`` compares with Triton's compiler which ops become which instructions.

As a plugin of pytest it computes so in all tests of a run::

    GPU_ARITHMETIC=first-above TRITON_INTERPRET=1 python -m pytest -p gpu_arithmetic -k "interpreter]" tests/kernels
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, TensorHandle

from approximations import BOUNDS, Bound

Contracts = Literal["nothing", "first", "second"]
Errs = Literal["exact", "above", "below", "mixed"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is contracted, and on which side of the right result approximations lie."""

    contracts: Contracts
    errs: Errs

    def __str__(self) -> str:
        return f"{self.contracts}-{self.errs}"


#: All combinations, and two that have what the interpreter's own arithmetic has not.
ALL: Final = tuple(
    Arithmetic(contracts, errs)
    for contracts in ("nothing", "first", "second")
    for errs in ("exact", "above", "below", "mixed")
)
SOME: Final = (Arithmetic("first", "above"), Arithmetic("second", "mixed"))


@dataclass(slots=True)
class Record:
    """What happened: launches of each kernel, FMAs made of a product and a sum (or terms of one), approximations."""

    launches: Counter[str] = field(default_factory=Counter)
    contracted: int = 0
    approximated: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def computing_as(arithmetic: Arithmetic) -> Iterator[Record]:
    """The interpreter computes so within. One at a time."""
    machine = _Machine(arithmetic)
    replaced = {(InterpreterBuilder, name): getattr(machine, name) for name in (*_ROUNDED, *_APPROXIMATED)}
    replaced |= {(InterpreterBuilder, name): machine.moves for name in _MOVING}
    replaced |= {(ReduceOps, "sum"): machine.sum, (GridExecutor, "__call__"): machine.launch}
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        for (owner, name), own in replaced.items():
            stack.enter_context(mock.patch.object(owner, name, _method(own, getattr(owner, name))))
        yield machine.record


def _method(own: Callable[..., Any], interpreters: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, told what it takes the place of, as a method of the interpreter's."""

    @functools.wraps(interpreters)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(functools.partial(interpreters, self), *args, **kwargs)

    return method


#: Methods of the interpreter's builder that round a product or a sum; that have an error; that move elements about.
_ROUNDED: Final = ("create_fmul", "create_fadd", "create_fsub", "create_fma", "cast_impl")
_APPROXIMATED: Final = (
    "create_exp", "create_exp2", "create_fdiv", "create_sqrt", "create_rsqrt", "create_log", "create_log2",
    "create_erf",
)  # fmt: skip
_MOVING: Final = (
    "create_broadcast", "create_expand_dims", "create_reshape", "create_trans", "create_splat", "create_unsplat",
)  # fmt: skip
_PRODUCT: Final = "product"
_LOG2E: Final = np.float32(1.44269504)
#: Of the terms of a sum over a dimension, those that a thread adds one after the other.
_EACH: Final = 8


class _Machine:
    """The ops in which a GPU differs, each given the interpreter's own as its first argument.

    A product keeps what it was before rounding, in float64, which holds it exactly, among its handle's attributes.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._contracting = False
        self.record = Record()

    def launch(self, own: Any, *args: Any, **kwargs: Any) -> None:
        """One launch, whose options say whether it may contract."""
        self._contracting = self._arithmetic.contracts != "nothing" and kwargs.get("enable_fp_fusion", True)
        self.record.launches[own.args[0].fn.__name__] += 1
        own(*args, **kwargs)

    # -- products and sums -------------------------------------------------------------------------------------------

    def create_fmul(self, own: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
        result = own(x, y)
        if self._contracting and _is_single(result):
            result.attr[_PRODUCT] = x.data.astype(np.float64) * y.data.astype(np.float64)
        return result

    def create_fadd(self, own: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
        return self._sum(own, x, y, 1.0)

    def create_fsub(self, own: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
        return self._sum(own, x, y, -1.0)

    def _sum(self, own: Any, x: TensorHandle, y: TensorHandle, sign: float) -> TensorHandle:
        products = [each.attr.get(_PRODUCT) for each in (x, y)]
        if not self._contracting or not _is_single(x) or all(product is None for product in products):
            return own(x, y)
        if products[0] is not None and products[1] is not None:  # one of them is rounded before
            products[self._arithmetic.contracts == "first"] = None
        first, second = (
            each.data.astype(np.float64) if product is None else product
            for each, product in zip((x, y), products, strict=True)
        )
        result = rounded_sum(first, sign * second)
        self.record.contracted += result.size
        return TensorHandle(result, x.dtype.scalar)

    def create_fma(self, own: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not _is_single(z):
            return own(x, y, z)
        product = x.data.astype(np.float64) * y.data.astype(np.float64)
        return TensorHandle(rounded_sum(product, z.data.astype(np.float64)), z.dtype.scalar)

    def sum(self, own: Any, input: Any) -> Any:
        """``tl.sum``. A thread's first term is a product, the next ones enter by an FMA each."""
        product = input.handle.attr.get(_PRODUCT)
        if not self._contracting or product is None:
            return own(input)
        reduce: ReduceOps = own.args[0]
        terms = np.moveaxis(product, reduce.axis, -1) if reduce.axis is not None else product.reshape(-1)
        each = np.gcd(terms.shape[-1], _EACH)
        terms = terms.reshape(*terms.shape[:-1], -1, each)
        total = terms[..., 0].astype(np.float32)
        for n in range(1, each):
            total = rounded_sum(terms[..., n], total.astype(np.float64))
        self.record.contracted += total.size * (each - 1)
        total = np.sum(total, axis=-1)
        if reduce.keep_dims:
            axes = reduce.axis if reduce.axis is not None else tuple(range(product.ndim))
            total = np.expand_dims(total, axes)
        return reduce.to_tensor(total, input.dtype)

    def moves(self, own: Any, *args: Any, **kwargs: Any) -> TensorHandle:
        """What moves elements moves exact products too."""
        result = own(*args, **kwargs)
        place = next(n for n, each in enumerate(args) if isinstance(each, TensorHandle))
        product = args[place].attr.get(_PRODUCT)
        if product is not None:
            wide = TensorHandle(product, interpreter.tl.float64)
            result.attr[_PRODUCT] = own(*args[:place], wide, *args[place + 1 :], **kwargs).data
        return result

    # -- approximations ----------------------------------------------------------------------------------------------

    def create_exp(self, own: Any, x: TensorHandle) -> TensorHandle:
        """2 to the rounded product with log2(e)."""
        if not _is_single(x):
            return own(x)
        scaled = TensorHandle(x.data * _LOG2E, x.dtype)
        return self._approximated(own, "ex2.approx.f32", np.exp2, scaled)

    def create_exp2(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "ex2.approx.ftz.f32", np.exp2, x)

    def create_fdiv(self, own: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
        return self._approximated(own, "div.full.f32", np.divide, x, y)

    def create_sqrt(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "sqrt.approx.ftz.f32", np.sqrt, x)

    def create_rsqrt(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "rsqrt.approx.ftz.f32", lambda v: 1.0 / np.sqrt(v), x)

    def create_log(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "logf", np.log, x)

    def create_log2(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "log2f", np.log2, x)

    def create_erf(self, own: Any, x: TensorHandle) -> TensorHandle:
        return self._approximated(own, "erff", lambda v: torch.erf(torch.from_numpy(v)).numpy(), x)

    def _approximated(self, own: Any, name: str, function: Callable[..., Any], *args: TensorHandle) -> TensorHandle:
        if not _is_single(args[0]):
            return own(*args)
        bound = BOUNDS[name]
        given = [_flushed(each.data) if bound.flushes else each.data for each in args]
        exact = function(*(np.ascontiguousarray(each, dtype=np.float64) for each in given))
        result = exact.astype(np.float32)
        if self._arithmetic.errs != "exact":
            moved = _at_bound(result, exact, bound, _sides(self._arithmetic.errs, given))
            if len(given) == 1:
                moved = np.where(given[0] == 0, result, moved)  # 2 to the 0 is 1
            if name == "erff":  # 1 - 2 to the ...: never above 1, and 1 where FP32 has nothing nearer
                moved = np.where(np.abs(result) == 1, result, np.clip(moved, -1, 1))
            result = moved
            self.record.approximated[name] += result.size
        return TensorHandle(_flushed(result) if bound.flushes else result, args[0].dtype.scalar)

    # -- casts -------------------------------------------------------------------------------------------------------

    def cast_impl(self, own: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        tl = interpreter.tl
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(_bfloat16(src.data), dst_type.scalar)
        return own(src, dst_type)


def rounded_sum(a: Any, b: Any) -> Any:
    """The sum of two float64 arrays, rounded once to float32.

    Rounded to odd before (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): if float64 does
    not hold the sum, the last bit of the one next to it is set, and the second rounding sees which side it was on.
    """
    total = np.asarray(a + b)
    shadow = total - a
    rest = (a - (total - shadow)) + (b - shadow)
    bits = total.view(np.int64)
    even = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    outwards = np.where((rest > 0) == (total > 0), 1, -1)
    return np.where(even, bits + outwards, bits).view(np.float64).astype(np.float32)


def _is_single(handle: TensorHandle) -> bool:
    return handle.data.dtype == np.float32


def _flushed(x: Any) -> Any:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _sides(errs: Errs, given: list[Any]) -> Any:
    """1 where a result lies above, -1 where below; "mixed": as a hash of the arguments' bits says."""
    if errs != "mixed":
        return 1 if errs == "above" else -1
    word = np.zeros((), np.uint32)
    for each in given:
        word = (word ^ np.ascontiguousarray(each).view(np.uint32)) * np.uint32(0x9E3779B1)
        word = word ^ (word >> np.uint32(15))
    return np.where(word * np.uint32(0x85EBCA77) >> np.uint32(31), 1, -1)


def _at_bound(result: Any, exact: Any, bound: Bound, sides: Any) -> Any:
    """As far from the exact result as it may be; zeros, infinities and NaN are exact, and none is made."""
    if bound.relative:
        moved = (exact * (1.0 + sides * bound.relative)).astype(np.float32)
    else:
        bits = np.ascontiguousarray(result).view(np.int32)
        outwards = np.where(result > 0, sides, -sides) * bound.ulps
        magnitude = np.maximum((bits & 0x7FFFFFFF) + outwards, 0).astype(np.int32)
        moved = np.copysign(magnitude.view(np.float32), result)
    special = ~np.isfinite(result) | ~np.isfinite(moved) | (exact == 0)
    return np.where(special, result, moved)


def _bfloat16(x: Any) -> Any:
    """The bits of FP32 numbers rounded to nearest even."""
    word = np.ascontiguousarray(x).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (word >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """As a plugin: all tests of a run under one arithmetic."""
    contracts, errs = os.environ["GPU_ARITHMETIC"].split("-")
    with computing_as(Arithmetic(contracts, errs)) as record:
        result = yield
    print(
        f"\n{sum(record.launches.values())} launches of {len(record.launches)} kernels, "
        f"{record.contracted} sums contracted, {record.approximated.total()} results approximated"
    )
    return result
