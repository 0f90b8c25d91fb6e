"""Cases that price compiled loops of a CPU: a few of torch's kernels, and loops that are compiled for it.

Of a call both ways, of memory, and of a step of each kind: ``kernels/rows/run/gains.py`` adds regions up from these.
Training is measured in chains, since a backward as such costs the same whatever runs in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fxprec.costs.cases import Case, Run, random
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.rows.program.prices import MORE_STEPS, Step
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.costs.device_costs import STEPPED, Work
from fxprec.passes.ops.names import canonical_op

Function = Callable[..., Tensor]

_COLUMNS: Final = 512
_ROWS: Final = (2, 64, 1024, 4096)
#: Functions in a row whose forward and backward is measured at once.
_CHAIN: Final = 8


def why_no_loops() -> str:
    """Return why there is nothing to measure here; "" where there is."""
    return why_not()


def loop_cases(low: bool) -> dict[Work, tuple[Case, ...]]:
    """Return all cases; none without a compiler. ``low``: whether bfloat16 is measured, which loops load and store."""
    # Loops are compiled for bfloat16: float16 alone has nothing to measure.
    if why_no_loops() or not low:
        return {}
    sized: dict[Work, Function] = {
        Work.KERNEL: _plain, Work.KERNEL_EXP: _silu, Work.KERNEL_TANH: _tanh, Work.KERNEL_ERF: _gelu,
        Work.KERNEL_NORM: _norm, Work.LOOP: as_loop(_plain),
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
        if node.op in ("call_function", "call_method"):
            node.meta["op"] = canonical_op(node)
    return FusedRegion("loop", GraphModule({}, graph), 0, 0, "loops")


# -- functions of two tensors, of which some read only the first ------------------------------------------------------


def _plain(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _silu(x: Tensor, _: Tensor) -> Tensor:
    return F.silu(x)


def _tanh(x: Tensor, _: Tensor) -> Tensor:
    return torch.tanh(x)


def _gelu(x: Tensor, _: Tensor) -> Tensor:
    return F.gelu(x)


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
