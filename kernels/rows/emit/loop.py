"""Writes kernels for rows longer than a tile: each level of reductions is one more pass over the columns of a row.

A program reads a row once for each level and once more to store its results. It adds column partials up in memory, in
its own row of them, since a row's worth of them does not fit into registers.
"""

from __future__ import annotations

from fxprec.kernels.rows.emit.tiling import reduction_levels
from fxprec.kernels.rows.emit.writer import NEUTRAL, REDUCE, Writer
from fxprec.kernels.rows.program.values import REDUCTIONS, Value, walk

_COMBINE = {"sum": "{} + {}", "max": "maximum({}, {})", "min": "minimum({}, {})"}


def long_rows(w: Writer) -> None:
    """Write the body of a kernel that takes one row after the other."""
    w.line(f"{'first' if w.tiling.persistent else 'tile'} = tl.program_id(0)")
    if w.partials:
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    with w.block("for tile in range(first, rows, tl.num_programs(0)):" if w.tiling.persistent else ""):
        w.row_index()
        for level, reductions in enumerate(reduction_levels(w.program)):
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
