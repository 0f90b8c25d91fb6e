"""What ``benchmarks.convert`` times, and DESIGN's budgets for it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, log
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer, symbolic_trace

import fxprec
import fxprec.programs.packed_weights
from fxprec.capture.capturing import fewer_collections
from fxprec.capture.symbolic.trace import propagate_shapes, trace_static
from fxprec.kernels.rows.program.layout import spec_of
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.context import Context
from fxprec.passes.fuse import fuse
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import PIPELINE, run_passes

__all__ = [
    "ALL", "GROUPS", "REGIONS", "STANDS_ON", "WAYS", "Budget", "Mlp", "Stack", "budgets", "derivations", "exponent",
    "pass_times", "stacks", "synthetic",
]  # fmt: skip

#: DESIGN's budgets, per 1,000 nodes: convert without its passes over the capture alone; milliseconds for all passes but
#: fuse, and for fuse; and the greatest exponent of time over nodes that still passes for linear.
CAPTURE_SHARE: Final = 1.2
PASSES: Final = 300.0
FUSE: Final = 300.0
LINEAR: Final = 1.1
#: Names of two sums in the table of passes: the whole pipeline as convert runs it, and fuse where it forms regions.
ALL: Final = "all with checks"
REGIONS: Final = "regions"
#: How often a measurement is repeated, and after how many seconds of it no more.
_ROUNDS: Final = 5
_REPEAT_WITHIN: Final = 12.0
#: Nodes of a stack below which its capture is dominated by what happens once.
_SMALL: Final = 500


class Mlp(nn.Module):
    """Residual blocks of layer norm, two linears and GELU, (N, dim) -> the same: 5 nodes a block, and 6 of weights."""

    def __init__(self, layers: int, dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def synthetic(nodes: int) -> GraphModule:
    """A residual network of about ``nodes`` nodes over one shared weight, as tracing would leave it."""
    root = nn.Module()
    root.w = nn.Parameter(torch.randn(4, 4))
    graph = Graph()
    x = graph.placeholder("x")
    w = graph.get_attr("w")
    w.meta["kind"] = "parameter"
    while len(graph.nodes) < nodes:
        h = graph.call_function(F.layer_norm, (x, (4,)))
        h = graph.call_function(F.linear, (h, w))
        h = graph.call_function(F.gelu, (h,))
        h = graph.call_function(F.linear, (h, w))
        h = graph.call_function(F.dropout, (h, 0.1))
        x = graph.call_function(torch.add, (x, h))
    graph.output(x)
    return GraphModule(root, graph)


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Of the processor, so that what else the machine does is not counted; or by another clock."""
    gc.collect()
    started = clock()
    function()
    return clock() - started


# -- stacks of blocks, each way to capture -----------------------------------------------------------------------------


def _trace(model: nn.Module, _: Tensor) -> int:
    return len(symbolic_trace(model).graph.nodes)


class _Through(Tracer):
    """torch.fx's own tracer, not told to stop at modules of torch.nn: its graph has the nodes that ours has.

    It walks through the names of all parameters for each one that is read: its cost is quadratic.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _trace_through(model: nn.Module, _: Tensor) -> int:
    return len(GraphModule(model, _Through().trace(model)).graph.nodes)


def _dynamo(model: nn.Module, x: Tensor) -> int:
    """dynamo's bytecode analysis, with a backend that runs its graph as it is."""
    nodes = 0

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal nodes
        nodes += len(gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return nodes


def _compile(model: nn.Module, x: Tensor) -> None:
    """Forward and backward by inductor, from an empty cache."""
    from torch._inductor.utils import fresh_cache  # which takes seconds to import

    torch.compiler.reset()
    with fresh_cache():
        torch.compile(model)(x).sum().backward()


#: The ways to get a graph, each giving how many nodes it has, where that is known.
WAYS: Final[dict[str, Callable[[nn.Module, Tensor], object]]] = {
    "symbolic_trace": _trace,
    "convert": lambda model, _: fxprec.convert(model, capture="symbolic"),
    "dynamo": _dynamo,
    "convert, dynamo": lambda model, x: fxprec.convert(model, (x,), capture="dynamo"),
    "fx, through modules": _trace_through,
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
    "torch.compile": _compile,
}
#: Ours -> the capture that it stands on.
STANDS_ON: Final = {"convert": "symbolic_trace", "convert, dynamo": "dynamo"}
#: Ways that are compared with one another take turns.
GROUPS: Final = (("symbolic_trace", "convert"), ("fx, through modules",), ("dynamo", "convert, dynamo"),
                 ("torch.export",), ("torch.compile",))  # fmt: skip
#: It compiles in other processes.
BY_WALL_CLOCK: Final = ("torch.compile",)


@dataclass
class Stack:
    """A stack of blocks: seconds of each way to capture it.

    Attributes:
        nodes: of the graph that the passes are given: weights are nodes of it.
        captured: way -> nodes of its graph; symbolic_trace stops at modules, so weights are none of its nodes.
        seconds: way -> all samples; without those that were left out.
        passes: way, of ours -> seconds of its fastest run that were spent in passes.
    """

    blocks: int
    nodes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)

    def best(self, way: str) -> float | None:
        return min(self.seconds[way]) if way in self.seconds else None

    def over_capture(self, way: str) -> float | None:
        """What ours takes besides its passes, over the capture alone."""
        ours, alone = self.best(way), self.best(STANDS_ON[way])
        return None if ours is None or alone is None else (ours - self.passes[way]) / alone

    def besides_passes(self, way: str) -> tuple[float, float] | None:
        """Milliseconds of ours for 1,000 nodes without its passes, and the budget: by the capture for 1,000 of its."""
        ours, alone = self.best(way), self.best(STANDS_ON[way])
        if ours is None or alone is None:
            return None
        limit = CAPTURE_SHARE * 1e6 * alone / self.captured[STANDS_ON[way]]
        return 1e6 * (ours - self.passes[way]) / self.nodes, limit

    def whole(self, way: str) -> tuple[float, float] | None:
        """Milliseconds of ours for 1,000 nodes, and what all budgets together allow."""
        besides = self.besides_passes(way)
        return besides and (besides[0] + 1e6 * self.passes[way] / self.nodes, besides[1] + PASSES + FUSE)


def stacks(blocks: Sequence[int], limit: float, groups: Sequence[Sequence[str]] = GROUPS) -> list[Stack]:
    """Time each way on stacks of more and more blocks, until it would take more than ``limit`` seconds.

    The ways of a group take turns, five rounds: what slows the machine for a while slows one round of all of them. One
    group comes after the other, since a compiler leaves memory in pieces, and a graph in pieces is slow to walk.
    """
    x = torch.randn(2, 16)
    found = [Stack(count) for count in sorted({*blocks})]
    for group in groups:
        for way in group:
            WAYS[way](Mlp(1), x)  # imports and caches
        for i, stack in enumerate(found):
            due = [way for way in group if _expected(found[:i], way, stack.blocks) <= limit]
            for _ in range(_ROUNDS):
                for way in due:
                    if sum(stack.seconds.get(way, [])) < _REPEAT_WITHIN:
                        _sample(stack, way, x)
    return found


def _expected(before: Sequence[Stack], way: str, count: int) -> float:
    """Seconds, by how they grew over the last two stacks, linearly at least; what was left out before stays out."""
    times = [(stack.blocks, best) for stack in before if (best := stack.best(way)) is not None]
    if len(times) < len(before):
        return inf
    if not times:
        return 0.0
    slope = max(1.0, exponent(*map(list, zip(*times[-2:], strict=True)))) if len(times) > 1 else 1.0
    blocks, last = times[-1]
    return last * (count / blocks) ** slope


def _sample(stack: Stack, way: str, x: Tensor) -> None:
    """Time one way once more, on a new model."""
    nodes: list[object] = []
    model = Mlp(stack.blocks)
    with _passes_timed() as spent:
        clock = time.perf_counter if way in BY_WALL_CLOCK else time.process_time
        stack.seconds.setdefault(way, []).append(seconds(lambda: nodes.append(WAYS[way](model, x)), clock))
    if isinstance(nodes[0], int):
        stack.captured[way] = nodes[0]
    if way in STANDS_ON and stack.seconds[way][-1] == stack.best(way):
        stack.nodes, stack.passes[way] = spent[-1]


@contextmanager
def _passes_timed() -> Iterator[list[tuple[int, float]]]:
    """Of each time that a conversion runs its passes, the nodes that they are given and seconds of the processor."""
    spent: list[tuple[int, float]] = []

    def timed(gm: GraphModule, context: Context) -> GraphModule:
        nodes, started = len(gm.graph.nodes), time.process_time()
        result = run_passes(gm, context)
        spent.append((nodes, time.process_time() - started))
        return result

    with mock.patch.object(fxprec.programs.packed_weights, "run_passes", timed):
        yield spent


# -- passes, and regions -----------------------------------------------------------------------------------------------


def pass_times(nodes: int) -> dict[str, float]:
    """Milliseconds per 1,000 nodes: of each pass, ``ALL`` and ``REGIONS``, on a synthetic graph.

    The fastest of five runs, of long ones fewer; with the collector as convert has it.
    """
    runs: list[dict[str, float]] = []
    started = time.process_time()
    while len(runs) < _ROUNDS and (not runs or time.process_time() - started < _REPEAT_WITHIN):
        with fewer_collections():
            runs.append(_pass_times(nodes))
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _pass_times(nodes: int) -> dict[str, float]:
    context = Context(torch.bfloat16, Policy.preset("O1"))
    regions = replace(context, device="cuda", regions="triton")
    gm = synthetic(nodes)
    found = {step.__name__: seconds(partial(step, gm, context)) for step in PIPELINE}
    found[ALL] = seconds(partial(run_passes, synthetic(nodes), context))
    before = run_passes(synthetic(nodes), regions, PIPELINE[: PIPELINE.index(fuse)])
    found[REGIONS] = seconds(partial(fuse, before, regions))
    return {name: 1e6 * each / nodes for name, each in found.items()}


def derivations() -> dict[str, dict[str, Any]]:
    """region -> its nodes, and milliseconds of deriving it forward and backward, first and again for other rows.

    For CUDA, whether there is a device or not: nothing is compiled.
    """
    module = Mlp(1, 768)
    gm = trace_static(module, ("x",), {}).gm
    propagate_shapes(gm, (torch.randn(8, 768),))
    gm = run_passes(gm, Context(torch.bfloat16, Policy.preset("O1"), device="cuda", regions="triton"))
    found: dict[str, dict[str, Any]] = {}
    for call in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(str(call.target))
        assert isinstance(region, FusedRegion)
        known: dict[Any, Any] = {}
        times = [1e3 * seconds(partial(_derive, region, call, rows, known)) for rows in (8, 16)]
        found[region.name] = {"nodes": len(region.graph_module.graph.nodes), "first_ms": times[0], "again_ms": times[1]}
    return found


def _derive(region: FusedRegion, call: Node, rows: int, known: dict[Any, Any]) -> None:
    """The plan of a region for so many rows; ``known`` keeps its row programs."""
    specs = []
    for source in call.all_input_nodes:
        shape = [rows if size == 8 else size for size in source.meta["val"].shape]
        dtype = actual_dtype(source) or source.meta["val"].dtype
        specs.append(spec_of(torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)))
    plan = make_plan(region.name, region.graph_module, specs, torch.device("cuda"), known)
    assert plan.forward_launch and plan.backward_launch


# -- budgets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """A figure and what it may be at most."""

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        value, limit = (f"{each:.3g}" if each < 1000 else f"{each:.0f}" for each in (self.value, self.limit))
        return f"{self.what}: {value}{self.unit}, budget {limit}{self.unit}: {'met' if self.met else 'missed'}"


def exponent(nodes: Sequence[float], times: Sequence[float]) -> float:
    """The slope of log(time) over log(nodes), by least squares: 1 is linear, 2 quadratic."""
    return statistics.linear_regression([log(n) for n in nodes], [log(t) for t in times]).slope


def budgets(found: Sequence[Stack], passes: Mapping[int, Mapping[str, float]]) -> list[Budget]:
    """Of what was measured, the worst figure of each kind; ``passes``: nodes -> ``pass_times``."""
    kept = []
    large = [stack for stack in found if stack.nodes >= _SMALL]
    for way in STANDS_ON:
        for what, of in (("without its passes", Stack.besides_passes), ("all of it", Stack.whole)):
            figures = [figure for stack in large if (figure := of(stack, way)) is not None]
            if figures:  # the one that is nearest to its limit
                value, limit = max(figures, key=lambda each: each[0] / each[1])
                by = f"by {STANDS_ON[way]} per 1,000 of its nodes"
                kept.append(Budget(f"{way}, {what}, per 1,000 nodes; {by}", value, limit, " ms"))
    if passes:
        rest = max(times[ALL] - times["fuse"] for times in passes.values())
        kept.append(Budget("all passes but fuse, per 1,000 nodes", rest, PASSES, " ms"))
        most = max(max(times["fuse"], times[REGIONS]) for times in passes.values())
        kept.append(Budget("fuse, per 1,000 nodes", most, FUSE, " ms"))
    if len(passes) > 1:
        for name in (ALL, REGIONS):
            slope = exponent([*passes], [nodes * times[name] for nodes, times in passes.items()])
            kept.append(Budget(f"exponent of {name} over nodes", slope, LINEAR))
    return kept
