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

One walk forwards: the op table says how a result's dtype follows from the inputs (``OpRule.result``), ``_SPECIAL`` holds
the ops that decide by their arguments (``max(x)`` and ``max(x, dim)``). Where neither has an answer the node's fake value
is asked, recomputed with the *original* dtypes if those it was captured with differ. Bodies of higher-order ops get their
placeholders' dtypes from the operands.

A list whose length nobody knows (``x.unbind()`` without shapes) has a tuple of one dtype.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.fake_results import fake_result, numel_of, value_dtype
from fxprec.passes.ir import NON_TENSOR, UNKNOWN, DTypeInfo, Op, PassResult, Rule
from fxprec.passes.op_names import cast_target, dtype_argument
from fxprec.passes.op_table import rule_of
from fxprec.passes.promotion import RESULT_KINDS, Operands, promote

__all__ = ["propagate"]

#: aten overloads that give several results where the Python function of the same name gives one.
_OVERLOAD_RESULTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "native_dropout": ("first", "bool"),
        "adaptive_max_pool1d": ("first", "int64"),
        "adaptive_max_pool2d": ("first", "int64"),
        "adaptive_max_pool3d": ("first", "int64"),
        "fractional_max_pool2d": ("first", "int64"),
        "fractional_max_pool3d": ("first", "int64"),
    }
)

#: Results of torch.return_types by name -> position.
_RESULT_FIELDS: Final[Mapping[str, int]] = MappingProxyType(
    {"values": 0, "indices": 1, "min": 0, "max": 1, "sign": 0, "logabsdet": 1, "mantissa": 0, "exponent": 1,
     "Q": 0, "R": 1, "U": 0, "S": 1, "V": 2, "Vh": 2, "P": 0, "L": 1, "eigenvalues": 0, "eigenvectors": 1,
     "solution": 0, "residuals": 1, "rank": 2, "singular_values": 3, "hist": 0, "bin_edges": 1, "result": 0,
     "info": 1, "LU": 0, "pivots": 1, "output": 0, "counts": 2}
)  # fmt: skip

_TENSOR_ATTRIBUTES: Final = frozenset({"T", "H", "mT", "mH", "data", "grad"})
_NO_TENSOR_ATTRIBUTES: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_sparse",
     "is_quantized", "is_meta", "is_nested", "itemsize", "nbytes", "names", "grad_fn", "_version", "is_mps", "is_xpu"}
)  # fmt: skip


def propagate(gm: GraphModule, context: Context) -> PassResult:
    """Annotate ``meta["dtype"]`` and ``meta["numel"]`` of every node, in the bodies of higher-order ops too."""
    _Walk(gm, context).run()
    return PassResult(gm, changed=False)


class _Walk:
    """One forward walk over one graph."""

    def __init__(self, gm: GraphModule, context: Context) -> None:
        self.gm = gm
        self.context = context
        self.floats: set[Node] = set()  # nodes whose value is a Python float (of the other numbers we take int)
        self.dtypes: dict[Node, DTypeInfo] = {}  # x.dtype as a value

    def run(self) -> DTypeInfo:
        """Walk; the dtype of what the graph returns."""
        returned: DTypeInfo = NON_TENSOR
        for node in self.gm.graph.nodes:
            if node.op == "output":
                returned = _structure(node.args[0])
                continue
            if node.op == "get_attr":
                info = self._attribute(node)
            elif node.op == "placeholder":
                info = self._placeholder(node)
                node.meta["numel"] = numel_of(node.meta.get("val"))
            else:
                info = self._call(node)
                node.meta["numel"] = numel_of(node.meta.get("val"))
            node.meta["dtype"] = info
        return returned

    def _placeholder(self, node: Node) -> DTypeInfo:
        preset = node.meta.get("dtype")
        if preset is not None:
            return preset
        return value_dtype(node.meta["val"]) if node.meta.get("val") is not None else UNKNOWN

    def _attribute(self, node: Node) -> DTypeInfo:
        value: Any = self.gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if not isinstance(value, torch.Tensor):
            node.meta["numel"] = None
            return NON_TENSOR
        node.meta["numel"] = numel_of(value)
        node.meta["ndim"] = value.dim()
        return value.dtype

    def _call(self, node: Node) -> DTypeInfo:
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node)
        op: Op | None = node.meta.get("op")
        operands = self._operands(node)
        if op is None:
            return self._opless(node, operands)
        if op.in_place:
            return NON_TENSOR if op.name == "setitem" else self._first(operands)
        if node.meta.get("derived_cast"):
            return torch.float32
        special = _SPECIAL.get(op.name)
        if special is not None:
            info = special(self, node, operands)
            if info is not None:
                return self._number(node, operands, info)
        dtype = self._requested(node)
        row = rule_of(op.name)
        if dtype is not None and (row is None or row.result != "none"):
            return dtype
        if row is None or row.result == "unknown":
            return fake_result(node, self.context.low)
        kind: str | tuple[str, ...] = row.result
        if isinstance(node.target, OpOverload):
            kind = _overload_kind(node.target, kind)
        operands = operands._replace(equal=row.rule is Rule.LOW)
        if isinstance(kind, tuple):
            return tuple(RESULT_KINDS[each](operands) for each in kind)
        if kind == "first*":
            value = node.meta.get("val")
            length = len(value) if isinstance(value, tuple | list) else 1
            return (self._first(operands),) * max(length, 1)
        return self._number(node, operands, RESULT_KINDS[kind](operands))

    def _operands(self, node: Node) -> Operands:
        tensors: list[tuple[DTypeInfo, Node]] = []
        rank = -1
        for leaf in _leaves((node.args, node.kwargs)):
            if isinstance(leaf, Node):
                info = leaf.meta["dtype"]
                if info is NON_TENSOR:
                    rank = max(rank, 2 if leaf in self.floats else 1)
                else:
                    tensors += [(each, leaf) for each in _flat(info)]
            else:
                rank = max(rank, _NUMBER_RANK.get(type(leaf), -1))
        return Operands(tuple(tensors), _NUMBERS[rank] if rank >= 0 else None, equal=False)

    def _first(self, operands: Operands) -> DTypeInfo:
        return RESULT_KINDS["first"](operands)

    def _number(self, node: Node, operands: Operands, info: DTypeInfo) -> DTypeInfo:
        """Remember which numbers are floats: they turn an integer tensor into a float one."""
        if info is NON_TENSOR:
            op: Op | None = node.meta.get("op")
            name = op.name if op is not None else getattr(node.target, "__name__", "")
            first = operands.tensors[0][0] if operands.tensors else None
            item = name == "item" and isinstance(first, torch.dtype) and first.is_floating_point
            if operands.numbers is float or item or name in _FLOAT_NUMBERS or _is_float(node.meta.get("val")):
                self.floats.add(node)
        return info

    def _requested(self, node: Node) -> DTypeInfo | None:
        """The dtype that the call itself asks for: a constant, or ``dtype=x.dtype``."""
        dtype = dtype_argument(node)
        if dtype is not None:
            return dtype
        given = node.kwargs.get("dtype")
        return self.dtypes.get(given, UNKNOWN) if isinstance(given, Node) else None

    def _opless(self, node: Node, operands: Operands) -> DTypeInfo:
        """A callable of no library: Python's own functions give numbers, of a user's function the fake value knows."""
        home = getattr(node.target, "__module__", None)
        if home in ("builtins", "math", "_operator") or (not operands.tensors and node.meta.get("val") is None):
            return self._number(node, operands, NON_TENSOR)
        return fake_result(node, self.context.low)

    def _higher_order(self, node: Node) -> DTypeInfo:
        """Give the bodies their placeholders' dtypes; the result is what the last body returns."""
        result: DTypeInfo | None = None
        bodies = [source for source in node.all_input_nodes if self._body(source) is not None]
        operands = [leaf for leaf in _leaves((node.args, node.kwargs)) if leaf not in bodies]
        for source in bodies:
            body = self._body(source)
            assert body is not None
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            for placeholder, operand in _matched(inputs, operands):
                placeholder.meta["dtype"] = operand.meta["dtype"] if isinstance(operand, Node) else NON_TENSOR
            returned = _Walk(body, self.context).run()
            if result is None or "while_loop" in str(node.target):
                result = returned  # a loop's condition comes first, a branch's or a backward's body comes last
        return fake_result(node, self.context.low) if result is None else result

    def _body(self, source: Node) -> GraphModule | None:
        if source.op != "get_attr":
            return None
        value = getattr(self.gm, str(source.target), None)
        return value if isinstance(value, GraphModule) else None
