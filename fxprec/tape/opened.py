"""Split a fused region's kernel by ops: what each of them would lose, were it done by itself, and the rest."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from torch import Tensor

from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.tape.adjoint import ErrorTerm, terms
from fxprec.tape.memory import Memory, TensorPlace
from fxprec.tape.nodes import NodeByNode
from fxprec.tape.recorder import OpRecorder
from fxprec.torch_internals import tree_unflatten

#: The op that a region's forward kernel is for a dispatch mode.
_FORWARD: Final = "fxprec::region_forward"
REST: Final = "kernel, rest"


def opened(term: ErrorTerm, memory: Memory) -> dict[str, float] | None:
    """Return node of a region -> its part of the kernel's rounding, and the kernel's rest. They add up.

    The region's ops run one by one on the kernel's inputs, with the kernel's adjoints of the results. A kernel that
    keeps all in registers has a rest that takes most of that back.

    Args:
        term: the latest of a walk.
        memory: of its recorder.

    Returns:
        None where the op is no kernel of a region, or draws random numbers, which ops would draw anew.
    """
    operation = term.operation
    node = operation.origin.node
    if operation.name != _FORWARD or node is None or node.graph.owning_module is None:
        return None
    region = node.graph.owning_module.get_submodule(str(node.target))
    if not isinstance(region, FusedRegion) or region.draws:
        return None
    (inputs, *_), _ = tree_unflatten([*operation.leaves], operation.spec)
    given = [memory.low(each).clone() if isinstance(each, TensorPlace) else each for each in inputs]
    recorder = OpRecorder(memory.reference)
    with recorder:
        made = NodeByNode(region.graph_module, recorder.look).run(*given)
    results: list[Tensor] = [*made]
    targets = [
        (recorder.memory.place(results[n]), result.weight) for n, result in term.results.items() if n < len(results)
    ]
    parts: dict[str, float] = defaultdict(float)
    for inner in terms(recorder, targets):
        parts[inner.operation.origin.name] += inner.rounding + inner.bend
    parts[REST] = term.rounding - sum(parts.values())
    return dict(parts)
