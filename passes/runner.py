"""Run the passes in order; after each: lint, check the invariants on the *result*, log one line.

A pass that says it changed nothing is held to what it sets up itself, annotations; the last lint and ``verify`` look at
everything once more, so that one which was wrong about that is found out too.

torch.fx's own PassManager checks the input of a pass and never lints: hence this small one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from torch.fx import GraphModule

from fxprec.passes.canonicalize import canonicalize, every_graph
from fxprec.passes.context import Context, Pass
from fxprec.passes.decide import decide
from fxprec.passes.fold_casts import fold_casts
from fxprec.passes.fuse import fuse
from fxprec.passes.insert_casts import insert_casts
from fxprec.passes.keep_returned import keep_returned
from fxprec.passes.merge_results import merge_results
from fxprec.passes.propagate import propagate
from fxprec.passes.share_returned import share_returned
from fxprec.passes.verify import check, verify

log = logging.getLogger(__name__)

PIPELINE: Final[tuple[Pass, ...]] = (
    canonicalize,
    propagate,
    merge_results,
    decide,
    insert_casts,
    fold_casts,
    keep_returned,
    share_returned,
    fuse,
    verify,
)


def run_passes(gm: GraphModule, context: Context, passes: Sequence[Pass] = PIPELINE) -> GraphModule:
    """Rewrite ``gm`` in place (its graph; never parameter data) and return it.

    ``gm.meta["declined"]`` collects 'pass: node: reason' for every rewrite that a pass saw and did not make.

    Raises:
        InvariantError: a pass broke an invariant; names pass, node, got and expected.
    """
    done: list[str] = []
    declined: list[str] = []
    for step in passes:
        started = time.perf_counter()
        gm, changed, refused = step(gm, context)
        if changed or step is passes[-1]:
            for graph in every_graph(gm):
                graph.graph.lint()
        done.append(step.__name__)
        if step is not verify:  # which is that very check
            check(gm, context, done if changed else done[-1:], step.__name__)
        declined += [f"{step.__name__}: {reason}" for reason in refused]
        log.debug(
            "%s: %s, %d nodes, %.1f ms",
            step.__name__,
            "changed" if changed else "unchanged",
            len(gm.graph.nodes),
            1e3 * (time.perf_counter() - started),
        )
    gm.meta["declined"] = declined
    for graph in every_graph(gm):
        graph.recompile()
    return gm
