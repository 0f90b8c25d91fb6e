"""Writes C++ source for row programs on a CPU: a loop over rows, in it one over columns for each level of reductions.

Rows are cut into tasks, which threads share (of a flat program, which has one row, the columns are)::

    for each task                                   in threads
      for each of its rows
        for each column: sum_3 += x * x             a level of reductions, in vectors
        rsqrt_5 = 1 / sqrt(sum_3 / COLUMNS + eps)   what columns do not change, once
        for each column: out = x * rsqrt_5 * w      what is stored; column partials are added up in the task's own row

A value is computed anew in each loop over the columns, but what takes long (functions of libm, and divisions) is kept
from the first of them on. Nothing is contracted to FMA: what a backward computes anew is what the forward had.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import torch

from fxprec.kernels.rows.emit.addresses import Access
from fxprec.kernels.rows.program.prices import LIBM_STEPS
from fxprec.kernels.rows.program.row_program import RowProgram, Store
from fxprec.kernels.rows.program.values import COMPARISONS, Declined, Operand, Value, walk

#: Columns that a loop of reductions adds at once. Left to itself gcc takes twice as many where it reads bfloat16, and
#: adds up one by one what is left of a row then: a layer norm of 50 columns took twice the time.
_AT_ONCE: Final = 16
#: What every source defines: (tensors, integers, column partials, tasks, threads).
FUNCTION: Final = "run"
_HEAD: Final = (
    f'extern "C" void {FUNCTION}(void* const* tensors, const int64_t* numbers, float* partials, int64_t tasks, '
    "int threads) {"
)


def emit_loops(
    program: RowProgram, flat: bool, loads: Sequence[Access], stores: Sequence[Access], dimensions: int,
    strides: Sequence[str],
) -> str:  # fmt: skip
    """Return the source of a library with ``FUNCTION``, which takes the integers of ``KernelArguments``, then columns.

    No name in it is the model's, so that equal layers share it. Sizes are arguments, not text: sequences of another
    length compile nothing anew. Only constants of the program are in it, such as the 1 / columns of a mean.

    Args:
        loads, stores: strides of each tensor, as text.
        dimensions: of the rows.
        strides: names of the stride arguments, as the accesses have them.

    Raises:
        Declined: loops do not support the program.
    """
    # Numbers in place of names that the model gave: equal layers then have the same source.
    check_supported(program)
    short = {name: f"stride_{number}" for number, name in enumerate(strides)}
    w = _Writer(program, flat, [_renamed(a, short) for a in loads], [_renamed(a, short) for a in stores], dimensions)
    numbers = ["columns" if flat else "rows", *(f"size_{i}" for i in range(1, dimensions)), *short.values()]
    numbers += [] if flat else ["columns"]
    with w.block(_HEAD):
        for place, (pointer, kind) in enumerate(w.pointers):
            w.line(f"{kind}* const {pointer} = static_cast<{kind}*>(tensors[{place}]);")
        for place, number in enumerate(numbers):
            w.line(f"const int64_t {number} = numbers[{place}];")
        w.line("#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tasks > 1)")
        with w.block("for (int64_t task = 0; task < tasks; ++task) {"):
            w.task()
    return "\n".join([_header(), *w.lines]) + "\n"


@functools.cache
def _header() -> str:
    return files("fxprec.kernels").joinpath("cpu/loops.h").read_text(encoding="utf-8")


def check_supported(program: RowProgram) -> None:
    """Raise ``Declined`` for programs that loops do not support.

    The columns that vectors leave over are not computed by the same code: libm's functions may differ there in the last
    bit. So ``x == max(x)`` might hold for no column, where the backward computes x anew. Programs that compare such
    values for equality are declined.
    """
    for _, port in program.loads:
        if port.dtype not in _TYPES:
            raise Declined(f"{port.dtype} in a C++ loop")
    values = program.values
    if any(store.dtype not in _TYPES for store in program.stores):
        raise Declined("an output that C++ loops do not have")
    if any(value.op == "round" and value.attribute not in _TYPES for value in values):
        raise Declined("a cast that C++ loops do not have")
    if any(value.op == "keep" for value in values):
        raise Declined("dropout, whose random numbers are torch's")
    if any(value.op in ("eq", "ne") and any(v.op in LIBM_STEPS for v in walk([value])) for value in values):
        raise Declined("a comparison of what libm computes")


def _renamed(access: Access, names: dict[str, str]) -> Access:
    return Access(tuple(names.get(row, row) for row in access.rows), names.get(access.columns, access.columns))


class _Writer:
    """Writer of a loop's body: the lines so far, and the names of the values in scope.

    Attributes:
        pointers: (name, C++ type) of each tensor, loads before stores.
    """

    def __init__(
        self, program: RowProgram, flat: bool, loads: Sequence[Access], stores: Sequence[Access], dimensions: int
    ) -> None:
        self._program, self._flat = program, flat
        self._dimensions = dimensions
        self._loads = {
            value: (f"in_{n}", access, port.dtype)
            for n, ((value, port), access) in enumerate(zip(program.loads, loads, strict=True))
        }
        walked = [(s, access) for s, access in zip(program.stores, stores, strict=True) if not s.partial]
        self._stores = [(store, f"out_{n}", access) for n, (store, access) in enumerate(walked)]
        self._partials = program.partials
        self.pointers = [(name, f"const {_TYPES[dtype]}") for name, _, dtype in self._loads.values()]
        self.pointers += [(name, _TYPES[store.dtype]) for store, name, _ in self._stores]
        self._levels = program.levels
        self._kept = self._kept_values()
        self._filled: set[Value] = set()  # kept values that an earlier loop has computed
        self.lines: list[str] = []
        self._names: dict[Value, str] = {}
        self._depth = 0

    # -- the frame ---------------------------------------------------------------------------------------------------

    def task(self) -> None:
        """Write the body of one task: its columns in a flat program, else its rows."""
        over, width = "columns" if self._flat else "rows", self._program.partial_width
        self.line(f"const int64_t begin = {over} * task / tasks, end = {over} * (task + 1) / tasks;")
        # Memory for one row of each kept value, which all rows of the task use in turn.
        for value in self._kept:
            self.line(f"const Row row_of_{value.number}(columns);")
            self.line(f"float* const kept_{value.number} = row_of_{value.number}.data;")
        if width:
            self.line(f"float* const mine = partials + task * {width};")
            self.line(f"memset(mine, 0, {width} * sizeof(float));")
        # A flat program has no rows: the task is a run of columns.
        if self._flat:
            self._compute(value for value in self._program.values if not value.columns)
            self._store_columns("begin", "end")
            return
        self._compute(value for value in self._loads if not value.rows and not value.columns)
        with self.block("for (int64_t row = begin; row < end; ++row) {"):
            self._row_index()
            for reductions in self._levels:
                self._reduce(reductions)
            self._compute(s.value for s in self._program.stores if not s.columns)
            self._store_columns("0", "columns")
            for store, name, access in self._stores:
                if not store.columns:
                    self._store(store, name, access)
            for store, offset in self._partials:
                if not store.columns:
                    self.line(f"mine[{offset}] += {self._text(store.value)};")

    def _reduce(self, reductions: list[Value]) -> None:
        """Write one loop over the columns, for all the reductions of a level."""
        arguments = [value.args[0] for value in reductions]
        self._compute_rowwise(arguments)
        names = {value: f"{value.op}_{value.number}" for value in reductions}
        for value, name in names.items():
            self.line(f"float {name} = {_NEUTRAL[value.op]};")
        clauses = " ".join(f"reduction({_REDUCTIONS[value.op]} : {name})" for value, name in names.items())
        # Lanes add up apart, in an order that the width fixes: sums have the same bits on any processor.
        self.line(f"#pragma omp simd simdlen({_AT_ONCE}) {clauses}")
        with self._columns("0", "columns"):
            self._compute(arguments)
            for value, name in names.items():
                self.line(f"{name} = {_COMBINE[value.op].format(name, self._text(value.args[0]))};")
        self._names |= names

    def _store_columns(self, first: str, end: str) -> None:
        """Write the last loop over the columns, which stores outputs and adds to column partials."""
        stored = [each for each in self._stores if each[0].columns]
        partials = [(store, offset) for store, offset in self._partials if store.columns]
        roots = [*(store.value for store, *_ in stored), *(store.value for store, _ in partials)]
        if not roots:
            return
        self._compute_rowwise(roots)
        self.line("#pragma omp simd")
        with self._columns(first, end):
            self._compute(roots)
            for each in stored:
                self._store(*each)
            for store, offset in partials:
                self.line(f"mine[{offset} + column] += {self._text(store.value)};")

    def _row_index(self) -> None:
        rest = "row"
        for i in range(self._dimensions - 1, 0, -1):
            self.line(f"const int64_t row_{i} = {rest} % size_{i}, over_{i} = {rest} / size_{i};")
            rest = f"over_{i}"
        if self._dimensions > 1:
            self.line(f"const int64_t row_0 = {rest};")

    # -- lines -------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Write one line at the current indentation."""
        self.lines.append("  " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a function or a loop around the lines of the context."""
        self.line(head)
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")

    @contextmanager
    def _columns(self, first: str, end: str) -> Iterator[None]:
        """Write a loop over the columns around the context, whose names go out of scope at its end."""
        before = dict(self._names)
        with self.block(f"for (int64_t column = {first}; column < {end}; ++column) {{"):
            yield
        self._names = before

    # -- values ------------------------------------------------------------------------------------------------------

    def _known(self, value: Value) -> bool:
        """Return whether a value needs no computation. Not each has a name: a loop reads what an earlier one kept."""
        return value in self._loads or value in self._names or value in self._filled

    def _compute(self, roots: Iterable[Operand]) -> None:
        """Write the values that the roots need and that have no name yet."""
        for value in walk([root for root in roots if isinstance(root, Value)], self._known):
            if value not in self._names:
                self._names[value] = self._define(value)

    def _compute_rowwise(self, roots: Sequence[Operand]) -> None:
        """Write, before a loop over the columns, what the roots need that is the same in every column."""
        values = walk([root for root in roots if isinstance(root, Value)], self._known)
        self._compute(value for value in values if not value.columns)

    def _kept_values(self) -> list[Value]:
        """Return the expensive values that several loops over the columns need: the first computes and keeps them."""
        apart = {*self._loads, *(value for level in self._levels for value in level)}
        loops = [[value.args[0] for value in level] for level in self._levels]
        loops.append([store.value for store in self._program.stores if store.columns])
        wanted = [walk([r for r in roots if isinstance(r, Value)], apart.__contains__) for roots in loops]
        long = [value for values in wanted for value in values if value.columns and value.op in _LONG]
        return [value for value in dict.fromkeys(long) if long.count(value) > 1]

    def _text(self, operand: Operand) -> str:
        """Return the name of a value, or a number as a C++ literal."""
        if isinstance(operand, Value):
            return self._names[operand]
        # C++ has no literals for these, and a double beyond FP32's range is an infinity in FP32.
        number = float(operand)
        if math.isnan(number):
            return "NAN"
        if abs(number) > torch.finfo(torch.float32).max:
            return "INFINITY" if number > 0 else "(-INFINITY)"
        return f"{number!r}f" if math.copysign(1.0, number) > 0 else f"({number!r}f)"

    def _define(self, value: Value) -> str:
        if value.op == "stop":
            return self._text(value.args[0])
        name = f"{_NAMES.get(value.op, value.op)}_{value.number}"
        if value in self._loads:
            pointer, access, dtype = self._loads[value]
            place = f"{pointer}[{self._offset(access, value.columns)}]"
            expression = _LOADED.get(dtype, "{}").format(place)
        elif value in self._filled:
            expression = f"kept_{value.number}[column]"
        else:
            # The first loop over the columns that needs a kept value stores it for the others.
            expression = self._expression(value)
            if value in self._kept:
                self._filled.add(value)
                expression = f"kept_{value.number}[column] = {expression}"
        self.line(f"const {_KINDS[value.kind]} {name} = {expression};")
        return name

    def _expression(self, value: Value) -> str:
        if value.op == "round":
            return f"wide(low({self._text(value.args[0])}))"
        # Integers are compared as such: int64 has values that FP32 does not.
        whole = value.op in COMPARISONS and any(isinstance(a, Value) and a.kind == "integer" for a in value.args)
        arguments = [str(int(a)) if whole and not isinstance(a, Value) else self._text(a) for a in value.args]
        return _EXPRESSIONS[value.op].format(*arguments)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _offset(self, access: Access, columns: bool) -> str:
        names = ["row"] if self._dimensions == 1 else [f"row_{i}" for i in range(self._dimensions)]
        steps = [] if self._flat else [*zip(names, access.rows, strict=False)]
        steps += [("column", access.columns)] if columns else []
        named = {"1": "", "COLUMNS": " * columns"}
        return " + ".join(f"{name}{named.get(step, f' * {step}')}" for name, step in steps if step) or "0"

    def _store(self, store: Store, name: str, access: Access) -> None:
        value = self._text(store.value)
        if store.dtype is torch.bfloat16:
            value = f"{'exact' if _is_rounded(store.value) else 'low'}({value})"
        self.line(f"{name}[{self._offset(access, store.columns)}] = {value};")


def _is_rounded(value: Operand) -> bool:
    """Return whether a value is rounded to bfloat16 already, so that its store may cut off the lower half."""
    while isinstance(value, Value) and value.op == "stop":
        value = value.args[0]
    return isinstance(value, Value) and value.op == "round" and value.attribute is torch.bfloat16


_TYPES: Final = MappingProxyType({
    torch.float32: "float", torch.bfloat16: "uint16_t", torch.bool: "uint8_t", torch.uint8: "uint8_t",
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
})  # fmt: skip
_KINDS: Final = MappingProxyType({"float": "float", "integer": "int64_t", "bool": "bool"})
_LOADED: Final = MappingProxyType({torch.bfloat16: "wide({})", torch.bool: "{} != 0"})
_NEUTRAL: Final = MappingProxyType({"sum": "0.0f", "max": "-INFINITY", "min": "INFINITY"})
_REDUCTIONS: Final = MappingProxyType({"sum": "+", "max": "larger", "min": "smaller"})
#: New value of a reduction from (its value so far, a column). Of equal numbers ``larger`` and ``smaller`` return the
#: second: the value so far stays, as where ``loops.h`` joins the lanes.
_COMBINE: Final = MappingProxyType({"sum": "{} + {}", "max": "larger({1}, {0})", "min": "smaller({1}, {0})"})
#: Operations whose results are kept from loop to loop.
_LONG: Final = frozenset({*LIBM_STEPS, "div"})
_NAMES: Final = MappingProxyType({
    "where": "chosen", "and": "both", "or": "either", "not": "other", "abs": "magnitude", "round": "rounded",
    "float": "number", "load": "value",
})  # fmt: skip
_EXPRESSIONS: Final = MappingProxyType(
    {
        "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "abs": "fabsf({})",
        "exp": "expf({})", "exp2": "exp2f({})", "expm1": "expm1f({})", "log": "logf({})", "log2": "log2f({})",
        "log1p": "log1pf({})", "sqrt": "sqrtf({})", "rsqrt": "1.0f / sqrtf({})", "erf": "erff({})",
        "tanh": "tanhf({})", "sigmoid": "1.0f / (1.0f + expf(-{}))",
        "sign": "({0} > 0.0f ? 1.0f : {0} < 0.0f ? -1.0f : 0.0f)",
        "floor": "floorf({})", "ceil": "ceilf({})", "trunc": "truncf({})", "isnan": "{0} != {0}",
        "maximum": "larger({}, {})", "minimum": "smaller({}, {})", "where": "{} ? {} : {}",
        "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}",
        "and": "{} && {}", "or": "{} || {}", "not": "!{}", "float": "static_cast<float>({})",
    }
)  # fmt: skip
