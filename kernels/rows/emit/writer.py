"""Writes the body of a Triton kernel: each value of a row program becomes a variable that holds a tile of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch

from fxprec.kernels.launch.philox import drop_threshold
from fxprec.kernels.rows.emit.addresses import Access, Addresses
from fxprec.kernels.rows.emit.tiling import Tiling
from fxprec.kernels.rows.program.row_program import RowProgram, Store
from fxprec.kernels.rows.program.values import COMPARISONS, REDUCTIONS, Operand, Value, walk


class Writer:
    """Writer of a kernel's body: the lines so far, and the names of the values in scope.

    Attributes:
        program, tiling, addresses: of the kernel.
        loads: value -> (pointer, strides) of the tensors that are read.
        stores: (store, (pointer, strides)) of the tensors that are written.
        partials: (store, first column) of the column partials; each program has a row of ``width`` numbers of its own.
        suffix: of names that are in scope for one pass over the columns only.
    """

    def __init__(
        self, program: RowProgram, tiling: Tiling, addresses: Addresses,
        loads: Sequence[tuple[str, Access]], stores: Sequence[tuple[str, Access]],
    ) -> None:  # fmt: skip
        self.program, self.tiling, self.addresses = program, tiling, addresses
        values = [value for value, _ in program.loads]
        self.loads = dict(zip(values, loads, strict=True))
        self.ports = dict(program.loads)
        self.stores = [each for each in zip(program.stores, stores, strict=True) if not each[0].partial]
        # An output in FP32 shows errors that a rounding to low hides.
        self._exact = any(store.dtype is torch.float32 and store.rows and store.columns for store in program.stores)
        self._decisive = program.decisive
        self.partials, self.width = program.partials, program.partial_width
        self.lines: list[str] = []
        self.suffix = ""
        self._names: dict[Value, str] = {}
        self._depth = 1

    # -- lines -------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Write one line at the current indentation."""
        self.lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a loop around the lines of the context; without a head they are neither repeated nor indented."""
        if head:
            self.line(head)
            self._depth += 1
        yield
        if head:
            self._depth -= 1

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Drop the names of the context at its end: they hold the values of one pass."""
        before = dict(self._names)
        yield
        self._names = before

    def row_index(self) -> None:
        """Write the row numbers of a tile, and the index along each row dimension."""
        self.line("row = tl.full((1,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)")
        self.line("within = row < rows")
        rest = "row"
        for i in range(self.addresses.dimensions - 1, 0, -1):
            self.line(f"row_{i} = {rest} % size_{i}")
            self.line(f"over_{i} = {rest} // size_{i}")
            rest = f"over_{i}"
        if self.addresses.dimensions > 1:
            self.line(f"row_0 = {rest}")

    # -- values ------------------------------------------------------------------------------------------------------

    def compute(self, roots: Iterable[Operand]) -> None:
        """Write the values that the roots need and that have no name yet."""
        for value in walk([root for root in roots if isinstance(root, Value)], self.known):
            if value not in self._names:
                self._names[value] = self._define(value)

    def known(self, value: Value) -> bool:
        """Return whether a value is loaded from memory or has a name."""
        return value in self.loads or value in self._names

    def name(self, value: Value, expression: str) -> None:
        """Write a value as this expression, in place of the one that ``compute`` would write."""
        self._names[value] = f"{value.op}_{value.number}"
        self.line(f"{self._names[value]} = {expression}")

    def text(self, operand: Operand) -> str:
        """Return the name of a value, or a number as a literal."""
        if isinstance(operand, Value):
            return self._names[operand]
        number = _single(operand)
        if not math.isfinite(number):
            return f'float("{number}")'
        return repr(number) if number >= 0 else f"({number!r})"

    def inside(self, value: Operand, neutral: str) -> str:
        """Return a value with its elements beyond the end of a row replaced by a reduction's neutral element."""
        inside = self.addresses.inside_row
        return f"tl.where({inside}, {self.text(value)}, {neutral})" if inside else self.text(value)

    def _define(self, value: Value) -> str:
        if value in self.loads:
            pointer, access = self.loads[value]
            name = f"{pointer.removesuffix('_ptr')}_value{self.suffix}"
            self.line(f"{name} = {self._load(pointer, access, self.ports[value].dtype, value)}")
            return name
        if value.op == "stop":
            return self.text(value.args[0])
        name = f"{_NAMES.get(value.op, value.op)}_{value.number}{self.suffix if value.columns else ''}"
        self.line(f"{name} = {self._expression(value)}")
        return name

    def _expression(self, value: Value) -> str:
        if value.op in REDUCTIONS:
            return REDUCE[value.op].format(self.inside(value.args[0], NEUTRAL[value.op]))
        if value.op == "keep":
            number, p = value.attribute
            row, count = ("tl.zeros((1,), tl.int64)", "columns") if self.addresses.flat else ("row", "COLUMNS")
            seed = f"tl.load(seeds + (seed + {number}))"
            return f"keep_tile({seed}, {row}, {count}, start, {drop_threshold(p)}, BLOCK)  # p={p:g}"
        if value.op == "round":
            return f"{self.text(value.args[0])}.to(tl.{_TRITON[value.attribute]}).to(tl.float32)"
        # Integers are compared as such: int64 has values that FP32 does not.
        whole = value.op in COMPARISONS and any(isinstance(a, Value) and a.kind == "integer" for a in value.args)
        arguments = [str(int(a)) if whole and not isinstance(a, Value) else self.text(a) for a in value.args]
        # One number a row is cheap to compute exactly, and its error would be in every element of the row.
        exact = value.op in _EXACT and (self._exact or not value.columns or value in self._decisive)
        return (_EXACT if exact else _EXPRESSIONS)[value.op].format(*arguments)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _load(self, pointer: str, access: Access, dtype: torch.dtype, value: Value) -> str:
        mask = self.addresses.mask(value.rows, value.columns)
        other = "" if not mask else f", mask={mask}, other=0" + (".0" if dtype.is_floating_point else "")
        text = f"tl.load({pointer}{self.addresses.offset(access, value.rows, value.columns)}{other})"
        if self.addresses.rowwise(value.rows, value.columns):
            text += "[:, None]"
        if dtype is torch.bool:
            return f"{text} != 0"
        if not dtype.is_floating_point:
            return text if dtype.itemsize >= 4 else f"{text}.to(tl.int32)"
        return text if dtype is torch.float32 else f"{text}.to(tl.float32)"

    def store(self, columns: bool | None = None) -> None:
        """Write the stores except column partials; ``columns``: only those that vary along columns, or the others."""
        for store, (pointer, access) in self.stores:
            if columns is None or store.columns is columns:
                mask = self.addresses.mask(store.rows, store.columns)
                where = self.addresses.offset(access, store.rows, store.columns)
                value = self._stored(store)
                if self.addresses.rowwise(store.rows, store.columns):
                    value = f"tl.reshape({value}, (ROWS,))"
                self.line(f"tl.store({pointer}{where}, {value}{f', mask={mask}' if mask else ''})")

    def partial_place(self, store: Store, offset: int) -> str:
        """Return the address of this program's partial of a store."""
        return f"mine + {offset} + {'column' if store.columns else 'tl.zeros((1, 1), tl.int32)'}"

    def _stored(self, store: Store) -> str:
        value, flat = store.value, self.addresses.flat
        rows = store.rows and not flat
        shape = f"({'ROWS' if rows else 1}, {'BLOCK' if store.columns else 1})"
        if not isinstance(value, Value):
            return f"tl.full({shape}, {self.text(value)}, tl.{_TRITON[store.dtype]})"
        text = self.text(value)
        if store.dtype is torch.bool:
            text = f"{text}.to(tl.int8)"
        if (value.rows and not flat) != rows or value.columns != store.columns:
            text = f"tl.broadcast_to({text}, {shape})"
        return text if store.dtype in (torch.float32, torch.bool) else f"{text}.to(tl.{_TRITON[store.dtype]})"


def _single(number: float) -> float:
    """Return a number as FP32 holds it, with subnormals as 0: Triton takes constants beyond FP32's range as FP64."""
    info = torch.finfo(torch.float32)
    if abs(number) > info.max:
        return math.copysign(math.inf, number)
    return math.copysign(0.0, number) if abs(number) < info.tiny else float(number)


HEADER: Final = """from fxprec.kernels.launch.philox import keep_tile
from fxprec.kernels.rows.emit.functions import exp, expm1, log1p, maximum, minimum, row_max, row_min, sign, tanh, trunc
from fxprec.kernels.launch.triton_support import constexpr, jit, tl

"""
#: Neutral element of each reduction, and the reduction of a tile.
NEUTRAL: Final = MappingProxyType({"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'})
REDUCE: Final = MappingProxyType(
    {"sum": "tl.sum({}, axis=1, keep_dims=True)", "max": "row_max({})", "min": "row_min({})"}
)
_TRITON: Final = MappingProxyType({torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"})
_NAMES: Final = MappingProxyType(
    {"where": "chosen", "and": "both", "or": "either", "not": "other", "abs": "magnitude", "round": "rounded"}
)
#: Used for values that are stored in FP32, are one number a row, or feed a discontinuous op: a GPU's default functions
#: are approximations, good enough for low outputs.
_EXACT: Final = MappingProxyType(
    {"div": "tl.div_rn({}, {})", "exp": "exp({})", "sigmoid": "tl.div_rn(1.0, 1.0 + exp(-{}))"}
)
_EXPRESSIONS: Final = MappingProxyType(
    {
        "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "abs": "tl.abs({})",
        "exp": "tl.exp({})", "exp2": "tl.exp2({})", "expm1": "expm1({})", "log": "tl.log({})", "log2": "tl.log2({})",
        "log1p": "log1p({})", "sqrt": "tl.sqrt_rn({})", "rsqrt": "tl.rsqrt({})", "erf": "tl.erf({})",
        "tanh": "tanh({})", "sigmoid": "tl.sigmoid({})", "sign": "sign({})",
        "floor": "tl.floor({})", "ceil": "tl.ceil({})", "trunc": "trunc({})", "isnan": "{0} != {0}",
        "maximum": "maximum({}, {})", "minimum": "minimum({}, {})", "where": "tl.where({}, {}, {})",
        "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}",
        "and": "{} & {}", "or": "{} | {}", "not": "~{}", "float": "{}.to(tl.float32)",
    }
)  # fmt: skip
