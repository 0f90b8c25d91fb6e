"""How a row program is cut into tiles of rows x columns, and how many programs take them.

Four forms, by what the row program needs::

    flat     one row of any length, no reductions: a program takes one block of columns
    blocks   rows x columns, no reductions: a program takes one block of columns of some rows
    tile     reductions over rows that fit into one tile
    loop     reductions over longer rows: each level of reductions is one more pass over the columns

Where there are column partials a program goes on from tile to tile and adds them up; otherwise it takes one tile. The
grid has one dimension, the only one that may be long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxprec.kernels.rows.program.row_program import Program
from fxprec.kernels.rows.program.values import REDUCTIONS, Value

#: Columns that a reduction may have in one tile.
LONGEST_TILE: Final = 16384
_TILE: Final = 2048
_FLAT: Final = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """The tiling.

    Attributes:
        kind: "flat", "blocks", "tile" or "loop".
        rows: of a tile.
        block: columns of a tile.
        warps: of a program.
        persistent: programs go from tile to tile.
    """

    kind: str
    rows: int
    block: int
    warps: int
    persistent: bool

    def across(self, columns: int) -> int:
        """How many programs share a row."""
        return -(-columns // self.block) if self.kind in ("flat", "blocks") else 1

    def down(self, rows: int, columns: int, resident: int) -> int:
        """How many programs share a column, where ``resident`` of them fill the device."""
        tiles = -(-rows // self.rows)
        return min(tiles, max(1, resident // self.across(columns))) if self.persistent else tiles

    def masked(self, columns: int) -> bool:
        """Whether a tile may reach over the end of a row."""
        return self.kind == "flat" or columns % self.block != 0


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
