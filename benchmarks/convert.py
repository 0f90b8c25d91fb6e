"""What ``convert`` costs, beside the capture that it stands on, from hundreds to a hundred thousand nodes.

    python -m benchmarks.convert [--layers 12 50 200] [--nodes 1000 10000 100000]

First table: stacks of pre-norm blocks, captured by torch.fx (no inputs) and by dynamo (first call). Second table: the
passes alone on synthetic graphs, with milliseconds per 1,000 nodes: a linear cost keeps that column flat; "regions" is
``fuse`` where it forms fused regions. Third table: what the first call of a region costs, once for all that are equal.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

import fxprec
from fxprec.capture.trace import trace_static
from fxprec.kernels.rows.derive import make_plan
from fxprec.kernels.rows.region import FusedRegion
from fxprec.kernels.rows.spec import spec_of
from fxprec.passes.context import Context
from fxprec.passes.fuse import fuse
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.policy import Policy
from fxprec.passes.runner import PIPELINE, run_passes
from fxprec.shapes import propagate_shapes

__all__ = ["synthetic"]


class Mlp(nn.Module):
    """Residual blocks of layer norm, two linears and GELU: 8 nodes a block in torch.fx."""

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


def best(function: Callable[[], object]) -> float:
    return min(seconds(function) for _ in range(3))


def seconds(function: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def captures(layers: list[int]) -> Table:
    """The two ways to capture, each beside the same capture without fxprec; "ours": the rest, for 1,000 nodes."""
    table = Table(title="convert beside its capture, seconds")
    for column in ("blocks", "nodes", "trace", "convert", "ours", "dynamo", "convert", "ours"):
        table.add_column(column, justify="right")
    for count in layers:
        inputs = (torch.randn(2, 16),)
        trace = best(lambda: symbolic_trace(Mlp(count)))  # noqa: B023
        static = best(lambda: fxprec.convert(Mlp(count), capture="symbolic"))  # noqa: B023
        dynamo = best(lambda: captured_alone(Mlp(count), *inputs))  # noqa: B023
        dynamic = best(lambda: fxprec.convert(Mlp(count), inputs, capture="dynamo"))  # noqa: B023
        nodes = len(fxprec.graph_module(fxprec.convert(Mlp(count)).module).graph.nodes)
        times = (trace, static, 1e3 * (static - trace) / nodes, dynamo, dynamic, 1e3 * (dynamic - dynamo) / nodes)
        table.add_row(str(count), str(nodes), *(f"{each:.3f}" for each in times))
    return table


def captured_alone(model: nn.Module, *inputs: Tensor) -> None:
    """dynamo's bytecode analysis, with a backend that runs its graph as it is."""
    torch._dynamo.reset()
    torch.compile(model, backend=lambda gm, _: gm.forward)(*inputs)


def passes(nodes: list[int]) -> Table:
    table = Table(title="The passes alone, milliseconds per 1,000 nodes")
    for column in ("nodes", *(step.__name__ for step in PIPELINE), "all with checks", "regions"):
        table.add_column(column, justify="right")
    context = Context(torch.bfloat16, Policy.preset("O1"))
    regions = replace(context, device="cuda", regions="triton")
    for count in nodes:
        gm = synthetic(count)
        each = []
        for step in PIPELINE:
            each.append(seconds(lambda: step(gm, context)))  # noqa: B023
        whole = synthetic(count)
        each.append(seconds(lambda: run_passes(whole, context)))  # noqa: B023
        before = run_passes(synthetic(count), regions, PIPELINE[: PIPELINE.index(fuse)])
        each.append(seconds(lambda: fuse(before, regions)))  # noqa: B023
        table.add_row(str(count), *(f"{1e6 * each_seconds / count:.0f}" for each_seconds in each))
    return table


def derivations() -> Table:
    """For CUDA, whether there is a device or not: nothing is compiled."""
    table = Table(title="Deriving a region, forward and backward, milliseconds")
    for column in ("region", "nodes", "first", "again, other rows"):
        table.add_column(column, justify="left" if column == "region" else "right")
    module = Mlp(1, 768)
    x = torch.randn(8, 768)
    gm = trace_static(module, ("x",), {}).gm
    propagate_shapes(gm, (x,))
    gm = run_passes(gm, Context(torch.bfloat16, Policy.preset("O1"), device="cuda", regions="triton"))
    for call in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(str(call.target))
        assert isinstance(region, FusedRegion)
        known: dict[Any, Any] = {}
        times = [1e3 * seconds(partial(derive, region, call, rows, known)) for rows in (8, 16)]
        nodes = len(region.graph_module.graph.nodes)
        table.add_row(region.name, str(nodes), *(f"{each:.1f}" for each in times))
    return table


def derive(region: FusedRegion, call: Node, rows: int, known: dict[Any, Any]) -> None:
    """The plan of a region for so many rows; ``known`` keeps its row programs."""
    specs = []
    for source in call.all_input_nodes:
        shape = [rows if size == 8 else size for size in source.meta["val"].shape]
        dtype = actual_dtype(source) or source.meta["val"].dtype
        specs.append(spec_of(torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)))
    plan = make_plan(region.name, region.graph_module, specs, torch.device("cuda"), known)
    assert plan.forward_launch and plan.backward_launch


def main() -> None:
    parser = argparse.ArgumentParser(description="Time convert")
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 50, 200, 800])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    options = parser.parse_args()
    console = Console()
    captured_alone(Mlp(1), torch.randn(2, 16))  # imports dynamo
    console.print(captures(options.layers))
    console.print(passes(options.nodes))
    console.print(derivations())


if __name__ == "__main__":
    main()
