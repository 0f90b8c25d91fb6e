"""What a training step consists of, and the time of each part on a machine with what is assumed of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.predict.launches import Launch, Unread
from benchmarks.predict.machines import Machine
from benchmarks.predict.model import LAUNCH, Kernel, predict
from benchmarks.predict.ops import Work

__all__ = ["ASSUMED", "Assumed", "Parts", "Times", "times_of"]


@dataclass(frozen=True)
class Parts:
    """Of one step.

    Attributes:
        launches: of Triton kernels, each in the forms from which one is chosen by its time.
        work: torch's ops.
        unread: kernels that cannot be simulated.
    """

    launches: Sequence[tuple[Launch, ...]]
    work: Sequence[Work]
    unread: Sequence[Unread] = ()

    def first(self) -> Parts:
        """With the form alone that comes first."""
        return replace(self, launches=[forms[:1] for forms in self.launches])


@dataclass(frozen=True)
class Assumed:
    """What is assumed where nothing is simulated.

    Attributes:
        shares: kind of product -> of the machine's peak what it gets.
        launch: seconds from kernel to kernel.
        copy: of the rate of a large copy what torch's ops get.
        model: the true time of a simulated kernel over the simulated one.
    """

    shares: Mapping[str, float]
    launch: float
    copy: float
    model: float


#: The best, the middle, the worst. Shares: what products, convolutions and attention of six models got on an H200, by
#: the times of their kernels in benchmarks/results/NVIDIA-H200/hotspots-*: 0.64 to 0.76, 0.40 to 0.50, 0.13 to 0.24;
#: taken for the other machines too. Launches and copies: an assumption. Model: one over predicted times of forms over
#: measured ones in benchmarks/results/predicted/forms-bfloat16.json, means of kernels from 0.85 to 1.03, of all 0.95.
ASSUMED: Final = (
    Assumed({"product": 0.76, "convolution": 0.50, "attention": 0.24}, 1e-6, 1.05, 1 / 1.03),
    Assumed({"product": 0.67, "convolution": 0.45, "attention": 0.19}, LAUNCH, 1.0, 1 / 0.95),
    Assumed({"product": 0.64, "convolution": 0.40, "attention": 0.13}, 3e-6, 0.95, 1 / 0.85),
)


@dataclass(frozen=True)
class Times:
    """Seconds of a step: of kernels, of products, convolutions and attention, of torch's other ops.

    ``launches``: how many kernels and ops there are.
    """

    kernels: float
    products: float
    others: float
    launches: int

    @property
    def all(self) -> float:
        return self.kernels + self.products + self.others


def times_of(parts: Parts, machine: Machine) -> tuple[Times, ...]:
    """With each of ``ASSUMED``."""
    alike = Counter(tuple(_Alike(each.kernel) for each in forms) for forms in parts.launches)
    simulated = sum(
        often * (min(predict(each.kernel, machine).seconds for each in forms) - LAUNCH)
        for forms, often in alike.items()
    )
    return tuple(_times(parts, simulated, machine, assumed) for assumed in ASSUMED)


def _times(parts: Parts, simulated: float, machine: Machine, assumed: Assumed) -> Times:
    rate = assumed.copy * machine.achieved
    kernels = simulated * assumed.model + sum(each.bytes for each in parts.unread) / rate
    products = others = 0.0
    for each in parts.work:
        seconds = assumed.launch + each.bytes / rate
        if each.kind == "other":
            others += seconds
        else:
            seconds = max(seconds, assumed.launch + each.flops / (assumed.shares[each.kind] * machine.flops))
            products += seconds
    count = len(parts.launches) + len(parts.unread)
    return Times(kernels + assumed.launch * count, products, others, count + len(parts.work))


@dataclass(frozen=True)
class _Alike:
    """A kernel by what its time depends on, without comparing all its instructions."""

    kernel: Kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        made = self.kernel
        numbers = made.trips, made.registers, made.shared, made.warps, made.programs, made.loaded, made.stored
        return id(made.path), *numbers
