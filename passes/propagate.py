"""Write on every node the dtype its value has in the original program, and how many elements it holds.

Before::

    %x: float32 = placeholder                    # meta["dtype"] preset by capture
    %w = get_attr[fc.weight]
    %linear = linear(%x, %w)
    %eq = eq(%linear, 0)
    %size = size(%x, 0)

After::

    %x: float32 = placeholder
    %w: float32 = get_attr[fc.weight]
    %linear: float32 = linear(%x, %w)
    %eq: bool = eq(%linear, 0)
    %size: - = size(%x, 0)                       # no tensor

One walk forwards: the op table says how a result's dtype follows from the inputs (``OpRule.result``),
``special_results`` holds the ops that decide by their arguments (``max(x)`` and ``max(x, dim)``). Where neither has an
answer the node's fake value is asked, recomputed with the *original* dtypes if those it was captured with differ.
Bodies of higher-order ops get their placeholders' dtypes from the operands.

A list whose length nobody knows (``x.unbind()`` without shapes) has a tuple of one dtype.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context, PassResult
from fxprec.passes.dtypes.fake_results import fake_result, numel_of, value_dtype
from fxprec.passes.dtypes.promotion import NUMBERS, RESULT_KINDS, Operands, first, has_dimensions, is_zero_dim
from fxprec.passes.dtypes.special_results import SPECIAL, Known
from fxprec.passes.graph.annotations import (
    NO_OP,
    NON_TENSOR,
    SPARSE,
    UNKNOWN,
    DTypeInfo,
    Rule,
    annotated,
    arg_nodes,
    is_castable,
    leaves,
    nested,
    notes,
)
from fxprec.passes.graph.subgraphs import attributes_in, body_of
from fxprec.passes.ops.table import OVERLOAD_RESULTS, facts_at, facts_of, row_of
from fxprec.passes.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of

#: Kinds of results (``OpRule.result``) that are FP32 also where the operands become low.
_WIDE: Final = frozenset({"wide", "float32"})

#: Higher-order ops whose bodies compute something else than the result.
_OPAQUE: Final = frozenset({"flex_attention", "flex_attention_backward"})

#: Functions whose first argument is integers. (The ops of their names take the weight first.)
_LOOKUPS: Final = frozenset({F.embedding, F.embedding_bag, F.one_hot})
#: Python's own functions that give a float.
_FLOAT_NUMBERS: Final = frozenset({"float", "truediv"})


def propagate(gm: GraphModule, context: Context) -> PassResult:
    """Annotate ``meta["dtype"]`` and ``meta["numel"]`` of every node, in the bodies of higher-order ops too."""
    _Walk(gm, context).run()
    return PassResult(gm, changed=False)


class _Walk:
    """Forward walk over one graph."""

    def __init__(self, gm: GraphModule, context: Context) -> None:
        self.gm = gm
        self.context = context
        self.fetched = attributes_in(gm)
        self.known = Known(context.low, context.policy.lowers_parameters)

    def run(self) -> DTypeInfo:
        """Walk; the dtype of what the graph returns."""
        returned: DTypeInfo = NON_TENSOR
        for node, noted in annotated(self.gm.graph):
            if node.op == "output":
                returned = nested(
                    node.args[0], lambda leaf: notes(leaf).dtype if isinstance(leaf, Node) else NON_TENSOR
                )
                continue
            if node.op == "get_attr":
                info = self._attribute(node)
            else:
                info = self._placeholder(node) if node.op == "placeholder" else self._call(node)
                if isinstance(noted.autocast, torch.dtype) and info is not NON_TENSOR and "val" in node.meta:
                    info = value_dtype(node.meta.get("val"))  # the user's own autocast says it
                noted.numel = numel_of(node.meta.get("val"))
            noted.dtype = info
            if node.op.startswith("call") and _gives_sparse(node):
                noted.sparse = True
            noted.is_zero_dim, noted.has_dimensions = is_zero_dim(node), has_dimensions(node)
        return returned

    def _placeholder(self, node: Node) -> DTypeInfo:
        if notes(node).state("dtype"):
            return notes(node).dtype
        if node.meta.get("val") is not None:
            return value_dtype(node.meta["val"])
        return torch.int64 if _is_index(node) else UNKNOWN

    def _attribute(self, node: Node) -> DTypeInfo:
        value, annotations = self.fetched[node], notes(node)
        annotations.numel = numel_of(value)
        if not isinstance(value, torch.Tensor):
            return NON_TENSOR
        annotations.sizes = tuple(value.shape)
        if value.layout in SPARSE:
            annotations.sparse = True
        return value.dtype

    def _call(self, node: Node) -> DTypeInfo:
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node, node.target.name())
        annotations = notes(node)
        op, operands = annotations.op, self._operands(node)
        if op is NO_OP:
            return self._opless(node, operands)
        # The first that knows wins: a write, what capture saw (``names_tensors_dtype``: a low dtype that stands for
        # FP32), the call's own dtype=, a special case, the row.
        if op.in_place:
            return NON_TENSOR if op.name == "setitem" else first(operands)
        if annotations.names_tensors_dtype:
            return torch.float32
        row = row_of(op.name)
        dtype = self.known.requested(node)
        # Not so of an op that gives no tensor, or takes what arrives: ``getitem`` and ``to`` have special cases.
        if dtype is not None and (row is None or (row.result != "none" and not row.arrives)):
            return dtype
        if row is not None and row.special is not None:
            info = SPECIAL[row.special](self.known, node, operands)
            if info is not None:
                return self._number(node, operands, info)
        if row is None and not any(map(is_castable, (info for info, _ in operands.tensors))) and _gives_no_tensor(node):
            return self._number(node, operands, NON_TENSOR)
        if row is None or row.result == "unknown":
            return fake_result(node, self.known.low)
        kind: str | tuple[str, ...] = row.result
        if (overload := _overload(node.target)) is not None:
            kind = _overload_kind(overload, kind)
        # A product takes operands of one dtype, so that one that is unknown has that of the others.
        operands = Operands(operands.tensors, operands.numbers, equal=row.rule is Rule.LOW)
        if isinstance(kind, tuple):
            if wide := frozenset(port for port, each in enumerate(kind) if each in _WIDE):
                annotations.wide = wide
            return tuple(RESULT_KINDS[each](operands) for each in kind)
        if kind.endswith("*"):
            value = node.meta.get("val")
            length = len(value) if isinstance(value, tuple | list) else 1  # of an unknown one all are alike
            return (RESULT_KINDS[kind.removesuffix("*")](operands),) * max(length, 1)
        return self._number(node, operands, RESULT_KINDS[kind](operands))

    def _operands(self, node: Node) -> Operands:
        tensors: list[tuple[DTypeInfo, Node]] = []
        rank = -1  # in ``NUMBERS``, of the widest number so far
        for leaf in chain.from_iterable(map(leaves, (*node.args, *node.kwargs.values()))):
            if isinstance(leaf, Node):
                info = notes(leaf).dtype
                if info is NON_TENSOR:
                    rank = max(rank, 2 if leaf in self.known.floats else 1)
                else:
                    tensors += [(each, leaf) for each in leaves(info) if each is not NON_TENSOR]
            else:
                rank = max(rank, NUMBERS.index(type(leaf)) if type(leaf) in NUMBERS else -1)
        return Operands(tuple(tensors), NUMBERS[rank] if rank >= 0 else None, equal=False)

    def _number(self, node: Node, operands: Operands, info: DTypeInfo) -> DTypeInfo:
        """Remember which numbers are floats: they turn an integer tensor into a float one."""
        if info is NON_TENSOR:
            name = notes(node).op.name or getattr(node.target, "__name__", "")
            source = first(operands)
            item = name == "item" and isinstance(source, torch.dtype) and source.is_floating_point
            gives_float = name in _FLOAT_NUMBERS or facts_of(name).float_number
            seen = isinstance(node.meta.get("val"), float | torch.SymFloat)
            if operands.numbers is float or item or gives_float or seen:
                self.known.floats.add(node)
        return info

    def _opless(self, node: Node, operands: Operands) -> DTypeInfo:
        """Return the dtype of what no library has: Python's own functions give numbers, others what was captured."""
        home = getattr(node.target, "__module__", None)
        if home in ("builtins", "math", "_operator") or (not operands.tensors and node.meta.get("val") is None):
            return self._number(node, operands, NON_TENSOR)
        return fake_result(node, self.known.low)

    def _higher_order(self, node: Node, name: str) -> DTypeInfo:
        """Give the bodies their placeholders' dtypes; the result is what the body that makes it returns."""
        bodies = [body for source in node.all_input_nodes if (body := body_of(source)) is not None]
        operands = [leaf for leaf in leaves(node.args) if not (isinstance(leaf, Node) and body_of(leaf))]
        results: list[DTypeInfo] = []
        for position, body in enumerate(bodies):
            if name != "autograd_function_apply" or position == 0:  # its backward takes gradients, not the operands
                _bind(body, operands)
            results.append(_Walk(body, self.context).run())
        if not bodies or name in _OPAQUE:
            return fake_result(node, self.known.low)
        return results[-1] if name == "while_loop" else results[0]


def _gives_no_tensor(node: Node) -> bool:
    """Return whether an unknown op gives no tensor, by its schema, or else none that anybody reads: an assertion."""
    overload = _overload(node.target)
    if overload is None:
        return not node.users
    return not any("Tensor" in str(result.type) for result in schema_of(overload).returns)


def _gives_sparse(node: Node) -> bool:
    """Return whether the result may be a sparse tensor."""
    facts = facts_of(notes(node).op.name)
    if facts.layout is not None and facts.layout != "mixed":
        return facts.layout == "sparse"
    sources = [notes(source) for source in node.all_input_nodes]
    tensors = [source.sparse for source in sources if source.dtype is not NON_TENSOR]
    if not any(tensors) or notes(node).dtype is NON_TENSOR:
        return False
    # Sparse with dense gives dense of a mixed op; so it does, for all we know, of an unknown one.
    mixed = facts.layout == "mixed" or row_of(notes(node).op.name) is None
    return all(tensors) if mixed else True


def _is_index(node: Node) -> bool:
    """Return whether a reader takes the value, or a view of it, where only integers may stand: then it is int64."""
    for user in node.users:
        row = facts_at(user)
        ports = (0, "input", "tensor") if user.target in _LOOKUPS else row.indices
        if any(source is node and port in ports for port, source in arg_nodes(user)):
            return True
        if row.view and row.rule is Rule.FOLLOW and user.args[:1] == (node,) and _is_index(user):
            return True
    return False


def _bind(body: GraphModule, operands: list[Any]) -> None:
    """Give a body's inputs the dtypes of the call's last operands: predicates, flags and names come before them."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    if len(inputs) > len(operands):
        return
    for placeholder, operand in zip(inputs, operands[len(operands) - len(inputs) :], strict=True):
        notes(placeholder).dtype = notes(operand).dtype if isinstance(operand, Node) else NON_TENSOR


def _overload(target: Any) -> OpOverload | None:
    """Return the aten overload that is called, or one of a packet whose overloads all give as many results."""
    if not isinstance(target, OpOverloadPacket):
        return target if isinstance(target, OpOverload) else None
    overloads = [getattr(target, name) for name in target.overloads()]
    return overloads[0] if len({len(schema_of(each).returns) for each in overloads}) == 1 else None


def _overload_kind(target: OpOverload, kind: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the result kind of an aten overload, which may give more or fewer results than the function of its row."""
    results = len(schema_of(target).returns)
    if results == 1:
        return kind[0] if isinstance(kind, tuple) else kind
    if isinstance(kind, str) and kind in RESULT_KINDS:
        return OVERLOAD_RESULTS.get(target.overloadpacket.__name__, (kind,) * results)
    return kind
