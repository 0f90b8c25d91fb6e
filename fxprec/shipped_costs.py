"""Device costs for machines that were not calibrated: one measured CPU, and estimates for the rest. Data.

- A CPU with bfloat16 units: an AMD EPYC 9004 (AVX512-BF16), torch 2.13, one thread, measured. More threads are taken to
  do 0.85 times as much more work each in the same time, while a call costs the same.
- Another CPU: an estimate. FP32 as above; products in a low dtype are converted on the way and take longer than FP32.
- A100, and H100 or H200: estimates from the published rates at usual efficiencies, FP32 products without TF32, and the
  usual cost of a launch from Python. Sources: NVIDIA's data sheets; 60 to 80 % of the peak where shapes are good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from fxprec.passes.device_costs import Curve, DeviceCosts, Work

__all__ = ["shipped"]

#: (work, microseconds), see ``Work`` for the units.
_CPU: Final[Mapping[torch.dtype, Mapping[Work, tuple[tuple[float, float], ...]]]] = {
    torch.float32: {
        Work.MATMUL: ((8.19e3, 2.41), (6.55e4, 3.37), (5.24e5, 8.3), (4.19e6, 46.2), (3.36e7, 375), (2.68e8, 3.92e3),
            (2.15e9, 3.72e4)),
        Work.STREAM: ((5.12e3, 3.54), (1.84e4, 6.43), (6.96e4, 19.4), (2.7e5, 73.6), (1.06e6, 431), (4.23e6, 2.23e3)),
        Work.CONVOLUTION: ((2.95e5, 14.4), (3.61e6, 72.2), (1.45e7, 286), (1.16e8, 1.45e3), (4.62e8, 4.62e3),
            (1.85e9, 2.54e4)),
        Work.CONVOLUTION_BACKWARD: ((2.95e5, 33.4), (3.61e6, 162), (1.45e7, 489), (1.16e8, 2.66e3), (4.62e8, 1.35e4),
            (1.85e9, 5.39e4)),
        Work.THIN_CONVOLUTION: ((2.82e4, 5.66), (4.52e5, 12.9), (3.61e6, 201), (2.89e7, 2.05e3), (6.94e8, 7.53e4)),
        Work.THIN_CONVOLUTION_BACKWARD: ((2.82e4, 15.8), (4.52e5, 39.1), (3.61e6, 683), (2.89e7, 8.81e3),
            (6.94e8, 1.68e5)),
        Work.ATTENTION: ((3.28e4, 6.43), (2.62e5, 13.8), (4.19e6, 86.2), (1.34e8, 2.39e3), (5.37e8, 1.19e4)),
        Work.ATTENTION_BACKWARD: ((3.28e4, 40.9), (2.62e5, 62.3), (4.19e6, 271), (1.34e8, 5.51e3), (5.37e8, 2.64e4)),
        Work.POINTWISE: ((512, 4.03), (4.1e3, 4.83), (3.28e4, 12.8), (2.62e5, 77.1), (1.05e6, 444), (4.19e6, 8.25e3),
            (1.68e7, 6.58e4)),
    },
    torch.bfloat16: {
        Work.MATMUL: ((8.19e3, 5.89), (6.55e4, 13.4), (5.24e5, 17), (4.19e6, 37.1), (3.36e7, 201), (2.68e8, 1.62e3),
            (2.15e9, 1.82e4)),
        Work.STREAM: ((5.12e3, 14.3), (1.84e4, 16), (6.96e4, 24.6), (2.7e5, 52.7), (1.06e6, 311), (4.23e6, 1.11e3)),
        Work.CONVOLUTION: ((2.95e5, 46.2), (3.61e6, 74), (1.45e7, 230), (1.16e8, 716), (4.62e8, 2.45e3),
            (1.85e9, 1.27e4)),
        Work.CONVOLUTION_BACKWARD: ((2.95e5, 100), (3.61e6, 168), (1.45e7, 371), (1.16e8, 1.44e3), (4.62e8, 9.22e3),
            (1.85e9, 2.68e4)),
        Work.THIN_CONVOLUTION: ((2.82e4, 34.8), (4.52e5, 46.5), (3.61e6, 142), (2.89e7, 1.1e3), (6.94e8, 4.52e4)),
        Work.THIN_CONVOLUTION_BACKWARD: ((2.82e4, 90.2), (4.52e5, 136), (3.61e6, 448), (2.89e7, 8.94e3),
            (6.94e8, 4.16e4)),
        Work.ATTENTION: ((3.28e4, 8.97), (2.62e5, 19.3), (4.19e6, 111), (1.34e8, 2.42e3), (5.37e8, 1.2e4)),
        Work.ATTENTION_BACKWARD: ((3.28e4, 54.6), (2.62e5, 314), (4.19e6, 1.17e3), (1.34e8, 1.74e4), (5.37e8, 3.01e4)),
        Work.POINTWISE: ((512, 4.05), (4.1e3, 5.09), (3.28e4, 14.5), (2.62e5, 85.9), (1.05e6, 351), (4.19e6, 1.77e3),
            (1.68e7, 1.54e4)),
        Work.CAST: ((512, 3.3), (4.1e3, 3.71), (3.28e4, 6.53), (2.62e5, 35.7), (1.05e6, 187), (4.19e6, 2.8e3),
            (1.68e7, 3.11e4)),
    },
    torch.float16: {
        Work.MATMUL: ((8.19e3, 5.72), (6.55e4, 20), (5.24e5, 85.1), (4.19e6, 392), (3.36e7, 2.2e3), (2.68e8, 2.73e4),
            (2.15e9, 1.58e5)),
        Work.STREAM: ((5.12e3, 13.8), (1.84e4, 28), (6.96e4, 72.1), (2.7e5, 221), (1.06e6, 844), (4.23e6, 5.37e3)),
        Work.CONVOLUTION: ((2.95e5, 78.9), (3.61e6, 833), (1.45e7, 3.67e3), (1.16e8, 5.54e4)),
        Work.CONVOLUTION_BACKWARD: ((2.95e5, 127), (3.61e6, 947), (1.45e7, 3.6e3), (1.16e8, 4.54e4)),
        Work.THIN_CONVOLUTION: ((2.82e4, 15.4), (4.52e5, 147), (3.61e6, 1.16e3), (2.89e7, 1.78e4), (6.94e8, 3.1e5)),
        Work.THIN_CONVOLUTION_BACKWARD: ((2.82e4, 26.8), (4.52e5, 117), (3.61e6, 804), (2.89e7, 1.5e4),
            (6.94e8, 2.13e5)),
        Work.ATTENTION: ((3.28e4, 11.3), (2.62e5, 31.1), (4.19e6, 241), (1.34e8, 5.73e3), (5.37e8, 2.38e4)),
        Work.ATTENTION_BACKWARD: ((3.28e4, 61.8), (2.62e5, 187), (4.19e6, 1.56e3), (1.34e8, 6.53e4)),
        Work.POINTWISE: ((512, 1.39), (4.1e3, 3.03), (3.28e4, 16.2), (2.62e5, 120), (1.05e6, 479), (4.19e6, 3.33e3),
            (1.68e7, 3.52e4)),
        Work.CAST: ((512, 2.94), (4.1e3, 3.24), (3.28e4, 5.25), (2.62e5, 30.6), (1.05e6, 182), (4.19e6, 2.23e3),
            (1.68e7, 1.79e4)),
    },
}  # fmt: skip

_THREAD: Final = 0.85
_PRODUCTS: Final = frozenset(Work) - {Work.STREAM, Work.POINTWISE, Work.CAST}
#: Work in a low dtype that a CPU without units for it does in the time of one unit of FP32 work.
_EMULATED: Final = 0.6


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a GPU does in a second, in 1e12: FLOP of products in FP32 and low, of fused attention, bytes of memory."""

    full: float
    low: float
    attention_full: float
    attention_low: float
    bytes: float


_HOPPER: Final = _Rates(full=45, low=650, attention_full=25, attention_low=450, bytes=3.0)
_AMPERE: Final = _Rates(full=15, low=220, attention_full=9, attention_low=150, bytes=1.3)
#: Seconds of a launch from Python: of a product, of a convolution, of fused attention, of a pointwise op or a cast.
_LAUNCH: Final = {"product": 8e-6, "convolution": 15e-6, "attention": 20e-6, "pointwise": 5e-6}
#: A convolution's share of the rate of products; of few channels: of the bytes' rate, FLOP a byte.
_CONVOLUTION: Final = 0.7
_THIN: Final = 4.0


def shipped(device: str, name: str, threads: int, bfloat16_units: bool) -> DeviceCosts:
    """The costs of the nearest class of device.

    Args:
        device: "cpu" or "cuda".
        name: what the processor calls itself.
        threads: of torch's, on a CPU.
        bfloat16_units: whether a CPU multiplies bfloat16 itself.
    """
    if device == "cuda":
        hopper = any(model in name for model in ("H100", "H200", "GH200", "H800", "H20"))
        rates, kind = (_HOPPER, "H100 and H200") if hopper else (_AMPERE, "A100")
        return DeviceCosts(device, name, 0, f"shipped for {kind}, an estimate", _gpu(rates))
    kind = "with bfloat16 units" if bfloat16_units else "without bfloat16 units, an estimate"
    curves = {
        dtype: {work: _cpu(work, dtype, points, threads, bfloat16_units) for work, points in of_work.items()}
        for dtype, of_work in _CPU.items()
    }
    return DeviceCosts(device, name, threads, f"shipped for CPUs {kind}", curves)


def _cpu(
    work: Work, dtype: torch.dtype, points: tuple[tuple[float, float], ...], threads: int, bfloat16_units: bool
) -> Curve:
    if dtype is torch.bfloat16 and work in _PRODUCTS and not bfloat16_units:
        curve = _curve(_CPU[torch.float32][work]).faster(_EMULATED)
    else:
        curve = _curve(points)
    return curve.faster(1 + _THREAD * (threads - 1))


def _curve(points: tuple[tuple[float, float], ...]) -> Curve:
    return Curve(tuple((work, microseconds * 1e-6) for work, microseconds in points))


def _gpu(rates: _Rates) -> dict[torch.dtype, dict[Work, Curve]]:
    low = _gpu_curves(rates.low, rates.attention_low, rates.bytes, 2)
    low[Work.CAST] = Curve.linear(_LAUNCH["pointwise"], rates.bytes * 1e12 / 6)
    full = _gpu_curves(rates.full, rates.attention_full, rates.bytes, 4)
    return {torch.float32: full, torch.bfloat16: low, torch.float16: low}


def _gpu_curves(products: float, attention: float, moved: float, itemsize: int) -> dict[Work, Curve]:
    elements = moved * 1e12 / itemsize
    convolutions = _CONVOLUTION * products * 1e12
    return {
        Work.MATMUL: Curve.linear(_LAUNCH["product"], products * 1e12),
        Work.STREAM: Curve.linear(_LAUNCH["product"], elements),
        Work.CONVOLUTION: Curve.linear(_LAUNCH["convolution"], convolutions),
        Work.CONVOLUTION_BACKWARD: Curve.linear(2 * _LAUNCH["convolution"], convolutions / 2),
        Work.THIN_CONVOLUTION: Curve.linear(_LAUNCH["convolution"], _THIN * elements),
        Work.THIN_CONVOLUTION_BACKWARD: Curve.linear(2 * _LAUNCH["convolution"], _THIN * elements / 3),
        Work.ATTENTION: Curve.linear(_LAUNCH["attention"], attention * 1e12),
        Work.ATTENTION_BACKWARD: Curve.linear(2 * _LAUNCH["attention"], attention * 1e12 / 2.5),
        Work.POINTWISE: Curve.linear(_LAUNCH["pointwise"], elements / 2),
    }
