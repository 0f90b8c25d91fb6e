"""Emits readable Triton source for a row program: the loop over its tiles (``tiling``), and the kernel's arguments.

A row longer than a tile is walked several times: each level of reductions is one more pass over its columns, and one
more stores its results. Column partials are then added up in memory, in the program's own row of them, since a row's
worth of them does not fit into registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxprec.kernels.rows.emit.addresses import Access, Addresses
from fxprec.kernels.rows.emit.tiling import Tiling
from fxprec.kernels.rows.emit.writer import HEADER, NEUTRAL, REDUCE, Writer
from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.values import REDUCTIONS, Value, walk

_COMBINE = {"sum": "{} + {}", "max": "maximum({}, {})", "min": "minimum({}, {})"}


def long_rows(w: Writer) -> None:
    """Write the body of a kernel that takes one row after the other."""
    w.line(f"{'first' if w.tiling.persistent else 'tile'} = tl.program_id(0)")
    if w.partials:
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    with w.block("for tile in range(first, rows, tl.num_programs(0)):" if w.tiling.persistent else ""):
        w.row_index()
        for level, reductions in enumerate(w.program.levels):
            w.suffix = f"_{level}"
            _reduce(w, level, reductions)
        w.suffix = "_last"
        _store(w)
        if w.tiling.persistent:
            w.line("tl.debug_barrier()  # the next row's partials are read again by this program")


def _reduce(w: Writer, level: int, reductions: list[Value]) -> None:
    """Write one pass for all the reductions of a level: first lane by lane, then over the lanes."""
    arguments = [value.args[0] for value in reductions]
    # One number a row: computed before the loop over the columns, not again in each step of it.
    rowwise = [v for v in walk([a for a in arguments if isinstance(a, Value)], w.known) if not v.columns]
    w.compute(value for value in rowwise if value.op not in REDUCTIONS or value in w.loads)
    for n, value in enumerate(reductions):
        w.line(f"running_{level}_{n} = tl.full((ROWS, BLOCK), {NEUTRAL[value.op]}, tl.float32)")
    with w.block(_COLUMNS), w.one_pass():
        _column_index(w)
        w.compute(arguments)
        for n, value in enumerate(reductions):
            running = f"running_{level}_{n}"
            term = w.inside(value.args[0], NEUTRAL[value.op])
            w.line(f"{running} = {_COMBINE[value.op].format(running, term)}")
    for n, value in enumerate(reductions):
        w.name(value, REDUCE[value.op].format(f"running_{level}_{n}"))


def _store(w: Writer) -> None:
    """Write the last pass, which stores outputs and adds up column partials."""
    w.compute(s.value for s in w.program.stores if isinstance(s.value, Value) and not s.value.columns)
    with w.block(_COLUMNS), w.one_pass():
        _column_index(w)
        w.compute(store.value for store in w.program.stores if store.columns)
        w.store(columns=True)
        for store, offset in w.partials:
            if store.columns:
                mask = ", mask=column < COLUMNS" if w.addresses.inside_row else ""
                place = w.partial_place(store, offset)
                # A program's first row has no earlier partials: the memory is uninitialized, so its load is masked.
                w.line(f"earlier = tl.load({place}, mask=column < tl.where(tile != first, COLUMNS, 0), other=0.0)")
                w.line(f"tl.store({place}, earlier + {w.text(store.value)}{mask})")
    w.store(columns=False)
    for store, offset in w.partials:
        if not store.columns:
            place = w.partial_place(store, offset)
            w.line(f"earlier = tl.load({place}, mask=tl.full((1, 1), tile, tl.int64) != first, other=0.0)")
            w.line(f"tl.store({place}, earlier + {w.text(store.value)})")


def _column_index(w: Writer) -> None:
    w.line("column = start + tl.arange(0, BLOCK)[None, :]")
    w.line(f"inside = within[:, None]{' & (column < COLUMNS)' if w.addresses.inside_row else ''}")


_COLUMNS = "for start in range(0, COLUMNS, BLOCK):"


#: For each kind of tiling the mask of its columns that exist, where a tile may reach over the end of a row.
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
    w = Writer(program, tiling, Addresses(flat, sizes, _INSIDE_ROW[tiling.kind] if masked else ""), loads, stores)
    if flat:
        _flat(w)
    elif tiling.kind == "loop":
        long_rows(w)
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
    return "\n".join((HEADER, head, *lines, *w.lines)) + "\n"


def _flat(w: Writer) -> None:
    w.line("start = tl.program_id(0).to(tl.int64) * BLOCK")
    w.line("column = start + tl.arange(0, BLOCK)[None, :]")
    w.line("inside = column < columns")
    w.compute(store.value for store, _ in w.stores)
    w.store()


def _tiles(w: Writer) -> None:
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
    if w.addresses.inside_row:
        w.line("inside_row = column < COLUMNS")
    _compute_once(w)
    for n, (store, _) in enumerate(w.partials):
        w.line(f"total_{n} = tl.zeros((ROWS, {'BLOCK' if store.columns else 1}), tl.float32)")
    ahead = f", num_stages={w.tiling.stages}" if w.tiling.stages > 1 else ""
    head = f"for tile in {'tl.' if ahead else ''}range(first, 1 + (rows - 1) // ROWS, {step}{ahead}):"
    with w.block(head if w.tiling.persistent else ""):
        w.row_index()
        w.line(f"inside = within[:, None]{' & inside_row' if w.addresses.inside_row else ''}")
        w.compute(store.value for store in w.program.stores)
        for n, (store, _) in enumerate(w.partials):
            # Rows beyond the end load zeros, from which a bias or an exponential makes other numbers: masked again.
            mask = "inside" if store.columns else "within[:, None]"
            w.line(f"total_{n} += tl.where({mask}, {w.text(store.value)}, 0.0)")
        w.store()
    if w.partials:
        # Each program has a row of partials of its own: no atomics, so sums have the same bits each time.
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    for n, (store, offset) in enumerate(w.partials):
        mask = ", mask=inside_row" if store.columns and w.addresses.inside_row else ""
        w.line(f"tl.store({w.partial_place(store, offset)}, tl.sum(total_{n}, axis=0, keep_dims=True){mask})")


def _compute_once(w: Writer) -> None:
    """Write, before the loop, the values that are the same in every row.

    Reductions stay inside: kept across the loop they would occupy its registers.
    """
    values = [v for v in w.program.values if not v.rows and (v in w.loads or v.op not in REDUCTIONS)]
    w.compute(value for value in values if not any(v.rows for v in walk([value], w.loads.__contains__)))
