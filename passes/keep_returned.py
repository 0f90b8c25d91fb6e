"""Let others read a returned value as it is returned, so that it lies on the path of gradients.

In the original program ``h.retain_grad()`` and ``torch.autograd.grad(loss, h)`` of a returned ``h`` give its gradient,
since what comes after it reads this very tensor. A cast that hangs beside the low value would lie on no path.

Before::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_1: bfloat16 = linear(%linear, %v_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %linear_1_f32: float32 = cast(%linear_1, torch.float32)
    return (%linear_1_f32, %linear_f32)

After::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %linear_f32_bf16: bfloat16 = cast(%linear_f32, torch.bfloat16)
    %linear_1: bfloat16 = linear(%linear_f32_bf16, %v_bf16)
    %linear_1_f32: float32 = cast(%linear_1, torch.float32)
    return (%linear_1_f32, %linear_f32)

The way there and back loses nothing. It is taken only where gradients are recorded, and only for a value that is
returned and read as well. The code calls the nodes by their roles:

============  ==========================================================================================================
``source``    the low value: ``%linear``
``returned``  its cast to FP32, which is handed out: ``%linear_f32``
``back``      the cast of that to low, which the others read: ``%linear_f32_bf16``
``after``     the node behind which ``returned`` is made: ``source`` or, of memory that is written in place, the last
              write. Only those that read the value behind it are readers: earlier ones see other numbers
============  ==========================================================================================================

Two dtypes of a node are compared throughout: ``notes(node).dtype``, the one in the original program (UNKNOWN where
nobody knows without inputs), and ``actual_dtype(node)``, the one in the graph as it is now: a cast of ours changes it.
Four functions cast: ``cast`` always; ``cast_if_float`` what is a float when it runs, where the dtype is UNKNOWN;
``cast_for_caller`` unless an input is low; ``read_back`` where the user's cast may have given the low value itself.

These count as returned, too:

- a tensor that gets a hook of the user's (``register_hook``): the hook is on what all readers read;
- the user's own cast of a low value, ``h.type_as(x)``, which gives ``h`` in the original (``_users_cast_and_low``).
  Where nobody knows without inputs that it does, ``read_back`` looks at run time;
- what a checkpoint returns: if the body reads it, too, the body gives it in FP32 (``_widen_results_of_bodies``);
- at O3, a result of low weights, which the model would widen behind the graph: it is widened in it
  (``_widen_for_caller``).

Several nodes may stand for one tensor, and readers of any of them count as readers of the value:

- an *identity chain* is a value and what it may be the very tensor of, through ops that give their argument back
  (``_identity_chain``): ``h.contiguous()`` is ``h`` itself where that is contiguous already (``OpRule.itself``);
- the *in-place versions* of a value are the results of the in-place ops that write it (``_in_place_versions``).

An op of an identity chain is computed in FP32, so that it gives its argument back here where it does in the original
(``_move_cast_above``)::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)            %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %contiguous: bfloat16 = contiguous(%linear)        ->   %linear_f32: float32 = cast(%linear, torch.float32)
    %contiguous_f32 = cast(%contiguous, torch.float32)      %contiguous: float32 = contiguous(%linear_f32)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context, PassResult, bodies_last
from fxprec.passes.graph.annotations import UNKNOWN, Precision, notes
from fxprec.passes.graph.casts import CASTS, cast, cast_for_caller, cast_if_float, read_back
from fxprec.passes.graph.grad_mode import exposed_values, grad_mode_at_nodes
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.graph.subgraphs import body_of
from fxprec.passes.insert_casts import HANDED_ON, actual_dtype, new_cast
from fxprec.passes.ops.aliases import alias_roots, written_by, written_memory
from fxprec.passes.ops.names import cast_target, may_give_itself


def keep_returned(gm: GraphModule, context: Context) -> PassResult:
    """Route the readers of each low value that is returned in a wider dtype through what is returned."""
    widened = context.policy.lowers_parameters and context.gradients and _widen_for_caller(gm.graph, context.low)
    kept = _keep_in_each_graph(gm, context).changed
    return PassResult(gm, widened or kept)


def _widen_for_caller(graph: Graph, low: torch.dtype) -> bool:
    """Widen what is returned low because its weights are, and is read as well; return whether there was any.

    Where an input is low, results are low in the original program, too. Of inputs of unknown dtype ``cast_for_caller``
    finds that out at each call, so it is given all of them.
    """
    inputs = graph.find_nodes(op="placeholder")
    if any(notes(each).dtype is low for each in inputs):
        return False
    low_ones = [node for node in exposed_values(graph) if actual_dtype(node) is notes(node).dtype is low]
    chains = [_identity_chain(node) for node in low_ones if _has_readers_beside(node) and _handed_out_by(node)]
    for same in (each for chain in chains for each in chain):
        notes(same).dtype = torch.float32  # which it was before O3 lowered the weights, and is for the caller
    for node, *_ in chains:
        with graph.inserting_before(min(_handed_out_by(node))):
            wide = new_cast(cast_for_caller, node, torch.float32, "returned by a model whose weights became low")
        wide.args = (*wide.args, *inputs)
        for taker in _handed_out_by(node):
            taker.replace_input_with(node, wide)
    return bool(chains)


def _handed_out_by(node: Node) -> list[Node]:
    """Return what hands a value out: the output, and the call that makes a named tuple of it."""
    return [user for user in node.users if user.op == "output" or isinstance(user.target, type)]


@bodies_last
def _keep_in_each_graph(gm: GraphModule, context: Context) -> PassResult:
    if context.policy.level == "O0" or not any(map(_is_read_as_well, exposed_values(gm.graph))):
        return PassResult(gm, False)
    return PassResult(gm, _keep(gm, context))


def _is_read_as_well(returned: Node) -> bool:
    """Return whether this is a cast of a low value that has other readers, or may have some in a checkpoint's body."""
    if (found := _users_cast_and_low(returned)) is not None:
        return any(len(same.users) > 1 for same in _in_place_versions(found[1]))
    source = widened(_identity_source(returned))
    return source is not None and _has_readers_beside(source)


def _has_readers_beside(returned: Node) -> bool:
    """Return whether others than the one that hands it out read a value, or what it may be the very tensor of."""
    values = _identity_chain(returned)
    several = any(len(same.users) > 1 for value in values for same in _in_place_versions(value))
    return several or any(_result_in_body(value) is not None for value in values)


def _keep(gm: GraphModule, context: Context) -> bool:
    """Rewrite one graph, casts of what its checkpoints return first; return whether it changed."""
    recorded = grad_mode_at_nodes(gm.graph, context.gradients)
    changed = _widen_results_of_bodies(gm, recorded)
    # Casts go up first: an op above which one was moved (contiguous) is one of the readers that are routed then.
    returned, moved = _move_casts_up(gm.graph, recorded)
    routed = _route_readers(gm.graph, returned, recorded)
    return changed or moved or routed


def _move_casts_up(graph: Graph, recorded: Mapping[Node, bool]) -> tuple[list[Node], bool]:
    """Cast returned values above the ops that may give their very argument back (``contiguous``).

    Returns what is handed out then, of each identity chain the first node, and whether something was moved.
    """
    roots, written = written_memory(graph)
    found, changed = [], False
    for returned in map(_identity_source, exposed_values(graph)):
        source = widened(returned)
        if source is not None and recorded.get(source) and roots[source] not in written:
            returned, moved = _move_cast_above(returned)
            changed |= moved
        found.append(_identity_source(returned))
    return found, changed


def _route_readers(graph: Graph, handed_out: list[Node], recorded: Mapping[Node, bool]) -> bool:
    """Let those that read a low value behind its last write read it through its returned cast."""
    seen: set[Node] = set()
    changed = False
    roots = alias_roots(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    last_write: dict[Node, Node] = {}  # root of memory -> the last node that writes to it
    for node in graph.nodes:
        last_write.update((roots[target], node) for target in written_by(node))
    # Casts of the user's last: where such a cast and ours are both returned, the user's becomes a reader of ours.
    for returned in sorted(handed_out, key=lambda each: _users_cast_and_low(each) is not None):
        source = widened(returned)
        if (found := _users_cast_and_low(returned)) is not None:
            returned, source = found
        # One tensor may be handed out as several nodes: ``y = h.type_as(x)``, and ``y.contiguous()``.
        if source is None or source.op == "placeholder" or returned in seen:
            continue
        seen.add(returned)
        # What was made here (a cast back to low, say) is not in ``recorded``: nothing is to be kept of it.
        if not recorded.get(_in_place_versions(source)[0]):
            continue
        after = max(last_write.get(roots[source], source), source)
        # A cast under no_grad would end the gradient.
        while after.op != "output" and not recorded.get(after, True):
            after = after.next
        readers = _readers_behind(after, source, returned, position)
        moved = _moved_along(returned, after, position)
        # ``returned`` moves behind ``after``, so that none of its readers may stand before.
        if readers and moved is not None and all(position[user] > position[after] for user in returned.users):
            for node in moved:
                after.append(node)
                after = node
            _read_through(graph, after, returned, readers)
            changed = True
    return changed


def _readers_behind(after: Node, source: Node, returned: Node, position: Mapping[Node, int]) -> list[tuple[Node, Node]]:
    """Return the readers of a value behind a node, each with the in-place version that it reads."""
    return [
        (user, same)
        for same in _in_place_versions(source)
        for user in same.users
        if user is not returned
        and user.op != "output"
        and position[user] > position[after]
        and user.target is not read_back
    ]


def _moved_along(returned: Node, after: Node, position: Mapping[Node, int]) -> list[Node] | None:
    """Return the nodes that move up with a returned cast because it reads them; None where one cannot.

    If the cast names another tensor (``h.to(x.dtype)``), the node of ``x.dtype`` is one: it can move if ``x`` itself is
    computed before.
    """
    others = [node for node in returned.all_input_nodes if position[node] > position[after]]
    asked = [node.all_input_nodes[0] if notes(node).op.name == "getattr" else node for node in others]
    return None if any(position[node] > position[after] for node in asked) else others


def _users_cast_and_low(returned: Node) -> tuple[Node, Node] | None:
    """Return the user's cast of a low value to FP32 that is handed out, and that value; None where it is no such cast.

    ``h.type_as(x)`` is one. In the original it gives ``h`` itself where both are FP32, which nobody knows without
    inputs.
    """
    node = _identity_source(returned)
    source = node.args[0] if node.args else None
    # Go past casts of ours behind it, which look at run time whether it is FP32 as its annotation says.
    while node.target is cast_if_float and notes(node).inserted and isinstance(source, Node):
        if actual_dtype(source) is not torch.float32:
            break
        node, source = source, source.args[0] if source.args else None
    if notes(node).op.name != "to" or notes(node).inserted or not isinstance(source, Node) or widened(node) is source:
        return None
    is_low = actual_dtype(source) in LOW_DTYPES and actual_dtype(node) is torch.float32
    only_casts = len(node.args) <= 2 and not node.kwargs.keys() - {"dtype", "other"}
    infos = {notes(node).dtype, notes(source).dtype}
    return (node, source) if is_low and only_casts and infos <= {torch.float32, UNKNOWN} else None


def _argument_given_back(node: Node) -> Node | None:
    """Return the argument that an op gives back where there is nothing to do; None: it always makes something else."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, Node) or not may_give_itself(node):
        return None
    original = inner.args[0] if _is_narrowed(inner) else inner  # a cast of ours states the dtype that it gives
    alike = actual_dtype(inner) is actual_dtype(node) and notes(original).dtype == notes(node).dtype  # type: ignore[arg-type]
    return inner if alike else None


def _identity_chain(node: Node) -> list[Node]:
    """Return the node, and those before it that it may be the very tensor of, the nearest first."""
    found = [node]
    while (inner := _argument_given_back(found[-1])) is not None:
        found.append(inner)
    return found


def _identity_source(node: Node) -> Node:
    """Return the last node of the identity chain: what was computed before ops gave it back."""
    return _identity_chain(node)[-1]


def _move_cast_above(returned: Node) -> tuple[Node, bool]:
    """Move the cast of a returned value above the ops that may give their very argument back.

    ::

        %linear: bfloat16       made               %linear: bfloat16
        %view: bfloat16         above[1]           %linear_f32: float32          wide
        %contiguous: bfloat16   above[0]           %view: float32
        %contiguous_f32         returned           %contiguous: float32

    Returns the cast, and whether it was moved.
    """
    graph = returned.graph
    *above, made = _identity_chain(returned.args[0])  # type: ignore[arg-type]
    is_read = any(len(each.users) > 1 for each in (*above, made)) or _is_narrowed(made)
    if not above or not is_read or made.op == "placeholder":
        return returned, False
    wide = _cast_beside(made, returned)
    above[-1].replace_input_with(made, wide)
    # Other readers of these ops read a cast back.
    for node in above:
        others = [user for user in node.users if user is not returned and user not in above]
        low = _cast_back(node, node) if others else node
        for user in others:
            user.replace_input_with(node, low)
    for node in above:
        why = "what it may give back is returned in float32"
        notes(node).precision = Precision.arriving(torch.float32, torch.float32, notes(node).precision.rule, why)
        if "val" in node.meta:
            node.meta["val"] = node.meta["val"].float()
    returned.replace_all_uses_with(above[0])
    graph.erase_node(returned)
    return wide, True


def _is_narrowed(node: Node) -> bool:
    """Return whether this is a cast of ours of a value that is FP32."""
    inner = node.args[0] if node.args else None
    return notes(node).inserted and isinstance(inner, Node) and actual_dtype(inner) is torch.float32


def _cast_beside(source: Node, returned: Node) -> Node:
    """Return the value in the wider dtype: what it was cast from, or its cast, which comes right behind it."""
    if _is_narrowed(source):
        return source.args[0]  # type: ignore[return-value]
    wide = next((user for user in source.users if _is_alike(user, returned, source)), None)
    if wide is None:
        function, arguments = returned.target, (source, *returned.args[1:])
        if function not in CASTS:  # but the user's own, perhaps a method
            function = cast_if_float if notes(source).dtype is UNKNOWN else cast
            arguments = source, torch.float32
        wide = new_node(source.graph, "call_function", function, arguments, {}, f"{source.name}_f32")
        wide.meta.update(returned.meta)
        wide.meta.update({each: source.meta[each] for each in HANDED_ON if each in source.meta})
    source.append(wide)
    return wide


def _is_alike(user: Node, returned: Node, source: Node) -> bool:
    """Return whether a user of ``source`` gives what the returned cast would, one that the user wrote included."""
    if user.target is returned.target and user.args[1:] == returned.args[1:]:
        return True
    only_casts = len(user.args) <= 2 and not user.kwargs.keys() - {"dtype"}
    return widened(user) is source and only_casts and cast_target(user) is torch.float32


def _widen_results_of_bodies(gm: GraphModule, recorded: Mapping[Node, bool]) -> bool:
    """Move a cast of what a checkpoint's body returns into the body, if the body reads that value as well.

    ::

        %h: bfloat16 = getitem(%checkpoint, 1)          %h: float32 = getitem(%checkpoint, 1)
        %h_f32: float32 = cast(%h, torch.float32)   ->
        return (%y_f32, %h_f32)                         return (%y_f32, %h)
    """
    changed = False
    for returned in exposed_values(gm.graph):
        result = widened(returned)
        if result is None or not recorded[result]:
            continue
        results = _levels(result)
        inner = results.pop()
        if not results:
            continue
        body, end = inner.graph, inner.graph.output_node()
        with body.inserting_before(end):
            wide = new_node(body, "call_function", cast, (inner, torch.float32), {}, f"{inner.name}_f32")
        wide.meta.update(returned.meta)
        end.replace_input_with(inner, wide)
        for each in results:
            others = [user for user in each.users if user is not returned and user.op != "output"]
            low = _cast_back(each, each) if others else each
            notes(each).precision = notes(returned).precision
            each.meta.update({key: returned.meta[key] for key in ("val",) if key in returned.meta})
            for reader in others:
                reader.replace_input_with(each, low)
        returned.replace_all_uses_with(result)
        gm.graph.erase_node(returned)
        changed = True
    return changed


def _levels(result: Node) -> list[Node]:
    """Return the nodes that stand for a result of a checkpoint, from the caller's to the innermost that others read.

    Checkpoints lie within checkpoints: each hands on what the one in it returned. Of no checkpoint: one node.
    """
    found = [result]
    while (inner := _result_in_body(found[-1])) is not None:
        found.append(inner)
    # Where the body's output alone reads a value, its cast may stay outside.
    while len(found) > 1 and len(found[-1].users) == 1:
        found.pop()
    return found


def _result_in_body(result: Node) -> Node | None:
    """Return the value in a checkpoint's body that this result of its call stands for; None: it is no such result."""
    call = result.args[0] if notes(result).op.name == "getitem" else result
    bodies = [body for each in call.all_input_nodes if (body := body_of(each)) is not None]  # type: ignore[union-attr]
    if len(bodies) != 1 or call.op != "call_function":  # type: ignore[union-attr]
        return None
    if call is not result and any(each.args == result.args for each in call.users if each is not result):  # type: ignore[union-attr]
        return None  # another node stands for the same result
    given = bodies[0].graph.output_node().args[0]
    inner = given if call is result else given[result.args[1]]  # type: ignore[index]
    if not isinstance(inner, Node) or actual_dtype(inner) != actual_dtype(result):
        return None
    return inner if notes(inner).dtype is torch.float32 else None


def _in_place_versions(node: Node) -> list[Node]:
    """Return the first node of a tensor, and the in-place ops that write to it, which give it as their result."""
    while notes(node).op.in_place and isinstance(node.args[0], Node):
        node = node.args[0]
    found = [node]
    for each in found:
        found += [user for user in each.users if notes(user).op.in_place and user.args[:1] == (each,)]
    return found


def widened(node: Node) -> Node | None:
    """Return the low value that a node casts to FP32, if the original program has both in one dtype; else None.

    The ``cast_if_float`` behind a guess counts, too. That is a value which the passes take for FP32 without being sure:
    it is low if an operand turns out to be 0-dim (``insert_casts``).
    """
    source = node.args[0] if node.args else None
    if notes(node).op.name != "to" or not isinstance(source, Node) or notes(node).dtype != notes(source).dtype:
        return None
    narrow, wide = actual_dtype(source), node.args[1] if node.target in CASTS else cast_target(node)
    guessed = narrow is torch.float32 and node.target is cast_if_float and notes(node).inserted
    return source if (narrow in LOW_DTYPES or guessed) and wide is torch.float32 else None


def _read_through(graph: Graph, after: Node, returned: Node, readers: list[tuple[Node, Node]]) -> None:
    """Move the returned cast behind ``after``, and let the readers (with what each reads now) read a cast back::

    before                                   after
    %h = linear(...)            low          %h = linear(...)
    %y = gelu(%h)                            %w = cast(%h, float32)      returned
    %s = to(%h, float32)        the user's   %b = cast(%w, bfloat16)     the cast back
    %w = cast(%h, float32)      returned     %y = gelu(%b)               a reader
    %c = cast(%w, bfloat16)     ours         %s = to(%w, float32)        a cast of the user's, if all is known
    %z = tanh(%c)                            %z = tanh(%b)               a cast of ours has the new one in its place
    """
    source = returned.args[0]
    assert isinstance(source, Node)
    after.append(returned)
    back = _cast_back(returned, source)
    # Only where what is returned is FP32 for certain may a cast of the user's read it in place of the low value.
    known = notes(returned).dtype is torch.float32 and returned.target is not cast_for_caller
    # Casts of what is returned to low that there are already: the new one takes their place.
    again = [(user, returned) for user in returned.users if user is not back and user.target is back.target]
    for reader, read in (*readers, *again):
        if reader.target in CASTS and notes(reader).inserted and reader.args[1] == back.args[1]:
            reader.replace_all_uses_with(back)  # it looked whether the value is low, or was made for what is returned
            graph.erase_node(reader)
        elif known and (found := _users_cast_and_low(reader)) and found[1] is read:
            reader.replace_input_with(read, returned)  # the user's cast, which gives back what it is given
        elif read is not returned:
            reader.replace_input_with(read, back)


def _cast_back(returned: Node, low: Node) -> Node:
    """Return a new cast of what is returned to the dtype in which ``low`` is now, right behind it.

    Where ``low`` is only guessed to be FP32 (see ``widened``), its readers expect FP32: they read what is returned.
    """
    graph, dtype, unknown = returned.graph, actual_dtype(low), notes(low).dtype is UNKNOWN
    if dtype is torch.float32:
        return returned
    assert dtype is not None
    with graph.inserting_after(returned):
        # A cast of the user's may give ``low`` itself: ``read_back`` looks, and takes both.
        looks = returned.target not in CASTS and UNKNOWN in (notes(returned).dtype, notes(low).dtype)
        function = read_back if looks else cast_if_float if unknown else cast
        why = f"cast inserted to have {returned.name}, which is returned, on the gradient's path"
        back = new_cast(function, returned, dtype, why)
    back.args = (returned, low) if looks else back.args
    back.meta.update(dtype=UNKNOWN if unknown else dtype, returns=True)
    if "val" in low.meta:
        back.meta["val"] = low.meta["val"]
    return back
