"""Costs of work on a device: seconds against size, one curve for each kind of work and dtype. Data and interpolation.

``calibration`` measures such tables and ``shipped`` holds some; ``op_costs`` reads them for ``lower="pays"``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import exp, inf, isfinite, log
from statistics import geometric_mean
from typing import Any, Final, Literal

import torch

from fxprec.kernels.rows.program.prices import Kernel, LoopPrices, Step
from fxprec.passes.graph.text import dtype_name

#: Version of what ``to_dict`` writes; another one is not read.
_FORMAT: Final = 1
#: Dtypes of what compiled loops load and store.
_OF_LOOPS: Final = (torch.float32, torch.bfloat16)
#: How many sizes two ways are compared at.
_SIZES: Final = 64
#: Another way must take less than this share of the time of the way that is preferred.
_CLEARLY: Final = 0.95


class Work(StrEnum):
    """Kinds of work, and the unit in which their size is counted.

    =========================  =====================================================================================
    MATMUL                     FLOP of one matrix product (forward, or one of the two of its backward), of cubes
    STREAM                     elements of a product's operands and result, where one operand is a handful of rows
    ROW                        the same elements, of a linear layer's forward for a single row. May be absent
    CONVOLUTION                FLOP of a forward; THIN_CONVOLUTION: of few input channels a group (a stem, a depthwise
                               one)
    CONVOLUTION_BACKWARD       FLOP of the forward, for both gradients; THIN_CONVOLUTION_BACKWARD likewise
    ATTENTION                  FLOP of the two products of a fused attention's forward
    ATTENTION_BACKWARD         the same FLOP, for the backward
    ATTENTION_PRODUCTS         the same FLOP, for a forward by plain products, of bfloat16 on a CPU
                               (``fxprec.kernels.cpu.attention_products``); ATTENTION_PRODUCTS_BACKWARD: for its
                               backward. May be absent
    ATTENTION_RECOMPUTED       likewise, by torch's forward and a backward of products, and
                               ATTENTION_RECOMPUTED_BACKWARD
    ATTENTION_COMPILED         likewise, by a compiled loop (``fxprec.kernels.cpu.compiled_attention``), and
                               ATTENTION_COMPILED_BACKWARD
    POINTWISE                  elements of a result
    KERNEL                     elements of ``x * y`` by torch on a CPU, with which compiled loops are compared;
                               KERNEL_EXP, KERNEL_TANH, KERNEL_ERF, KERNEL_NORM: of ``silu``, ``tanh``, the exact
                               ``gelu``, a layer norm; KERNEL_TRAINED, KERNEL_NORM_TRAINED: forward and backward. May
                               be absent
    LOOP                       the same elements by a compiled loop (``fxprec.kernels.rows``); LOOP_TRAINED: forward and
                               backward; LOOP_SUMS: likewise, where ``y`` is one row, whose gradient is a sum;
                               LOOP_STEPS, LOOP_EXP, LOOP_TANH, LOOP_ERF: with more steps (``MORE_STEPS``), in bfloat16.
                               May be absent
    CAST                       elements; forward and backward each cost this. Kept with the low dtype
    =========================  =====================================================================================
    """

    MATMUL = "matmul"
    STREAM = "stream"
    ROW = "row"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution backward"
    THIN_CONVOLUTION = "thin convolution"
    THIN_CONVOLUTION_BACKWARD = "thin convolution backward"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    ATTENTION_PRODUCTS = "attention by products"
    ATTENTION_PRODUCTS_BACKWARD = "attention by products backward"
    ATTENTION_RECOMPUTED = "recomputed attention"
    ATTENTION_RECOMPUTED_BACKWARD = "recomputed attention backward"
    ATTENTION_COMPILED = "compiled attention"
    ATTENTION_COMPILED_BACKWARD = "compiled attention backward"
    POINTWISE = "pointwise"
    KERNEL = "kernel"
    KERNEL_TRAINED = "kernel, trained"
    KERNEL_EXP = "kernel of silu"
    KERNEL_TANH = "kernel of tanh"
    KERNEL_ERF = "kernel of gelu"
    KERNEL_NORM = "kernel of layer norm"
    KERNEL_NORM_TRAINED = "kernel of layer norm, trained"
    LOOP = "loop"
    LOOP_TRAINED = "loop, trained"
    LOOP_SUMS = "loop with a sum, trained"
    LOOP_STEPS = "loop of more steps"
    LOOP_EXP = "loop of more exp"
    LOOP_TANH = "loop of more tanh"
    LOOP_ERF = "loop of more erf"
    CAST = "cast"


#: Ways to compute attention in bfloat16 on a CPU.
AttentionWay = Literal["products", "recomputed", "compiled"]
#: Way -> work of the forward, and of the backward.
ATTENTION_WAYS: Final[Mapping[AttentionWay, tuple[Work, Work]]] = {
    "products": (Work.ATTENTION_PRODUCTS, Work.ATTENTION_PRODUCTS_BACKWARD),
    "recomputed": (Work.ATTENTION_RECOMPUTED, Work.ATTENTION_RECOMPUTED_BACKWARD),
    "compiled": (Work.ATTENTION_COMPILED, Work.ATTENTION_COMPILED_BACKWARD),
}
#: Torch's own kernel: forward and backward.
_TORCHS: Final = (Work.ATTENTION, Work.ATTENTION_BACKWARD)
#: What compiled loops are priced by: of torch's kernels, forward, and forward and backward; of loops with more steps.
KERNELS: Final[Mapping[Kernel, Work]] = {
    "plain": Work.KERNEL, "exp": Work.KERNEL_EXP, "tanh": Work.KERNEL_TANH, "erf": Work.KERNEL_ERF,
    "norm": Work.KERNEL_NORM,
}  # fmt: skip
_TRAINED: Final[Mapping[Literal["plain", "norm"], Work]] = {
    "plain": Work.KERNEL_TRAINED, "norm": Work.KERNEL_NORM_TRAINED,
}  # fmt: skip
STEPPED: Final[Mapping[Step, Work]] = {
    "plain": Work.LOOP_STEPS, "exp": Work.LOOP_EXP, "tanh": Work.LOOP_TANH, "erf": Work.LOOP_ERF,
}  # fmt: skip
#: Measured in bfloat16 alone.
LOOPS_ALONE: Final = frozenset({Work.LOOP_TRAINED, Work.LOOP_SUMS, *STEPPED.values()})
#: What is known where loops were compiled.
LOOPS: Final = frozenset({*KERNELS.values(), *_TRAINED.values(), Work.LOOP, *LOOPS_ALONE})
_MAY_BE_ABSENT: Final = LOOPS.union(*ATTENTION_WAYS.values(), {Work.ROW})
#: Rows of the products that measure STREAM.
STREAM_ROWS: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against an amount of work, linear between logarithms.

    Below the first point the time of the first (the call itself), beyond the last in proportion to the work.

    Attributes:
        points: (work, seconds), ascending in work.

    Raises:
        ValueError: no points, not ascending, or one that is not positive and finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        work = [each for each, _ in self.points]
        positive = all(isfinite(number) and number > 0 for point in self.points for number in point)
        if not work or not positive or any(a >= b for a, b in pairwise(work)):
            raise ValueError(f"a curve wants positive (work, seconds), ascending in work, not {self.points!r}")

    def __call__(self, work: float) -> float:
        """Seconds for this much work."""
        after = bisect_right(self.points, work, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        (left, start) = self.points[after - 1]
        if after == len(self.points):
            return start * work / left
        (right, end) = self.points[after]
        share = log(work / left) / log(right / left)
        return exp(log(start) + share * (log(end) - log(start)))

    @classmethod
    def linear(cls, overhead: float, rate: float) -> Curve:
        """Make the curve of ``overhead`` seconds a call and ``rate`` units of work a second."""
        work = [overhead * rate * 4.0**step for step in range(-4, 8)]
        return cls(tuple((each, overhead + each / rate) for each in work))

    def faster(self, factor: float) -> Curve:
        """Return the curve of a device that does ``factor`` times the work in the same time; calls cost the same."""
        return Curve(tuple((work * factor, seconds) for work, seconds in self.points))


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """The curves of one device; ``convert(model, lower=DeviceCosts(...))`` takes one's own.

    Attributes:
        device: device type, "cpu" or "cuda".
        name: model of the processor.
        threads: of torch's, on a CPU; 0 elsewhere.
        source: where the numbers come from: "calibrated on 2026-11-21".
        curves: dtype -> kind of work -> curve. A low dtype without curves has no costs: everything is lowered.
        torch: the version that was measured.

    Raises:
        ValueError: there are no curves of FP32, or a dtype lacks a kind of work that must be there (all but those of
            ``_MAY_BE_ABSENT``, and casts of FP32).
    """

    device: str
    name: str
    threads: int
    source: str
    curves: Mapping[torch.dtype, Mapping[Work, Curve]]
    torch: str = field(default_factory=lambda: torch.__version__)

    def __post_init__(self) -> None:
        full = self.curves.get(torch.float32, {})
        for dtype, curves in self.curves.items():
            wanted = set(Work) - _MAY_BE_ABSENT - ({Work.CAST} if dtype is torch.float32 else set())
            if missing := sorted(wanted - curves.keys()):
                raise ValueError(f"costs of {self.name}: {dtype_name(dtype)} has no curve for {', '.join(missing)}")
        if not full:
            raise ValueError(f"costs of {self.name}: none of float32, with which all others are compared")

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        return f"{self.name}{threads}, {self.source}"

    def seconds(self, work: Work, dtype: torch.dtype, amount: float) -> float:
        """Return the seconds that this much work takes in this dtype."""
        return self.curves[dtype][work](amount)

    def product(self, dtype: torch.dtype, flop: float, elements: float) -> float:
        """Return the seconds of a matrix product, which is limited by arithmetic or by what it reads and writes."""
        return max(self.seconds(Work.MATMUL, dtype, flop), self.seconds(Work.STREAM, dtype, elements))

    def linear(self, dtype: torch.dtype, flop: float, elements: float) -> float:
        """Return the seconds of a linear layer's forward, where products of a single row have a curve of their own.

        A CPU without bfloat16 units multiplies one row with the rows of a weight at the speed of memory, so that a low
        weight halves the time. From some rows on conversions bound it, and for the products of the backward, which read
        the weight the other way, they always do. Between one row and ``STREAM_ROWS`` both curves are joined, in
        proportion to the logarithm of the rows.

        Args:
            dtype: of the operands.
            flop: 2 * rows * depth * columns.
            elements: of both operands and the result. Where rows are few, flop / (2 * elements) is their number.
        """
        rows = max(1.0, flop / (2 * elements))
        if Work.ROW not in self.curves[dtype] or rows >= STREAM_ROWS:
            return self.product(dtype, flop, elements)
        share = log(rows) / log(STREAM_ROWS)
        one, several = self.seconds(Work.ROW, dtype, elements), self.seconds(Work.STREAM, dtype, elements)
        return one ** (1 - share) * several**share

    def attention(self, dtype: torch.dtype, flop: float, gradients: float, way: AttentionWay | None = None) -> float:
        """Seconds of attention, by torch's kernel or by a way that was measured, whichever is faster.

        Args:
            gradients: the share of the backward that runs.
            way: the other one that there is.
        """
        ways: list[tuple[Work, Work]] = [_TORCHS]
        if way is not None and self._knows(dtype, way):
            ways.append(ATTENTION_WAYS[way])
        return min(self.there_and_back(dtype, flop, gradients, works) for works in ways)

    def attention_from(self, dtype: torch.dtype, way: AttentionWay) -> tuple[float, float]:
        """FLOP from which on attention is faster that way than by torch's kernel: alone, and with its backward.

        Infinite where it never is, or nobody measured it.
        """
        if not self._knows(dtype, way):
            return inf, inf
        sizes = [work for work, _ in self.curves[dtype][Work.ATTENTION].points]
        grid = [min(sizes) * (max(sizes) / min(sizes)) ** (step / _SIZES) for step in range(_SIZES + 1)]
        found = []
        for gradients in (0.0, 1.0):
            first = inf
            for flop in reversed(grid):
                ours, torchs = (
                    self.there_and_back(dtype, flop, gradients, works) for works in (ATTENTION_WAYS[way], _TORCHS)
                )
                if ours >= torchs:
                    break
                first = flop
            found.append(first)
        return found[0], found[1]

    def best_attention(self, dtype: torch.dtype, ways: Sequence[AttentionWay]) -> AttentionWay:
        """Return the first of these that was measured, unless another takes clearly less time, forward and backward.

        The last one where none was measured.
        """
        best, least = ways[-1], inf
        sizes = [work for work, _ in self.curves[torch.float32][Work.ATTENTION].points]
        for way in ways:
            if self._knows(dtype, way):
                seconds = geometric_mean(self.there_and_back(dtype, size, 1.0, ATTENTION_WAYS[way]) for size in sizes)
                if seconds < _CLEARLY * least:
                    best, least = way, seconds
        return best

    @property
    def loops(self) -> LoopPrices | None:
        """Prices of compiled loops; None where nobody measured them."""
        full, low = (self.curves.get(dtype, {}) for dtype in _OF_LOOPS)
        if not LOOPS <= low.keys() or not LOOPS - LOOPS_ALONE <= full.keys():
            return None
        both = dict(zip(_OF_LOOPS, (full, low), strict=True))
        return LoopPrices(
            {dtype: {kernel: of[work] for kernel, work in KERNELS.items()} for dtype, of in both.items()},
            {dtype: {kernel: of[work] for kernel, work in _TRAINED.items()} for dtype, of in both.items()},
            {dtype: of[Work.LOOP] for dtype, of in both.items()},
            low[Work.LOOP_TRAINED], low[Work.LOOP_SUMS],
            {step: low[work] for step, work in STEPPED.items()},
        )  # fmt: skip

    def _knows(self, dtype: torch.dtype, way: AttentionWay) -> bool:
        return dtype in self.curves and self.curves[dtype].keys() >= {*ATTENTION_WAYS[way]}

    def there_and_back(self, dtype: torch.dtype, flop: float, gradients: float, works: tuple[Work, Work]) -> float:
        """Return the seconds of a forward and of the share ``gradients`` of its backward."""
        forward, backward = works
        return self.seconds(forward, dtype, flop) + gradients * self.seconds(backward, dtype, flop)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {
            "format": _FORMAT,
            **{key: getattr(self, key) for key in ("device", "name", "threads", "source", "torch")},
            "curves": {
                dtype_name(dtype): {
                    str(kind): [list(point) for point in curve.points] for kind, curve in curves.items()
                }
                for dtype, curves in self.curves.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceCosts:
        """Make the costs of what ``to_dict`` gave.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}, this version reads {_FORMAT}")
        text = {key: str(data[key]) for key in ("device", "name", "source", "torch")}
        curves = {
            getattr(torch, dtype): {
                Work(kind): Curve(tuple((float(work), float(time)) for work, time in points))
                for kind, points in of_kind.items()
            }
            for dtype, of_kind in data["curves"].items()
        }
        return cls(threads=int(data["threads"]), curves=curves, **text)


def time_text(seconds: float) -> str:
    """Return a time as text: ``12.3 us``, ``4.56 ms``."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
