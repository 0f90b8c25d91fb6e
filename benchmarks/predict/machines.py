"""GPUs as the model of time sees them: sizes, rates and latencies, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["MACHINES", "Machine"]

#: Warp instructions a cycle and multiprocessor. CUDA C++ Programming Guide, "Arithmetic Instructions", results a cycle
#: over 32: FP32 128 (64 on 8.0), integer adds, logic, comparisons and packing conversions 64, exponentials, roots and
#: other conversions 16, shuffles 32, FP64 64 (32). Shared memory and L1 give 128 bytes a cycle (Hopper white paper).
_RATES: Final = {"alu": 2.0, "xu": 0.5, "shuffle": 1.0, "constant": 2.0}


@dataclass(frozen=True)
class Machine:
    """A GPU.

    Attributes:
        name: as one says it.
        capability: ten times its compute capability: what kernels are compiled for.
        processors: multiprocessors.
        clock: cycles a second.
        peak: bytes a second of its memory, by its data sheet.
        achieved: bytes a second of a large copy.
        flops: a second, of dense products in bfloat16 and float16, by its data sheet.
        cache: bytes of L2.
        shared: bytes of shared memory of a multiprocessor.
        memory, l2: cycles until a load has come from there, on an idle device.
        rates: unit -> warp instructions a cycle and multiprocessor.
    """

    name: str
    capability: int
    processors: int
    clock: float
    peak: float
    achieved: float
    flops: float
    cache: int
    shared: int
    memory: int
    l2: int
    rates: Mapping[str, float]

    @property
    def bytes_a_cycle(self) -> float:
        """Of memory, for each multiprocessor."""
        return self.achieved / self.processors / self.clock


#: A large copy on an H200 over its data sheet's 4.8 TB/s, in benchmarks/results/NVIDIA-H200; taken for the others too.
_SHARE: Final = 4.27 / 4.8
_HOPPER: Final = MappingProxyType({"fma": 4.0, "fp64": 2.0, **_RATES})
_AMPERE: Final = MappingProxyType({"fma": 2.0, "fp64": 1.0, **_RATES})


def _rates(memory: float, products: float) -> tuple[float, float, float]:
    """Of a data sheet's TB/s and TFLOP/s: ``peak``, ``achieved`` and ``flops``."""
    return 1e12 * memory, 1e12 * memory * _SHARE, 1e12 * products


#: Processors, bytes and flops a second, L2: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM. Clocks: their
#: boost clocks, at which kernels that wait for memory run. Cycles of latency: of A100 Luo et al., "Benchmarking and
#: Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024, table IV (466 and 262); of Hopper with
#: HBM3 the markdewing/AI_kernels repository's latency/README.md, a GH200 (690 and 281).
MACHINES: Final = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            Machine("A100", 80, 108, 1.41e9, *_rates(2.039, 312), 40 << 20, 164 << 10, 466, 262, _AMPERE),
            Machine("H100", 90, 132, 1.98e9, *_rates(3.35, 989), 50 << 20, 228 << 10, 690, 281, _HOPPER),
            Machine("H200", 90, 132, 1.98e9, *_rates(4.8, 989), 50 << 20, 228 << 10, 690, 281, _HOPPER),
        )
    }
)
