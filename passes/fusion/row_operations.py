"""Tell which nodes a fused region may hold: row operations, as far as the graph alone can tell.

A row operation is pointwise, or reduces over the last dimensions. What shapes decide (does it broadcast as rows and
columns do?) is found out at the first call; what arguments decide is found out here, so that one unusual call does not
cost a region its kernel.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.kernels.launch.graph_call import is_op_of_torch
from fxprec.kernels.rows.program.lowering import LOWERINGS, ROW_REDUCTIONS, trailing_dimensions
from fxprec.passes.graph.annotations import CASTABLE, NON_TENSOR, UNKNOWN, Op, arg_nodes, argument, notes
from fxprec.passes.ops.table import facts_of

#: Keyword arguments that may be there, and what they must be.
_ALLOWED: Final = {"inplace": (False, True), "out": (None,), "rounding_mode": (None,)}
_EXPONENTS: Final = frozenset({1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, -4.0, 0.5, -0.5, 1.5})
#: Dtypes of operands that never change the dtype of a float that they meet.
INTEGERS: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
#: Dtypes of tensors that kernels load.
_LOADED: Final = CASTABLE | INTEGERS
#: Dtypes with integers that FP32, in which kernels compare, does not tell apart.
_LONG: Final = frozenset({torch.int32, torch.int64})
#: Integers up to here FP32 tells apart.
_EXACT_IN_FP32: Final = 2**24


def is_row_operation(node: Node) -> bool:
    """Return whether a row program can compute this node, if its shapes allow it."""
    op = notes(node).op
    if op.in_place or node.op not in ("call_function", "call_method"):
        return False
    if not _is_loaded(notes(node).dtype, results=True) or not _reads_tensors(node):
        return False
    if op.name == "to":
        return _is_plain_cast(node)
    if op.name == "dropout":
        return _binds(_dropout, node)
    # A graph call may compute more than the op whose name it has, such as a relu behind a norm.
    if op.name not in LOWERINGS or not is_op_of_torch(node.target) or not _binds(LOWERINGS[op.name], node):
        return False
    if notes(node).dtype is torch.bool and not _is_boolean(node, op):
        return False
    if op.name in ROW_REDUCTIONS:
        return reduced_dimensions(node) > 0
    if op.name == "pow":
        exponent, base = argument(node, 1, "exponent"), argument(node, 0, "input")
        return isinstance(base, Node) and isinstance(exponent, int | float) and float(exponent) in _EXPONENTS
    if op.name in ("clone", "contiguous"):
        return len(node.args) == 1 and not node.kwargs
    return True


def drops(node: Node) -> bool:
    """Return whether this is a dropout that drops: outside of training its calls do nothing."""
    if notes(node).op.name != "dropout":
        return False
    return argument(node, 2, "training", True) is not False and argument(node, 1, "p", 0.5) not in (0, 1)


def reduced_dimensions(node: Node) -> int:
    """Return how many trailing dimensions the node reduces over: 0 for none, -1 for others or where nobody knows."""
    name = notes(node).op.name
    if name not in ROW_REDUCTIONS:
        return 0
    value = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    return trailing_dimensions(node, name, value.dim() if isinstance(value, torch.Tensor) else None)


def _is_loaded(info: Any, results: bool) -> bool:
    return info is UNKNOWN or (info in CASTABLE or info is torch.bool if results else info in _LOADED)


def _is_boolean(node: Node, op: Op) -> bool:
    """Return whether an operation that gives bool gives the same for operands in FP32."""
    sources = [notes(source).dtype for _, source in arg_nodes(node)]
    if op.name.startswith("logical_"):
        return all(dtype is torch.bool for dtype in sources)
    if not facts_of(op.name).boolean:
        return False
    numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, int | float)]
    if any(dtype in CASTABLE for dtype in sources) or any(isinstance(number, float) for number in numbers):
        # torch converts the others as well.
        return True
    long = sum(dtype in _LONG for dtype in sources)
    return long < 2 and not (long and any(abs(number) >= _EXACT_IN_FP32 for number in numbers))


def _reads_tensors(node: Node) -> bool:
    sources = [source for _, source in arg_nodes(node)]
    return bool(sources) and all(
        notes(source).dtype is not NON_TENSOR and _is_loaded(notes(source).dtype, results=False) for source in sources
    )


def _is_plain_cast(node: Node) -> bool:
    """Return whether this always casts, from one float dtype to another on the same device."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.kwargs.keys() - {"dtype"}:
        return False
    # A program hands over a weight's shadow in place of its cast, which is no work. The cast of a bias that is made in
    # registers is.
    if source.op == "get_attr" and not notes(node).in_registers:
        return False
    if not all(isinstance(each, torch.dtype) for each in node.args[1:]):
        return False
    return notes(node).dtype in CASTABLE or notes(node).dtype is UNKNOWN


def _dropout(call: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    """Declare, as a signature that is never called, the arguments of a dropout that a region can hold."""


def _binds(function: Any, node: Node) -> bool:
    """Return whether the lowering has these arguments, with no nested tensors among them and nothing unusual."""
    try:
        _signature(function).bind(None, *node.args, **node.kwargs)
    except TypeError:
        return False
    options = {key: value for key, value in node.kwargs.items() if not isinstance(value, Node)}
    if any(value not in _ALLOWED.get(key, (value,)) for key, value in options.items()):
        return False
    return not any(isinstance(arg, tuple | list) and any(isinstance(a, Node) for a in arg) for arg in node.args)


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)
