"""Find what one call casts, and what it holds in memory, by running its graphs on fake tensors: nothing is computed.

Each graph runs twice: as it was rewritten, and as eager autocast would run it, with the casts of the passes taken out,
FP32 weights and autocast on::

    %x_bf16 = cast(%x, torch.bfloat16)
    %linear = linear(%x_bf16, %low_fc_weight)      ->      %linear = linear(%x, %fc_weight)       under autocast

Both sides are counted alike: casts of weights apart from the others, and memory as weights, their low copies (shadows
here, autocast's cached or saved casts there) and what is kept for the backward.

Where ours casts more often there are two reasons, which are counted: results get back the dtype that they had in the
original, and ops are FP32 that autocast runs low: by the policy, or by the op table, which follows autocast's list for
CUDA on every device. (On a CPU autocast lists fewer ops.)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.fx import GraphModule

from fxprec.inspection.nodes import op_name
from fxprec.inspection.rehearsed_run import RehearsedRun
from fxprec.inspection.text import clause_of
from fxprec.kernels.torch_internals import FakeTensor
from fxprec.model.captured import Captured
from fxprec.passes.torch_internals import FakeTensorMode

_NO_SHAPES: Final = "unknown without shapes: give convert(model, example_inputs=...)"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Casts in the forward of one call, from one float dtype to another.

    Attributes:
        casts: of anything but weights and buffers.
        cast_bytes: what these write.
        weight_casts: of weights and buffers. (A shadow is no cast of a forward: it stays, and is refreshed.)
        weight_bytes: what these write.
    """

    casts: int = 0
    cast_bytes: int = 0
    weight_casts: int = 0
    weight_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) + getattr(other, each.name) for each in dataclasses.fields(self)))


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes that a call holds when its forward has ended, within the autocast block where there is one.

    Attributes:
        weights: of the parameters.
        copies: of low copies of weights and buffers: shadows, packed copies, autocast's casts that are still alive.
        kept: of what autograd keeps for the backward besides these and the inputs; 0 for graphs of eval mode. Of a
            fused region it is what its ops would keep, one by one: kernels keep less.
    """

    weights: int = 0
    copies: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.copies + self.kept


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Figures of our run beside those of eager autocast on the same graphs; or ``unknown``: why there are none.

    Attributes:
        ours, autocast: the casts of a forward.
        memory, autocast_memory: what is held when it has ended.
        unknown: why there are no figures; "" where there are.
        training: whether graphs are of training mode, so that something is kept for a backward.
        unsized: how many of these casts and tensors have a size that depends on data: no figure holds their bytes.
        results: of the casts of ours, those that give results of the graphs their original dtype.
        wider: op -> how many read FP32, or give it to a cast, and do so low under autocast, without any cast.
    """

    ours: Traffic = Traffic()
    autocast: Traffic = Traffic()
    memory: HeldMemory = HeldMemory()
    autocast_memory: HeldMemory = HeldMemory()
    unknown: str = ""
    training: bool = False
    unsized: int = 0
    results: int = 0
    wider: Mapping[str, int] = field(default_factory=dict)


def rehearse(
    captured: Sequence[Captured],
    device: str,
    low: torch.dtype,
    held: HeldMemory,
    autocast_weights: int,
    lowered: bool = False,
) -> Rehearsal:
    """Run each graph once on fake tensors, with gradients where the module was in training mode, and add up.

    Args:
        captured: the graphs.
        device, low: of the conversion, and of the autocast that it is compared with.
        held: the weights of the conversion, and the low copies of them that stay between calls.
        autocast_weights: bytes of the weights that eager autocast runs on.
        lowered: whether the parameters themselves became low (O3, frozen models): autocast runs on FP32 ones.
    """
    ours: list[RehearsedRun] = []
    autocast: list[RehearsedRun] = []
    for each in captured:
        # Without fake values there are no sizes, and a guess would be no figure.
        mode = _mode(each.gm)
        if mode is None:
            return Rehearsal(unknown=_NO_SHAPES)
        try:
            ours.append(RehearsedRun.of(each, mode, device, low))
            autocast.append(RehearsedRun.of(each, mode, device, low, autocast=True, lowered=lowered))
        except Exception as error:  # an op without a fake, a value that the graph reads: there is nothing to tell
            what = "a graph" if len(ours) == len(autocast) else "eager autocast of a graph"
            return Rehearsal(unknown=f"unknown, as {what} does not run on fake tensors ({clause_of(error)})")
    return Rehearsal(
        ours=_traffic(ours),
        autocast=_traffic(autocast),
        memory=HeldMemory(held.weights, held.copies + _copies(ours), sum(run.kept for run in ours)),
        autocast_memory=HeldMemory(autocast_weights, _copies(autocast), sum(run.kept for run in autocast)),
        training=any(each.training for each in captured),
        unsized=sum(run.unsized for run in (*ours, *autocast)),
        results=sum(run.results for run in ours),
        wider=dict(Counter(op_name(node) for run in autocast for node in run.wider).most_common()),
    )


def _mode(gm: GraphModule) -> FakeTensorMode | None:
    """Return the fake mode of a graph's values; None where its shapes are not known."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _traffic(runs: Sequence[RehearsedRun]) -> Traffic:
    return sum((Traffic(run.casts, run.cast_bytes, run.weight_casts, run.weight_bytes) for run in runs), Traffic())


def _copies(runs: Sequence[RehearsedRun]) -> int:
    """Return the bytes of the casts of weights that are alive at the end.

    Autocast caches the cast of a weight that wants a gradient, for all graphs within its block: it counts once.
    """
    cached = {copy.weight: copy.size for run in runs for copy in run.alive if copy.cached}
    return sum(cached.values()) + sum(copy.size for run in runs for copy in run.alive if not copy.cached)
