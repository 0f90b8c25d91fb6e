"""Say of every node what it reads, computes and puts out, and why; rewrite nothing.

Before (propagated)::

    %x: float32 = placeholder
    %w: float32 = get_attr[fc.weight]
    %linear: float32 = linear(%x, %w)
    %relu: float32 = relu(%linear)
    %exp: float32 = exp(%relu)

After: ``meta["precision"]``::

    node      reads     compute   output    rule
    %x        -         -         float32   keep
    %w        -         -         float32   keep
    %linear   bfloat16  bfloat16  bfloat16  low
    %relu     bfloat16  bfloat16  bfloat16  follow
    %exp      float32   float32   float32   full

``placement`` chooses between the cheapest casts (``mincut``) and torch.autocast's (``autocast``). With
costs of the device, LOW ops that do not pay are FULL. What the levels mean for both:

====  ===============================================================================================================
O0    every op is KEEP (the policy says so)
O1    inputs, parameters and buffers are FP32, and what promotes or follows is as wide as its widest input, so the
      residual stream stays FP32 as under autocast
O2    inputs and parameters count as low, so every op that no FP32 value reaches may run low: the residual stream is
      low; what another piece of the method hands over is no input, and counts as at O1
O3    as O2; the policy turns FULL into LOW
====  ===============================================================================================================

How the annotation reads for who inserts casts:

- ``reads`` is a dtype: the float arguments on data ports (``OpRule.ports``) are wanted in it, the others in their
  original dtype. Where the kernel promotes by itself and ``reads`` is FP32, low arguments stay low if another one with
  dimensions is FP32.
- ``reads`` is ``ORIGINAL``: every float argument is wanted in its original dtype. KEEP ops read so, and so does the
  output node of the whole graph: that is how returned values get their original dtype back.
- ``reads`` is ``AS_IT_ARRIVES``: nothing is cast. So say user casts ("to"), getitem, getattr and copy, and the output
  of a checkpointed region's body, which returns what it has.
- ``output`` is what the kernel itself puts out. Where the node is the root of memory that is written later and has to
  live in another dtype, ``meta["stored_dtype"]`` names it (see ``placement.walk``).
- An input at O2 is annotated as it arrives; its readers ask for it in low.

Bodies of checkpointed regions are decided together with their caller, without casts at the border. Branches, loops and
bodies called more than once take and give original dtypes. Bodies of any other higher-order op are left alone.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxprec.passes.context import Context, PassResult
from fxprec.passes.graph.annotations import graph_notes, notes
from fxprec.passes.placement.autocast import place_as_autocast
from fxprec.passes.placement.mincut import ops_kept_in_fp32, place_by_cut
from fxprec.passes.placement.origins import taken_for_floats
from fxprec.passes.placement.walk import Walk


def decide(gm: GraphModule, context: Context) -> PassResult:
    """Annotate ``meta["precision"]`` on every node of the graph and of the bodies it calls."""
    declined: tuple[str, ...] = ()
    walk = Walk([gm], context)
    if context.placement == "autocast":
        place_as_autocast(walk)
    else:
        if context.costs is not None:
            counted = "forward and backward" if context.gradients else "forward alone"
            graph_notes(gm).costs = f"{context.costs}, {counted}"
            graph_notes(gm).counts_backward = context.gradients
        declined = tuple(place_by_cut(walk, ops_kept_in_fp32(walk)))
    # At O2 and O3 an input of unknown dtype counts as a low float. Where that could make an integer's result low, the
    # input is marked: a call that gives an integer gets another graph, which knows.
    assumed = taken_for_floats(gm.graph, context.low) if context.policy.lowers_sources else set()
    for node in gm.graph.find_nodes(op="placeholder"):
        notes(node).taken_for_float = node in assumed
    return PassResult(gm, False, declined)
