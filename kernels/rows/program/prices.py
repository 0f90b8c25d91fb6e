"""Prices torch's kernels and the work of compiled loops on a CPU, and lists the kernels that torch runs for each op.

The prices are the device's: measured by ``python -m fxprec calibrate``, or shipped. ``run.gains`` adds them up for a
region and compares; the fusion pass asks for one node at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import torch
from torch.fx import Node

from fxprec.kernels.rows.program.region_graph import op_name

#: Steps of a loop by what they take: one or two instructions, or a function of libm.
Step = Literal["plain", "exp", "tanh", "erf"]
#: Time for a number of elements.
Seconds = Callable[[float], float]
#: torch's kernels by what they take: a step for each element, or a norm.
Kernel = Step | Literal["norm"]
#: Steps that a loop of ``LoopPrices.stepped`` has more than the plain one.
MORE_STEPS: Final[Mapping[Step, int]] = MappingProxyType({"plain": 16, "exp": 4, "tanh": 4, "erf": 4})
#: Loads and stores of the plain loop, ``x * y``.
_ACCESSES: Final = 3
#: Elements by which ops are compared without sizes: a few hundred thousand, which fit into the cache.
_TYPICAL: Final = float(1 << 18)


class AtenKernels(NamedTuple):
    """Kernels that torch runs for an op on a CPU, of the forward and of the gradients."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


_ATEN_KERNELS: Final[Mapping[str, AtenKernels]] = MappingProxyType({
    # The argument itself, or a copy: torch computes nothing.
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
        """Return the seconds of torch's kernels for one node, in training with those of its gradients."""
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

    def step(self, kind: Step, elements: float) -> float:
        """Return the seconds of one more step of a kind in a loop over all elements."""
        more = self.stepped[kind](elements) - self.loop[torch.bfloat16](elements)
        return max(0.0, more) / MORE_STEPS[kind]

    def call(self, trained: bool, sums: int) -> float:
        """Return the seconds of a call whatever its size; in training of two, with autograd and the sums over rows."""
        if not trained:
            return min(loop(1) for loop in self.loop.values())
        return self.loop_trained(1) + sums * max(0.0, self.loop_sums(1) - self.loop_trained(1))

    def access(self, dtype: torch.dtype, elements: float) -> float:
        """Return the seconds of one load or store of all elements."""
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
    (kernel, *others) = aten_kernels_of(node).forward or ("plain",)
    if others or kernel == "norm":
        return False
    return prices.kernels[torch.bfloat16][kernel](_TYPICAL) < prices.step(kernel, _TYPICAL)
