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

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from fxprec.inspection.nodes import is_inserted, moves_data, op_name, run_opened
from fxprec.inspection.text import clause_of
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.kernels.torch_internals import FakeTensor
from fxprec.model.captured import Captured
from fxprec.passes.dtypes.fake_results import hint, quietly
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.torch_internals import FakeTensorMode
from fxprec.programs.program import checkpointed
from fxprec.torch_internals import OpMode, aten_to_copy, storage_key

_NO_SHAPES: Final = "unknown without shapes: give convert(model, example_inputs=...)"


class WeightCopy(NamedTuple):
    """Cast of a weight that is alive when the forward has ended.

    Attributes:
        weight: the ``id`` of the real weight.
        size: its bytes.
        cached: whether autocast keeps it until its block ends, for whoever reads that weight next.
    """

    weight: int
    size: int
    cached: bool


class RehearsedRun(OpMode):
    """Dispatch mode that counts what one run of one graph casts, and what autograd keeps of it.

    Attributes:
        traffic: the casts that run.
        results: casts of ours that give results of the graph their original dtype.
        wider: nodes that are FP32 in ours, and low under autocast.
        alive: the casts of weights that live at the end.
        kept: bytes that autograd keeps besides weights, copies of them and inputs.
        unsized: casts and kept tensors whose size depends on data: their bytes are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.results = self.kept = self.unsized = 0
        self.wider: dict[Node, None] = {}
        self.alive: list[WeightCopy] = []
        self._weights: dict[int, Tensor] = {}
        self._made: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._saved: dict[int, int] = {}

    @classmethod
    def of(
        cls, captured: Captured, mode: FakeTensorMode, device: str, low: torch.dtype, autocast: bool = False,
        lowered: bool = False,
    ) -> RehearsedRun:  # fmt: skip
        """Run the program of a graph.

        Args:
            captured: the graph.
            mode: the fake mode of its values.
            device, low: of the conversion.
            autocast: as eager autocast runs it: FP32 weights, and no cast of the passes.
            lowered: only under autocast: low weights are low since the conversion, and count as FP32 ones.
        """
        run, inputs = cls(), _Inputs(mode)
        program, weights, real = captured.program, _weights(captured.gm), {}

        def fake(path: str, dtype: torch.dtype | None) -> Tensor:
            value = weights[path]
            if autocast:
                dtype = torch.float32 if lowered and value.dtype is low else None
            made = real.setdefault((id(value), dtype), inputs.weight(value, dtype))
            run._weights[storage_key(made)] = value
            return made

        with quietly(inputs.mode), torch.set_grad_enabled(captured.training), contextlib.ExitStack() as block:
            if autocast:
                block.enter_context(torch.autocast(device, low))
            # A program takes its low weights first, then the others, then the inputs of the call.
            given = [fake(path, low) for path in program.low] + [fake(path, None) for path in program.plain]
            placeholders = [*program.gm.graph.find_nodes(op="placeholder")]
            given += [inputs.of(node) for node in placeholders[len(given) :]]
            # Saved tensors are counted by storage: a view of one that is kept costs nothing.
            with run, torch.autograd.graph.saved_tensors_hooks(run._keep, lambda kept: kept):
                outputs = _Player(program.gm, inputs.mode, run, casts=not autocast).run(*given)
            run._finish([value for value in given if isinstance(value, Tensor)], autocast)
            del outputs  # what autograd keeps lived as long as they
        return run

    def _finish(self, given: Sequence[Tensor], autocast: bool) -> None:
        """Sort what is alive into copies of weights and what else is kept for the backward."""
        # Inputs and weights are there anyway: what autograd saves of them is no memory of the call.
        known = {storage_key(value) for value in given}
        for reference, weight in self._made:
            copy = reference()
            if copy is not None and storage_key(copy) not in known:
                known.add(storage_key(copy))
                # Autocast caches casts of leaves that want a gradient, until its block ends.
                cached = autocast and weight.requires_grad
                self.alive.append(WeightCopy(id(weight), self._sized(copy.untyped_storage().nbytes()), cached))
        self.kept = sum(self._sized(size) for storage, size in self._saved.items() if storage not in known)

    def _sized(self, size: Any) -> int:
        """Return a size as it was when the graph was captured; 0 where it depends on data, which is counted."""
        seen = hint(size)
        self.unsized += seen is None
        return seen or 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten_to_copy and args[0].is_floating_point() and result.is_floating_point():
            if args[0].dtype is not result.dtype:
                size = self._sized(result.numel() * result.itemsize)
                weight = self._weights.get(storage_key(args[0]))
                self.traffic += Traffic(1, size) if weight is None else Traffic(0, 0, 1, size)
                if weight is not None:
                    self._made.append((weakref.ref(result), weight))
        return result

    def note(self, node: Node) -> None:
        """Note a node that is FP32 in ours, and low under autocast, unless it only moves values."""
        if node.op.startswith("call") and not moves_data(op_name(node)):
            self.wider[node] = None

    def _keep(self, tensor: Tensor) -> Tensor:
        self._saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


class _Inputs:
    """Makes the fake tensors that a graph is run on, with the sizes that it was captured with.

    A graph for any size has symbolic ones: they stand for what they were at the capture. Only a size that depends on
    data (what ``nonzero`` found before a graph break) stays symbolic, as nobody knows it.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        shapes = mode.shape_env
        self.mode = FakeTensorMode(shape_env=shapes and type(shapes)(), allow_non_fake_inputs=True)
        self._unknown: dict[str, Any] = {}

    def weight(self, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a fake of a real weight, in another dtype perhaps."""
        fake = torch.empty_like(self.mode.from_tensor(value, static_shapes=True), dtype=dtype, requires_grad=False)
        return fake.requires_grad_(value.requires_grad)

    def of(self, node: Node) -> Any:
        """Return what a placeholder stands for."""
        value = node.meta.get("val")
        if not isinstance(value, FakeTensor):
            return self._known(value)
        # Strides decide which kernels run, and whether they copy: fakes keep them where they are numbers.
        sizes, strides = [*map(self._known, value.shape)], [*map(self._known, value.stride())]
        like = {"dtype": value.dtype, "device": value.device}
        if all(isinstance(each, int) for each in (*sizes, *strides)):
            return torch.empty_strided(sizes, strides, **like).requires_grad_(value.requires_grad)
        return torch.empty(sizes, **like).requires_grad_(value.requires_grad)

    def _known(self, value: Any) -> Any:
        """Return a symbolic number as the plain one that it was, or as a new symbol where it depends on data."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        # What a symbol was at the capture is as good as any size, and the only one that is known to run.
        seen = value.node.hint if value.node.has_hint() else None
        if isinstance(seen, int | float):
            return seen
        name, shapes = str(value.node.expr), self.mode.shape_env
        if name not in self._unknown:
            kind = {torch.SymInt: "symint", torch.SymFloat: "symfloat", torch.SymBool: "symbool"}[type(value)]
            self._unknown[name] = getattr(shapes, f"create_unbacked_{kind}")()
        return self._unknown[name]


def _weights(gm: GraphModule) -> dict[str, Tensor]:
    """Return, by path, the parameters and buffers that a graph reads."""
    nodes = [node for node in gm.graph.find_nodes(op="get_attr") if notes(node).kind in ("parameter", "buffer")]
    return {weight_path(node): attribute_of(node) for node in nodes}


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES


class _Player(Interpreter):
    """Interpreter of a graph, with its regions and checkpointed bodies, with or without the casts of the passes."""

    def __init__(
        self, gm: GraphModule, mode: FakeTensorMode, counting: RehearsedRun, casts: bool, within: bool = False
    ) -> None:
        super().__init__(gm)
        self._mode, self._counting, self._casts, self._within = mode, counting, casts, within

    def run_node(self, n: Node) -> Any:
        # Autocast makes casts of its own: on its side each of ours hands its input on.
        if is_inserted(n) and not self._casts:
            value, maker = self.fetch_args_kwargs_from_env(n)[0][0], n.all_input_nodes[0]
            if notes(n).precision.output in LOW_DTYPES and _is_low(value):
                self._counting.note(maker)
            return value
        before = self._counting.traffic.casts
        widened = not self._casts and any(map(self._is_widened, n.all_input_nodes))  # before their values are let go
        result = super().run_node(n)
        ran = self._counting.traffic.casts - before
        if is_inserted(n):
            self._counting.results += ran if any(user.op == "output" for user in n.users) and not self._within else 0
        # An op that FP32 reached here without a cast there computes low under autocast.
        elif widened and not ran:
            self._counting.note(n)
        return result

    def _is_widened(self, source: Node) -> bool:
        """Return whether a pass casts to FP32 here what is low under autocast."""
        wide = is_inserted(source) and notes(source).precision.output is torch.float32
        return wide and _is_low(self.env.get(source))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, FusedRegion):
            # A region runs as its ops: its kernel has no fake implementation that casts could be seen in.
            return run_opened(called, self._inner(called.graph_module), args)
        return super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Run as a checkpoint, so that autograd keeps for it what it would keep in training.
        if target is checkpointed:
            return checkpoint(self._inner(args[0]).run, *args[1:], use_reentrant=False)
        return super().call_function(target, args, kwargs)

    def _inner(self, gm: GraphModule) -> _Player:
        return _Player(gm, self._mode, self._counting, self._casts, within=True)


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
    captured: Sequence[Captured], device: str, low: torch.dtype, held: HeldMemory, autocast_weights: int,
    lowered: bool = False,
) -> Rehearsal:  # fmt: skip
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
        ours=sum((run.traffic for run in ours), Traffic()),
        autocast=sum((run.traffic for run in autocast), Traffic()),
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


def _copies(runs: Sequence[RehearsedRun]) -> int:
    """Return the bytes of the casts of weights that are alive at the end.

    Autocast caches the cast of a weight that wants a gradient, for all graphs within its block: it counts once.
    """
    cached = {copy.weight: copy.size for run in runs for copy in run.alive if copy.cached}
    return sum(cached.values()) + sum(copy.size for run in runs for copy in run.alive if not copy.cached)
