"""Emits readable Triton source for a row program: the loop over its tiles (``tiling``), and the kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from fxprec.kernels.rows.emit.addresses import Access, Addresses
from fxprec.kernels.rows.emit.loop import long_rows
from fxprec.kernels.rows.emit.tiling import Tiling
from fxprec.kernels.rows.emit.writer import HEADER, Writer
from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.values import REDUCTIONS, walk

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
