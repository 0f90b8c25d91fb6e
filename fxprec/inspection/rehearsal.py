"""What one call casts and keeps for its backward, found by running its graphs on fake tensors: nothing is computed.

Each graph runs twice: as it was rewritten, and as eager autocast would run it, with the casts of the passes taken out,
FP32 weights and autocast on::

    %x_bf16 = cast(%x, torch.bfloat16)
    %linear = linear(%x_bf16, %low_fc_weight)      ->      %linear = linear(%x, %fc_weight)       under autocast

Where ours casts more often there are two reasons, which are counted: results get back the dtype that they had in the
original, and ops are FP32 that autocast runs low: by the policy, or by the op table, which follows autocast's list for
CUDA on every device. (On a CPU autocast lists fewer ops.)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from fxprec.inspection.nodes import is_inserted, moves_data, op_name
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.kernels.torch_internals import FakeTensor
from fxprec.model.captured import Captured
from fxprec.passes.dtypes.fake_results import quietly
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.passes.graph.fetched import attribute_of
from fxprec.passes.torch_internals import FakeTensorMode
from fxprec.programs.program import checkpointed
from fxprec.torch_internals import OpMode, aten_to_copy, storage_key

_LOW: Final = (torch.float16, torch.bfloat16)
_NO_SHAPES: Final = "unknown without shapes: give convert(model, example_inputs=...)"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the forward of one call.

    Attributes:
        casts: from one float dtype to another, those of weights apart.
        cast_bytes: what these write.
        weight_casts: of weights, at every step of a training.
        kept: bytes of what autograd keeps for the backward, inputs and weights apart; 0 for a graph of eval mode. Of a
            fused region it is what its ops would keep, one by one: kernels keep less.
    """

    casts: int = 0
    cast_bytes: int = 0
    weight_casts: int = 0
    kept: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """``ours`` beside ``autocast``: what eager autocast would do with the same graphs; or ``unknown``: why not told.

    Attributes:
        results: of the casts of ours, those that give results of the graphs their original dtype.
        wider: op -> how many read FP32, or give it to a cast, and do so low under autocast, without any cast.
    """

    ours: Traffic = Traffic()
    autocast: Traffic = Traffic()
    unknown: str = ""
    results: int = 0
    wider: Mapping[str, int] = field(default_factory=dict)


def rehearse(captured: Iterable[Captured], device: str, low: torch.dtype) -> Rehearsal:
    """Of all these graphs, one call of each, with gradients where the module was in training mode."""
    ours, autocast = Traffic(), Traffic()
    results, wider = 0, Counter[str]()
    for each in captured:
        mode = _mode(each.gm)
        if mode is None:
            return Rehearsal(unknown=_NO_SHAPES)
        try:
            with quietly(mode), torch.set_grad_enabled(each.training):
                traffic, counting = _run(each, mode, low)
                ours, results = ours + traffic, results + counting.results
                with torch.autocast(device, low):
                    traffic, counting = _run(each, mode, None)
                autocast, wider = autocast + traffic, wider + Counter(map(op_name, counting.wider))
        except Exception as error:  # an op without a fake, a value that the graph reads: there is nothing to tell
            text = str(error).strip().partition("\n")[0]
            return Rehearsal(unknown=f"unknown: it does not run on fake tensors ({type(error).__name__}: {text[:80]})")
    return Rehearsal(ours, autocast, results=results, wider=dict(wider.most_common()))


def _mode(gm: GraphModule) -> FakeTensorMode | None:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _run(captured: Captured, mode: FakeTensorMode, low: torch.dtype | None) -> tuple[Traffic, _Counting]:
    """Run the program of a graph; with the shadows as they are, or (``low`` is None) without any cast of ours."""
    program, values = captured.program, _weights(captured.gm)
    weights = [_weight(values[path], mode, low) for path in program.low]
    weights += [_weight(values[path], mode) for path in program.plain]
    inputs = [_input(node, mode) for node in [*program.gm.graph.find_nodes(op="placeholder")][len(weights) :]]
    with _Counting(weights) as counting, torch.autograd.graph.saved_tensors_hooks(counting.keep, lambda kept: kept):
        outputs = _Player(program.gm, mode, counting, casts=low is not None).run(*weights, *inputs)
    known = {storage_key(value) for value in [*weights, *inputs] if isinstance(value, Tensor)}
    kept = sum(size for storage, size in counting.kept.items() if storage not in known)
    del outputs  # what autograd keeps lived as long as they
    return Traffic(counting.casts, counting.cast_bytes, counting.weight_casts, kept), counting


def _weights(gm: GraphModule) -> dict[str, Tensor]:
    """By path, the parameters and buffers that a graph reads."""
    nodes = [node for node in gm.graph.find_nodes(op="get_attr") if notes(node).kind in ("parameter", "buffer")]
    return {weight_path(node): attribute_of(node) for node in nodes}


def _weight(value: Tensor, mode: FakeTensorMode, low: torch.dtype | None = None) -> Tensor:
    fake = torch.empty_like(mode.from_tensor(value, static_shapes=True), dtype=low, requires_grad=False)
    return fake.requires_grad_(value.requires_grad)


def _input(node: Node, mode: FakeTensorMode) -> Any:
    value = node.meta.get("val")
    if isinstance(value, FakeTensor):
        return torch.empty_like(value, requires_grad=value.requires_grad)
    return value


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _LOW


class _Player(Interpreter):
    """Runs a graph, the regions and the checkpointed bodies in it, with or without the casts of the passes."""

    def __init__(
        self, gm: GraphModule, mode: FakeTensorMode, counting: _Counting, casts: bool, within: bool = False
    ) -> None:
        super().__init__(gm)
        self._mode, self._counting, self._casts, self._within = mode, counting, casts, within

    def run_node(self, n: Node) -> Any:
        if is_inserted(n) and not self._casts:
            value, maker = self.fetch_args_kwargs_from_env(n)[0][0], n.all_input_nodes[0]
            if notes(n).precision.output in _LOW and _is_low(value):
                self._counting.note(maker)
            return value
        before = self._counting.casts
        widened = not self._casts and any(map(self._is_widened, n.all_input_nodes))  # before their values are let go
        result = super().run_node(n)
        ran = self._counting.casts - before
        if is_inserted(n):
            self._counting.results += ran if any(user.op == "output" for user in n.users) and not self._within else 0
        elif widened and not ran:
            self._counting.note(n)
        return result

    def _is_widened(self, source: Node) -> bool:
        """Whether a pass casts to FP32 here what is low under autocast."""
        wide = is_inserted(source) and notes(source).precision.output is torch.float32
        return wide and _is_low(self.env.get(source))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, FusedRegion):
            reads = len(called.graph_module.graph.find_nodes(op="placeholder"))  # the seeds of dropouts come after them
            results = self._inner(called.graph_module).run(*args[:reads])
            return results[0] if called.single else results
        return super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is checkpointed:
            return checkpoint(self._inner(args[0]).run, *args[1:], use_reentrant=False)
        return super().call_function(target, args, kwargs)

    def _inner(self, gm: GraphModule) -> _Player:
        return _Player(gm, self._mode, self._counting, self._casts, within=True)


class _Counting(OpMode):
    """Casts that run, as of ``Traffic`` and ``Rehearsal``, and what autograd keeps: storage -> bytes."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {storage_key(weight) for weight in weights}
        self.casts = self.cast_bytes = self.weight_casts = self.results = 0
        self.wider: dict[Node, None] = {}
        self.kept: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten_to_copy and args[0].is_floating_point() and result.is_floating_point():
            if args[0].dtype is not result.dtype:
                self._count(args[0], result)
        return result

    def _count(self, source: Tensor, result: Tensor) -> None:
        if storage_key(source) in self._weights:
            self.weight_casts += 1
        else:
            self.casts += 1
            self.cast_bytes += result.numel() * result.itemsize

    def note(self, node: Node) -> None:
        """It is FP32 in ours, and low under autocast; of what only moves values those say so that it moves them for."""
        if node.op.startswith("call") and not moves_data(op_name(node)):
            self.wider[node] = None

    def keep(self, tensor: Tensor) -> Tensor:
        self.kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor
