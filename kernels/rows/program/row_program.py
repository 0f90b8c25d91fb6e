"""Defines row programs: what one kernel loads, computes and stores. A region has a forward and a backward program.

The forward program computes the region's outputs, and stores the row statistics (results of reductions) that the
backward will ask for. The backward program starts again from what is in memory anyway: of the region's inputs and
outputs it loads those that make the fewest bytes, and computes the rest anew. Gradients of what does not vary along
rows (a bias, a norm's weight) are column partials, added up by a second stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxprec.kernels.rows.program.values import DECIDING, REDUCTIONS, Builder, Operand, Value, walk


@dataclass(frozen=True, slots=True)
class Port:
    """Dtype of a tensor that a program loads, and whether it varies along rows and columns.

    ``some_rows``: of several row dimensions it varies along some only.
    """

    dtype: torch.dtype
    rows: bool
    columns: bool
    some_rows: bool = False

    def size(self, rows: int, columns: int) -> int:
        """Return the bytes of the tensor, if it varies along all the rows or along none."""
        return self.dtype.itemsize * (rows if self.rows else 1) * (columns if self.columns else 1)


@dataclass(frozen=True, slots=True)
class Store:
    """Tensor that a program writes.

    ``partial``: summed over rows, as FP32, by a second stage. ``dropped``: how many trailing dimensions it lacks.
    """

    value: Operand
    dtype: torch.dtype
    rows: bool
    columns: bool
    partial: bool = False
    dropped: int = 0

    @property
    def port(self) -> Port:
        """Port by which the backward loads this tensor."""
        return Port(self.dtype, self.rows, self.columns)

    @property
    def exact(self) -> bool:
        """True if loading the tensor gives back the very value that was computed with."""
        value = self.value
        # A store in FP32 rounds nothing; a low one nothing that the program did not round before.
        return isinstance(value, Value) and (
            self.dtype is torch.float32 or (value.op == "round" and value.attribute is self.dtype)
        )


@dataclass(frozen=True, slots=True)
class RowProgram:
    """Computation of one kernel over rows x columns.

    Attributes:
        loads: (value, port) of each tensor that is read, in the order of the kernel's arguments.
        stores: of each tensor that is written, likewise.
        seeds: how many dropouts there are.
        columns: of a row; a program with reductions is made for this number.
    """

    loads: tuple[tuple[Value, Port], ...]
    stores: tuple[Store, ...]
    seeds: int
    columns: int

    @property
    def loaded(self) -> set[Value]:
        """Values that are read from memory, where every walk over the program ends."""
        return {value for value, _ in self.loads}

    @property
    def values(self) -> list[Value]:
        """All values of the program in the order of computation: arguments before results."""
        roots = [store.value for store in self.stores if isinstance(store.value, Value)]
        return walk(roots, self.loaded.__contains__)

    @property
    def is_discontinuous(self) -> bool:
        """True if an op is discontinuous (``DECIDING``): the last bits of its operands then decide between results.

        Such a program is compiled without FMAs: the compiler might fuse a product with a sum in one of the two kernels
        and not in the other, and then their bits would differ.
        """
        return bool(self._discontinuous)

    @property
    def exact_values(self) -> set[Value]:
        """Values that discontinuous ops are computed from.

        The backward computes such ops anew, or looks for the operand that equals a maximum. So these values must have
        the same bits in both kernels, however those are compiled.
        """
        # The walk ends at loads: both kernels read the same bits from memory.
        operands = [a for value in self._discontinuous for a in value.args if isinstance(a, Value)]
        return {*walk(operands, self.loaded.__contains__)}

    @property
    def _discontinuous(self) -> list[Value]:
        # A maximum that the forward saved is loaded, not computed: its bits are those that the forward found.
        loaded = self.loaded
        return [value for value in self.values if value.op in DECIDING and value not in loaded]

    @property
    def partials(self) -> list[tuple[Store, int]]:
        """Column partials, each with its first column in the row of ``partial_width`` numbers that a program writes."""
        found, width = [], 0
        for store in self.stores:
            if store.partial:
                found.append((store, width))
                width += self.columns if store.columns else 1
        return found

    @property
    def partial_width(self) -> int:
        """Number of columns of all column partials together; 0 without any."""
        return sum(self.columns if store.columns else 1 for store in self.stores if store.partial)

    @property
    def reduces(self) -> bool:
        """True if the program reduces over columns."""
        return bool(self.levels)

    @property
    def levels(self) -> list[list[Value]]:
        """Reductions, grouped by how many others lie beneath them: each level takes a pass over a long row."""
        loaded = self.loaded
        level: dict[Value, int] = {}
        found: list[list[Value]] = []
        for value in self.values:
            beneath = 0 if value in loaded else max((level[a] for a in value.args if isinstance(a, Value)), default=0)
            if value.op in REDUCTIONS and value not in loaded:
                found += [[]] if beneath == len(found) else []
                found[beneath].append(value)
                beneath += 1
            level[value] = beneath
        return found


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward program of a region, with the values that the backward can start from.

    Attributes:
        builder: made the values; the backward goes on with it.
        inputs: the value of each graph input that is a tensor.
        outputs: the store of each graph output.
        made: how many values the forward has; values with this number or a higher one belong to the backward.
    """

    program: RowProgram
    builder: Builder
    inputs: tuple[Value, ...]
    input_ports: tuple[Port, ...]
    outputs: tuple[Store, ...]
    made: int

    def program_with_statistics(self, values: Sequence[Value]) -> RowProgram:
        """Return the program extended by the stores of these row statistics."""
        # After the outputs, so that a launch without a backward leaves them out.
        stores = (*self.outputs, *(Store(v, torch.float32, v.rows, False) for v in values))
        return replace(self.program, stores=stores)


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward program of a region, with the tensors that the forward saves for it.

    Attributes:
        program: loads ``saved`` and then the cotangents; stores a gradient for each wanted input.
        saved: ("input" | "output" | "statistic", number) of what the forward keeps for it, in the order of the loads.
        double_backward_sources: (value, source) of what is kept besides, for a double backward alone: it computes the
            statistics again, which takes inputs that this program, with the statistics at hand, does not read.
        statistics: the forward's reductions among the loads.
        cotangents: numbers of the outputs whose gradients the program loads, after ``saved``.
        wanted: numbers of the inputs that get gradients.
        stored_in: for each of them the number of its store; equal gradients share one.
        owners: the other way: for each store the number of the input that it was made for first.
    """

    program: RowProgram
    saved: tuple[tuple[str, int], ...]
    double_backward_sources: tuple[tuple[Value, tuple[str, int]], ...]
    statistics: tuple[Value, ...]
    cotangents: tuple[int, ...]
    wanted: tuple[int, ...]
    stored_in: tuple[int, ...]
    owners: tuple[int, ...]
