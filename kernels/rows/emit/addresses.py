"""Writes the offsets and masks of a tile's elements in memory, as Triton expressions.

``row`` (or ``row_0``, ``row_1``, ... where several strides are needed) counts rows in 64 bits, ``column`` columns in as
many as they need. What varies along rows alone is a vector of them, read and written once a row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """Strides of a tensor as a kernel writes them, for each row dimension (``rows``) and for the ``columns``.

    "" where the tensor does not vary, "1", "COLUMNS" (that many), or the name of a stride argument.
    """

    rows: tuple[str, ...]
    columns: str


@dataclass(frozen=True, slots=True)
class Addresses:
    """Offsets and masks for the tiles of one kernel.

    Attributes:
        flat: there is one row of any length.
        dimensions: how many row dimensions there are.
        inside_row: mask of the tile's columns that exist; "" where tiles never reach over the end of a row.
    """

    flat: bool
    dimensions: int
    inside_row: str

    def rowwise(self, rows: bool, columns: bool) -> bool:
        """Return whether a tensor that varies so is a vector, with one element for each row of the tile."""
        return rows and not columns and not self.flat

    def offset(self, access: Access, rows: bool, columns: bool) -> str:
        """Return the offset from the pointer of a tensor that varies along rows, columns, both or neither."""
        names = ["row"] if self.dimensions == 1 else [f"row_{i}" for i in range(self.dimensions)]
        steps = [(name, stride) for name, stride in zip(names, access.rows, strict=False) if stride]
        parts = [name if stride == "1" else f"{name} * {stride}" for name, stride in steps]
        if self.rowwise(rows, columns):
            # A stride of 0 still needs the shape of the rows, hence ``row * 0``.
            return "".join(f" + {part}" for part in parts) or " + row * 0"
        text = f" + ({' + '.join(parts)})[:, None]" if parts else ""
        if access.columns:
            return text + (" + column" if access.columns == "1" else f" + column.to(tl.int64) * {access.columns}")
        return text + " + column * 0" if columns or parts else text

    def mask(self, rows: bool, columns: bool) -> str:
        """Return the mask of the tile's elements that exist; "" where all do."""
        if self.flat:
            return "inside" if columns else ""
        if rows and columns:
            return "inside"
        if columns:
            return self.inside_row
        return "within" if rows else ""
