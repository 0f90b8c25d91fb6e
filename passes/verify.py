"""Check the invariants of a rewritten graph, at the end of the pipeline or after each pass (``runner``).

Each invariant names the pass from which on it holds. After a pass its own and those of the passes before are checked.

What the annotations say of results is judged by torch in the end: the graph is run once on fake tensors, which know
nothing of the op table, of rules or of the passes.

Nothing is rewritten here. A broken invariant is a bug of fxprec: the error names the pass, the node, what was found and
what was expected::

    insert_casts broke "every float edge has the dtype its reader wants": node exp, argument linear:
    got bfloat16, expected float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fxprec.errors import InvariantError
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context, PassResult
from fxprec.passes.dtypes.fake_run import run_on_fakes
from fxprec.passes.graph.annotations import CASTABLE, NO_OP, UNDECIDED, UNKNOWN, Rule, annotated, notes
from fxprec.passes.graph.casts import CASTS, cast, cast_if_float
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.insert_casts import actual_dtype, original_dtype, wanted_dtypes
from fxprec.passes.limit_readers import READERS, uses
from fxprec.passes.ops.aliases import written_by, written_memory
from fxprec.passes.ops.table import row_of


class Violation(NamedTuple):
    """Violation of an invariant by one node."""

    node: str
    got: str
    expected: str


class Invariant(NamedTuple):
    """``holds_after``: the first pass on whose result it must hold; "verify": it is checked once, in the end."""

    text: str
    holds_after: str
    violations: Callable[[GraphModule, Context], Iterator[Violation]]


def verify(gm: GraphModule, context: Context) -> PassResult:
    """Check every invariant once more on the final graph, which stays as it is; raises InvariantError."""
    check(gm, context, [invariant.holds_after for invariant in INVARIANTS], "verify")
    return PassResult(gm, False)


def check(gm: GraphModule, context: Context, done: list[str], name: str) -> None:
    """Raise InvariantError where the result of pass ``name`` breaks an invariant that the passes in ``done`` set up."""
    # The first violation is enough: what follows from it would hide where it began.
    for graph in every_graph(gm):
        for invariant in INVARIANTS:
            if invariant.holds_after in done:
                for node, got, expected in invariant.violations(graph, context):
                    raise InvariantError(
                        f'{name} broke "{invariant.text}": node {node}: got {got}, expected {expected}. '
                        "This is a bug in fxprec: please report it with fxprec.graph_module(model).print_readable()."
                    )


def _in_order(gm: GraphModule, context: Context) -> Iterator[Violation]:
    made: set[Node] = set()
    for node in gm.graph.nodes:
        if not made.issuperset(node.all_input_nodes):
            late = next(source for source in node.all_input_nodes if source not in made)
            yield Violation(node.name, f"its operand {late.name} behind it", "operands before it")
        made.add(node)


def _dtypes_known(gm: GraphModule, context: Context) -> Iterator[Violation]:
    for node, noted in annotated(gm.graph):
        if node.op != "output" and not noted.state("dtype"):
            yield Violation(node.name, "no dtype", "a dtype, UNKNOWN or NON_TENSOR")


def _decided(gm: GraphModule, context: Context) -> Iterator[Violation]:
    for node, noted in annotated(gm.graph):
        if node.op == "output":
            continue
        precision, info = noted.precision, noted.dtype
        if precision is UNDECIDED:
            yield Violation(node.name, "no precision", "what it reads, computes and puts out")
        elif isinstance(info, torch.dtype) and info not in CASTABLE and precision.output not in (info, None):
            yield Violation(node.name, dtype_name(precision.output), dtype_name(info) + " untouched")


def _edges(gm: GraphModule, context: Context) -> Iterator[Violation]:
    for node in gm.graph.nodes:
        for (_, source), wanted in wanted_dtypes(node).items():
            annotations = notes(source)
            have = annotations.precision.output
            # Of an input nobody knew whether it is a float: the cast looks at run time.
            guarded = source.target is cast_if_float or annotations.dtype is UNKNOWN
            if have != wanted and not (guarded and have is None):
                yield Violation(f"{node.name}, argument {source.name}", dtype_name(have), dtype_name(wanted))


def _full_in_fp32(gm: GraphModule, context: Context) -> Iterator[Violation]:
    if context.policy.level == "O3":  # which lowers what is FULL
        return
    for node, noted in annotated(gm.graph):
        precision, op = noted.precision, noted.op
        if op is NO_OP or precision.rule is not Rule.FULL:
            continue
        row = row_of(op.name)
        if precision.compute not in (torch.float32, torch.float64, None):
            yield Violation(node.name, f"computes in {dtype_name(precision.compute)}", "computes in float32")
        elif precision.reads in LOW_DTYPES:
            # The kernel reads low and computes in FP32 inside: by itself on this device, or as ``dtype=`` asks it to.
            served = row is not None and (context.device in row.mixed or node.kwargs.get("dtype") is not None)
            if not served:
                yield Violation(node.name, f"reads {dtype_name(precision.reads)}", "a kernel with FP32 inside")


def _non_floats_untouched(gm: GraphModule, context: Context) -> Iterator[Violation]:
    for node in gm.graph.nodes:
        if node.target not in CASTS or not isinstance(node.args[0], Node):
            continue
        info = notes(node.args[0]).dtype
        if original_dtype(info) is None:
            yield Violation(node.name, "a cast of " + dtype_name(info), "no cast")
        elif info is UNKNOWN and node.target is cast:
            yield Violation(node.name, "a cast whatever arrives", "one that looks at run time")


def _as_torch_says(gm: GraphModule, context: Context) -> Iterator[Violation]:
    for node, got, stated in run_on_fakes(gm):
        yield Violation(node.name, dtype_name(got), dtype_name(stated))


def _least_casts(gm: GraphModule, context: Context) -> Iterator[Violation]:
    gradients = grad_mode_at_nodes(gm.graph, context.gradients)
    made: dict[tuple[object, ...], list[Node]] = {}
    for node in gm.graph.nodes:
        if node.target not in CASTS or not isinstance(source := node.args[0], Node):
            continue
        made.setdefault((source, node.args[1], node.target, gradients[node]), []).append(node)
        if node.target is cast and actual_dtype(source) == node.args[1] and notes(source).dtype is not UNKNOWN:
            yield Violation(node.name, f"{source.name} is {dtype_name(node.args[1])} already", "no cast")
    again = {node: key for key, alike in made.items() if len(alike) > 1 for node in alike}
    yield from _alike_in_an_epoch(gm, again) if again else ()


def _alike_in_an_epoch(gm: GraphModule, casts: dict[Node, tuple[object, ...]]) -> Iterator[Violation]:
    """Find casts of one key (what is read, how, in which grad mode) with no write to that memory between them."""
    roots, _ = written_memory(gm.graph)
    epoch: dict[Node, int] = {}
    seen: dict[tuple[object, ...], Node] = {}
    for node in gm.graph.nodes:
        for target in written_by(node):
            epoch[roots[target]] = epoch.get(roots[target], 0) + 1
        if node in casts:
            source = node.all_input_nodes[0]
            key = (*casts[node], epoch.get(roots[source], 0))
            # A second one is right if the first is full, that is, has as many readers as may share one
            # (``limit_readers``).
            if key in seen and sum(uses(reader, seen[key]) for reader in seen[key].users) < READERS:
                yield Violation(node.name, f"a second cast of {source.name}", "one per dtype and mutation epoch")
            seen[key] = node


INVARIANTS: Final = (
    Invariant("a node reads what stands before it in its graph", "verify", _in_order),
    Invariant("every value's original dtype is stated", "propagate", _dtypes_known),
    Invariant("every node has a precision, and only castable floats change", "decide", _decided),
    # The output node wants original dtypes, unless ``keep_output_dtype`` is off.
    Invariant("every float edge has the dtype its reader wants", "insert_casts", _edges),
    Invariant("non-float and float64 values are untouched", "insert_casts", _non_floats_untouched),
    Invariant("no cast is idle or made twice", "fold_casts", _least_casts),
    Invariant("a FULL op computes in FP32", "fuse", _full_in_fp32),
    Invariant("every result has the dtype that torch gives it", "verify", _as_torch_says),
)
