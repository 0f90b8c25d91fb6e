"""Run the passes in order, and log one line for each.

The last one, ``verify``, checks the result. A compiler's developer wants to know *which* pass broke it: with the
environment variable ``FXPREC_VERIFY_EACH=1``, under which the tests run, the result of each pass is checked too, by
torch.fx's lint and by the invariants. That costs a tenth of a conversion, and names the pass. After a pass that reports
no change only its own invariants are checked, to save time. If it changed something all the same, the full check at the
end finds that.

torch.fx's own PassManager checks the input of a pass and never lints: hence this small one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch.fx import GraphModule

from fxprec.errors import FxprecError, InvariantError
from fxprec.passes.canonical.autocast_regions import resolve_autocast_regions
from fxprec.passes.canonical.losses import take_logits
from fxprec.passes.canonical.rotary import recognize_rotary
from fxprec.passes.canonicalize import canonicalize
from fxprec.passes.context import Context, Pass
from fxprec.passes.decide import decide
from fxprec.passes.fold_casts import fold_casts
from fxprec.passes.fuse import fuse
from fxprec.passes.fusion.channels_last import lay_out_images
from fxprec.passes.fusion.functional import make_functional
from fxprec.passes.fusion.kernel_calls import call_kernels
from fxprec.passes.fusion.wide_sums import accumulate_wide
from fxprec.passes.fusion.wide_words import move_wide
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.insert_casts import insert_casts
from fxprec.passes.keep_returned import keep_returned
from fxprec.passes.limit_readers import limit_readers
from fxprec.passes.merge_results import merge_results
from fxprec.passes.propagate import propagate
from fxprec.passes.share_returned import share_returned
from fxprec.passes.verify import check, verify

log = logging.getLogger(__name__)

#: Every rewrite that runs, in order. Each file's docstring has the graph before and after.
PIPELINE: Final[tuple[Pass, ...]] = (
    # one spelling for every op; what the program means by its own autocast
    resolve_autocast_regions,
    canonicalize,
    recognize_rotary,
    take_logits,
    # dtypes of the original program
    propagate,
    merge_results,
    # which precision each op runs in, and the casts that this takes
    decide,
    insert_casts,
    fold_casts,
    keep_returned,
    share_returned,
    limit_readers,
    # faster ways of the same
    accumulate_wide,
    lay_out_images,
    make_functional,
    call_kernels,
    fuse,
    move_wide,
    verify,
)


def run_passes(gm: GraphModule, context: Context, passes: Sequence[Pass] = PIPELINE) -> GraphModule:
    """Rewrite ``gm`` in place (its graph; never parameter data) and return it.

    ``graph_notes(gm).declined`` collects 'pass: node: reason' for every rewrite that a pass saw and did not make.

    Raises:
        InvariantError: a pass broke an invariant, which names pass, node, got and expected; or failed otherwise.
    """
    verify_each = os.environ.get("FXPREC_VERIFY_EACH", "") not in ("", "0")
    done: list[str] = []
    declined: list[str] = []
    for step in passes:
        started = time.perf_counter()
        try:
            gm, changed, refused = step(gm, context)
        # Raised as they are: our own errors, warnings that the user made errors, and a lack of memory.
        except (FxprecError, Warning, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvariantError(
                f"the pass {step.__name__} failed: {type(error).__name__}: {error}. This is a bug in fxprec, not in "
                "the model: please report it. Until then a policy may exclude what the pass met"
            ) from error
        if changed and verify_each:
            for graph in every_graph(gm):
                graph.graph.lint()
        done.append(step.__name__)
        if verify_each and step is not verify:  # which is that very check
            check(gm, context, done if changed else done[-1:], step.__name__)
        declined += [f"{step.__name__}: {reason}" for reason in refused]
        log.debug(
            "%s: %s, %d nodes, %.1f ms",
            step.__name__,
            "changed" if changed else "unchanged",
            len(gm.graph.nodes),
            1e3 * (time.perf_counter() - started),
        )
    graph_notes(gm).declined = declined
    for graph in every_graph(gm):
        graph.recompile()
    return gm
