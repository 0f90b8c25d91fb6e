"""Readable Triton source for a row program.

Every program of the launch takes tiles of rows x columns. Four forms, by what the row program needs::

    flat     one row of any length, no reductions: a program takes one block of columns
    blocks   rows x columns, no reductions: a program takes one block of columns of some rows
    tile     reductions over rows that fit into one tile
    loop     reductions over longer rows: each level of reductions is one more pass over the columns

Where there are column partials a program goes on from tile to tile and adds them up in registers (in ``loop``: in its
own row of the partials); otherwise it takes one tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from fxprec.kernels.philox import drop_threshold
from fxprec.kernels.rows.row_program import Program, Store
from fxprec.kernels.rows.values import REDUCTIONS, Operand, Value, walk

__all__ = ["Access", "Form", "emit", "form_of", "reduction_levels"]

#: Columns that a reduction may have in one tile.
LONGEST_TILE: Final = 16384
_TILE: Final = 2048
_FLAT: Final = 1024


@dataclass(frozen=True, slots=True)
class Access:
    """How a tensor is walked. ``rows``: for each row dimension "" (not), "COLUMNS" or the name of a stride argument.

    ``columns``: "" (not), "1", or the name of a stride argument.
    """

    rows: tuple[str, ...]
    columns: str


@dataclass(frozen=True, slots=True)
class Form:
    """The tiling. ``persistent``: programs go from tile to tile."""

    kind: str
    rows: int
    block: int
    warps: int
    persistent: bool


def form_of(program: Program, flat: bool, count: int) -> Form:
    """The tiling for a program with ``count`` rows."""
    columns = max(program.columns, 1)
    partial = any(store.partial for store in program.stores)
    if flat:
        return Form("flat", 1, _FLAT, 4, False)
    block = max(16, 1 << (columns - 1).bit_length())
    if not program.reduces and block > _FLAT:
        return Form("blocks", 4 if count > 1 else 1, 512 if columns % 512 == 0 or columns > 4096 else _FLAT, 4, partial)
    if block > LONGEST_TILE:
        return Form("loop", 1, 4096, 8, partial)
    rows = max(1, _TILE // block) if count > 1 else 1
    each = 256 if partial else 512  # elements of a warp: where partials stay in registers, half as many
    warps = min(32, max(4, rows * block // each))
    return Form("tile", rows, block, warps, partial)


def reduction_levels(program: Program) -> list[list[Value]]:
    """A program's reductions by how many others lie beneath them: each level takes a pass over a long row."""
    loads = {value for value, _ in program.loads}
    level: dict[Value, int] = {}
    found: list[list[Value]] = []
    for value in program.values:
        beneath = 0 if value in loads else max((level[a] for a in value.args if isinstance(a, Value)), default=0)
        if value.op in REDUCTIONS and value not in loads:
            found += [[]] if beneath == len(found) else []
            found[beneath].append(value)
            beneath += 1
        level[value] = beneath
    return found


def emit(
    name: str, program: Program, form: Form, loads: Sequence[tuple[str, Access]], stores: Sequence[tuple[str, Access]],
    sizes: int, strides: Sequence[str],
) -> str:  # fmt: skip
    """The source of a module that defines the kernel ``name``.

    :param loads, stores: the name of each pointer argument, and how it is walked.
    :param sizes: how many row dimensions there are; the sizes of all but the outermost are arguments.
    :param strides: names of the stride arguments.
    """
    return _Emitter(name, program, form, loads, stores, sizes, strides).source()


class _Emitter:
    def __init__(
        self, name: str, program: Program, form: Form, loads: Sequence[tuple[str, Access]],
        stores: Sequence[tuple[str, Access]], sizes: int, strides: Sequence[str],
    ) -> None:  # fmt: skip
        self.name, self.program, self.form = name, program, form
        self.loads = {
            value: (pointer, access) for (value, _), (pointer, access) in zip(program.loads, loads, strict=True)
        }
        self.ports = dict(program.loads)
        self.stores = list(zip(program.stores, stores, strict=True))
        self.sizes, self.strides = sizes, strides
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Value, str] = {}
        self.suffix = ""
        columns = max(program.columns, 1)
        self.masked = form.kind in ("flat", "loop", "blocks") or form.block != columns
        if form.kind in ("loop", "blocks") and columns % form.block == 0:
            self.masked = False

    # -- the frame ---------------------------------------------------------------------------------------------------

    def source(self) -> str:
        program, form = self.program, self.form
        body = getattr(self, form.kind)
        body()
        pointers = [
            pointer
            for pointer, _ in (*self.loads.values(), *(s for _, s in self.stores if not s[0].startswith("partial")))
        ]
        arguments = [*pointers]
        arguments += ["seeds", "seed"] if self.draws else []
        arguments += ["partials"] if any(store.partial for store in program.stores) else []
        arguments += ["rows" if form.kind != "flat" else "columns"]
        arguments += [f"size_{i}" for i in range(1, self.sizes)] + [*self.strides]
        constants = [f"    ROWS: constexpr = {form.rows}", f"    BLOCK: constexpr = {form.block}"]
        if form.kind != "flat":
            constants.insert(0, f"    COLUMNS: constexpr = {program.columns}")
        fixed = 'do_not_specialize=["seed"]' if self.draws else ""
        head = f"{_HEADER}\n@jit({fixed})\ndef {self.name}(\n    {', '.join(arguments)},\n):"
        return "\n".join((head, *constants, *self.lines)) + "\n"

    @property
    def draws(self) -> bool:
        return any(value.op == "keep" for value in self.program.values)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def flat(self) -> None:
        self.line("start = tl.program_id(0).to(tl.int64) * BLOCK")
        self.line("column = start + tl.arange(0, BLOCK)[None, :]")
        self.line("inside = column < columns")
        self.compute([store.value for store, _ in self.stores])
        self.store_all()

    def tile(self) -> None:
        self.line("start = 0")
        self.line("column = tl.arange(0, BLOCK)[None, :]")
        self.rows_loop()

    def blocks(self) -> None:
        self.line("start = tl.program_id(1) * BLOCK")
        self.line("column = start + tl.arange(0, BLOCK)[None, :]")
        self.rows_loop()

    def rows_loop(self) -> None:
        """What each tile of rows does; operands of the columns alone are loaded once."""
        if self.masked:
            self.line("inside_row = column < COLUMNS")
        values = self.program.values
        once = [value for value in values if not value.rows and (value in self.loads or value.op not in REDUCTIONS)]
        once = [value for value in once if all(not v.rows for v in walk([value], self.loads.__contains__))]
        self.compute(once)
        partials = [store for store, _ in self.stores if store.partial]
        for n, store in enumerate(partials):
            self.line(f"total_{n} = tl.zeros((ROWS, {'BLOCK' if store.columns else 1}), tl.float32)")
        if self.form.persistent:
            self.line("for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):")
            self.depth += 1
        else:
            self.line("tile = tl.program_id(0)")
        self.row_index()
        self.line(f"inside = within[:, None]{' & inside_row' if self.masked else ''}")
        self.compute([store.value for store, _ in self.stores])
        for n, store in enumerate(partials):
            mask = "inside" if store.columns else "within[:, None]"
            self.line(f"total_{n} += tl.where({mask}, {self.text(store.value)}, 0.0)")
        self.store_all()
        if self.form.persistent:
            self.depth -= 1
        self.store_partials([f"tl.sum(total_{n}, axis=0, keep_dims=True)" for n in range(len(partials))])

    def row_index(self) -> None:
        self.line("row = tl.full((1,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)")
        self.line("within = row < rows")
        rest = "row"
        for i in range(self.sizes - 1, 0, -1):
            self.line(f"row_{i} = {rest} % size_{i}")
            self.line(f"over_{i} = {rest} // size_{i}")
            rest = f"over_{i}"
        if self.sizes > 1:
            self.line(f"row_0 = {rest}")

    # -- rows longer than a tile -------------------------------------------------------------------------------------

    def loop(self) -> None:
        partials = [store for store, _ in self.stores if store.partial]
        if self.form.persistent:
            self.line("first = tl.program_id(0)")
            self.line("for tile in range(first, rows, tl.num_programs(0)):")
            self.depth += 1
        else:
            self.line("tile = tl.program_id(0)")
        self.row_index()
        levels = reduction_levels(self.program)
        for number, reductions in enumerate(levels):
            self.suffix = f"_{number}"
            self.one_pass(number, reductions)
        self.suffix = "_last"
        rowwise = [v for v in (s.value for s, _ in self.stores) if isinstance(v, Value) and not v.columns]
        self.compute(rowwise)
        self.line("for start in range(0, COLUMNS, BLOCK):")
        self.depth += 1
        self.columns_of_pass()
        wide = [store.value for store, _ in self.stores if store.columns]
        before = dict(self.names)
        self.compute(wide)
        self.store_all(columns=True)
        offset = 0
        for store in partials:
            if store.columns:
                place = f"partials + tl.program_id(0).to(tl.int64) * WIDTH + {offset} + column"
                mask = f", mask={self.inside_columns()}" if self.masked else ""
                self.line(f"earlier = tl.load({place}, mask=(tile != first) & (column < COLUMNS), other=0.0)")
                self.line(f"tl.store({place}, earlier + {self.text(store.value)}{mask})")
            offset += self.width(store)
        self.names = before
        self.depth -= 1
        self.store_all(columns=False)
        offset = 0
        for store in partials:
            if not store.columns:
                place = f"partials + tl.program_id(0).to(tl.int64) * WIDTH + {offset} + tl.zeros((1, 1), tl.int32)"
                self.line(f"earlier = tl.load({place}, mask=tl.full((1, 1), tile, tl.int64) != first, other=0.0)")
                self.line(f"tl.store({place}, earlier + {self.text(store.value)})")
            offset += self.width(store)
        if self.form.persistent:
            self.line("tl.debug_barrier()  # the next row's partials are read again by this program")
            self.depth -= 1
        self.lines = [line.replace("WIDTH", str(offset)) for line in self.lines]

    def one_pass(self, number: int, reductions: list[Value]) -> None:
        start = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
        arguments = [value.args[0] for value in reductions]
        rowwise = [v for v in walk([a for a in arguments if isinstance(a, Value)], self.known) if not v.columns]
        self.compute([v for v in rowwise if v.op not in REDUCTIONS or v in self.loads])
        for n, value in enumerate(reductions):
            self.line(f"running_{number}_{n} = tl.full((ROWS, BLOCK), {start[value.op]}, tl.float32)")
        self.line("for start in range(0, COLUMNS, BLOCK):")
        self.depth += 1
        self.columns_of_pass()
        before = dict(self.names)
        self.compute(arguments)
        for n, value in enumerate(reductions):
            running = f"running_{number}_{n}"
            term = self.text(value.args[0])
            if self.masked:
                term = f"tl.where({self.inside_columns()}, {term}, {start[value.op]})"
            combined = {
                "sum": f"{running} + {term}",
                "max": f"maximum({running}, {term})",
                "min": f"minimum({running}, {term})",
            }
            self.line(f"{running} = {combined[value.op]}")
        self.names = before
        self.depth -= 1
        for n, value in enumerate(reductions):
            self.names[value] = f"{value.op}_{value.number}"
            self.line(f"{self.names[value]} = {_REDUCE[value.op].format(f'running_{number}_{n}')}")

    def columns_of_pass(self) -> None:
        self.line("column = start + tl.arange(0, BLOCK)[None, :]")
        self.line(f"inside = within[:, None]{' & (column < COLUMNS)' if self.masked else ''}")

    def known(self, value: Value) -> bool:
        return value in self.loads or value in self.names

    # -- values ------------------------------------------------------------------------------------------------------

    def compute(self, roots: Iterable[Operand]) -> None:
        """Write down what the roots need and is not there yet."""
        wanted = [root for root in roots if isinstance(root, Value)]
        for value in walk(wanted, self.known):
            if value not in self.names:
                self.names[value] = self.define(value)

    def define(self, value: Value) -> str:
        if value in self.loads:
            pointer, access = self.loads[value]
            name = f"{pointer}_value{self.suffix}"
            self.line(f"{name} = {self.load(pointer, access, self.ports[value].dtype, value)}")
            return name
        if value.op == "stop":
            return self.text(value.args[0])
        name = f"{_NAMES.get(value.op, value.op)}_{value.number}{self.suffix if value.columns else ''}"
        self.line(f"{name} = {self.expression(value)}")
        return name

    def expression(self, value: Value) -> str:
        arguments = [self.text(argument) for argument in value.args]
        if value.op in REDUCTIONS:
            neutral = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}[value.op]
            inside = f"tl.where({self.inside_columns()}, {arguments[0]}, {neutral})" if self.masked else arguments[0]
            return _REDUCE[value.op].format(inside)
        if value.op == "keep":
            number, p = value.attribute
            row = "row" if self.form.kind != "flat" else "tl.zeros((1,), tl.int64)"
            count = "COLUMNS" if self.form.kind != "flat" else "columns"
            seed = f"tl.load(seeds + (seed + {number}))"
            return f"keep_tile({seed}, {row}, {count}, start, {drop_threshold(p)}, BLOCK)  # p={p:g}"
        if value.op == "round":
            return f"{arguments[0]}.to(tl.{_TRITON[value.attribute]}).to(tl.float32)"
        return _EXPRESSIONS[value.op].format(*arguments)

    def text(self, operand: Operand) -> str:
        if isinstance(operand, Value):
            return self.names[operand]
        if math.isnan(operand):
            return 'float("nan")'
        if math.isinf(operand):
            return f'float("{operand}")'
        return repr(float(operand)) if operand >= 0 else f"({float(operand)!r})"

    def inside_columns(self) -> str:
        return {"flat": "inside", "tile": "inside_row", "blocks": "inside_row"}.get(self.form.kind, "column < COLUMNS")

    # -- memory ------------------------------------------------------------------------------------------------------

    def load(self, pointer: str, access: Access, dtype: torch.dtype, value: Value) -> str:
        where = self.offset(access, value.rows, value.columns)
        mask = self.mask(value.rows, value.columns)
        other = "" if not mask else f", mask={mask}, other=0" + (".0" if dtype.is_floating_point else "")
        text = f"tl.load({pointer}{where}{other})"
        if self.rowwise(value.rows, value.columns):
            text += "[:, None]"
        if dtype is torch.bool:
            return f"{text} != 0"
        return text if dtype is torch.float32 or not dtype.is_floating_point else f"{text}.to(tl.float32)"

    def rowwise(self, rows: bool, columns: bool) -> bool:
        """Whether a tensor varies along rows alone: it is loaded and stored as a vector of them, once a row."""
        return rows and not columns and self.form.kind != "flat"

    def offset(self, access: Access, along_rows: bool, along_columns: bool) -> str:
        rows = ["row"] if self.sizes == 1 else [f"row_{i}" for i in range(self.sizes)]
        parts = [f"{row} * {stride}" for row, stride in zip(rows, access.rows, strict=False) if stride]
        if self.rowwise(along_rows, along_columns):
            return "".join(f" + {part}" for part in parts) or " + row * 0"
        text = f" + ({' + '.join(parts)})[:, None]" if parts else ""
        if access.columns:
            text += " + column" if access.columns == "1" else f" + column.to(tl.int64) * {access.columns}"
        elif along_columns or parts:
            text += " + column * 0"
        return text

    def mask(self, rows: bool, columns: bool) -> str:
        if self.form.kind == "flat":
            return "inside" if columns else ""
        if rows and columns:
            return "inside"
        if columns:
            return self.inside_columns() if self.masked else ""
        return "within" if rows else ""

    def store_all(self, columns: bool | None = None) -> None:
        for store, (pointer, access) in self.stores:
            if not store.partial and (columns is None or store.columns is columns):
                mask = self.mask(store.rows, store.columns)
                where = self.offset(access, store.rows, store.columns)
                value = self.shaped(store)
                value = f"tl.reshape({value}, (ROWS,))" if self.rowwise(store.rows, store.columns) else value
                self.line(f"tl.store({pointer}{where}, {value}{f', mask={mask}' if mask else ''})")

    def shaped(self, store: Store) -> str:
        value = store.value
        rows = store.rows and self.form.kind != "flat"
        shape = f"({'ROWS' if rows else 1}, {'BLOCK' if store.columns else 1})"
        if not isinstance(value, Value):
            return f"tl.full({shape}, {self.text(value)}, tl.{_TRITON[store.dtype]})"
        text = self.text(value)
        if store.dtype is torch.bool:
            text = f"{text}.to(tl.int8)"
        if (value.rows and self.form.kind != "flat") != rows or value.columns != store.columns:
            text = f"tl.broadcast_to({text}, {shape})"
        return text if store.dtype in (torch.float32, torch.bool) else f"{text}.to(tl.{_TRITON[store.dtype]})"

    def store_partials(self, totals: list[str]) -> None:
        partials = [store for store, _ in self.stores if store.partial]
        if not partials:
            return
        width = sum(map(self.width, partials))
        self.line(f"mine = partials + tl.program_id(0).to(tl.int64) * {width}")
        offset = 0
        for store, total in zip(partials, totals, strict=True):
            if store.columns:
                mask = f", mask={self.inside_columns()}" if self.masked else ""
                self.line(f"tl.store(mine + {offset} + column, {total}{mask})")
            else:
                self.line(f"tl.store(mine + {offset} + tl.zeros((1, 1), tl.int32), {total})")
            offset += self.width(store)

    def width(self, store: Store) -> int:
        return self.program.columns if store.columns else 1


_HEADER: Final = """from fxprec.kernels.philox import keep_tile
from fxprec.kernels.rows.functions import expm1, log1p, maximum, minimum, row_max, row_min, sign, tanh, trunc
from fxprec.kernels.triton_support import constexpr, jit, tl

"""

_TRITON: Final = MappingProxyType({torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"})
_NAMES: Final = MappingProxyType(
    {"where": "chosen", "and": "both", "or": "either", "not": "other", "abs": "size", "round": "rounded"}
)
_REDUCE: Final = MappingProxyType(
    {"sum": "tl.sum({}, axis=1, keep_dims=True)", "max": "row_max({})", "min": "row_min({})"}
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
