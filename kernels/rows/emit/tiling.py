"""Chooses the tiles of rows x columns that a row program is cut into, and the number of programs.

Four kinds, by what the row program needs::

    flat     one row of any length, no reductions: a program takes one block of columns
    blocks   rows x columns, no reductions: a program takes one block of columns of some rows
    tile     reductions over rows that fit into one tile
    loop     reductions over longer rows: each level of reductions is one more pass over the columns

Where there are column partials a program goes on from tile to tile and adds them up (it is *persistent*); otherwise it
takes one tile. The grid has one dimension, the only one that may be long.

A tile must fit into registers: values that spill go through memory, which fusion is to spare. A thread has at most 255,
and a multiprocessor 65,536 for all its threads. The estimate, in *values of the tile*, each of which takes as
many registers of a thread as the thread has elements::

    registers of a thread = 28 + elements of a thread * values        with
    values = live values of rows x columns, and column partials       ``_pressure``
           + live values of one number a row / 4, and row indices / 4  if the tile has several rows
           + half the number of dropouts                              whose draws have numbers of their own
           + 2 * tensors                                              if elements are loaded one by one: addresses

A norm of 768 columns, in a tile of 1024, whose program has 7 values: with 32 elements a thread, so in one warp, that
makes 28 + 32 * 7 = 252, which fits (244 were counted). With 8 values it does not: 8 elements a thread, in four warps.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.values import Value

#: Columns that a reduction may have in one tile.
LONGEST_TILE: Final = 16384
#: Elements of a tile of several short rows: one warp, with 32 elements a thread, which loads ahead. Measured on an H200
#: (2026-11-26, torch 2.11, bfloat16): layer norm of 768 columns with dropout ran at 85 % of a copy's bandwidth forward
#: and 83 % backward (75 % and 44 % with 8 elements a thread), RMS norm of 2048 at 91 % and 88 %.
_SMALL_TILE: Final = 1024
#: Largest tiles of the first two classes; the third is of longer ones.
_TILE_CLASSES: Final = (_SMALL_TILE, LONGEST_TILE // 2)
#: Elements of a thread for each class of tiles, the best first; what follows is tried where registers do not suffice.
_ELEMENTS_PER_THREAD: Final = ((32, 8, 16), (16, 32, 8), (32, 16))
#: Columns of 2 bytes that are read at once, where rows are whole numbers of them.
_VECTOR: Final = 8
#: Elements of a thread where rows are no whole numbers of vectors: each has an address of its own.
_UNVECTORED_PER_THREAD: Final = (16, 8)
#: Rows of such a tile up to which addresses are few, since they differ by what is known to the compiler: layer norm's
#: backward of five tensors took 122 registers with 4 rows, 221 with 8, and spilled with 16.
_SHARED_ADDRESSES: Final = 4
#: Numbers of a row (a value without columns, an index) that take as many registers as one value of the tile: a thread
#: reads four FP32 values of a row at once, so that it has a quarter as many rows as elements. Three norms in a row,
#: which keep seven statistics to the end, took 267 registers with 4 values of a tile, 32 elements a thread, and two
#: dimensions of rows.
_ROW_NUMBERS: Final = 4
#: Registers of a 64-bit number. A row's number is one; with several row dimensions each has three: its index, the
#: remainder for the next dimension, and the offset.
_INDEX: Final = 2
#: Elements of a block of columns where nothing is reduced.
_FLAT: Final = 1024
#: Tiles that are on their way or computed at one time.
_STAGES: Final = 3


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes, warps and pipeline stages of a kernel.

    Attributes:
        kind: "flat", "blocks", "tile" or "loop".
        rows: of a tile.
        block: columns of a tile.
        warps: of a program.
        persistent: programs go from tile to tile.
        stages: of a persistent program's loads, which are ahead of what it computes; 1: none is.
        resident: how many persistent programs there are for each multiprocessor, at most.
    """

    kind: str
    rows: int
    block: int
    warps: int
    persistent: bool
    stages: int = 1
    resident: int = 4

    def across(self, columns: int) -> int:
        """Return how many programs there are along a row."""
        return -(-columns // self.block) if self.kind in ("flat", "blocks") else 1

    def down(self, rows: int, columns: int, device_programs: int) -> int:
        """Return how many programs there are along the rows; the grid has so many times ``across``.

        ``device_programs``: how many persistent programs the device is to run.
        """
        tiles = -(-rows // self.rows)
        return min(tiles, max(1, device_programs // self.across(columns))) if self.persistent else tiles

    def masked(self, columns: int) -> bool:
        """Return whether a tile may reach over the end of a row."""
        return self.kind == "flat" or columns % self.block != 0


def tiling_of(program: RowProgram, flat: bool, count: int, dimensions: int = 1, vectors: bool = True) -> Tiling:
    """Choose the tiling for a program with ``count`` rows.

    Args:
        dimensions: of rows.
        vectors: strides let several columns be read at once.
    """
    columns = max(program.columns, 1)
    partial = any(store.partial for store in program.stores)
    if flat:
        return Tiling("flat", 1, _FLAT, 4, False)
    block = max(16, 1 << (columns - 1).bit_length())
    if not program.reduces and block > _FLAT:
        return _blocks(columns, count, partial)
    wide = vectors and columns % _VECTOR == 0
    rows = max(1, (_SMALL_TILE if wide else _SMALL_TILE // 2) // block) if count > 1 else 1
    values = _values(program, rows, dimensions, wide)
    warps = None if block > LONGEST_TILE else _warps(rows * block, values, wide)
    # Small tiles, of which several rows make one, are not cut further: four warps, whatever the estimate says.
    if warps is None and block > _SMALL_TILE:
        return Tiling("loop", 1, 4096, 8, partial)
    return Tiling("tile", rows, block, warps or 4, partial, _STAGES if partial and rows * block <= _SMALL_TILE else 1)


def _values(program: RowProgram, rows: int, dimensions: int, wide: bool) -> int:
    """Return the values of the tile that registers must hold at a time (see above), for a tile of ``rows``."""
    values = _pressure(program) + sum(value.op == "keep" for value in program.values) // 2
    if rows > 1:
        indices = _INDEX * (1 if dimensions == 1 else 3 * dimensions)
        values += -(-(indices + _live(program, columns=False)) // _ROW_NUMBERS)
    # An address takes two registers, as many as two values.
    if not wide and rows > _SHARED_ADDRESSES:
        values += 2 * _full_tensors(program)
    return values


def _warps(elements: int, values: int, wide: bool) -> int | None:
    """Return the warps for a tile of ``elements`` with ``values`` live at a time, or None if registers do not suffice.

    ``wide``: elements are loaded as vectors. Otherwise a thread has fewer, since each has an address.
    """
    per_thread = _ELEMENTS_PER_THREAD[bisect(_TILE_CLASSES, elements - 1)] if wide else _UNVECTORED_PER_THREAD
    for each in per_thread:
        warps = max(1, elements // (32 * each))
        registers = min(255, 65536 // (32 * warps))
        if warps <= 32 and values <= (registers - 28) // each:
            return warps
    return None


def _full_tensors(program: RowProgram) -> int:
    """Return how many tensors of rows and columns the program loads and stores."""
    read = sum(port.rows and port.columns for _, port in program.loads)
    return read + sum(store.rows and store.columns and not store.partial for store in program.stores)


def _pressure(program: RowProgram) -> int:
    """Return how many values of a tile are live at one time, in the order of the source, with the column partials.

    The estimate of registers was within 15 % for norms with gelu, dropout and biases (of 7 values, with 32 elements a
    thread 244 were counted, and with 16 elements 136).
    """
    return _live(program, columns=True) + sum(store.partial and store.columns for store in program.stores)


def _live(program: RowProgram, columns: bool) -> int:
    """Return how many values of a tile are live at one time; without ``columns`` count those of one number a row."""
    loads = {value for value, _ in program.loads}
    place = {value: number for number, value in enumerate(program.values)}
    first, last = dict(place), dict(place)
    for value in reversed(program.values):
        if value not in loads:
            for argument in (a for a in value.args if isinstance(a, Value)):
                last[argument] = max(last[argument], place[value])
                if argument in loads:
                    first[argument] = place[value]  # backwards through the program: the earliest reader is seen last
    # What is stored is live to the end.
    last |= {store.value: len(place) for store in program.stores if isinstance(store.value, Value)}
    # +1 where a value is first used, -1 after its last use: the running sum is the number of live values. Roundings are
    # not counted: the estimate without them is what was compared with the registers that kernels took.
    change = [0] * (len(place) + 1)
    for value in program.values:
        if value.op != "round" and (value.columns if columns else value.rows and not value.columns):
            change[first[value]] += 1
            change[last[value]] -= 1
    return max(accumulate(change))


def _blocks(columns: int, count: int, partial: bool) -> Tiling:
    """Choose blocks of columns for a program without reductions.

    A bias and gelu of 3072 columns ran at 94 % forward and 81 % backward of a copy's bandwidth (see above).
    """
    # Blocks of 512 where they divide a row, so that none is partly empty, or where a row has many of them anyway.
    halves = columns % 512 == 0 or columns > 4096
    if not partial:
        rows, block = 4 if count > 1 else 1, 512 if halves else 1024
        return Tiling("blocks", rows, block, max(1, rows * block // _SMALL_TILE), False)
    # With partials fewer and larger blocks of one row, and 8 elements a thread: a partial stays in registers for each.
    block = 512 if halves and columns % 1024 and columns <= 4096 else 1024
    return Tiling("blocks", 1, block, block // 256, True, _STAGES, 8)
