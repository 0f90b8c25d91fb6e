"""Measure what products, convolutions, attention, pointwise ops, casts and loops take here: ``fxprec calibrate``.

A handful of sizes a kind of work, FP32 and the low dtype in turns, the fastest run of each: a few seconds in all. What
is measured is what a call takes from Python on a machine that does nothing else.

Compiled loops of a CPU are priced by a few of torch's kernels and by loops that are compiled for it: of a call both
ways, of memory, and of a step of each kind, from which ``kernels/rows/program/prices.py`` adds regions up. Training is
measured in chains, since a backward as such costs the same whatever runs in it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from itertools import repeat
from math import inf
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fxprec.costs.files import processor_name
from fxprec.errors import ServiceWarning
from fxprec.kernels.cpu.attention_products import attention_by_products, recomputed_attention
from fxprec.kernels.cpu.compiled_attention import compiled_attention, why_not
from fxprec.kernels.rows.program.prices import MORE_STEPS, Step
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.costs.device_costs import (
    ATTENTION_WAYS,
    LOOPS,
    LOOPS_ALONE,
    STEPPED,
    STREAM_ROWS,
    AttentionWay,
    Curve,
    DeviceCosts,
    Work,
)
from fxprec.passes.ops.names import canonical_op

Run = Callable[[], object]


class Case(NamedTuple):
    """Amount of work, and a function that makes it for a dtype, ``calls`` times over."""

    amount: float
    make: Callable[[torch.device, torch.dtype], Run]
    calls: int = 1


def random(device: torch.device, dtype: torch.dtype, *shape: int, gradient: bool = False) -> Tensor:
    """Return normal random numbers."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_(gradient)


Function = Callable[..., Tensor]

_COLUMNS: Final = 512
_ROWS: Final = (2, 64, 1024, 4096)
#: Functions in a row whose forward and backward is measured at once.
_CHAIN: Final = 8


def loop_cases(low: bool) -> dict[Work, tuple[Case, ...]]:
    """Return all cases; none without a compiler. ``low``: whether bfloat16 is measured, which loops load and store."""
    # Loops are compiled for bfloat16: float16 alone has nothing to measure.
    if why_not() or not low:
        return {}
    sized: dict[Work, Function] = {
        Work.KERNEL: _plain, Work.KERNEL_EXP: lambda x, _: F.silu(x), Work.KERNEL_TANH: lambda x, _: torch.tanh(x),
        Work.KERNEL_ERF: lambda x, _: F.gelu(x), Work.KERNEL_NORM: _norm, Work.LOOP: as_loop(_plain),
        **{STEPPED[step]: as_loop(function) for step, function in _STEPPED.items()},
    }  # fmt: skip
    trained: dict[Work, Function] = {Work.KERNEL_TRAINED: _plain, Work.KERNEL_NORM_TRAINED: _norm}
    calls = {Work.LOOP_TRAINED: False, Work.LOOP_SUMS: True}
    loop = as_loop(_plain)
    return {
        **{work: tuple(_forward(rows, function) for rows in _ROWS) for work, function in sized.items()},
        **{work: tuple(_trained(rows, function) for rows in _ROWS) for work, function in trained.items()},
        **{work: (_trained(_ROWS[0], loop, of_one_row),) for work, of_one_row in calls.items()},
    }


def _forward(rows: int, function: Function) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x, y = (random(device, dtype, rows, _COLUMNS) for _ in range(2))
        return lambda: function(x, y)

    return Case(rows * _COLUMNS, make)


def _trained(rows: int, function: Function, of_one_row: bool = False) -> Case:
    """Time forward and backward. Small ones in a chain: what a backward takes whatever runs in it is shared then."""
    length = _CHAIN if rows * _COLUMNS < 1 << 18 else 2

    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x = random(device, dtype, rows, _COLUMNS, gradient=True)
        shape = (_COLUMNS,) if of_one_row or function is _norm else (rows, _COLUMNS)
        others = [random(device, dtype, *shape, gradient=True) for _ in range(length)]
        gradient = random(device, dtype, rows, _COLUMNS)

        def run() -> object:
            out = x
            for other in others:
                out = function(out, other)
            return torch.autograd.grad(out, (x, *others), gradient)

        return run

    return Case(rows * _COLUMNS, make, calls=length)


def as_loop(function: Function, inputs: int = 2) -> FusedRegion:
    """Compile a function of so many tensors as a loop, at whatever price."""
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    out: Any = function(*[Proxy(graph.placeholder(f"x{number}"), tracer) for number in range(inputs)])
    graph.output((out.node,))
    for node in graph.nodes:
        # A region asks each node for its op, which a pass of the pipeline would have noted.
        if node.op in ("call_function", "call_method"):
            node.meta["op"] = canonical_op(node)
    return FusedRegion("loop", GraphModule({}, graph), 0, 0, "loops")


# -- functions of two tensors, of which some read only the first ------------------------------------------------------


def _plain(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x, (_COLUMNS,), y if y.dim() == 1 else None)


def _more_steps(x: Tensor, y: Tensor) -> Tensor:
    for _ in repeat(None, MORE_STEPS["plain"] // 2):
        x = (x + y) * y
    return x * y


def _four_times(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return function(x * y) + function(x) + function(y) + function(x + y)


_STEPPED: Final[dict[Step, Function]] = {
    "plain": _more_steps,
    "exp": lambda x, y: _four_times(torch.exp, x, y),
    "tanh": lambda x, y: _four_times(torch.tanh, x, y),
    "erf": lambda x, y: _four_times(torch.erf, x, y),
}


#: Seconds for one size and dtype, and runs at least.
_SECONDS: Final = 0.03
_RUNS: Final = 3
#: No larger size is tried once a call took this long: from there on time is in proportion.
_LONGEST: Final = 0.03
#: What tells that a busy machine disturbed a measurement: it took so many times as long as one of a larger size, or,
#: of the smallest size, so many seconds. Then it is measured again, so many times.
_DISTURBED: Final = 1.5
_TOO_LONG: Final = 5e-4
_AGAIN: Final = 4


def calibrate(
    device: torch.device | str = "cpu",
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    quick: bool = False,
) -> DeviceCosts:
    """Measure this machine, with the present number of threads and the present precision of FP32 products.

    Args:
        device: "cpu" or "cuda" (the current one).
        dtypes: low dtypes, each beside FP32.
        quick: only the smallest two sizes of everything, for a test of the command: the result is worthless.

    Raises:
        ValueError: a device of another type; CUDA where there is none.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: there are costs of cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch finds no CUDA device here")
    low = list(dtypes)
    clock = _cuda_seconds if device.type == "cuda" else _seconds
    curves: dict[torch.dtype, dict[Work, Curve]] = {dtype: {} for dtype in (torch.float32, *low)}
    disturbed: list[str] = []
    loops = loop_cases(torch.bfloat16 in low) if device.type == "cpu" else {}
    for work, cases in [*_CASES.items(), *_ways_of_attention(device), *loops.items()]:
        bench = _Bench(clock, device, cases[:2] if quick else cases, 0.0 if quick else _SECONDS)
        bench.run(_dtypes(work, low))
        for dtype, of_dtype in bench.curves().items():
            curves[dtype][work] = of_dtype
        disturbed += [str(work)] if bench.disturbed() and not quick else []
    # A calibration is used for months: one taken on a busy machine is worth a warning.
    if disturbed:
        warnings.warn(
            f"the machine was busy while {', '.join(disturbed)} were measured: these costs may be wrong. "
            "Run it again when nothing else runs",
            category=ServiceWarning,
            stacklevel=2,
        )
    return DeviceCosts(
        device=device.type,
        name=processor_name(device.type),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        source=f"calibrated on {date.today().isoformat()}",
        curves=curves,
    )


class _Bench:
    """Bench for the sizes of one kind of work. ``best``: dtype -> size (by position) -> seconds."""

    def __init__(self, clock: Callable[[Run], float], device: torch.device, cases: Sequence[Case], budget: float):
        self._clock, self._device, self._cases, self._budget = clock, device, cases, budget
        self.best: dict[torch.dtype, dict[int, float]] = {}

    def run(self, dtypes: Sequence[torch.dtype]) -> None:
        """Measure all sizes, and once more those that cannot be right."""
        self.best = {dtype: {} for dtype in dtypes}
        waiting = list(dtypes)
        for position, case in enumerate(self._cases):
            self._measure(position, waiting)
            # Sizes rise: a dtype that is slow already is not measured at larger ones.
            waiting = [dtype for dtype in waiting if self.best[dtype][position] * case.calls < _LONGEST]
        for _ in range(_AGAIN if self._budget else 0):
            for position, of_position in self.disturbed().items():
                self._measure(position, of_position)

    def disturbed(self) -> dict[int, list[torch.dtype]]:
        """Return sizes that cannot have taken that long, with the dtypes."""
        found: dict[int, list[torch.dtype]] = {}
        for dtype, seconds in self.best.items():
            for position, took in seconds.items():
                beyond = any(took > _DISTURBED * seconds[larger] for larger in seconds if larger > position)
                if beyond or (position == 0 and took > _TOO_LONG):
                    found.setdefault(position, []).append(dtype)
        return found

    def curves(self) -> dict[torch.dtype, Curve]:
        """Return curves that never fall: what noise is left is cut off at the time of a larger size."""
        found: dict[torch.dtype, Curve] = {}
        for dtype, seconds in self.best.items():
            least = {position: min(of for at, of in seconds.items() if at >= position) for position in seconds}
            # Four digits are more than any clock here is good for.
            points = ((self._cases[position].amount, float(f"{of:.4g}")) for position, of in least.items())
            found[dtype] = Curve(tuple(points))
        return found

    def _measure(self, position: int, dtypes: Sequence[torch.dtype]) -> None:
        """Measure dtypes in turns, so that a busy moment of the machine hits them alike; the fastest run counts."""
        case = self._cases[position]
        # Inputs are made, and kernels warmed up, before the clock starts.
        runs = [(self.best[dtype], case.make(self._device, dtype)) for dtype in dtypes]
        for _, run in runs:
            run()
        end, done = time.perf_counter() + self._budget * len(runs), 0
        while done < _RUNS or time.perf_counter() < end:
            for best, run in runs:
                best[position] = min(best.get(position, inf), self._clock(run) / case.calls)
            done += 1


def _dtypes(work: Work, low: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return the dtypes in which this work is measured."""
    if work in LOOPS or work in _BFLOAT16_ALONE:
        low = [dtype for dtype in low if dtype is torch.bfloat16]
    return [*low] if work is Work.CAST or work in _BFLOAT16_ALONE else [torch.float32, *low]


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Run) -> float:
    """Time a call among many: its launch, or what the device takes where that is longer."""
    # Work of before must be done when the clock starts, and this work when it stops.
    torch.cuda.synchronize()
    start, calls = time.perf_counter(), 0
    while calls < 20 or (time.perf_counter() - start < 1e-3 and calls < 500):
        run()
        calls += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def _product(m: int, k: int, n: int) -> Callable[[torch.device, torch.dtype], Run]:
    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x, weight = random(device, dtype, m, k), random(device, dtype, n, k)
        return lambda: F.linear(x, weight)

    return make


def _rows(rows: int, size: int) -> Case:
    """Return a product of few rows with square weights, of as many weights in turns as no cache holds (64 MB)."""
    # A product of one row reads each weight once: from the cache it would look several times as fast as in a model.
    weights = max(1, min(64, 2**24 // size**2)) if rows == 1 else 1

    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x = random(device, dtype, rows, size)
        each = [random(device, dtype, size, size) for _ in range(weights)]
        return lambda: [F.linear(x, weight) for weight in each]

    return Case(size * size + 2 * rows * size, make, calls=weights)


def _convolution(batch: int, channels: int, size: int, out: int, backward: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x, weight = random(device, dtype, batch, channels, size, size), random(device, dtype, out, channels, 3, 3)
        if not backward:
            return lambda: F.conv2d(x, weight, padding=1)
        gradient = random(device, dtype, batch, out, size, size)
        same = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return lambda: torch.ops.aten.convolution_backward(gradient, x, weight, None, *same)

    return Case(2 * 9 * batch * channels * size * size * out, make)


def _ways_of_attention(device: torch.device) -> list[tuple[Work, tuple[Case, ...]]]:
    """Return the ways to attend that this machine has besides torch's kernel."""
    ways: dict[AttentionWay, Callable[..., Tensor]] = {}
    if device.type == "cpu":
        ways |= {"products": attention_by_products, "recomputed": recomputed_attention}
        if not why_not():
            ways["compiled"] = compiled_attention
    return [
        (work, tuple(_attention(*sizes, backward=work is ATTENTION_WAYS[way][1], attend=attend) for sizes in _HEADS))
        for way, attend in ways.items()
        for work in ATTENTION_WAYS[way]
    ]


def _attention(
    batch: int, heads: int, length: int, width: int, backward: bool,
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype) -> Run:
        shape = (batch, heads, length, width)
        query, key, value = (random(device, dtype, *shape, gradient=backward) for _ in range(3))
        if not backward:
            return lambda: attend(query, key, value)
        out, gradient = attend(query, key, value), random(device, dtype, *shape)
        return lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    return Case(4 * batch * heads * length * length * width, make)


def _pointwise(elements: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Run:
        x = random(device, dtype, elements)
        return lambda: (F.gelu(x), x + x)

    return Case(elements, make, calls=2)


def _cast(elements: int) -> Case:
    """Cast down and up, forward and backward; small ones in a chain, as autograd itself takes longer than they."""
    chain = 8 if elements < 2**18 else 1

    def make(device: torch.device, dtype: torch.dtype) -> Run:
        # Down and up: of a cast down alone the gradient's cast would be missing, which costs as much.
        x = random(device, torch.float32, elements, gradient=True)

        def run() -> None:
            y = x
            for _ in range(chain):
                y = y.to(dtype).float()
            torch.autograd.grad(y, x, x.detach())

        return run

    return Case(elements, make, calls=4 * chain)


#: (batch, input channels, size, output channels)
_CONVOLUTIONS: Final = (
    (1, 16, 8, 16), (1, 32, 14, 32), (1, 64, 14, 64), (8, 64, 14, 64), (8, 64, 28, 64), (8, 128, 28, 128),
)  # fmt: skip
_THIN: Final = ((1, 1, 14, 8), (1, 1, 28, 32), (8, 1, 28, 32), (64, 1, 28, 32), (4, 3, 112, 64))
#: (batch, heads, length, width)
_HEADS: Final = (
    (1, 2, 16, 16), (1, 4, 32, 16), (2, 4, 64, 32), (4, 8, 64, 64), (4, 8, 128, 64), (4, 8, 256, 64),
)  # fmt: skip
_ELEMENTS: Final = tuple(2**power for power in (9, 12, 15, 18, 20, 22, 24))

_BFLOAT16_ALONE: Final = LOOPS_ALONE.union(*ATTENTION_WAYS.values())
_CASES: Final[dict[Work, tuple[Case, ...]]] = {
    Work.MATMUL: tuple(Case(2 * n**3, _product(n, n, n)) for n in (16, 32, 64, 128, 256, 512, 1024)),
    Work.STREAM: tuple(_rows(STREAM_ROWS, n) for n in (64, 128, 256, 512, 1024, 2048)),
    Work.ROW: tuple(_rows(1, n) for n in (64, 128, 256, 512, 1024, 2048, 4096)),
    Work.CONVOLUTION: tuple(_convolution(*sizes, backward=False) for sizes in _CONVOLUTIONS),
    Work.CONVOLUTION_BACKWARD: tuple(_convolution(*sizes, backward=True) for sizes in _CONVOLUTIONS),
    Work.THIN_CONVOLUTION: tuple(_convolution(*sizes, backward=False) for sizes in _THIN),
    Work.THIN_CONVOLUTION_BACKWARD: tuple(_convolution(*sizes, backward=True) for sizes in _THIN),
    Work.ATTENTION: tuple(_attention(*sizes, backward=False) for sizes in _HEADS),
    Work.ATTENTION_BACKWARD: tuple(_attention(*sizes, backward=True) for sizes in _HEADS),
    Work.POINTWISE: tuple(map(_pointwise, _ELEMENTS)),
    Work.CAST: tuple(map(_cast, _ELEMENTS)),
}  # fmt: skip
