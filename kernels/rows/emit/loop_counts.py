"""Counts the loads, stores and computations of a compiled loop (``loops``) for each element, to price it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from fxprec.kernels.rows.emit.tiling import reduction_levels
from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.values import Value, walk

#: Steps of a loop by what they take: one or two instructions, or a function of libm.
Step = Literal["plain", "exp", "tanh", "erf"]
#: Functions of libm -> the one of these three that takes about as long.
_LIBM: Final[MappingProxyType[str, Step]] = MappingProxyType({
    "exp": "exp", "exp2": "exp", "sigmoid": "exp",
    "tanh": "tanh", "expm1": "tanh", "log": "tanh", "log2": "tanh", "log1p": "tanh",
    "erf": "erf",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """Work of a loop for one element of rows x columns.

    Attributes:
        accesses: loads and stores of memory, by dtype; each tensor that varies along rows and columns counts once.
        steps: computations, by kind; a value read again from the cache counts as a plain one.
    """

    accesses: Counter[torch.dtype]
    steps: Counter[Step]


def count(program: RowProgram) -> Counts:
    """Count the work of a program's loops for each element.

    Each loop over the columns loads and computes anew, except for functions of libm; work once a row costs nothing.
    """
    loads = dict(program.loads)
    levels = reduction_levels(program)
    reductions = {value for level in levels for value in level}
    loops = [[value.args[0] for value in level] for level in levels]
    loops.append([store.value for store in program.stores if store.columns])
    accesses: Counter[torch.dtype] = Counter()
    steps: Counter[Step] = Counter({"plain": len(reductions)})
    seen: set[Value] = set()
    stored = {store.value for store in program.stores if store.exact}  # a store rounds anyway
    for roots in loops:
        for value in walk([root for root in roots if isinstance(root, Value)], {*loads, *reductions}.__contains__):
            if not value.columns or (value.op == "round" and value in stored):
                continue
            again, kind = value in seen, _LIBM.get(value.op, "plain")
            seen.add(value)
            if value in loads and value.rows and not again:
                accesses[loads[value].dtype] += 1
            elif kind == "plain" or not again:
                steps[kind] += 1
    for store in program.stores:
        if store.partial:  # read from the task's own row, added to and written there
            steps["plain"] += 2 * store.columns
        else:
            accesses[store.dtype] += store.columns
    return Counts(accesses, steps)
