"""Prices torch's kernels and compiled loops on a CPU, and decides where a loop pays: for a region of given sizes.

A loop reads and writes memory once, where torch does for each kernel of each op, and it is one call from Python; but an
autograd function of Python around it costs as much as several of torch's, and libm's functions take longer than some
kernels that torch has (the exact gelu is oneDNN's). The device decides how long each takes (``LoopPrices``: measured
by ``python -m fxprec calibrate``, or shipped); this file knows which kernels an op consists of::

    op by op    kernels of each node (``_ATEN_KERNELS``), of its size and dtype; in training those of its gradients, too
    as a loop   a call, what it loads and stores and computes for each element (``count``)

``(x + y) * y`` of n elements, without gradients, takes::

    op by op    2 * kernels["plain"](n)
    as a loop   call + 3 * access(n) + 2 * step("plain", n)         loads of x and y, and a store; two steps

``python -m benchmarks loops`` measures regions both ways, beside these prices. The fusion pass asks for one node at a
time, without sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fxprec.kernels.rows.program.region_graph import op_name
from fxprec.kernels.rows.program.row_program import RowProgram
from fxprec.kernels.rows.program.values import Declined, Value, walk

#: Steps of a loop by what they take: one or two instructions ("plain"), or as long as this function of libm.
Step = Literal["plain", "exp", "tanh", "erf"]
#: Time for a number of elements.
Seconds = Callable[[float], float]
#: torch's kernels by what they take: a step for each element, or a norm.
Kernel = Step | Literal["norm"]
#: Steps that a loop of ``LoopPrices.stepped`` has more than ``x * y``. The difference of their times divided by this is
#: the price of one: where ``x * y`` takes 50 us, and with 4 exponentials more 90 us, an exponential takes 10 us.
MORE_STEPS: Final[Mapping[Step, int]] = MappingProxyType({"plain": 16, "exp": 4, "tanh": 4, "erf": 4})
#: Loads and stores of the loop ``x * y``, which are taken for all its time.
_ACCESSES: Final = 3
#: Elements by which ops are compared without sizes: a few hundred thousand, which fit into the cache.
_TYPICAL: Final = float(1 << 18)


class AtenKernels(NamedTuple):
    """Kernels that torch runs for an op on a CPU, of the forward and of the gradients."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


_ATEN_KERNELS: Final[Mapping[str, AtenKernels]] = MappingProxyType({
    # The argument itself, or a copy: torch computes nothing. Dropout is one that drops nothing: loops have no other.
    "clone": AtenKernels((), ()), "contiguous": AtenKernels((), ()), "dropout": AtenKernels((), ()),
    "add": AtenKernels(("plain",), ()), "sub": AtenKernels(("plain",), ()),  # whose gradients are the result's
    "rms_norm": AtenKernels(("plain",) * 5, ("plain",) * 16),
    "normalize": AtenKernels(("plain",) * 4, ("plain",) * 12),
    "layer_norm": AtenKernels(("norm",), ("norm",)),
    "softmax": AtenKernels(("exp",), ("plain",)), "log_softmax": AtenKernels(("exp",), ("exp",)),
    "exp": AtenKernels(("exp",), ("plain",)), "exp2": AtenKernels(("exp",), ("plain",)),
    "sigmoid": AtenKernels(("exp",), ("plain",)),
    "silu": AtenKernels(("exp",), ("exp",)),
    "tanh": AtenKernels(("tanh",), ("plain",)), "expm1": AtenKernels(("tanh",), ("plain",)),
    "log": AtenKernels(("tanh",), ("plain",)), "log2": AtenKernels(("tanh",), ("plain",)),
    "log1p": AtenKernels(("tanh",), ("plain",)),
    "softplus": AtenKernels(("tanh",), ("exp",)), "logsigmoid": AtenKernels(("tanh",), ("exp",)),
    "mish": AtenKernels(("tanh", "tanh"), ("tanh", "tanh")),
    "erf": AtenKernels(("erf",), ("exp",)),
    "gelu": AtenKernels(("erf",), ("erf", "plain")),
})  # fmt: skip
_TANH_GELU: Final = AtenKernels(("tanh",), ("tanh",))


@dataclass(frozen=True, slots=True)
class LoopPrices:
    """Prices of torch's kernels and of loops on a CPU, by dtype: functions from elements to seconds.

    Attributes:
        kernels: one call of torch: ``x * y``, ``silu``, ``tanh``, the exact ``gelu``, a layer norm.
        trained: likewise forward and backward, of ``x * y`` and of a layer norm.
        loop: ``x * y`` as a loop.
        loop_trained: its forward and backward.
        loop_sums: the same where one operand is a row, whose gradient is a sum over rows.
        stepped: ``x * y`` as a loop with ``MORE_STEPS`` of a kind, in bfloat16: what is in registers is FP32 anyway.
    """

    kernels: Mapping[torch.dtype, Mapping[Kernel, Seconds]]
    trained: Mapping[torch.dtype, Mapping[Literal["plain", "norm"], Seconds]]
    loop: Mapping[torch.dtype, Seconds]
    loop_trained: Seconds
    loop_sums: Seconds
    stepped: Mapping[Step, Seconds]

    def of_kernels(self, work: AtenKernels, dtype: torch.dtype, elements: float, trained: bool) -> float:
        """Return the seconds of torch's kernels for one node, in training with those of its gradients.

        A gradient's kernel is taken for one of a product's gradients, which were measured with autograd's part, plus
        what this kind of kernel takes more than a plain one. ``silu`` in training::

            kernels["exp"] + (trained["plain"] - kernels["plain"]) / 2 + kernels["exp"] - kernels["plain"]
        """
        kernels, both = self.kernels[dtype], self.trained[dtype]
        found = sum(kernels[each](elements) for each in work.forward)
        if not trained:
            return found
        plain = kernels["plain"](elements)
        gradient = (both["plain"](elements) - plain) / 2  # a product has two gradients, each a plain kernel
        for each in work.backward:
            if each == "norm":
                found += both["norm"](elements) - kernels["norm"](elements)
            else:
                found += gradient + kernels[each](elements) - plain
        return found

    def step(self, kind: Step, elements: float) -> float:
        """Return the seconds of one more step of a kind in a loop over all elements."""
        more = self.stepped[kind](elements) - self.loop[torch.bfloat16](elements)
        return max(0.0, more) / MORE_STEPS[kind]

    def call(self, trained: bool, sums: int) -> float:
        """Return the seconds of a call whatever its size, for which a loop over one element stands.

        In training these are two calls and autograd's part, and the second stages of ``sums`` column partials.
        """
        if not trained:
            return min(loop(1) for loop in self.loop.values())
        return self.loop_trained(1) + sums * max(0.0, self.loop_sums(1) - self.loop_trained(1))

    def access(self, dtype: torch.dtype, elements: float) -> float:
        """Return the seconds of one load or store of all elements; dtypes without a price of their own go as FP32."""
        loop = self.loop.get(dtype, self.loop[torch.float32])
        return (loop(elements) - loop(1)) / _ACCESSES


def aten_kernels_of(node: Node) -> AtenKernels:
    """Return the kernels that torch runs for a node; an unlisted op has a plain one, and one for each gradient."""
    name = op_name(node)
    approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
    if name == "gelu" and approximate == "tanh":
        return _TANH_GELU
    return _ATEN_KERNELS.get(name) or AtenKernels(("plain",), ("plain",) * len(node.all_input_nodes))


def count_aten_kernels(nodes: Iterable[Node]) -> int:
    """Return how many kernels torch runs for the forward of these nodes."""
    return sum(len(aten_kernels_of(node).forward) for node in nodes if node.op not in ("placeholder", "output"))


def may_gain_alone(node: Node) -> bool:
    """Return whether a loop of this node alone may pay: it has several kernels, or slow ones in both directions."""
    work = aten_kernels_of(node)
    return len(work.forward) > 1 or ("tanh" in work.forward and "tanh" in work.backward)


def is_faster_by_torch(node: Node, prices: LoopPrices) -> bool:
    """Return whether torch's kernel for this row operation takes less time than its step in a loop."""
    # What costs torch nothing is no step of a loop either: it is compared as a plain op, so that a loop takes it in.
    (kernel, *others) = aten_kernels_of(node).forward or ("plain",)
    # Of these a loop saves passes over memory, which the price of a step leaves out.
    if others or kernel == "norm":
        return False
    return prices.kernels[torch.bfloat16][kernel](_TYPICAL) < prices.step(kernel, _TYPICAL)


class SlowerThanOps(Declined):
    """Refusal of a region that a loop supports but runs slower than torch's kernels."""


def seconds(gm: GraphModule, programs: Sequence[RowProgram], elements: int, prices: LoopPrices) -> tuple[float, float]:
    """Return the seconds of a region (op by op, as a loop), forward and, where one follows, backward.

    Args:
        gm: a region's graph, for which a plan was made: its nodes know their shapes.
        programs: of the plan, forward and maybe backward.
        elements: of rows x columns.
    """
    trained = len(programs) > 1
    ops = sum(_seconds_of(node, prices, trained) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
    sums = sum(store.partial for program in programs for store in program.stores)
    loops = sum(_seconds_of_loop(program, prices, float(elements)) for program in programs)
    return ops, prices.call(trained, sums) + loops


def check_gain(gm: GraphModule, programs: Sequence[RowProgram], elements: int, prices: LoopPrices) -> None:
    """Raise ``SlowerThanOps`` if a region takes less time op by op; the arguments are those of ``seconds``."""
    ops, loop = seconds(gm, programs, elements, prices)
    if ops < loop:
        raise SlowerThanOps(f"op by op takes {1e6 * ops:.3g} us, a loop {1e6 * loop:.3g} us, by the device's costs")


def _seconds_of(node: Node, prices: LoopPrices, trained: bool) -> float:
    """Return the seconds of torch's kernels for a node of a region, whose nodes know their shapes and dtypes."""
    made, sources = node.meta["torch_dtype"], node.all_input_nodes
    work = aten_kernels_of(node)
    # An op of several dtypes casts its arguments within its kernel, but a gradient by a kernel of its own. With one
    # source the op is a cast itself, and its gradient's kernel is listed already.
    others = [each for each in sources if each.meta["torch_dtype"] not in (made, torch.bool)]
    if others and len(sources) > 1:
        work = work._replace(backward=(*work.backward, "plain"))
    elements = max(prod(each.meta["shape"]) for each in (node, *sources))
    return prices.of_kernels(work, made if made in prices.kernels else torch.float32, float(elements), trained)


def _seconds_of_loop(program: RowProgram, prices: LoopPrices, elements: float) -> float:
    """Return the seconds of a loop over all elements, without the call."""
    counts = count(program)
    accesses = sum(prices.access(dtype, elements) * times for dtype, times in counts.accesses.items())
    return accesses + sum(prices.step(kind, elements) * times for kind, times in counts.steps.items())


#: Functions of libm -> the one of these three that takes about as long.
LIBM_STEPS: Final[MappingProxyType[str, Step]] = MappingProxyType({
    "exp": "exp", "exp2": "exp", "sigmoid": "exp",
    "tanh": "tanh", "expm1": "tanh", "log": "tanh", "log2": "tanh", "log1p": "tanh",
    "erf": "erf",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """Work of a loop for one element of rows x columns.

    Attributes:
        accesses: loads and stores of memory, by dtype; each tensor that varies along rows and columns counts once.
        steps: computations, by kind; a tensor that a later loop loads again, from the cache, counts as a plain one.
    """

    accesses: Counter[torch.dtype]
    steps: Counter[Step]


def count(program: RowProgram) -> Counts:
    """Count the work of a program's loops for each element.

    ==================================  ==========================  =================================================
    value of a loop over the columns    in the first loop           in each later loop that needs it
    ==================================  ==========================  =================================================
    load of rows x columns              an access                   a plain step: it is in the cache
    load without rows, plain op         a plain step                a plain step: it is computed anew
    function of libm                    a step of its kind          nothing: it is kept, and read from the cache
    reduction                           a plain step                nothing: it is a number of the row
    rounding to the dtype of a store    nothing: part of the store  nothing
    without columns                     nothing: it is computed     nothing
                                        once a row
    ==================================  ==========================  =================================================

    What a kept value was computed from is counted in later loops all the same, though they do not compute it: a few
    plain steps too many (two of ten in a softmax of ``2 * x``). A store counts as an access.
    """
    loads = dict(program.loads)
    # One loop over the columns for each level of reductions, and one that stores.
    levels = program.levels
    reductions = {value for level in levels for value in level}
    loops = [[value.args[0] for value in level] for level in levels]
    loops.append([store.value for store in program.stores if store.columns])
    accesses: Counter[torch.dtype] = Counter()
    steps: Counter[Step] = Counter({"plain": len(reductions)})
    seen: set[Value] = set()
    stored = {store.value for store in program.stores if store.exact}
    for roots in loops:
        for value in walk([root for root in roots if isinstance(root, Value)], {*loads, *reductions}.__contains__):
            if not value.columns or (value.op == "round" and value in stored):
                continue
            again, kind = value in seen, LIBM_STEPS.get(value.op, "plain")
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
