"""The packed weights of a frozen model, and its programs on them.

A packed weight is a cache beside the plain one, which stays the parameter: it is never copied, saved or moved with the
model. Programs that read one weight share its packed copy, and look at each call whether the weights are those that
were packed (identity, version, address):

=====================================  ===========================================================================
the very first call                    packs the weights, and runs on the packed copies
the same weights as at the last call   runs on these
others, or others' values              runs on plain weights
a second call with those               packs them anew
=====================================  ===========================================================================

So weights that change at each call (``functional_call`` with several sets) are not packed each time.

Whoever looks into the ops, or wants gradients of an input, gets the program on plain weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxprec.kernels.calls.attention import cpu_attention
from fxprec.kernels.calls.attention import run_for as attention_run_for
from fxprec.kernels.calls.rope import rope
from fxprec.kernels.calls.rope import run_for as rope_run_for
from fxprec.kernels.cpu.packed import PackedConv, fold_norm, pack_linear
from fxprec.kernels.cpu.words import SampledWords
from fxprec.kernels.launch.direct import direct
from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, DUAL, FX, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.kernels.torch_internals import version_of
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import graph_notes, notes
from fxprec.passes.pack import Packing, pack
from fxprec.passes.runner import run_passes
from fxprec.programs.program import Program, lift, without_autocast
from fxprec.settings import Settings
from fxprec.shadows import ShadowStore

_pointer: Final = Tensor.data_ptr
_PLAIN_TYPES: Final = (Tensor, nn.Parameter)
#: Options of attention that its loop knows: no mask, no dropout, which are torch's in a forward alone.
_ATTENTION: Final = frozenset({"is_causal", "scale", "enable_gqa", "from_flop"})

#: What tells a weight from another one, and from itself as it was.
_Key = tuple[Any, ...]
#: What a program takes in the place of a weight.
_Copy = Tensor | PackedConv
#: Versions and addresses of weights in a call, and how often shadows were refreshed: a refresh through an alias changes
#: neither version nor address of a shadow.
_Seen = tuple[list[int], list[int], int]


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """Packed copies, and the keys of what they were made from: first the refreshes of shadows, if one is a shadow."""

    keys: tuple[Any, ...]
    copies: tuple[_Copy, ...]


def rewrite(gm: GraphModule, settings: Settings, packed: PackedWeights | None = None, by_size: bool = True) -> Program:
    """Run the passes on a captured graph, in place, and make its program: the main step of each capture.

    Args:
        gm: the graph, as it was captured.
        settings: of the conversion.
        packed: the store of a frozen model that runs on packed weights; else None.
        by_size: small regions may be left to torch's ops.
    """
    # What is returned keeps its gradient only in graphs that were rewritten while gradients are recorded.
    run_passes(gm, settings.context(gradients=torch.is_grad_enabled(), by_size=by_size))
    program = lift(gm, settings.dtype, settings.executor, settings.device)
    if packed is not None:
        packed.take(program, gm)
    return program


class PackedWeights:
    """Packed weights of one frozen model.

    Attributes:
        context: of the passes.
        shadows: of the weights that stay FP32: those are packed from their shadows.
    """

    def __init__(self, context: Context, shadows: ShadowStore) -> None:
        self.context = context
        self.shadows = shadows
        self._packed: dict[Packing, _CacheEntry] = {}  # by paths in the model
        self._functions: weakref.WeakSet[_PackedFunction] = weakref.WeakSet()

    def take(self, program: Program, shown: GraphModule) -> None:
        """Have a program run on packed weights where it can.

        Args:
            program: changed in place.
            shown: the graph that users see: its nodes are told what serves them.
        """
        if program.packed is not None:
            return
        # Of a copy: the plain program serves whoever looks into its ops.
        gm = _copy(program.gm)
        run_passes(gm, self.context, [pack])
        found, about = graph_notes(gm), graph_notes(shown)
        about.declined = [*dict.fromkeys([*about.declined, *found.declined])]
        about.packed = found.packed
        if not found.packings:
            return
        # Users see one graph, the plain one: what serves its nodes is told there.
        serving = {node.name: notes(node).fused for node in gm.graph.nodes}
        for node in shown.graph.nodes:
            if node.name in found.packed:
                notes(node).fused = serving[node.name]
        program.packed = gm
        function = _PackedFunction(self, program, gm)
        self._functions.add(function)
        program.function = without_autocast(function, self.context.device)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the packed copies hold by now."""
        copies = [copy for each in self._packed.values() for copy in each.copies]
        return sum(
            copy.nbytes if isinstance(copy, PackedConv) else copy.numel() * copy.element_size() for copy in copies
        )

    def clear(self) -> None:
        """Forget all: the next calls pack anew."""
        self._packed.clear()
        for function in self._functions:
            function.forget()

    @contextlib.contextmanager
    def folded_before(self, model: nn.Module) -> Iterator[None]:
        """Fold norms into weights before the block, within which the FP32 masters of weights go."""
        tensors = _tensors_of(model)
        packings = {packing for each in self._functions for packing in each.packings if packing.norm is not None}
        known = [packing for packing in packings if all(name in tensors for name in packing.sources)]
        folded = {packing: _make(packing, _weights(packing, tensors)) for packing in known}
        yield
        tensors = _tensors_of(model)
        # The keys are of the weights that later calls come with. They are low by now, and no shadows: 0 refreshes.
        for packing, copies in folded.items():
            self._packed[packing] = _CacheEntry((0, *_keys(_weights(packing, tensors))), copies)

    def copies_for(self, packing: Packing, weights: Sequence[Tensor | None], refreshes: int) -> tuple[_Copy, ...]:
        """Return the packed copy of a weight, with a folded batch norm its bias too.

        Args:
            packing: what makes it, by paths in the model.
            weights: the weight; with a norm its bias, then the norm's mean, variance, weight and bias.
            refreshes: of shadows so far, where some of these are shadows; else 0.
        """
        found, keys = self._packed.pop(packing, None), (refreshes, *_keys(weights))
        if found is None or found.keys != keys:
            del found  # before there is another one
            found = _CacheEntry(keys, _make(packing, weights))
        self._packed[packing] = found
        return found.copies


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _keys(weights: Sequence[Tensor | None]) -> tuple[_Key, ...]:
    given = [each for each in weights if each is not None]
    keys = [(id(each), version_of(each), each.data_ptr(), each.dtype, each.shape, each.stride()) for each in given]
    return (*keys, tuple(SampledWords(given).noted.tolist()))


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor's memory holds its numbers, in rows."""
    return type(x) is Tensor and not (x.is_nested or x.is_sparse or x.is_neg())


def _stays(weight: Tensor) -> bool:
    """Return whether a weight can be packed, and no other process may write to its memory unseen."""
    return type(weight) in _PLAIN_TYPES and weight.device.type == "cpu" and not weight.is_shared()


def _make(packing: Packing, weights: Sequence[Tensor | None]) -> tuple[_Copy, ...]:
    weight, *norm = weights
    assert weight is not None
    with torch.no_grad():
        bias: tuple[_Copy, ...] = ()
        if packing.norm is not None:
            old, mean, var, gamma, beta = norm
            assert mean is not None and var is not None and packing.conv is not None
            weight, shift = fold_norm(weight, old, mean, var, gamma, beta, packing.eps, packing.conv)
            bias = (shift.to(packing.dtype) if packing.same_bias else shift,)
        weight = weight.to(packing.dtype)
        return (pack_linear(weight) if packing.conv is None else PackedConv(weight, packing.conv), *bias)


def _weights(packing: Packing, by_name: Mapping[str, Tensor]) -> list[Tensor | None]:
    return [None if name is None else by_name[name] for name in (packing.weight, *(packing.norm or ()))]


class _PackedFunction:
    """Function of a program that has packed weights.

    Attributes:
        packings: how each of the packed copies is made, by paths in the model; in the order in which the copies come,
            before the arguments of the plain program.
    """

    def __init__(self, store: PackedWeights, program: Program, gm: GraphModule) -> None:
        names = [str(node.target) for node in program.gm.graph.find_nodes(op="placeholder")]
        paths = dict(zip(names, (*program.low, *program.plain), strict=False))
        packings = graph_notes(gm).packings
        self.packings = tuple(packing.renamed(paths) for packing in packings)
        read = dict.fromkeys(name for packing in packings for name in packing.sources)
        self._paths = tuple(paths[name] for name in read)
        positions = [names.index(name) for name in read]
        self._weights: Callable[[Sequence[Any]], Any] = (
            itemgetter(*positions) if len(positions) > 1 else lambda given: (given[positions[0]],)
        )
        low = frozenset(program.low)
        self._of_shadows = frozenset(packing for packing in self.packings if not low.isdisjoint(packing.sources))
        self._inputs = len(program.low) + len(program.plain)
        self._store, self._plain, self._forward = store, program.function, _direct(gm).forward
        self.forget()

    def __call__(self, *given: Any) -> Any:
        # Somebody who looks into the ops, or wants gradients, must see the plain ones.
        if watcher(COMPILER, TRANSFORM, DUAL, SCRIPT, FX, ANY_MODE) is not None:
            return self._plain(*given)
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in given):
            return self._plain(*given)
        for each in given[self._inputs :]:
            if isinstance(each, Tensor) and not _is_plain(each):
                return self._plain(*given)
        weights = self._weights(given)
        try:
            seen = [*map(version_of, weights)], [*map(_pointer, weights)], self._refreshes()
        except RuntimeError:  # inference tensors count no versions, others have no address
            return self._plain(*given)
        # As for shadows: counters and addresses first, then sampled elements of what may be written unseen.
        packed_for, samples, copies = self._packed_for
        if packed_for != seen or samples is None or not samples.same():
            copies = self._take(weights, seen)
        return self._plain(*given) if copies is None else self._forward(*copies, *given)

    def _refreshes(self) -> int:
        return self._store.shadows.refreshes if self._of_shadows else 0

    def forget(self) -> None:
        """Forget what is packed: it is out of date."""
        # The weights of the latest call with others than the packed ones, and those that the copies are made of.
        self._latest_others: tuple[_Seen, list[int]] | None = None
        self._packed_for: tuple[_Seen | None, SampledWords | None, tuple[_Copy, ...]] = None, None, ()

    def _take(self, weights: Sequence[Tensor], seen: _Seen) -> tuple[_Copy, ...] | None:
        """Pack weights that are others than those that are packed. None: not yet, or not these."""
        if not all(map(_stays, weights)):
            return None
        samples = SampledWords(weights)
        now = seen, samples.noted.tolist()
        # The very first call packs, and then a second one with the same weights.
        packs, self._latest_others = self._latest_others in (None, now), now
        if not packs:
            return None
        by_path = dict(zip(self._paths, weights, strict=True))
        copies: tuple[_Copy, ...] = ()
        for packing in self.packings:
            refreshes = seen[2] if packing in self._of_shadows else 0
            copies += self._store.copies_for(packing, _weights(packing, by_path), refreshes)
        self._packed_for = seen, samples, copies
        return copies


def _direct(gm: GraphModule) -> GraphModule:
    """Return a copy whose fused regions, rotary embeddings and attention go to their compiled loops the shortest way.

    ::

        %sum = call_module[target=fused_add](%linear, %x)    ->    %sum = call_function[target=fused_add](%linear, %x)

    The function asks nothing but how its tensors lie (``kernels.launch.direct``): who runs the copy has asked whether
    somebody looks into its ops or wants gradients.
    """
    gm = _copy(gm)
    for node in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(str(node.target))
        if isinstance(region, FusedRegion) and region.kernels == "loops" and not region.draws and not node.kwargs:
            node.op, node.target = "call_function", direct(region.name, region, region.run_for, region.note_path)
    for node in gm.graph.find_nodes(op="call_function", target=rope):
        if len(node.args) == 5 and not node.kwargs:  # x, cos, sin, half, compiled
            *tensors, half, _ = node.args
            node.args = tuple(tensors)
            node.target = direct("rope", partial(rope, half=half, compiled=True), partial(rope_run_for, half=half))
    for node in gm.graph.find_nodes(op="call_function", target=cpu_attention):
        options = {name: value for name, value in node.kwargs.items() if name != "way"}
        if len(node.args) == 3 and node.kwargs["way"] == "compiled" and options.keys() <= _ATTENTION:
            node.kwargs = {}
            whole = partial(cpu_attention, way="compiled", **options)
            node.target = direct("attention", whole, partial(attention_run_for, **options))
    gm.recompile()
    return gm


def _copy(gm: GraphModule) -> GraphModule:
    """Return the same graph module on a graph of its own."""
    graph = Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return GraphModule(gm, graph, class_name="Program")
