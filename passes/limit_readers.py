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

Left alone are values that autocast has low as well, and memory that the graph writes to. Not every reader counts:

- a view of a part (``h[0]``) does not: each mostly takes another part, so that few gradients meet in one element;
- a product that reads the copy of a weight does not: autocast, too, casts a parameter once for all of them. Views of
  that copy do (``w.t()`` at each step of a loop). Inputs are no parameters here: an earlier layer, or graph, may have
  made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

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

#: Readers that may share a low copy, as the products for query, key and value of one norm do. A low sum of four
#: gradients is about as exact as each of the gradients is.
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
    under_autocast: dict[Node, UnderAutocast] = {}
    values_under_autocast(gm.graph, {}, under_autocast)
    changed = False
    for node in crowded:
        memory = {roots[each] for each in (node, *(node.all_input_nodes if _is_inserted_cast(node) else ()))}
        # FP32 under autocast, so that gradients are summed in FP32 there: made of weights alone, or of inputs and ops
        # that autocast widens. NOTHING has no gradient, and of a value that is LOWERED autocast, too, sums in low.
        in_fp32 = under_autocast[node] in (UnderAutocast.TABLE, UnderAutocast.WIDENED)
        # A further copy would miss what is written to the memory later.
        if recorded[node] and in_fp32 and memory.isdisjoint(written):
            _split(node, sorted(_readers(node)), recorded)
            changed = True
    return PassResult(gm, changed)


def uses(reader: Node, value: Node) -> int:
    """Return how often a value is among a reader's arguments, lists included."""
    return sum(each is value for each in leaves((reader.args, reader.kwargs)))


def _is_crowded(node: Node) -> bool:
    """Return whether a value that was made low here, and not in the original program, has too many readers."""
    # A first look that costs little: a user takes the value once, but for long lists of it.
    if len(node.users) <= READERS and not any(map(_takes_many, node.users)):
        return False
    if actual_dtype(node) not in LOW_DTYPES or _original(node) in LOW_DTYPES:
        return False
    return sum(uses(user, node) for user in _readers(node)) > READERS


def _takes_many(reader: Node) -> bool:
    """Return whether a reader takes a list that is long enough to have a value more often than ``READERS``."""
    first = reader.args[0] if reader.args else None
    return isinstance(first, tuple | list) and len(first) > READERS


def _original(node: Node) -> object:
    """Return the dtype that a value, or what a cast of ours was made of, had in the original program."""
    return notes(node.args[0] if _is_inserted_cast(node) else node).dtype  # type: ignore[arg-type]


def _is_inserted_cast(node: Node) -> bool:
    return node.target in (cast, cast_if_float) and notes(node).inserted


def _is_copy_of_weight(node: Node) -> bool:
    source = node.args[0] if _is_inserted_cast(node) else None
    return isinstance(source, Node) and notes(source).kind == "parameter"


def _readers(node: Node) -> list[Node]:
    """Return the readers that count (see the module): autograd adds up a gradient of the whole value from each."""
    rows = {user: facts_at(user) for user in node.users if carries_float(notes(user).dtype)}
    shares_under_autocast = (Rule.LOW,) if _is_copy_of_weight(node) else ()
    # A view counts if it shows all of the value (``whole``: transpose, reshape), all else unless it is such a product.
    return [user for user, row in rows.items() if row.whole or not (row.view or row.rule in shares_under_autocast)]


def _split(node: Node, readers: list[Node], recorded: Mapping[Node, bool]) -> None:
    """Let the first four readers keep the value, and each four further ones have a copy of their own.

    A reader that takes the value several times (``cat([h, h])``) counts as so many, and may take several copies.
    """
    function: object = cast_if_float if notes(node).dtype is UNKNOWN else cast
    # What the copies are cast from. Of a cast of ours its FP32 input. Of anything else a cast of it to FP32, made when
    # it is wanted. So also of the copy of a weight: a program makes one shadow of all casts of a parameter, so that
    # another cast of it would be the same tensor.
    source: Node | None = None
    if _is_inserted_cast(node) and not _is_copy_of_weight(node):
        source, function = node.args[0], node.target  # type: ignore[assignment]
    left, copy, last, dtype = READERS, node, node, actual_dtype(node)
    assert dtype is not None
    for reader in readers:
        copies: list[Node] = []
        for _ in range(uses(reader, node)):
            if not left:
                if source is None:
                    source = last = cast_behind(node, recorded, _WHY)
                # Right behind the value, in its grad mode: a reader may stand under no_grad.
                with node.graph.inserting_after(last):
                    copy = last = new_cast(function, source, dtype, _WHY)
                left = READERS
            copies.append(copy)
            left -= 1
        _read(reader, node, iter(copies))


def _read(reader: Node, value: Node, copies: Iterator[Node]) -> None:
    """Let a reader take the copies, in order, wherever it takes the value."""
    given = (reader.args, reader.kwargs)
    args, kwargs = map_arg(given, lambda each: next(copies) if each is value else each)  # type: ignore[misc]
    set_arguments(reader, args, kwargs)
