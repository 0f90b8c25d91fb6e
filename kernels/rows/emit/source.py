"""Emits readable Triton source for a row program: a loop over its tiles (``tiling``), in it a variable for each value.

The backward of ``softmax(x + b, -1)``: 96 columns in a tile of 128, and a column partial for the gradient of b::

    COLUMNS: constexpr = 96
    ROWS: constexpr = 8
    BLOCK: constexpr = 128
    start = 0
    first = tl.program_id(0)
    column = start + tl.arange(0, BLOCK)[None, :]
    inside_row = column < COLUMNS                                                  the tile's columns that exist
    b_value = tl.load(b_ptr + column, mask=inside_row, other=0.0)                  the same in all rows: once
    total_0 = tl.zeros((ROWS, BLOCK), tl.float32)                                  the column partial
    for tile in tl.range(first, 1 + (rows - 1) // ROWS, tl.num_programs(0), num_stages=3):
        row = tl.full((1,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        within = row < rows                                                        the tile's rows that exist
        inside = within[:, None] & inside_row
        x_value = tl.load(x_ptr + (row * COLUMNS)[:, None] + column, mask=inside, other=0.0)
        add_2 = x_value + b_value
        ...
        sum_14 = tl.sum(tl.where(inside_row, neg_13, 0.0), axis=1, keep_dims=True) a reduction, masked
        ...
        total_0 += tl.where(inside, mul_16, 0.0)
        tl.store(grad_x_ptr + (row * COLUMNS)[:, None] + column, mul_16, mask=inside)
    mine = partials + first.to(tl.int64) * 96                                      this program's row of partials
    tl.store(mine + 0 + column, tl.sum(total_0, axis=0, keep_dims=True), mask=inside_row)

A program that takes one tile has no loop, and no ``first``. Blocks of columns are tiles of which several make a row. A
row longer than a tile is walked several times: each level of reductions is one more pass over its columns, and one more
stores its results. Column partials are then added up in memory, in the program's own row of them, since a row's worth
of them does not fit into registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch

from fxprec.kernels.launch.philox import drop_threshold
from fxprec.kernels.rows.emit.addresses import Access
from fxprec.kernels.rows.emit.tiling import Tiling
from fxprec.kernels.rows.program.row_program import RowProgram, Store
from fxprec.kernels.rows.program.values import COMPARISONS, REDUCTIONS, Operand, Value, walk

#: For each kind of tiling how its source names the mask of the columns that exist, where a tile may reach over the end
#: of a row.
_INSIDE_ROW = {"flat": "inside", "tile": "inside_row", "blocks": "inside_row", "loop": "column < COLUMNS"}


def emit(
    name: str, program: RowProgram, tiling: Tiling,
    loads: Sequence[tuple[str, Access]], stores: Sequence[tuple[str, Access]], sizes: int, strides: Sequence[str],
) -> str:  # fmt: skip
    """Return the source of a module that defines the kernel ``name``.

    Args:
        loads, stores: the name of each pointer argument, and how it is walked.
        sizes: how many row dimensions there are; the sizes of all but the outermost are arguments.
        strides: names of the stride arguments.
    """
    flat = tiling.kind == "flat"
    masked = tiling.masked(max(program.columns, 1))
    w = _Writer(program, tiling, sizes, _INSIDE_ROW[tiling.kind] if masked else "", loads, stores)
    if flat:
        _flat(w)
    elif tiling.kind == "loop":
        _long_rows(w)
    else:
        _tiles(w)
    # In the order in which a launch gives them: tensors, seeds, partials, then numbers.
    draws = any(value.op == "keep" for value in program.values)
    arguments = [pointer for pointer, _ in (*w.loads.values(), *(place for _, place in w.stores))]
    arguments += ["seeds", "seed"] if draws else []
    arguments += ["partials"] if w.partials else []
    arguments += ["columns" if flat else "rows", *(f"size_{i}" for i in range(1, sizes)), *strides]
    constants = {} if flat else {"COLUMNS": program.columns}
    constants |= {"ROWS": tiling.rows, "BLOCK": tiling.block}
    options = 'do_not_specialize=["seed"]' if draws else ""
    head = f"@jit({options})\ndef {name}(\n    {', '.join(arguments)},\n):"
    lines = [f"    {constant}: constexpr = {value}" for constant, value in constants.items()]
    return "\n".join((_HEADER, head, *lines, *w.lines)) + "\n"


def _flat(w: _Writer) -> None:
    """Write the body of a kernel for one row of any length, of which each program takes a block."""
    w.line("start = tl.program_id(0).to(tl.int64) * BLOCK")
    w.line("column = start + tl.arange(0, BLOCK)[None, :]")
    w.line("inside = column < columns")
    w.compute(store.value for store, _ in w.stores)
    w.store()


def _tiles(w: _Writer) -> None:
    """Write the loop over tiles of rows; operands that vary along columns alone are loaded once, before it."""
    across = w.tiling.across(w.program.columns)
    first = "first" if w.tiling.persistent else "tile"
    if across > 1:  # neighbouring programs read neighbouring columns
        wide = ".to(tl.int64)" if w.program.columns + w.tiling.block >= 2**31 else ""
        w.line(f"start = (tl.program_id(0) % {across}){wide} * BLOCK")
        w.line(f"{first} = tl.program_id(0) // {across}")
        step = f"tl.num_programs(0) // {across}"
    else:
        w.line("start = 0")
        w.line(f"{first} = tl.program_id(0)")
        step = "tl.num_programs(0)"
    w.line("column = start + tl.arange(0, BLOCK)[None, :]")
    if w.inside_row:
        w.line("inside_row = column < COLUMNS")
    _compute_once(w)
    for n, (store, _) in enumerate(w.partials):
        w.line(f"total_{n} = tl.zeros((ROWS, {'BLOCK' if store.columns else 1}), tl.float32)")
    ahead = f", num_stages={w.tiling.stages}" if w.tiling.stages > 1 else ""
    head = f"for tile in {'tl.' if ahead else ''}range(first, 1 + (rows - 1) // ROWS, {step}{ahead}):"
    with w.block(head if w.tiling.persistent else ""):
        w.row_index()
        w.line(f"inside = within[:, None]{' & inside_row' if w.inside_row else ''}")
        w.compute(store.value for store in w.program.stores)
        for n, (store, _) in enumerate(w.partials):
            # Rows beyond the end load as 0, but 0 + bias or exp(0) is not 0: masked again before it is added.
            mask = "inside" if store.columns else "within[:, None]"
            w.line(f"total_{n} += tl.where({mask}, {w.text(store.value)}, 0.0)")
        w.store()
    if w.partials:
        # Each program has a row of partials of its own: no atomics, so sums have the same bits each time.
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    for n, (store, offset) in enumerate(w.partials):
        mask = ", mask=inside_row" if store.columns and w.inside_row else ""
        w.line(f"tl.store({w.partial_place(store, offset)}, tl.sum(total_{n}, axis=0, keep_dims=True){mask})")


def _compute_once(w: _Writer) -> None:
    """Write, before the loop, the values that are the same in every row.

    A reduction stays inside unless another of these values needs it: its result would occupy registers all along.
    """
    w.compute(v for v in w.program.values if not v.rows and (v in w.loads or v.op not in REDUCTIONS))


def _long_rows(w: _Writer) -> None:
    """Write the body of a kernel that takes one row after the other."""
    w.line(f"{'first' if w.tiling.persistent else 'tile'} = tl.program_id(0)")
    if w.partials:
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    with w.block("for tile in range(first, rows, tl.num_programs(0)):" if w.tiling.persistent else ""):
        w.row_index()
        for level, reductions in enumerate(w.program.levels):
            w.suffix = f"_{level}"
            _reduce_pass(w, level, reductions)
        w.suffix = "_last"
        _store_pass(w)
        if w.tiling.persistent:
            # Other threads of the program may load a partial for the next row than stored it for this one.
            w.line("tl.debug_barrier()  # the next row's partials are read again by this program")


def _reduce_pass(w: _Writer, level: int, reductions: list[Value]) -> None:
    """Write one pass over the columns for all the reductions of a level.

    Each column of the block adds up by itself (``running``), and at the end these are reduced to one number a row.
    """
    arguments = [value.args[0] for value in reductions]
    # One number a row: computed before the loop over the columns, not again in each step of it. Reductions of earlier
    # levels are known by now.
    w.compute(v for v in walk([a for a in arguments if isinstance(a, Value)], w.known) if not v.columns)
    for n, value in enumerate(reductions):
        w.line(f"running_{level}_{n} = tl.full((ROWS, BLOCK), {_NEUTRAL[value.op]}, tl.float32)")
    with w.block(_COLUMNS), w.one_pass():
        _column_index(w)
        w.compute(arguments)
        for n, value in enumerate(reductions):
            running = f"running_{level}_{n}"
            term = w.masked_for_reduction(value.args[0], _NEUTRAL[value.op])
            w.line(f"{running} = {_COMBINE[value.op].format(running, term)}")
    for n, value in enumerate(reductions):
        w.name(value, _REDUCE[value.op].format(f"running_{level}_{n}"))


def _store_pass(w: _Writer) -> None:
    """Write the last pass, which stores outputs and adds up column partials."""
    w.compute(s.value for s in w.program.stores if isinstance(s.value, Value) and not s.value.columns)
    with w.block(_COLUMNS), w.one_pass():
        _column_index(w)
        w.compute(store.value for store in w.program.stores if store.columns)
        w.store(columns=True)
        for store, offset in w.partials:
            if store.columns:
                mask = ", mask=column < COLUMNS" if w.inside_row else ""
                place = w.partial_place(store, offset)
                # A program's first row has no earlier partials: the memory is uninitialized, so its load is masked, as
                # "tile != first and column < COLUMNS". Triton 3.9 takes no & of a number and a block.
                w.line(f"earlier = tl.load({place}, mask=column < tl.where(tile != first, COLUMNS, 0), other=0.0)")
                w.line(f"tl.store({place}, earlier + {w.text(store.value)}{mask})")
    w.store(columns=False)
    for store, offset in w.partials:
        if not store.columns:
            # Likewise, for one number: its address is a block of 1 x 1, and so must be its mask.
            place = w.partial_place(store, offset)
            w.line(f"earlier = tl.load({place}, mask=tl.full((1, 1), tile, tl.int64) != first, other=0.0)")
            w.line(f"tl.store({place}, earlier + {w.text(store.value)})")


def _column_index(w: _Writer) -> None:
    """Write the column numbers of one step of a pass, and the mask of the elements that exist."""
    w.line("column = start + tl.arange(0, BLOCK)[None, :]")
    w.line(f"inside = within[:, None]{' & (column < COLUMNS)' if w.inside_row else ''}")


#: The loop of a pass over the columns.
_COLUMNS = "for start in range(0, COLUMNS, BLOCK):"


class _Writer:
    """Writer of a kernel's body: the lines so far, and the names of the values in scope.

    In the source ``row`` (or ``row_0``, ``row_1``, ... where several strides are needed) counts rows in 64 bits,
    ``column`` columns in as many as they need. What varies along rows alone is a vector, read and written once a row.

    Attributes:
        program, tiling: of the kernel.
        flat: there is one row of any length.
        dimensions: how many row dimensions there are.
        inside_row: mask of the tile's columns that exist; "" where tiles never reach over the end of a row.
        loads: value -> (pointer, strides) of the tensors that are read.
        stores: (store, (pointer, strides)) of the tensors that are written.
        partials: (store, first column) of the column partials; each program has a row of ``width`` numbers of its own.
        suffix: of names that are in scope for one pass over the columns only.
    """

    def __init__(
        self, program: RowProgram, tiling: Tiling, dimensions: int, inside_row: str,
        loads: Sequence[tuple[str, Access]], stores: Sequence[tuple[str, Access]],
    ) -> None:  # fmt: skip
        self.program, self.tiling, self.flat = program, tiling, tiling.kind == "flat"
        self.dimensions, self.inside_row = dimensions, inside_row
        values = [value for value, _ in program.loads]
        self.loads = dict(zip(values, loads, strict=True))
        self.ports = dict(program.loads)
        self.stores = [each for each in zip(program.stores, stores, strict=True) if not each[0].partial]
        # An output in FP32 shows errors that a rounding to a low dtype hides.
        self._stores_fp32 = any(
            store.dtype is torch.float32 and store.rows and store.columns for store in program.stores
        )
        self._exact_values = program.exact_values
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
        """Write the row numbers of a tile, and the index along each row dimension.

        Of three dimensions, innermost first::

            row_2 = row % size_2
            over_2 = row // size_2
            row_1 = over_2 % size_1
            over_1 = over_2 // size_1
            row_0 = over_1                  the size of the outermost is not needed
        """
        self.line("row = tl.full((1,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)")
        self.line("within = row < rows")
        rest = "row"
        for i in range(self.dimensions - 1, 0, -1):
            self.line(f"row_{i} = {rest} % size_{i}")
            self.line(f"over_{i} = {rest} // size_{i}")
            rest = f"over_{i}"
        if self.dimensions > 1:
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

    def masked_for_reduction(self, value: Operand, neutral: str) -> str:
        """Return a value with its elements beyond the end of a row replaced by a reduction's neutral element."""
        mask = self.inside_row
        return f"tl.where({mask}, {self.text(value)}, {neutral})" if mask else self.text(value)

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
            return _REDUCE[value.op].format(self.masked_for_reduction(value.args[0], _NEUTRAL[value.op]))
        if value.op == "keep":
            number, p = value.attribute
            row, count = ("tl.zeros((1,), tl.int64)", "columns") if self.flat else ("row", "COLUMNS")
            seed = f"tl.load(seeds + (seed + {number}))"
            return f"keep_tile({seed}, {row}, {count}, start, {drop_threshold(p)}, BLOCK)  # p={p:g}"
        if value.op == "round":
            return f"{self.text(value.args[0])}.to(tl.{_TRITON[value.attribute]}).to(tl.float32)"
        # Integers are compared as such: int64 has values that FP32 does not.
        whole = value.op in COMPARISONS and any(isinstance(a, Value) and a.kind == "integer" for a in value.args)
        arguments = [str(int(a)) if whole and not isinstance(a, Value) else self.text(a) for a in value.args]
        # One number a row is cheap to compute exactly, and its error would be in every element of the row.
        precise = value.op in _PRECISE_EXPRESSIONS and (
            self._stores_fp32 or not value.columns or value in self._exact_values
        )
        return (_PRECISE_EXPRESSIONS if precise else _EXPRESSIONS)[value.op].format(*arguments)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _is_vector(self, rows: bool, columns: bool) -> bool:
        """Return whether a tensor that varies so is a vector, with one element for each row of the tile."""
        return rows and not columns and not self.flat

    def _offset(self, access: Access, rows: bool, columns: bool) -> str:
        """Return the offset from the pointer of a tensor that varies along rows, columns, both or neither."""
        names = ["row"] if self.dimensions == 1 else [f"row_{i}" for i in range(self.dimensions)]
        steps = [(name, stride) for name, stride in zip(names, access.rows, strict=False) if stride]
        parts = [name if stride == "1" else f"{name} * {stride}" for name, stride in steps]
        if self._is_vector(rows, columns):
            # A stride of 0 still needs the shape of the rows, hence ``row * 0``.
            return "".join(f" + {part}" for part in parts) or " + row * 0"
        text = f" + ({' + '.join(parts)})[:, None]" if parts else ""
        if access.columns:
            return text + (" + column" if access.columns == "1" else f" + column.to(tl.int64) * {access.columns}")
        # Likewise for columns: what is loaded or stored is a block, whatever its stride.
        return text + " + column * 0" if columns else text

    def _mask(self, rows: bool, columns: bool) -> str:
        """Return the mask of the tile's elements that exist; "" where all do."""
        if columns:
            return "inside" if rows or self.flat else self.inside_row
        return "within" if rows and not self.flat else ""

    def _load(self, pointer: str, access: Access, dtype: torch.dtype, value: Value) -> str:
        mask = self._mask(value.rows, value.columns)
        other = "" if not mask else f", mask={mask}, other=0" + (".0" if dtype.is_floating_point else "")
        text = f"tl.load({pointer}{self._offset(access, value.rows, value.columns)}{other})"
        if self._is_vector(value.rows, value.columns):
            text += "[:, None]"
        if dtype is torch.bool:
            return f"{text} != 0"
        if not dtype.is_floating_point:
            # Numbers up to 2**31 are compared with integers, and do not fit into fewer bits.
            return text if dtype.itemsize >= 4 else f"{text}.to(tl.int32)"
        return text if dtype is torch.float32 else f"{text}.to(tl.float32)"

    def store(self, columns: bool | None = None) -> None:
        """Write the stores except column partials; ``columns``: only those that vary along columns, or the others."""
        for store, (pointer, access) in self.stores:
            if columns is None or store.columns is columns:
                mask = self._mask(store.rows, store.columns)
                where = self._offset(access, store.rows, store.columns)
                value = self._stored(store)
                if self._is_vector(store.rows, store.columns):
                    value = f"tl.reshape({value}, (ROWS,))"
                self.line(f"tl.store({pointer}{where}, {value}{f', mask={mask}' if mask else ''})")

    def partial_place(self, store: Store, offset: int) -> str:
        """Return the address of this program's partial of a store."""
        return f"mine + {offset} + {'column' if store.columns else 'tl.zeros((1, 1), tl.int32)'}"

    def _stored(self, store: Store) -> str:
        value, flat = store.value, self.flat
        # Values are broadcast to what the store varies along: a gradient may be one number a row, or in all.
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


_HEADER: Final = """from fxprec.kernels.launch.philox import keep_tile
from fxprec.kernels.rows.emit.functions import exp, expm1, log1p, maximum, minimum, row_max, row_min, sign, tanh, trunc
from fxprec.kernels.launch.triton_support import constexpr, jit, tl

"""
_COMBINE: Final = {"sum": "{} + {}", "max": "maximum({}, {})", "min": "minimum({}, {})"}
#: Neutral element of each reduction, and the reduction of a tile.
_NEUTRAL: Final = MappingProxyType({"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'})
_REDUCE: Final = MappingProxyType(
    {"sum": "tl.sum({}, axis=1, keep_dims=True)", "max": "row_max({})", "min": "row_min({})"}
)
_TRITON: Final = MappingProxyType({torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"})
_NAMES: Final = MappingProxyType(
    {"where": "chosen", "and": "both", "or": "either", "not": "other", "abs": "magnitude", "round": "rounded"}
)
#: Used for values that are stored in FP32, are one number a row, or feed a discontinuous op: a GPU's default functions
#: are approximations, good enough for low outputs.
_PRECISE_EXPRESSIONS: Final = MappingProxyType(
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
