"""Where a compiled loop pays on a CPU, against torch's kernels one after the other: both are priced, for given sizes.

A loop reads and writes memory once, where torch does for each kernel of each op, and it is one call from Python; but an
autograd function of Python around it costs as much as several of torch's, and libm's functions take longer than some
kernels that torch has (the exact gelu is oneDNN's). What each takes is the device's (``LoopPrices``: measured by
``python -m fxprec calibrate``, or shipped); what an op is made of is known here::

    op by op    kernels of each node (``_TORCHS``), of its size and dtype; in training those of its gradients, too
    as a loop   a call, what it loads and stores and computes for each element (``emit.loop_counts``)

``python -m benchmarks loops`` measures regions both ways, beside what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fxprec.kernels.rows.emit.loop_counts import Step, count
from fxprec.kernels.rows.program.region_node import op_name
from fxprec.kernels.rows.program.row_program import Program
from fxprec.kernels.rows.program.terms import Declined

if TYPE_CHECKING:
    from fxprec.kernels.rows.run.plan import Plan

#: What it takes for so many elements.
Seconds = Callable[[float], float]
#: torch's kernels by what they take: a step for each element, or a norm.
Kernel = Step | Literal["norm"]
#: Steps that a loop of ``LoopPrices.stepped`` has more than the plain one.
MORE_STEPS: Final[Mapping[Step, int]] = MappingProxyType({"plain": 16, "exp": 4, "tanh": 4, "erf": 4})
#: Loads and stores of the plain loop, ``x * y``.
_ACCESSES: Final = 3
#: Elements by which ops are compared without sizes: a few hundred thousand, which fit into the cache.
_TYPICAL: Final = float(1 << 18)


@dataclass(frozen=True, slots=True)
class LoopPrices:
    """What a CPU takes for torch's kernels and for loops; elements -> seconds, where not said otherwise by dtype.

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

    def of_kernels(self, work: Torchs, dtype: torch.dtype, elements: float, trained: bool) -> float:
        """Of torch's kernels for one node, in training with those of its gradients."""
        kernels, both = self.kernels[dtype], self.trained[dtype]
        found = sum(kernels[each](elements) for each in work.forward)
        if not trained:
            return found
        plain = kernels["plain"](elements)
        gradient = (both["plain"](elements) - plain) / 2  # of a product's two factors, each a plain kernel
        for each in work.backward:
            if each == "norm":
                found += both["norm"](elements) - kernels["norm"](elements)
            else:
                found += gradient + kernels[each](elements) - plain
        return found

    def of_loop(self, program: Program, elements: float) -> float:
        """Of all elements, without the call."""
        counts = count(program)
        accesses = sum(self._access(dtype, elements) * times for dtype, times in counts.accesses.items())
        return accesses + sum(self.step(kind, elements) * times for kind, times in counts.steps.items())

    def step(self, kind: Step, elements: float) -> float:
        """Of one step more in a loop."""
        more = self.stepped[kind](elements) - self.loop[torch.bfloat16](elements)
        return max(0.0, more) / MORE_STEPS[kind]

    def call(self, trained: bool, sums: int) -> float:
        """Of a loop, whatever its size; in training two, with what autograd and sums over rows take."""
        if not trained:
            return min(loop(1) for loop in self.loop.values())
        return self.loop_trained(1) + sums * max(0.0, self.loop_sums(1) - self.loop_trained(1))

    def _access(self, dtype: torch.dtype, elements: float) -> float:
        loop = self.loop.get(dtype, self.loop[torch.float32])
        return (loop(elements) - loop(1)) / _ACCESSES


class TooDear(Declined):
    """A loop could serve, and takes more time than torch's kernels."""


class Torchs(NamedTuple):
    """What torch runs for an op on a CPU: kernels of the forward and of the gradients."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


_TORCHS: Final[Mapping[str, Torchs]] = MappingProxyType({
    "clone": Torchs((), ()), "contiguous": Torchs((), ()), "dropout": Torchs((), ()),  # only given back, or copied
    "add": Torchs(("plain",), ()), "sub": Torchs(("plain",), ()),  # whose gradients are the result's
    "rms_norm": Torchs(("plain",) * 5, ("plain",) * 16),
    "normalize": Torchs(("plain",) * 4, ("plain",) * 12),
    "layer_norm": Torchs(("norm",), ("norm",)),
    "softmax": Torchs(("exp",), ("plain",)), "log_softmax": Torchs(("exp",), ("exp",)),
    "exp": Torchs(("exp",), ("plain",)), "exp2": Torchs(("exp",), ("plain",)), "sigmoid": Torchs(("exp",), ("plain",)),
    "silu": Torchs(("exp",), ("exp",)),
    "tanh": Torchs(("tanh",), ("plain",)), "expm1": Torchs(("tanh",), ("plain",)),
    "log": Torchs(("tanh",), ("plain",)), "log2": Torchs(("tanh",), ("plain",)),
    "log1p": Torchs(("tanh",), ("plain",)),
    "softplus": Torchs(("tanh",), ("exp",)), "logsigmoid": Torchs(("tanh",), ("exp",)),
    "mish": Torchs(("tanh", "tanh"), ("tanh", "tanh")),
    "erf": Torchs(("erf",), ("exp",)),
    "gelu": Torchs(("erf",), ("erf", "plain")),
})  # fmt: skip
_TANH_GELU: Final = Torchs(("tanh",), ("tanh",))


def torchs_of(node: Node) -> Torchs:
    """What torch runs for a node of a region: of an op that is not listed a plain kernel, and one for each gradient."""
    name = op_name(node)
    approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
    if name == "gelu" and approximate == "tanh":
        return _TANH_GELU
    return _TORCHS.get(name) or Torchs(("plain",), ("plain",) * len(node.all_input_nodes))


def kernels_of(nodes: Iterable[Node]) -> int:
    """How many kernels torch runs for the forward of these nodes."""
    return sum(len(torchs_of(node).forward) for node in nodes if node.op not in ("placeholder", "output"))


def gains_alone(node: Node) -> bool:
    """Whether a loop may gain where it holds this node alone: several kernels, or slow ones in both directions."""
    work = torchs_of(node)
    return len(work.forward) > 1 or ("tanh" in work.forward and "tanh" in work.backward)


def is_faster_by_torch(node: Node, prices: LoopPrices) -> bool:
    """Whether torch's kernel for this row operation takes less time than its part of a loop."""
    (kernel, *others) = torchs_of(node).forward or ("plain",)
    if others or kernel == "norm":
        return False
    return prices.kernels[torch.bfloat16][kernel](_TYPICAL) < prices.step(kernel, _TYPICAL)


def seconds(gm: GraphModule, plan: Plan, prices: LoopPrices) -> tuple[float, float]:
    """(op by op, as a loop), forward and, where one follows, backward.

    Args:
        gm: a region's graph, for which the plan was made: its nodes know their shapes.
    """
    trained = plan.derived.backward is not None
    ops = sum(_seconds_of(node, prices, trained) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
    elements = float(plan.layout.rows * plan.layout.columns)
    programs = [plan.derived.forward, *([plan.backward_program.program] if trained else [])]
    sums = sum(store.partial for program in programs for store in program.stores)
    return ops, prices.call(trained, sums) + sum(prices.of_loop(program, elements) for program in programs)


def check_gain(gm: GraphModule, plan: Plan, prices: LoopPrices) -> None:
    """Raise ``TooDear`` where a region takes less time op by op; the arguments are those of ``seconds``."""
    ops, loop = seconds(gm, plan, prices)
    if ops < loop:
        raise TooDear(f"op by op takes {1e6 * ops:.3g} us, a loop {1e6 * loop:.3g} us, by the device's costs")


def _seconds_of(node: Node, prices: LoopPrices, trained: bool) -> float:
    made, sources = node.meta["torch_dtype"], node.all_input_nodes
    work = torchs_of(node)
    others = [each for each in sources if each.meta["torch_dtype"] not in (made, torch.bool)]
    if others and len(sources) > 1:
        work = work._replace(backward=(*work.backward, "plain"))  # a gradient is cast
    elements = max(prod(each.meta["shape"]) for each in (node, *sources))
    return prices.of_kernels(work, made if made in prices.kernels else torch.float32, float(elements), trained)
