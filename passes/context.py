"""The form of a pass: a function of a graph module and a ``Context``, which gives a ``PassResult``.

A pass that rewrites graph by graph is written for one graph, and decorated with ``bodies_first`` or ``bodies_last``:
then it also runs on the bodies of checkpoints, branches and loops, at any depth, but not on fused regions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch.fx import GraphModule

from fxprec.kernels.rows.program.prices import LoopPrices
from fxprec.passes.costs.device_costs import AttentionWay, DeviceCosts
from fxprec.passes.graph.subgraphs import bodies_before, bodies_behind
from fxprec.passes.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of one conversion, as the passes see them.

    Attributes:
        low: the low dtype, float16 or bfloat16.
        policy: level, op rules and overrides.
        placement: where casts go: "mincut" (cheapest assignment) or "autocast" (forward promotion as torch.autocast).
        device: device type of the parameters, "cpu" or "cuda".
        keep_output_dtype: cast module outputs back to the dtype of the original program.
        native_mixed: norms, sums and means may read low input in their native mixed kernels.
        regions: fused regions that run as kernels ("triton", on a CPU "loops"), or whose ops run one by one ("aten");
            "": none.
        region_choices: (pattern of region names, whether to fuse them); the last match wins, without one: yes.
        by_size: a region of few elements that no pattern of ``region_choices`` names is left to torch's ops.
        costs: of the device: LOW ops stay FP32 where lowering them loses time. None: all are lowered.
        gradients: whether a backward pass is to be counted.
        attention: (way, FLOP, FLOP): another way than torch's kernel for low attention, from how many FLOP on a forward
            alone is faster by it, and a forward with its backward. None: all is torch's.
        loops: measured times of torch's kernels and of compiled loops, where regions run as loops: a region is left to
            torch where its kernels take less. None: loops serve wherever they can.
        channels_last: convolutions on a CPU may have images whose channels are next to each other in memory.
        casts_fuse: casts are part of the kernels between matrix products, and cost nothing there.
    """

    low: torch.dtype
    policy: Policy
    placement: Literal["mincut", "autocast"] = "mincut"
    device: str = "cpu"
    keep_output_dtype: bool = True
    native_mixed: bool = True
    regions: Literal["", "aten", "triton", "loops"] = ""
    region_choices: tuple[tuple[str, bool], ...] = ()
    by_size: bool = False
    costs: DeviceCosts | None = None
    gradients: bool = True
    attention: tuple[AttentionWay, float, float] | None = None
    loops: LoopPrices | None = None
    channels_last: bool = False
    casts_fuse: bool = False

    def choice(self, region: str) -> bool | None:
        """Return whether the user wants the region of this name fused; None where the settings say nothing of it."""
        return next((yes for pattern, yes in reversed(self.region_choices) if fnmatchcase(region, pattern)), None)


class PassResult(NamedTuple):
    """Result of a pass. ``declined``: 'node: reason' for every rewrite that it saw and did not make."""

    gm: GraphModule
    changed: bool
    declined: tuple[str, ...] = ()


Pass: TypeAlias = Callable[[GraphModule, Context], PassResult]


def bodies_first(rewrite: Pass) -> Pass:
    """Make a pass of the rewrite of one graph (a decorator): it runs on each body before the graph that calls it."""
    return _on_each(bodies_before, rewrite)


def bodies_last(rewrite: Pass) -> Pass:
    """Make a pass of the rewrite of one graph (a decorator): it runs on each body after the graph that calls it."""
    return _on_each(bodies_behind, rewrite)


def _on_each(graphs: Callable[[GraphModule], Iterable[GraphModule]], rewrite: Pass) -> Pass:
    @functools.wraps(rewrite)
    def run(gm: GraphModule, context: Context) -> PassResult:
        results = [rewrite(graph, context) for graph in graphs(gm)]
        declined = tuple(reason for result in results for reason in result.declined)
        return PassResult(gm, any(result.changed for result in results), declined)

    return run
