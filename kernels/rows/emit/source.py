"""Readable Triton source for a row program: the frame around its tiles (``tiling``), and the kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from fxprec.kernels.rows.emit.addresses import Access, Addresses
from fxprec.kernels.rows.emit.loop import long_rows
from fxprec.kernels.rows.emit.tiling import Form
from fxprec.kernels.rows.emit.writer import HEADER, Writer
from fxprec.kernels.rows.program.row_program import Program
from fxprec.kernels.rows.program.values import REDUCTIONS, walk

#: In each kind of tile, which of its columns there are, where it may reach over the end of a row.
_INSIDE_ROW = {"flat": "inside", "tile": "inside_row", "blocks": "inside_row", "loop": "column < COLUMNS"}


def emit(
    name: str, program: Program, form: Form, loads: Sequence[tuple[str, Access]], stores: Sequence[tuple[str, Access]],
    sizes: int, strides: Sequence[str],
) -> str:  # fmt: skip
    """The source of a module that defines the kernel ``name``.

    Args:
        loads, stores: the name of each pointer argument, and how it is walked.
        sizes: how many row dimensions there are; the sizes of all but the outermost are arguments.
        strides: names of the stride arguments.
    """
    flat = form.kind == "flat"
    masked = form.masked(max(program.columns, 1))
    w = Writer(program, form, Addresses(flat, sizes, _INSIDE_ROW[form.kind] if masked else ""), loads, stores)
    if flat:
        _flat(w)
    elif form.kind == "loop":
        long_rows(w)
    else:
        _tiles(w)
    draws = any(value.op == "keep" for value in program.values)
    arguments = [pointer for pointer, _ in (*w.loads.values(), *(place for _, place in w.stores))]
    arguments += ["seeds", "seed"] if draws else []
    arguments += ["partials"] if w.partials else []
    arguments += ["columns" if flat else "rows", *(f"size_{i}" for i in range(1, sizes)), *strides]
    constants = {} if flat else {"COLUMNS": program.columns}
    constants |= {"ROWS": form.rows, "BLOCK": form.block}
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
    """What each tile of rows does; operands of the columns alone are loaded once."""
    across = w.form.across(w.program.columns)
    first = "first" if w.form.persistent else "tile"
    if across > 1:  # neighbouring programs read neighbouring columns
        wide = ".to(tl.int64)" if w.program.columns + w.form.block >= 2**31 else ""
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
    ahead = f", num_stages={w.form.stages}" if w.form.stages > 1 else ""
    head = f"for tile in {'tl.' if ahead else ''}range(first, 1 + (rows - 1) // ROWS, {step}{ahead}):"
    with w.block(head if w.form.persistent else ""):
        w.row_index()
        w.line(f"inside = within[:, None]{' & inside_row' if w.addresses.inside_row else ''}")
        w.compute(store.value for store in w.program.stores)
        for n, (store, _) in enumerate(w.partials):
            mask = "inside" if store.columns else "within[:, None]"
            w.line(f"total_{n} += tl.where({mask}, {w.text(store.value)}, 0.0)")
        w.store()
    if w.partials:
        w.line(f"mine = partials + first.to(tl.int64) * {w.width}")
    for n, (store, offset) in enumerate(w.partials):
        mask = ", mask=inside_row" if store.columns and w.addresses.inside_row else ""
        w.line(f"tl.store({w.partial_place(store, offset)}, tl.sum(total_{n}, axis=0, keep_dims=True){mask})")


def _compute_once(w: Writer) -> None:
    """What no row changes; reductions stay in the loop, whose registers they would take."""
    values = [v for v in w.program.values if not v.rows and (v in w.loads or v.op not in REDUCTIONS)]
    w.compute(value for value in values if not any(v.rows for v in walk([value], w.loads.__contains__)))
