"""A rewritten graph as a function of its weights and inputs: what runs.

The graph that users see reads each parameter by ``get_attr`` and casts it, and stands on its own. The program made from
it takes the weights as arguments, low ones as their shadows, so that one call costs no attribute walks and no weight
casts, and works on whatever tensors stand in for the parameters (functional_call, parametrizations, DTensors). Dropouts
that do nothing are left out::

    %w = get_attr[fc.weight]                          %fc_weight_bf16 = placeholder    (a shadow)
    %w_bf16 = cast(%w, torch.bfloat16)       ->       %x = placeholder
    %linear = linear(%x, %w_bf16)                     %linear = linear(%x, %fc_weight_bf16)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxprec.kernels.launch.graph_call import call_directly, graph_call
from fxprec.kernels.launch.observers import DUAL, TRANSFORM, watcher
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.annotations import Annotations, Precision, Rule, annotated, notes, weight_path
from fxprec.passes.graph.casts import cast, cast_if_float
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.names import is_idle_dropout
from fxprec.passes.ops.table import facts_of
from fxprec.passes.torch_internals import HigherOrderOperator, LazyBase
from fxprec.settings import Executor
from fxprec.torch_internals import checkpoint_context, tag_activation_checkpoint


@dataclass(slots=True, eq=False)
class Program:
    """``function(*low, *plain, *inputs)``. Only ``PackedWeights`` changes it, once: its function, and ``packed``.

    Attributes:
        function: runs the graph, with torch.autocast off: the graph itself says what is lowered.
        low: paths in the model of the weights whose low-precision shadows come first, in order.
        plain: paths of the parameters and buffers that come next, as they are.
        gm: the lifted graph.
        writes: it writes to inputs, parameters or buffers: it is right for those alone that share memory with each
            other as they did when it was captured.
        watched: of ``plain`` those for which that matters: what it writes, and what it reads a copy of. (Of ``low`` it
            matters for all, since shadows are copies.)
        writes_weights: it writes to parameters: afterwards their shadows are stale.
        packed: the lifted graph on packed weights, which its function runs where it can.
    """

    function: Callable[..., Any]
    low: tuple[str, ...]
    plain: tuple[str, ...]
    gm: GraphModule
    writes: bool = False
    watched: tuple[str, ...] = ()
    writes_weights: bool = False
    packed: GraphModule | None = None


#: What cannot be part of a Python name.
_NO_NAME: Final = re.compile(r"\W")


def lift(gm: GraphModule, low: torch.dtype, executor: Executor = "eager", device: str = "cpu") -> Program:
    """Make the program of a rewritten, self-contained graph. Constants and subgraphs stay attributes."""
    # A cast of a weight becomes an input: the shadow. The weight itself is one where others read it too.
    nodes = annotated(gm.graph)
    shadows: dict[Node, Any] = {node: node.args[0] for node, _ in nodes if is_weight_cast(node, low)}
    weights = [node for node, noted in nodes if node.op == "get_attr" and noted.kind in ("parameter", "buffer")]
    read = {node: None for node in weights if not node.users.keys() <= shadows.keys()}
    graph = Graph()
    slots = {("low", weight_path(node)): node for node in shadows.values()}
    slots |= {("plain", weight_path(node)): node for node in read}
    placeholders: dict[tuple[str, str], Node] = {}
    taken: set[str] = set()
    shadow = Precision.arriving(None, low, Rule.KEEP, "the shadow of a parameter")
    # Weights are arguments under names that say whose they are: errors and printed programs show them.
    for (kind, path), node in slots.items():
        name = _argument(f"{kind}_{path}", taken)
        placeholders[kind, path] = graph.create_node("placeholder", name, (), {}, name)
        placeholders[kind, path].meta.update(node.meta)
        if kind == "low":
            notes(placeholders[kind, path]).precision = shadow
    values: dict[Node, Node] = {}
    # The graph once more, with the arguments in the places of weights.
    for node, noted in nodes:
        if node in shadows:
            values[node] = placeholders["low", weight_path(shadows[node])]
        elif node.op == "get_attr" and noted.kind in ("parameter", "buffer"):
            if node in read:
                values[node] = placeholders["plain", weight_path(node)]
        elif node.op == "output":
            graph.output(map_arg(node.args[0], values.__getitem__))
        elif is_idle_dropout(node) and isinstance(node.args[0], Node):  # a call would cost as much as a cast
            values[node] = values[node.args[0]]
        else:
            args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            values[node] = new_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
            # In place: an assignment to any attribute of a node takes it out of the graph's table, and puts it back.
            values[node].meta.update(node.meta)
    # Regions that recompute run torch's checkpoint; the passes wanted dynamo's operator, whose body they see.
    checkpoints = gm.graph.find_nodes(op="call_function", target=tag_activation_checkpoint())
    run_checkpoints(graph, {values[node]: _written_operands(node) for node in checkpoints})
    # Regions within regions, and within branches; the program shares them with the graph.
    for body in every_graph(gm):
        if body is not gm and run_checkpoints(body.graph):
            body.recompile()
    _bind_patched(graph)
    lifted = (LazyBase if executor == "eager" else GraphModule)(gm, graph, class_name="Program")
    compiled = None if executor == "eager" else torch.compile(lifted, backend="inductor")
    named = {kind: tuple(path for k, path in slots if k == kind) for kind in ("low", "plain")}
    written = [noted for _, noted in nodes if noted.written]
    writes_weights = any(noted.kind == "parameter" for noted in written)
    function = _runner(lifted, compiled, device)
    # What it neither writes nor copies may share memory with anything.
    matters = {weight_path(node) for node in _written_or_copied(gm.graph) if node.op == "get_attr"} if written else ()
    watched = tuple(path for path in named["plain"] if path in matters)
    return Program(function, named["low"], named["plain"], lifted, bool(written), watched, writes_weights)


def _runner(lifted: GraphModule, compiled: Callable[..., Any] | None, device: str) -> Callable[..., Any]:
    """Return the forward of a lifted graph, with autocast off.

    The source of the forward is written at the first call, since it takes a tenth of a conversion's time.

    Where ``torch.func`` transforms norms, or in forward mode, they compute in FP32: there torch's derivatives of norms
    of low values with FP32 weights do not run, or give FP32 tangents to low values.
    """
    mixed, forward, wide = _has_mixed_norms(lifted), compiled, None
    autocast_is_on = torch.is_autocast_enabled

    def run(*args: Any) -> Any:
        nonlocal forward, wide
        if autocast_is_on(device):
            return without_autocast(run, device)(*args)
        if mixed and watcher(TRANSFORM, DUAL) is not None:
            wide = wide or _with_wide_norms(lifted).forward
            return wide(*args)
        if forward is None:
            # Write the source now, and then call what it calls directly.
            lifted.real_recompile()  # type: ignore[operator]  # of a lazy graph module
            forward = lifted.forward
            call_directly(forward)
        return forward(*args)

    return run


def _written_or_copied(graph: Graph) -> set[Node]:
    """Return placeholders and attributes that the graph writes or casts, or that a region or body reads.

    A cast holds the values of its time, and a cast or region may stand at another side of a write than in the original.
    """
    roots = alias_roots(graph)
    found: set[Node] = set()
    for node in graph.nodes:
        op = notes(node).op
        casts = op.name == "to"
        if casts or node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
            found.update(roots[source] for source in node.all_input_nodes)
    return {node for node in roots if notes(node).written or roots[node] in found}


def without_autocast(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Turn autocast off around a function, here and nowhere else.

    ``torch.autocast(enabled=False)`` would cost ten times as much.
    """
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled

    def run(*args: Any) -> Any:
        if not is_enabled(device):
            return function(*args)
        set_enabled(device, False)
        try:
            return function(*args)
        finally:
            set_enabled(device, True)

    return run


def _is_mixed_norm(annotations: Annotations) -> bool:
    """Return whether a node's kernel reads low values beside FP32 weights or statistics: norms of a CPU."""
    return bool(facts_of(annotations.op.name).mixed) and annotations.precision.output in LOW_DTYPES


def _regions(gm: GraphModule) -> dict[str, FusedRegion]:
    parts = {str(node.target): gm.get_submodule(str(node.target)) for node in gm.graph.find_nodes(op="call_module")}
    return {path: part for path, part in parts.items() if isinstance(part, FusedRegion)}


def _has_mixed_norms(gm: GraphModule) -> bool:
    own = any(_is_mixed_norm(noted) for _, noted in annotated(gm.graph))
    return own or any(_has_mixed_norms(region.graph_module) for region in _regions(gm).values())


def _with_wide_norms(lifted: GraphModule) -> GraphModule:
    """Return a copy of a lifted graph, and of its regions, in which norms of low values compute in FP32."""
    graph = Graph()
    values: dict[Node, Node] = {}
    graph.output(graph.graph_copy(lifted.graph, values))
    # From the end: where a norm reads another one, it finds the other's copy in ``values``, not yet the cast behind it.
    for node, copied in reversed(values.items()):
        if not _is_mixed_norm(notes(node)):
            continue
        for operand in node.all_input_nodes:  # at O3 its weights are low as well
            if notes(operand).precision.output in LOW_DTYPES and not notes(operand).written:
                with graph.inserting_before(copied):
                    wide = graph.call_function(cast_if_float, (values[operand], torch.float32))
                copied.replace_input_with(values[operand], wide)
        with graph.inserting_after(copied):
            low = graph.call_function(cast_if_float, (copied, notes(node).precision.output))
        copied.replace_all_uses_with(low, delete_user_cb=lambda user, low=low: user is not low)
    program = GraphModule(lifted, graph, class_name="Program")
    for path, region in _regions(program).items():
        ops = _with_wide_norms(region.graph_module)
        program.set_submodule(path, FusedRegion(region.name, ops, region.draws, region.seed, "aten"))
    return program


def _argument(path: str, taken: set[str]) -> str:
    """Return a new name for an argument of the generated function: a path such as "blocks.layer-1.weight" is none."""
    name = base = path.replace(".", "_")
    if not base.isidentifier():
        name = base = _NO_NAME.sub("_", path)
    while name in taken:
        name = f"{base}_{len(taken)}"
    taken.add(name)
    return name


def is_weight_cast(node: Node, low: torch.dtype) -> bool:
    """Return whether a shadow can take the place of this node: not of a weight that the graph itself writes to."""
    if node.target is not cast or node.args[1] is not low:
        return False
    source = node.args[0]
    if not isinstance(source, Node) or source.op != "get_attr":
        return False
    return notes(source).kind == "parameter" and not notes(source).written


def _bind_patched(graph: Graph) -> None:
    """Bind functions of torch: generated code finds them by names, where somebody may have put others since."""
    for node in graph.nodes:
        target = node.target
        if isinstance(target, FunctionType) and target.__module__.startswith("torch."):
            named = getattr(sys.modules.get(target.__module__), target.__name__, target)
            if named is not target:
                node.target = _bound(target)


def _bound(function: FunctionType) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def run_checkpoints(graph: Graph, known: Mapping[Node, tuple[int, ...]] = MappingProxyType({})) -> bool:
    """Let a graph run real checkpoints, and return whether it has any.

    dynamo's operator for activation checkpointing only tags nodes for a later compiler. Run as it stands it draws other
    random numbers when it computes a region again, and gradients are wrong.

    Args:
        graph: of a module, which has the regions.
        known: of a graph that has no module yet: call of a region -> ``_written_operands``.
    """
    tagged = graph.find_nodes(op="call_function", target=tag_activation_checkpoint())
    for node in tagged:
        written = known[node] if node in known else _written_operands(node)
        node.target = checkpointed
        node.kwargs = {**node.kwargs, "written": written} if written else node.kwargs
    return bool(tagged)


def _written_operands(node: Node) -> tuple[int, ...]:
    """Return which operands a region writes to: positions behind the region itself."""
    operands = {*written_by(node)}
    return tuple(position for position, operand in enumerate(node.args[1:]) if operand in operands)


@graph_call
def checkpointed(body: GraphModule, *args: Any, written: tuple[int, ...] = (), **kwargs: Any) -> Any:
    """Run a checkpointed region: activations are recomputed in the backward, with the same random numbers.

    Args:
        body: the region.
        args: what it reads; a running statistic of a batch norm is among them.
        written: positions in ``args`` of what the region writes to. As in the original program nobody keeps these for
            the backward: autograd would complain that they changed.
        kwargs: dynamo's options.
    """
    from torch.utils.checkpoint import checkpoint

    options = {"preserve_rng_state": kwargs.get("preserve_rng_state", True)}
    if (context := checkpoint_context(body)) is not None:
        options["context_fn"] = context
    # Nothing is written: torch's own checkpoint keeps all operands.
    if not written:
        return checkpoint(body.forward, *args, use_reentrant=False, **options)
    kept = [position for position in range(len(args)) if position not in written]
    own = {position: args[position] for position in written}

    def run(*given: Any) -> Any:
        values = own | dict(zip(kept, given, strict=True))
        return body.forward(*(values[position] for position in range(len(values))))

    return checkpoint(run, *(args[position] for position in kept), use_reentrant=False, **options)
