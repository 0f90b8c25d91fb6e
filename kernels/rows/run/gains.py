"""Decides where a compiled loop pays on a CPU: prices it and torch's kernels, one after the other, for given sizes.

A loop reads and writes memory once, where torch does for each kernel of each op, and it is one call from Python; but an
autograd function of Python around it costs as much as several of torch's, and libm's functions take longer than some
kernels that torch has (the exact gelu is oneDNN's). The device decides how long each takes (``LoopPrices``: measured
by ``python -m fxprec calibrate``, or shipped); this file knows which kernels an op consists of::

    op by op    kernels of each node (``_ATEN_KERNELS``), of its size and dtype; in training those of its gradients, too
    as a loop   a call, what it loads and stores and computes for each element (``count``)

``python -m benchmarks loops`` measures regions both ways, beside these prices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import GraphModule, Node

from fxprec.kernels.rows.emit.tiling import reduction_levels
from fxprec.kernels.rows.program.prices import LoopPrices, Step, aten_kernels_of
from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.terms import Declined
from fxprec.kernels.rows.program.values import Value, walk

if TYPE_CHECKING:
    from fxprec.kernels.rows.run.plan import RegionPlan


class SlowerThanOps(Declined):
    """Refusal of a region that a loop supports but runs slower than torch's kernels."""


def seconds(gm: GraphModule, plan: RegionPlan, prices: LoopPrices) -> tuple[float, float]:
    """Return the seconds of a region (op by op, as a loop), forward and, where one follows, backward.

    Args:
        gm: a region's graph, for which the plan was made: its nodes know their shapes.
    """
    trained = plan.derived.backward is not None
    ops = sum(_seconds_of(node, prices, trained) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
    elements = float(plan.layout.rows * plan.layout.columns)
    programs = [plan.derived.forward, *([plan.backward_program.program] if trained else [])]
    sums = sum(store.partial for program in programs for store in program.stores)
    return ops, prices.call(trained, sums) + sum(_seconds_of_loop(program, prices, elements) for program in programs)


def check_gain(gm: GraphModule, plan: RegionPlan, prices: LoopPrices) -> None:
    """Raise ``SlowerThanOps`` if a region takes less time op by op; the arguments are those of ``seconds``."""
    ops, loop = seconds(gm, plan, prices)
    if ops < loop:
        raise SlowerThanOps(f"op by op takes {1e6 * ops:.3g} us, a loop {1e6 * loop:.3g} us, by the device's costs")


def _seconds_of(node: Node, prices: LoopPrices, trained: bool) -> float:
    made, sources = node.meta["torch_dtype"], node.all_input_nodes
    work = aten_kernels_of(node)
    others = [each for each in sources if each.meta["torch_dtype"] not in (made, torch.bool)]
    if others and len(sources) > 1:
        work = work._replace(backward=(*work.backward, "plain"))  # a gradient is cast
    elements = max(prod(each.meta["shape"]) for each in (node, *sources))
    return prices.of_kernels(work, made if made in prices.kernels else torch.float32, float(elements), trained)


def _seconds_of_loop(program: RowProgram, prices: LoopPrices, elements: float) -> float:
    """Return the seconds of a loop over all elements, without the call."""
    counts = count(program)
    accesses = sum(prices.access(dtype, elements) * times for dtype, times in counts.accesses.items())
    return accesses + sum(prices.step(kind, elements) * times for kind, times in counts.steps.items())


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
