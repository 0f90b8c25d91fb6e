"""Calls in a program of a frozen model that go to their kernels by the shortest way.

Before::

    %fused_add_layer_norm = call_module[target=fused_add_layer_norm](%linear, %x, %weight, %bias)

After::

    %fused_add_layer_norm = call_function[target=fused_add_layer_norm](%linear, %x, %weight, %bias)

of which the function asks nothing but how its tensors lie (``kernels.launch.direct``). Who runs such a program has
asked whether somebody looks into its ops or wants gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from torch.fx import GraphModule

from fxprec.kernels.launch.direct import direct
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.canonical.rope_calls import rope, run_for
from fxprec.passes.fusion.attention_calls import cpu_attention
from fxprec.passes.fusion.attention_calls import run_for as attention_run_for


def call_directly(gm: GraphModule) -> None:
    """Change the calls of fused regions, rotary embeddings and attention that are compiled loops."""
    for node in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(str(node.target))
        if isinstance(region, FusedRegion) and region.kernels == "loops" and not region.draws and not node.kwargs:
            node.op, node.target = "call_function", direct(region.name, region, region.run_for, region.note_path)
    for node in gm.graph.find_nodes(op="call_function", target=rope):
        if len(node.args) == 5 and not node.kwargs:  # x, cos, sin, half, compiled
            *tensors, half, _ = node.args
            node.args = tuple(tensors)
            node.target = direct("rope", partial(rope, half=half, compiled=True), partial(run_for, half=half))
    for node in gm.graph.find_nodes(op="call_function", target=cpu_attention):
        options = {name: value for name, value in node.kwargs.items() if name != "way"}
        if len(node.args) == 3 and node.kwargs["way"] == "compiled" and options.keys() <= _ATTENTION:
            node.kwargs = {}
            whole = partial(cpu_attention, way="compiled", **options)
            node.target = direct("attention", whole, partial(attention_run_for, **options))
    gm.recompile()


#: No mask, no dropout: these are torch's in a forward alone.
_ATTENTION: Final = frozenset({"is_causal", "scale", "enable_gqa", "from_flop"})
