"""Let at most four readers share a low copy of a value that is FP32 under torch.autocast.

Autograd adds up the gradients of all readers of a tensor in the tensor's dtype. Under autocast each product casts for
itself, and the sum is FP32; of one low copy with a hundred readers (experts or heads on one norm, blocks on one
embedding of time, a weight made once for all steps of a loop) the sum would lose what the later ones add.

Before (each ``linear`` with a weight of its own)::

    %norm_bf16: bfloat16 = cast(%norm, torch.bfloat16)
    %linear: bfloat16 = linear(%norm_bf16, %w_bf16)
    ...
    %linear_4: bfloat16 = linear(%norm_bf16, %w_4_bf16)      # the fifth

After::

    %norm_bf16: bfloat16 = cast(%norm, torch.bfloat16)
    %norm_bf16_1: bfloat16 = cast(%norm, torch.bfloat16)
    %linear: bfloat16 = linear(%norm_bf16, %w_bf16)
    ...
    %linear_4: bfloat16 = linear(%norm_bf16_1, %w_4_bf16)

What no cast made, but an op that runs low (a silu, a transposed weight), goes to FP32 and back, which loses nothing::

    %silu_f32: float32 = cast(%silu, torch.float32)
    %silu_f32_bf16: bfloat16 = cast(%silu_f32, torch.bfloat16)
    %linear_4: bfloat16 = linear(%silu_f32_bf16, %w_4_bf16)

Left alone are values that autocast has low as well, memory that the graph writes to, and readers that take a view of a
part of it, mostly each of another. Of the copy of a weight only views count (``w.t()`` at each step of a loop):
autocast, too, casts a leaf itself once for all. Inputs are no leaves here: an earlier layer, or graph, may have made
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import UNKNOWN, Rule, leaves, notes
from fxprec.passes.graph.casts import cast, cast_if_float
from fxprec.passes.graph.grad_mode import ever_records, grad_mode_at_nodes
from fxprec.passes.graph.new_node import set_arguments
from fxprec.passes.insert_casts import actual_dtype, cast_behind, new_cast
from fxprec.passes.ops.aliases import written_memory
from fxprec.passes.ops.table import facts_at
from fxprec.passes.placement.sites import UnderAutocast, carries_float, values_under_autocast

#: Of a low copy: queries, keys and values share one. A sum of so many terms is about as exact as each of them.
READERS: Final = 4
_WHY: Final = f"at most {READERS} readers share a low copy"


@bodies_first
def limit_readers(gm: GraphModule, context: Context) -> PassResult:
    """Give further readers of a low copy further copies, where gradients are recorded."""
    crowded = [node for node in gm.graph.nodes if _is_crowded(node)]
    if not crowded or not ever_records(gm.graph, context.gradients):
        return PassResult(gm, False)
    recorded = grad_mode_at_nodes(gm.graph, context.gradients)
    roots, written = written_memory(gm.graph)
    found: dict[Node, UnderAutocast] = {}
    values_under_autocast(gm.graph, {}, found)
    changed = False
    for node in crowded:
        memory = {roots[each] for each in (node, *(node.all_input_nodes if _is_inserted_cast(node) else ()))}
        if (
            recorded[node]
            and memory.isdisjoint(written)
            and found[node] in (UnderAutocast.TABLE, UnderAutocast.WIDENED)
        ):
            _split(node, sorted(_readers(node)), recorded)
            changed = True
    return PassResult(gm, changed)


def uses(reader: Node, value: Node) -> int:
    """Return how often a value is among a reader's arguments, lists included."""
    return sum(each is value for each in leaves((reader.args, reader.kwargs)))


def _is_crowded(node: Node) -> bool:
    """Return whether a value that ran low for us has more readers than may share it."""
    if len(node.users) <= READERS and not any(map(_takes_many, node.users)):
        return False
    if actual_dtype(node) not in LOW_DTYPES or _original(node) in LOW_DTYPES:
        return False
    return sum(uses(user, node) for user in _readers(node)) > READERS


def _takes_many(reader: Node) -> bool:
    """Return whether a reader takes a list that is long enough to have a value more often than that."""
    first = reader.args[0] if reader.args else None
    return isinstance(first, tuple | list) and len(first) > READERS


def _original(node: Node) -> object:
    """Return the dtype that a value had in the original program."""
    return notes(node.args[0] if _is_inserted_cast(node) else node).dtype  # type: ignore[arg-type]


def _is_inserted_cast(node: Node) -> bool:
    return node.target in (cast, cast_if_float) and notes(node).inserted


def _is_copy_of_weight(node: Node) -> bool:
    source = node.args[0] if _is_inserted_cast(node) else None
    return isinstance(source, Node) and notes(source).kind == "parameter"


def _readers(node: Node) -> list[Node]:
    """Return those that give back a gradient of all the value, under autocast to a copy of their own.

    Products that read a weight itself share one under autocast, too.
    """
    found = [user for user in node.users if carries_float(notes(user).dtype)]
    shared = (Rule.LOW,) if _is_copy_of_weight(node) else ()
    rows = {user: facts_at(user) for user in found}
    return [user for user, row in rows.items() if row.whole or not (row.view or row.rule in shared)]


def _split(node: Node, readers: list[Node], recorded: Mapping[Node, bool]) -> None:
    """Let the first readers keep the value, and each four further ones have a copy of their own."""
    function: object = cast_if_float if notes(node).dtype is UNKNOWN else cast
    source: Node | None = None  # in FP32
    if _is_inserted_cast(node) and not _is_copy_of_weight(node):
        source, function = node.args[0], node.target  # type: ignore[assignment]
    left, copy, last = READERS, node, node
    for reader in readers:
        copies: list[Node] = []
        for _ in range(uses(reader, node)):
            if not left:
                if source is None:
                    source = last = cast_behind(node, recorded, _WHY)
                # Right behind the value, in its grad mode: a reader may stand under no_grad.
                copy = last = _cast(source, actual_dtype(node), function, last)
                left = READERS
            copies.append(copy)
            left -= 1
        _read(reader, node, iter(copies))


def _cast(source: Node, dtype: torch.dtype | None, function: object, after: Node) -> Node:
    assert dtype is not None
    with source.graph.inserting_after(after):
        return new_cast(function, source, dtype, _WHY)


def _read(reader: Node, value: Node, copies: Iterator[Node]) -> None:
    """Let a reader take the copies, in order, wherever it takes the value."""

    def other(each: Node) -> Argument:
        return next(copies) if each is value else each

    args, kwargs = map_arg((reader.args, reader.kwargs), other)  # type: ignore[misc]
    set_arguments(reader, args, kwargs)
