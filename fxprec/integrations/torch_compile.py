"""``torch.compile(model, backend="fxprec")``: dynamo captures, the passes rewrite, weights are read as shadows.

``convert`` does more (checks, a scaler, the report of a model); this is for code that takes a backend by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxprec.capture.dynamo.graph import own_copy, own_graph, source_of
from fxprec.errors import ConversionError, did_you_mean
from fxprec.passes.graph.annotations import clean_path
from fxprec.passes.policy.policy import Policy
from fxprec.programs.dynamo_programs import ArgumentProgram, Calls, ProgramsByMemory, Ran
from fxprec.programs.memory import mark_all_shared, mark_shared
from fxprec.programs.packed_weights import rewrite
from fxprec.settings import Settings
from fxprec.shadows import ShadowStore

_OPTIONS: Final = (
    "level", "dtype", "policy", "placement", "lower", "fuse", "executor", "keep_output_dtype", "on_graph",
)  # fmt: skip


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of dynamo's, as a backend of ``torch.compile``; installed under the name "fxprec".

    Args:
        gm: what dynamo captured.
        example_inputs: one a placeholder.
        options: ``torch.compile(..., options={...})``: level, dtype, policy, placement, lower, fuse, executor and
            keep_output_dtype as for ``fxprec.convert``, but dtype is bfloat16 unless it is given: there is no scaler
            here. ``on_graph``: called with each rewritten graph, which ``fxprec.report`` takes.
        mode: refused; it is inductor's.

    Raises:
        ValueError: an unknown option, or a mode.
        ConversionError: under torch.autocast, which would insert casts too; level O3, which changes parameters.
    """
    settings, on_graph = _settings(options or {}, mode, example_inputs)
    holder = _holder(gm, example_inputs)
    # One store for all programs of the graph: they read the same weights.
    store, ran = ShadowStore(settings.dtype), Ran()
    known: list[Calls] = []

    def make(gm: GraphModule, inputs: Sequence[Any], any_memory: bool) -> ArgumentProgram:
        own, arguments = own_graph(gm, inputs, holder, "")
        known.append(calls := Calls.of(own, ""))
        if any_memory:
            mark_all_shared(own)
        else:
            placeholders = own.graph.find_nodes(op="placeholder")
            mark_shared(own, dict(zip(placeholders, [inputs[i] for i in arguments.inputs], strict=True)))
        program = rewrite(own, settings)
        if on_graph is not None:
            on_graph(own)
        return ArgumentProgram.of(program, arguments, inputs, any_memory, calls)

    program = make(gm, example_inputs, any_memory=False)
    programs = ProgramsByMemory(None if program.memory is None else own_copy(gm), make, program)

    @functools.wraps(gm.forward)
    def run(*given: Any) -> Any:
        # Shadows count as stale from here on, and are refreshed when the programs of this call read them.
        store.begin()
        with ran.noted():
            return programs.serving(given).run(store, given, ran)

    return run


def _settings(
    options: Mapping[str, Any], mode: str | None, inputs: Sequence[Any]
) -> tuple[Settings, Callable[[GraphModule], object] | None]:
    if mode is not None:
        raise ValueError(f'mode={mode!r} is inductor\'s: torch.compile(model, backend="fxprec", options={{...}})')
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}{did_you_mean(name, _OPTIONS)}; there are {', '.join(_OPTIONS)}")
    # The rest are fields of Settings, which checks their values.
    given = dict(options)
    on_graph, level, policy = given.pop("on_graph", None), given.pop("level", None), given.pop("policy", None)
    policy = policy or Policy.preset(level or "O1")
    if policy.lowers_parameters:
        raise ConversionError("level O3 changes parameters, which no backend of torch.compile may: fxprec.convert does")
    device = next((value.device.type for value in inputs if isinstance(value, Tensor)), "cpu")
    if torch.is_autocast_enabled(device):
        raise ConversionError(
            f'torch.compile(backend="fxprec") under torch.autocast({device!r}): both would insert casts. Leave the '
            "autocast context away"
        )
    return Settings(policy=policy, device=device, **{"dtype": torch.bfloat16, **given}), on_graph


def _holder(gm: GraphModule, inputs: Sequence[Any]) -> nn.Module:
    """Return a module with the parameters among the inputs, under the names that they have in the model."""
    holder = nn.Module()
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, nn.Parameter):
            *parts, name = _name(node).split(".")
            module = holder
            # Two names may clean to one path (a tied weight, a wrapper): then the placeholder's own name serves.
            for part in parts:
                if not isinstance(getattr(module, part, None), nn.Module):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(name if not hasattr(module, name) else node.name, value)
    return holder


def _name(node: Node) -> str:
    # The path in the model by which dynamo knows the tensor; a placeholder may have none.
    source = source_of(node.meta.get("grapharg"))
    if source is None:
        return node.name
    return clean_path(source.replace("._parameters['", "._modules['")) or node.name
