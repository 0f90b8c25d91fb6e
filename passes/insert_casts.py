"""Put the casts where ``decide`` asked for them: each tensor at most once to a dtype per mutation epoch.

Before (annotated)::

    %x: float32 = placeholder
    %w: float32 = get_attr[fc.weight]
    %linear = linear(%x, %w)              # reads bfloat16, puts out bfloat16
    %exp = exp(%linear)                   # reads float32
    return %exp

After::

    %x: float32 = placeholder
    %w: float32 = get_attr[fc.weight]
    %x_bf16: bfloat16 = cast(%x, torch.bfloat16)
    %w_bf16: bfloat16 = cast(%w, torch.bfloat16)
    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %exp: float32 = exp(%linear_f32)
    return %exp

A cast is made right before its first reader and shared by the later ones, until something writes to the tensor or to a
tensor that shares its memory; the next reader then gets a new one. So does the first reader that autograd records
(``grad_mode``) where the cast was not. A value whose dtype nobody can know without inputs is cast by
``cast_if_float``, which looks at run time, a list or tuple of tensors by ``cast_each``. Additive attention masks are
cast by ``cast_saturating``.

What takes its dtype from a low tensor, and needs digits that this has not (``placement.origins``: counts, and
``placement.pins``), is written as FP32 (``keep_digits``)::

    %t: float32 = to(%ids, torch.float32)              # was %ids.to(%y.dtype)

A *guess* is the result of a kernel that promotes a low operand with an FP32 one of which nobody knows whether it has
dimensions. It counts as FP32, but if the FP32 operand turns out to be 0-dim, which does not promote, it is low. So who
wants it in FP32 gets it by ``cast_if_float``, too (``is_guess``)::

    %s: float32 = getitem(%scale, 0)
    %y: float32 = mul(%h, %s)                          # bfloat16, if %s is 0-dim as it is here
    %y_f32: float32 = cast_if_float(%y, torch.float32)

A cast of the user's gives its very input where that has the dtype already, else a copy. Now that values are low it
may be the other one of the two than in the original program, which somebody may notice who writes to either of them or
asks for a gradient. ``keep_users_cast`` has three cases.

``keep_recorded``: it gave its input, and converts now, under ``no_grad``, which would end the gradient of the input. It
moves to where autograd records::

    %y: bfloat16 = linear(%x_bf16, %w_bf16)            # FP32 in the original
    %z: float32 = cast(%y, torch.float32)              # stood under no_grad, as %y.float()

``keep_shared``: it gave its input, somebody writes to the memory, and it names another dtype than this has now. It
names the dtype of its input instead::

    %z: bfloat16 = to(%y, dtype=torch.bfloat16)        # was %y.float(), which was %y
    %a: bfloat16 = add_(%z, 1.0)                       # %y is written to

``keep_apart``: it made a copy, and would give its input now. It copies still::

    %z: bfloat16 = to(%y, torch.bfloat16, copy=True)   # was %y.bfloat16()
    %a: bfloat16 = add_(%z, 1.0)                       # %y stays as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_aggregate, map_arg

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.dtypes.promotion import is_zero_dim
from fxprec.passes.graph.annotations import (
    CASTABLE,
    NON_TENSOR,
    UNKNOWN,
    Arrival,
    DTypeInfo,
    Op,
    Precision,
    Rule,
    arg_nodes,
    is_castable,
    notes,
)
from fxprec.passes.graph.casts import cast, cast_each, cast_if_float, cast_saturating
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.graph.new_node import new_node, set_arguments
from fxprec.passes.graph.wide_state import WITH_WIDE_STATE
from fxprec.passes.ops.aliases import written_by, written_memory
from fxprec.passes.ops.names import cast_target, dtype_argument, may_give_itself
from fxprec.passes.ops.table import facts_at, facts_of
from fxprec.passes.placement.sites import dtype_reference

SHORT_NAMES: Final = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_TENSORS: Final[dict[object, str]] = {torch.float16: "torch.HalfTensor", torch.bfloat16: "torch.BFloat16Tensor"}
_CAST: Final = Op("to")
#: Of a node's meta, what its casts take over.
HANDED_ON: Final = ("nn_module_stack", "stack_trace", "numel", "val")


@bodies_first
def insert_casts(gm: GraphModule, context: Context) -> PassResult:
    """Cast every argument whose dtype differs from what its reader wants; restore the outputs' original dtypes."""
    if context.policy.level == "O0":
        return PassResult(gm, False)
    changed = False
    inserter = _CastInserter(gm, context)
    for node in list(gm.graph.nodes):
        inserter.transformed(node)
        if node.op in ("placeholder", "get_attr"):  # reads nothing
            continue
        changed |= inserter.keep_digits(node)
        # A cast of the user's whose argument was just cast reads a new tensor: whether it gave its very input is no
        # question any more.
        changed |= inserter.cast_arguments(node) or inserter.keep_users_cast(node)
        annotations = notes(node)
        row = facts_of(annotations.op.name)
        if row.bits:
            changed |= _name_dtype_of_bits(node)
        if row.wide_state:
            changed |= _widen_state(node)
        # Behind the node's own casts: what it reads was cast before it writes.
        inserter.written(node)
        dtype = annotations.stored_dtype
        if dtype is not None:
            annotations.discard("stored_dtype")
            changed |= inserter.recast_root(node, dtype)
    return PassResult(gm, changed)


def _name_dtype_of_bits(node: Node) -> bool:
    """Let ``x.view(y.dtype)`` name the dtype that ``y`` had in the original program: here it may be low."""
    reference, dtype = dtype_reference(node), notes(node).dtype
    if reference is None or not isinstance(dtype, torch.dtype):
        return False
    asked = next(source for source in node.all_input_nodes if source.args[:2] == (reference, "dtype"))
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda each: dtype if each is asked else each)  # type: ignore[assignment, misc]
    return True


def _widen_state(node: Node) -> bool:
    """Keep the state of a recurrent op wide between its low products."""
    precision = notes(node).precision
    if isinstance(precision.reads, Arrival) or precision.reads == precision.output:
        return False
    node.op, node.target = "call_function", WITH_WIDE_STATE[notes(node).op.name]
    node.kwargs = {**node.kwargs, "state": precision.output}
    return True


def new_cast(function: object, source: Node, dtype: torch.dtype, why: str) -> Node:
    """Return a new cast by a function of ``graph.casts``, where the graph inserts nodes now."""
    name, info = f"{source.name}_{SHORT_NAMES[dtype]}", notes(source).dtype
    new = new_node(source.graph, "call_function", function, (source, dtype), {}, name)
    new.meta.update(
        {each: source.meta[each] for each in HANDED_ON if each in source.meta},
        op=_CAST,
        dtype=info if function is cast_each or info is UNKNOWN else dtype,
        precision=Precision.arriving(dtype, dtype, Rule.KEEP, why),
        inserted=True,
    )
    return new


def cast_behind(source: Node, recorded: Mapping[Node, bool], why: str) -> Node:
    """Return a cast of a value to FP32, right behind it: the one that there is in its grad mode, or a new one."""
    function = cast_if_float if notes(source).dtype is UNKNOWN else cast
    for user in source.users:
        if user.target is function and user.args == (source, torch.float32) and recorded.get(user) is recorded[source]:
            source.append(user)
            return user
    with source.graph.inserting_after(source):
        return new_cast(function, source, torch.float32, why)


def actual_dtype(node: Node) -> torch.dtype | None:
    """Return the float dtype of a value in the rewritten graph, None where it is no float that a policy touches."""
    return notes(node).precision.output


def original_dtype(info: DTypeInfo | None) -> torch.dtype | None:
    """Return the dtype that a castable value has in the original program (all castable ones of a tuple); else None."""
    if isinstance(info, tuple):
        found = {each for each in info if is_castable(each)}
        info = found.pop() if len(found) == 1 else None
    if isinstance(info, torch.dtype):
        return info if info in CASTABLE else None
    return torch.float32 if info is UNKNOWN else None


def wanted_dtypes(node: Node) -> dict[tuple[int | str, Node], torch.dtype]:
    """Map (port, source) to the dtype in which a node wants that castable argument, in the order of the arguments.

    An argument that it takes as it comes is absent.
    """
    annotations = notes(node)
    reads = annotations.precision.reads
    if reads is Arrival.AS_IT_ARRIVES:
        return {}
    op = annotations.op
    row = facts_of(op.name)
    wanted: dict[tuple[int | str, Node], torch.dtype] = {}
    data: list[tuple[int | str, Node]] = []
    for port, source in arg_nodes(node):
        original = original_dtype(notes(source).dtype)
        if original is None or (op.in_place and port == 0):
            continue  # the target of a write is never a copy
        if reads is Arrival.ORIGINAL or (row.ports is not None and port not in row.ports):
            # Off the ports that carry the rule's dtype (a norm's weight): FP32 if the kernel takes nothing else there.
            wanted[port, source] = torch.float32 if row.fp32_ports else original
        else:
            wanted[port, source] = reads
            data.append((port, source))
    if row.native_promotion and not isinstance(reads, Arrival):
        still = _wanted_despite_promotion(data, reads, op)
        for each in data:
            if each not in still:
                wanted.pop(each, None)
    return wanted


def _wanted_despite_promotion(
    data: list[tuple[int | str, Node]], reads: torch.dtype, op: Op
) -> list[tuple[int | str, Node]]:
    """Return the data that want a cast although the kernel promotes: so many that it computes in the dtype it reads.

    As in torch's promotion, a 0-dim operand counts only where there are none with dimensions.
    """
    # An in-place op computes in the promoted dtype, and writes its target's: whatever arrives is right.
    if op.in_place:
        return []
    dimensioned = [(port, source) for port, source in data if not is_zero_dim(source)]
    # To compute in low, all that promote must be low.
    if reads is not torch.float32:
        return dimensioned or data
    # To compute in FP32, one of them must be FP32 and pulls the others up: one that is already, or else the first.
    if any(actual_dtype(source) is torch.float32 for _, source in dimensioned):
        return []
    first = (dimensioned or data)[0][1]
    return [(port, source) for port, source in data if source is first]


def _next_call(node: Node) -> Node:
    """Return what comes behind a node and the graph's inputs: a new node may stand before it."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


class _CastInserter:
    """Inserter of the casts of one graph, which readers of a tensor share until its memory is written."""

    def __init__(self, gm: GraphModule, context: Context) -> None:
        self.graph = gm.graph
        self.recorded = grad_mode_at_nodes(gm.graph, context.gradients)
        self.roots, self.written_roots = written_memory(gm.graph)
        # Root of memory -> (value, dtype, function, whether it is recorded) -> the cast, until that memory is written.
        self.made: dict[Node, dict[tuple[Node, torch.dtype, object, bool], Node]] = {}
        self.last_write: dict[Node, Node] = {}  # root of memory -> the last node so far that writes to it
        self.transforms: list[Node] = []  # the calls that entered the transforms around the node, the innermost last
        self.depth: dict[Node, int] = {}  # of a node in transforms: how many
        self.guessed: set[Node] = set()

    def transformed(self, node: Node) -> None:
        """Note which transforms of ``torch.func`` (``grad``, ``vmap``) a node is in: calls enter and leave them."""
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            self.transforms.append(node)
        elif name.endswith("_decrement_nesting") and self.transforms:
            self.transforms.pop()
        if self.transforms:
            self.depth[node] = len(self.transforms)

    def place(self, source: Node, reader: Node) -> Node:
        """Return the node to put a cast before: the reader, or the call that enters a transform the value is not in.

        A transform of ``torch.func`` wraps what is made inside of it, also a cast of a value from outside.
        """
        depth = self.depth.get(source, 0)
        return self.transforms[depth] if depth < len(self.transforms) else reader

    def cast_arguments(self, node: Node) -> bool:
        """Let a node read every argument in the dtype that it wants."""
        wanted = wanted_dtypes(node)
        if self.is_guess(node, wanted):
            self.guessed.add(node)
            # Its memory is written, so that no reader may have a cast of its own: it is FP32 from the start.
            if self.roots[node] in self.written_roots:
                notes(node).stored_dtype = torch.float32
        # By port, since an op may want one value in two dtypes: as its data and as its weight.
        images = {(port, source): self.cast(source, dtype, node, port) for (port, source), dtype in wanted.items()}
        ports = {port for (port, source), image in images.items() if image is not source}
        if not ports:
            return False

        def convert(port: int | str, argument: Argument) -> Argument:
            if port not in ports:
                return argument
            return map_arg(argument, lambda source: images.get((port, source), source))

        args = tuple([convert(i, a) for i, a in enumerate(node.args)])
        set_arguments(node, args, {k: convert(k, a) for k, a in node.kwargs.items()})
        return True

    def cast(self, source: Node, wanted: torch.dtype, reader: Node, port: int | str) -> Node:
        """Return what a reader gets for an argument that it wants in a dtype: a cast, or the argument itself."""
        annotations = notes(source)
        info, same = annotations.dtype, annotations.precision.output == wanted
        unknown = info is UNKNOWN or (isinstance(info, tuple) and UNKNOWN in info) or (same and source in self.guessed)
        if same and not unknown:
            return source
        # What may be an integer stays one. A mask's -1e9 becomes the lowest number of float16, no infinity.
        function = cast_each if isinstance(info, tuple) else cast_if_float if unknown else cast
        if port in facts_at(reader).masks and wanted is not torch.float32:
            function = cast_saturating
        return self.shared_cast(function, source, wanted, reader)

    def shared_cast(self, function: object, source: Node, wanted: torch.dtype, reader: Node) -> Node:
        """Return the cast of a value that there is since its memory was written, or a new one.

        A cast made under ``no_grad`` ends the gradient. So one that autograd records serves all readers, one that it
        does not record only those that are not recorded either.
        """
        made = self.made.setdefault(self.roots[source], {})
        recorded, behind = self.recorded[reader], self.last_write.get(self.roots[source], source)
        # A reader under no_grad that only hands the tensor on (output, contiguous) must not end its gradient: its cast
        # stands right behind the value, where autograd records.
        early = not recorded and self.recorded[behind] and (reader.op == "output" or may_give_itself(reader))
        recorded = recorded or early
        with_gradient = (source, wanted, function, True)
        key = with_gradient if with_gradient in made else (source, wanted, function, recorded)
        if key not in made:
            with self.graph.inserting_before(_next_call(behind) if early else self.place(source, reader)):
                new = new_cast(function, source, wanted, "cast inserted for " + reader.name)
            made[key] = new
            self.roots[new], self.recorded[new] = self.roots[source], recorded
        return made[key]

    def is_guess(self, node: Node, wanted: Mapping[tuple[int | str, Node], torch.dtype]) -> bool:
        """Return whether a value counts as FP32, but is low if operands turn out to be 0-dim (see the module).

        ``wanted``: what ``wanted_dtypes`` says of the node.
        """
        annotations = notes(node)
        reads, op = annotations.precision.reads, annotations.op
        # What an in-place op gives has the dtype of the memory that it writes, whatever it reads.
        if op.in_place:
            return False
        if reads is Arrival.AS_IT_ARRIVES:  # a part of a guess, or moved to another device
            guessed = self.guessed and not self.guessed.isdisjoint(node.all_input_nodes)
            return bool(guessed) and cast_target(node) is None
        if reads is not torch.float32 or not facts_of(op.name).native_promotion:
            return False
        # FP32 operands, those that become FP32 by a cast included, and those that are left low for the kernel to widen.
        wide: list[Node] = []
        low: list[Node] = []
        for port, source in arg_nodes(node):
            if original_dtype(notes(source).dtype) is not None:
                is_wide = actual_dtype(source) is torch.float32 and source not in self.guessed
                (wide if is_wide or (port, source) in wanted else low).append(source)
        # Low ones that are 0-dim make nothing low; one FP32 operand that is known to have dimensions makes it FP32.
        return not all(map(is_zero_dim, low)) and not any(notes(source).has_dimensions for source in wide)

    def written(self, node: Node) -> None:
        """Begin a new mutation epoch for the memory that a node writes to: casts of it are good no longer."""
        for target in written_by(node) if self.written_roots else ():
            self.made.pop(self.roots[target], None)
            self.last_write[self.roots[target]] = node

    def keep_digits(self, node: Node) -> bool:
        """Write FP32 where a value that needs its digits takes its dtype from a tensor that is low now.

        ``decide`` has marked such calls (``names_fp32``). There are three spellings::

            to(%ids, %y.dtype)             ->  to(%ids, torch.float32)
            to(%ids, torch.bfloat16)       ->  to(%ids, torch.float32)             # as dynamo wrote ``y.dtype``
            type_as(%ids, %y)              ->  to(%ids, %y.device, torch.float32)
        """
        annotations = notes(node)
        if not annotations.names_fp32:
            return False
        reference = dtype_reference(node)
        dtypes: list[object] = [each for each in node.all_input_nodes if each.args == (reference, "dtype")]
        if annotations.names_tensors_dtype:  # as a constant, or as the name of a type: type("torch.BFloat16Tensor")
            low = dtype_argument(node)
            dtypes = [low, *filter(None, [_TENSORS.get(low)])]
        if dtypes:
            node.args, node.kwargs = map_aggregate(  # type: ignore[assignment]
                (node.args, node.kwargs), lambda each: torch.float32 if each in dtypes else each
            )
        elif reference is None:
            return False
        else:  # type_as(h), to(h): which move as well
            with self.graph.inserting_before(node):
                device = new_node(self.graph, "call_function", getattr, (reference, "device"), {})
            device.meta.update(
                op=Op("getattr"), dtype=NON_TENSOR, precision=Precision.arriving(None, None, Rule.FOLLOW, "where to")
            )
            node.op, node.target, node.args = "call_method", "to", (node.args[0], device, torch.float32)
            node.kwargs = {name: each for name, each in node.kwargs.items() if each is not reference}
        return True

    def keep_users_cast(self, node: Node) -> bool:
        """Let a cast of the user's go on giving its very input, or a copy, as in the original program."""
        source = node.args[0] if node.args else None
        if notes(node).op.name != "to" or not isinstance(source, Node):
            return False
        return self.keep_recorded(node, source) or self.keep_shared(node, source) or self.keep_apart(node, source)

    def keep_recorded(self, node: Node, source: Node) -> bool:
        """Keep the gradient of a user's cast that gave its input in the original program, and converts now."""
        # Memory that is written has one dtype: a cast that gave its input does so still (``keep_shared``).
        if self.roots[node] in self.written_roots:
            return False
        ends_gradient = self.recorded[source] and not self.recorded[node]
        only_casts = len(node.args) <= 2 and not node.kwargs.keys() - {"dtype"}
        gave_its_input = notes(node).dtype == notes(source).dtype
        dtype = actual_dtype(node)
        if not (ends_gradient and only_casts and gave_its_input) or dtype in (None, actual_dtype(source)):
            return False
        with self.graph.inserting_after(source):
            new = new_node(self.graph, "call_function", cast, (source, dtype), {}, node.name)
        new.meta.update(node.meta)
        self.roots[new], self.recorded[new] = self.roots[source], True
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return True

    def keep_shared(self, node: Node, source: Node) -> bool:
        """Let a user's cast of written memory that gave its very input in the original program give it still."""
        dtype, reference = actual_dtype(source), dtype_reference(node)
        gave_its_input = notes(node).dtype == notes(source).dtype
        if self.roots[node] not in self.written_roots or not gave_its_input:
            return False
        # ``decide`` had both in one dtype, if they are floats that it decides.
        if actual_dtype(node) is not dtype or dtype is None:
            return False
        # The call would convert only if it names another dtype: not if it names this one, or none but a device.
        named = actual_dtype(reference) if reference is not None else cast_target(node)
        if named in (None, dtype):
            return False
        given = {name: each for name, each in node.kwargs.items() if name in ("device", "copy", "memory_format")}
        for each in node.args[1:]:
            if isinstance(each, str | torch.device) or (isinstance(each, Node) and each.args[1:] == ("device",)):
                given["device"] = each
        node.op, node.target, node.args, node.kwargs = "call_method", "to", (source,), {**given, "dtype": dtype}
        return True

    def keep_apart(self, node: Node, source: Node) -> bool:
        """Let a user's cast that copied in the original program copy still, where it would give its input itself.

        That matters where somebody writes to either side, and where the copy, made under ``no_grad``, has no gradient.
        """
        ends_gradient = self.recorded[source] and not self.recorded[node]
        if not ends_gradient and self.roots[node] not in self.written_roots:
            return False
        before, after = (torch.float32 if (info := notes(each).dtype) is UNKNOWN else info for each in (source, node))
        # The dtype that the call names, or that of the tensor that it names (``type_as(h)``); None: only a device.
        dtype = cast_target(node) or (actual_dtype(node) if node.all_input_nodes != [source] else None)
        copied, gives_its_input = before != after, actual_dtype(source) == dtype
        if dtype is None or not (copied and gives_its_input):
            return False
        # Only ``to`` takes ``copy=True``: the other spellings of a cast (``bfloat16()``, ``type(...)``) become one.
        if node.target == "type_as":
            node.target = "to"
        elif cast_target(node) is not None and (node.op != "call_method" or node.target != "to"):
            node.op, node.target, node.args, node.kwargs = "call_method", "to", (source, dtype), {}
        node.kwargs = {**node.kwargs, "copy": True}
        return True

    def recast_root(self, node: Node, dtype: torch.dtype) -> bool:
        """Cast a value that lives in another dtype than its maker puts out: all that read or write it use the cast."""
        function = cast_if_float if notes(node).dtype is UNKNOWN or node in self.guessed else cast
        with self.graph.inserting_after(node):
            new = self.graph.call_function(function, (node, dtype))
        self.roots[new], self.recorded[new] = self.roots[node], self.recorded[node]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        new.meta = node.meta | {
            "op": _CAST,
            "precision": Precision.arriving(dtype, dtype, Rule.KEEP, "cast inserted behind " + node.name),
            "inserted": True,
        }
        return True
