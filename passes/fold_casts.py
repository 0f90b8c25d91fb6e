"""Remove the casts that the others made idle, and move those of a called subgraph's operands to the caller.

Before::

    %a: bfloat16 = linear(%x, %w)
    %b: float32 = to(%a, torch.float32)      # the user's .float()
    %c: bfloat16 = cast(%b, torch.bfloat16)  # undoes it, and nothing was lost
    %d: bfloat16 = relu(%c)
    %e: bfloat16 = to(%d, torch.bfloat16)    # already is

After::

    %a: bfloat16 = linear(%x, %w)
    %d: bfloat16 = relu(%a)

A cast *folds* when its readers read an earlier node that holds the same value: what it was cast from (``%b`` reads a
low value, ``%c`` casts it back), or an equal cast of the same tensor. These stay:

- a narrowing cast followed by a widening one: it rounds;
- a cast that autograd does not record (``grad_mode``), for readers that are recorded: it ends the gradient;
- any cast of memory that the graph writes to;
- the user's own cast, for a reader that wants its original dtype (``_may_read``);
- the user's own cast that is returned, for the output: the cast made a copy, and folding it would return an alias. If
  it is returned while gradients are recorded its other readers keep it, too: it lies on their path of gradients.

Where nobody knows a dtype the cast looks at run time. What is computed in the dtype of what it reads needs no second
look: it is bfloat16, or no float that a cast is about::

    %x_bf16: bfloat16 = cast_if_float(%x, torch.bfloat16)
    %y: bfloat16 = matmul(%x_bf16, %x_bf16)
    %y_bf16: bfloat16 = cast_if_float(%y, torch.bfloat16)    # goes
    %z: bfloat16 = relu(%y_bf16)                             # reads %y

Body of a checkpointed region, before and after (``%x_bf16`` is made by the caller, where a shadow can serve it)::

    %x: float32 = placeholder                           %x: bfloat16 = placeholder
    %x_bf16: bfloat16 = cast(%x, torch.bfloat16)
    %y: bfloat16 = relu(%x_bf16)                        %y: bfloat16 = relu(%x)
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import UNKNOWN, Precision, Rule, annotated, graph_notes, notes
from fxprec.passes.graph.casts import CASTS, cast, cast_if_float
from fxprec.passes.graph.grad_mode import exposed_values, grad_mode_at_nodes
from fxprec.passes.graph.subgraphs import bodies_in
from fxprec.passes.insert_casts import actual_dtype, wanted_dtypes
from fxprec.passes.ops.aliases import alias_roots, written_memory
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.ops.table import facts_of


@bodies_first
def fold_casts(gm: GraphModule, context: Context) -> PassResult:
    """Fold identities and round trips, and hoist casts of what bodies read; ``graph_notes(gm).folded`` counts folds."""
    # A body's cast that is done by its caller may be idle there, so hoisting comes first.
    hoisted = _hoist(gm)
    folded = _fold(gm, context)
    erased = 0
    # Backwards, as an idle cast may be the last reader of another one.
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _is_cast(node) and (notes(node).inserted or cast_target(node) is not None):
            gm.graph.erase_node(node)
            erased += 1
    graph_notes(gm).folded += folded
    return PassResult(gm, folded + hoisted + erased > 0)


def _fold(gm: GraphModule, context: Context) -> int:
    folded = 0
    nodes = annotated(gm.graph)
    casts = dict.fromkeys(node for node, noted in nodes if noted.op.name == "to" and _is_cast(node))
    gradients = grad_mode_at_nodes(gm.graph, context.gradients)
    # Where nothing is written ``written_memory`` saves its time, and each node is its own root. ``_copies_for_caller``
    # wants the real roots all the same, if there is a copy of the user's that it will be asked about.
    roots, written = written_memory(gm.graph)
    if not written and any(map(_is_users_copy, casts)):
        roots = alias_roots(gm.graph)
    made: dict[tuple[object, torch.dtype, bool], Node] = {}  # (source, dtype, recorded) -> its first cast
    looked: dict[Node, torch.dtype] = {}
    kept = {node for node in exposed_values(gm.graph) if gradients[node] and _is_users_copy(node)}
    for node, noted in nodes:
        if noted.dtype is UNKNOWN:
            folded += _drop_second_look(node, looked)
        target = _pure_target(node) if node in casts else None
        if target is None or roots[node] in written or node in kept:
            continue
        # A cast that is not recorded may stand in for no recorded one; the other way round it may.
        key = (node.args[0], target, gradients[node])
        source = _held_by(node, target, gradients, kept) or made.get((*key[:2], True)) or made.setdefault(key, node)
        if source is not node and not _copies_for_caller(node, source, roots):
            readers = [user for user in node.users if _may_read(user, node, source)]
            readers = [user for user in readers if gradients[node] or not gradients[user]]
            for reader in readers:
                reader.replace_input_with(node, source)
            folded += bool(readers)
    return folded


def _drop_second_look(node: Node, looked: dict[Node, torch.dtype]) -> bool:
    """Let the readers of a ``cast_if_float`` read its input, if that has the dtype already, or is no float to cast.

    ``looked``: value of unknown dtype -> the dtype that it has for certain if it is FP32, FP16 or BF16 at all, because
    a ``cast_if_float`` before it looked. The entry of this node is added. Returns whether the readers changed.
    """
    row = facts_of(notes(node).op.name)
    if node.target is cast_if_float:
        source, dtype = node.args
        if looked.get(source) == dtype:  # type: ignore[arg-type]
            node.replace_all_uses_with(source)  # type: ignore[arg-type]
            return True
        looked[node] = dtype  # type: ignore[assignment]
        return False
    # An op hands the dtype on if its result has that of its first, or of all its tensors, whatever else it is given
    # (``special`` looks at that). ``view`` is one where it names no dtype.
    hands_on = not row.special or (row.bits and dtype_argument(node) is None)
    if row.result in ("first", "tensors") and hands_on:
        sources = node.args[:1] if row.result == "first" else node.all_input_nodes
        found = {looked.get(source) or _known(source) for source in sources if isinstance(source, Node)}
        if found == {actual_dtype(node)}:
            looked[node] = found.pop()  # type: ignore[assignment]
    return False


def _is_cast(node: Node) -> bool:
    return notes(node).op.name == "to" and bool(node.args) and isinstance(node.args[0], Node)


def _held_by(node: Node, target: torch.dtype, gradients: dict[Node, bool], kept: Set[Node]) -> Node | None:
    """Return the earlier node that holds the very value of this cast already, its gradient too; None if there is none.

    Walks up the casts that it is made of, as long as each kept all digits, and was recorded if this one is. It does not
    go past ``kept``: casts of the user's that are returned, and lie on the path of gradients of their readers.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    if _known(source) == target:
        return source
    while _is_cast(source) and source not in kept and _pure_target(source) is not None:
        if gradients[node] and not gradients[source]:
            return None
        inner = source.args[0]
        assert isinstance(inner, Node)
        if not _lossless(_known(inner), _known(source)):
            return None
        if _known(inner) == target:
            return inner
        source = inner
    return None


def _may_read(user: Node, node: Node, source: Node) -> bool:
    """Return whether a reader of a cast may read ``source`` instead."""
    # The caller gets a copy, as in the original program.
    if user.op == "output" and _is_users_copy(node):
        return False
    if notes(node).dtype == notes(source).dtype:
        return True
    # The two have different original dtypes. A reader that wants arguments in their original dtype would want another
    # one of ``source``; one that wants the dtype of its rule, or takes what comes, would not.
    precision = notes(user).precision
    wanted = {dtype for (_, read), dtype in wanted_dtypes(user).items() if read is node}
    return not wanted or (wanted == {precision.reads})


def _copies_for_caller(node: Node, source: Node, roots: dict[Node, Node]) -> bool:
    """Return whether the user's cast gives a copy of what belongs to the caller, who may write to either."""
    belongs_to_caller = roots[source].op in ("placeholder", "get_attr")
    return belongs_to_caller and _is_users_copy(node)


def _is_users_copy(node: Node) -> bool:
    """Return whether this is a cast that changed the dtype in the original program, and so made a tensor of its own."""
    return _is_cast(node) and not notes(node).inserted and notes(node).dtype != notes(node.args[0]).dtype  # type: ignore[union-attr]


def _pure_target(node: Node) -> torch.dtype | None:
    """Return the dtype a cast leads to, if changing the dtype is all that it does and it always does it.

    None of a ``cast_if_float``, which looks, and of ``x.to(device, dtype)`` or ``x.to(dtype, copy=True)``.
    """
    if node.target in CASTS:
        return node.args[1] if node.target is cast else None  # type: ignore[return-value]
    plain = all(isinstance(each, torch.dtype) for each in node.args[1:])
    if not plain or len(node.args) > 2 or node.kwargs.keys() - {"dtype"}:
        return None
    return cast_target(node)


def _known(node: Node) -> torch.dtype | None:
    """Return the dtype of a value where it is certain: not where a run-time test decides."""
    if node.target in CASTS and node.target is not cast:
        return None
    return actual_dtype(node) if isinstance(notes(node).dtype, torch.dtype) else None


def _lossless(narrow: torch.dtype | None, wide: torch.dtype | None) -> bool:
    """Return whether a cast to ``wide`` keeps every value. float8, which torch does not promote, counts as no."""
    if narrow is None or wide is None:
        return False
    try:
        return torch.promote_types(narrow, wide) == wide
    except RuntimeError:
        return False


def _hoist(gm: GraphModule) -> int:
    """Move casts out of called bodies: an operand that a body reads through one cast alone is cast by the caller."""
    calls = _calls(gm)
    if not calls:
        return 0
    roots, written = written_memory(gm.graph)
    hoisted = 0
    for call, body in calls:
        inputs = body.graph.find_nodes(op="placeholder")
        if len(inputs) != len(call.args) - 1 or any(notes(node).op.in_place for node in body.graph.nodes):
            continue
        for position, (operand, inner) in enumerate(zip(call.args[1:], inputs, strict=True), 1):
            readers = list(inner.users)
            if len(readers) == 1 and readers[0].target is cast and roots.get(operand) not in written:  # type: ignore[arg-type]
                _cast_outside(call, position, inner, readers[0])
                hoisted += 1
    return hoisted


def _calls(gm: GraphModule) -> list[tuple[Node, GraphModule]]:
    """Return the calls of bodies that are called once, and whose nodes were decided as part of this graph."""
    calls = []
    for node, body in bodies_in(gm).items():
        if len(node.users) == 1:
            (call,) = node.users
            # A call whose body was decided alone, between original dtypes, is KEEP (``placement.walk``).
            if call.args and call.args[0] is node and notes(call).precision.rule is Rule.FOLLOW:
                calls.append((call, body))
    return calls


def _cast_outside(call: Node, position: int, inner: Node, inside: Node) -> None:
    operand, dtype = call.args[position], inside.args[1]
    assert isinstance(operand, Node) and isinstance(dtype, torch.dtype)
    with call.graph.inserting_before(call):
        outside = call.graph.call_function(cast, (operand, dtype))
    outside.meta = {**inside.meta, "numel": notes(operand).numel}
    call.update_arg(position, outside)
    inside.replace_all_uses_with(inner)
    inside.graph.erase_node(inside)
    # With a cast of the user's the original program is now, too, one whose body is given the cast value.
    if not notes(inside).inserted:
        notes(inner).dtype = dtype
    notes(inner).precision = Precision.arriving(dtype, dtype, Rule.KEEP, "cast by the caller")
