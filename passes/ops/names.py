"""One canonical name for every spelling of an op.

``torch.add``, ``Tensor.add``, ``x + y``, ``x += y``, ``operator.iadd``, ``aten.add_.Tensor`` and ``x.__radd__(y)`` are
all ``Op("add", in_place)``. Names have no trailing underscore, no ``special_`` prefix, and follow the function
namespaces: ``linalg_norm``, ``fft_rfft``. Ops of other libraries keep their namespace: ``torchvision::nms``.

``inplace=True`` and ``out=`` are for ``canonicalize`` to resolve.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxprec.passes.graph.annotations import Op, argument, notes, tensors_of
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.wide_state import WITH_WIDE_STATE
from fxprec.passes.ops.equations import Form, equation_of
from fxprec.passes.ops.spellings import ALIASES, FIXED_CASTS
from fxprec.passes.ops.table import facts_of
from fxprec.passes.torch_internals import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    builtin_nn,
    builtins_of_torch,
    data_of,
)

#: Functions that several names reach with different meanings, or whose own name says nothing.
_EXPLICIT: Final[tuple[tuple[Any, str], ...]] = (
    (F.fold, "fold"),
    (F.unfold, "im2col"),  # Tensor.unfold is another op
    (builtins.getattr, "getattr"),
    (operator.index, "item"),
    (torch.adaptive_max_pool1d, "adaptive_max_pool1d_with_indices"),
    (builtin_nn.adaptive_max_pool2d, "adaptive_max_pool2d_with_indices"),
    (builtin_nn.adaptive_max_pool3d, "adaptive_max_pool3d_with_indices"),
    (builtin_nn.fractional_max_pool2d, "fractional_max_pool2d_with_indices"),
    (builtin_nn.fractional_max_pool3d, "fractional_max_pool3d_with_indices"),
    (data_of, "detach"),  # dynamo's x.data
)

#: Operators that write their first argument: operator.iadd and x.__iadd__.
_AUGMENTED: Final = frozenset(
    {"iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
     "ilshift", "irshift"}
)  # fmt: skip

#: Dunders whose bare name is a torch function of another meaning.
_DUNDERS: Final = MappingProxyType(
    dict.fromkeys(
        ("__bool__", "__nonzero__", "__int__", "__long__", "__index__", "__float__", "__complex__"),
        "item",
    )
    | {"__rand__": "bitwise_and"}
)

_OWN_NAMESPACES: Final = frozenset({"aten", "prims", "prim"})


def canonical_name(target: Any, node_op: str = "call_function") -> Op | None:
    """Canonical op of a ``call_function`` or ``call_method`` target; None for a callable that is nobody's op."""
    if node_op == "call_method":
        return _named(target)
    if node_op != "call_function":
        return None
    if isinstance(target, OpOverload | OpOverloadPacket):
        return _library_op(target)
    if isinstance(target, HigherOrderOperator):
        return Op(f"higher_order::{target.name()}")
    try:
        return _functions().get(target) or _dtensor_op(target)
    except TypeError:  # an unhashable callable is nobody's op
        return None


def _dtensor_op(target: Any) -> Op | None:
    """DTensor's functions, as dynamo writes them: some by themselves, some as a closure over the mesh."""
    if str(getattr(target, "__module__", "")).partition(".tensor")[0] != "torch.distributed":
        return None
    name = getattr(target, "__name__", "").removeprefix("prim_")
    return Op(name) if name in _DTENSOR_OPS else None


_DTENSOR_OPS: Final = frozenset({"from_local", "to_local", "redistribute", "full_tensor", "distribute_tensor"})


def cast_target(node: Node) -> torch.dtype | None:
    """Return the dtype that a node named "to" casts to; None where it only moves, or where the call does not say."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return FIXED_CASTS.get(str(name)) or dtype_argument(node)


def is_idle_dropout(node: Node) -> bool:
    """Return whether this dropout hands its very input on: not training, or a probability of 0."""
    if notes(node).op.name not in ("dropout", "alpha_dropout"):
        return False
    return argument(node, 2, "training") is False or argument(node, 1, "p") == 0


def may_give_itself(node: Node) -> bool:
    """Return whether an op gives its very argument where there is nothing to do (``contiguous``)."""
    facts = facts_of(notes(node).op.name)
    if notes(node).op.name == "getattr":
        return node.args[1:] == ("real",)
    # A call that names a dtype, or a tensor that has one (``h.to(x)``), may convert.
    if not facts.itself or len(tensors_of(node)) != 1 or cast_target(node) is not None:
        return False
    if any(each.args[1:] == ("dtype",) for each in node.all_input_nodes):  # h.to(x.dtype)
        return False
    return not facts.random or is_idle_dropout(node)


def dtype_argument(node: Node) -> torch.dtype | None:
    """Return the dtype among a call's arguments (``softmax(x, 0, dtype=torch.float32)``), which its result has."""
    return dtype_among((*node.args, *node.kwargs.values()))


def dtype_among(arguments: Iterable[object]) -> torch.dtype | None:
    """Return the first dtype among arguments, however it is written; None where there is none."""
    for each in arguments:
        if not isinstance(each, Node) and (dtype := _as_dtype(each)) is not None:
            return dtype
    return None


def canonical_op(node: Node) -> Op | None:
    """Return ``canonical_name`` of a call, told apart by its arguments where one callee does several things."""
    op = canonical_name(node.target, node.op)
    if op is None:
        return None
    if op.name == "interpolate":
        return Op(_INTERPOLATION.get(str(argument(node, 3, "mode", "nearest")), op.name))
    if op.name == "einsum":
        equation = equation_of(node)
        return op if equation is None else Op(_EINSUMS.get(equation.form, op.name))
    if op.name == "div" and node.target is operator.truediv and not isinstance(node.args[0], Node):
        return Op("rdiv")  # 1 / x
    return op


_INTERPOLATION: Final = MappingProxyType(
    {"nearest": "interpolate_nearest", "nearest-exact": "interpolate_nearest", "area": "interpolate_area"}
)

_EINSUMS: Final = MappingProxyType({Form.PRODUCT: "einsum_product", Form.SUM: "einsum_sum", Form.VIEW: "einsum_view"})


def _as_dtype(argument: object) -> torch.dtype | None:
    """Return the dtype of ``torch.half``, or of what ``Tensor.type`` takes: a ``torch.HalfTensor``, or its name."""
    if isinstance(argument, torch.dtype):
        return argument
    if isinstance(argument, str) and argument.endswith("Tensor"):
        return FIXED_CASTS.get(argument.rpartition(".")[2].removesuffix("Tensor").lower())
    if isinstance(argument, type(torch.FloatTensor)):
        return getattr(argument, "dtype", None)
    return None


@functools.cache
def _named(name: str) -> Op:
    """Return the op of a function or method of torch, as its name is written: a trailing underscore means in place."""
    if name in _DUNDERS:
        return Op(_DUNDERS[name])
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in _AUGMENTED:
            return Op(_alias(bare[1:]), in_place=True)
        return Op(_alias(bare), in_place=bare == "setitem")
    in_place = name.endswith("_") and not name.endswith("__")
    return Op(_alias(name.removesuffix("_") if in_place else name), in_place)


def _alias(name: str) -> str:
    """Prefixes off, copies of views to their view, then the table of synonyms."""
    name = name.removeprefix("special_")
    name = name.lstrip("_")
    if name.endswith("_copy") and name not in ("index_copy", "to_copy", "narrow_copy"):
        name = name.removesuffix("_copy")
    return ALIASES.get(name, name)


@functools.cache
def _library_op(target: OpOverload | OpOverloadPacket) -> Op:
    overload = target if isinstance(target, OpOverload) else getattr(target, target.overloads()[0])
    namespace, _, name = overload.name().partition("::")
    name = name.partition(".")[0]
    if namespace in _OWN_NAMESPACES:
        return _named(name)
    in_place = name.endswith("_") and not name.endswith("__")
    return Op(f"{namespace}::{name.removesuffix('_') if in_place else name}", in_place)


@functools.cache
def _functions() -> dict[Any, Op]:
    """Return every Python function and builtin of torch that is an op, by identity. Built at first use."""
    found = {function: Op(name) for function, name in _EXPLICIT if function is not None}
    found |= dict.fromkeys(CASTS, Op("to"))
    found |= {function: Op(name) for name, function in WITH_WIDE_STATE.items()}
    for function, op in (*_operators(), *_namespaces()):
        found.setdefault(function, op)
    return found


def _operators() -> Iterator[tuple[Callable[..., Any], Op]]:
    for name in dir(operator):
        function = getattr(operator, name)
        if not callable(function) or isinstance(function, type):
            continue
        bare = name.strip("_")
        if bare in ("concat", "iconcat"):  # + of lists, never torch.concat
            yield function, Op("sequence_concat", in_place=bare == "iconcat")
        elif bare in _AUGMENTED:
            yield function, Op(_alias(bare[1:]), in_place=True)
        else:
            yield function, Op(_alias(bare), in_place=bare in ("setitem", "delitem"))


def _namespaces() -> Iterator[tuple[Callable[..., Any], Op]]:
    """Yield the functions of torch's namespaces; ``_functions`` takes the first name of one: F's, if it is there."""
    for prefix, home in (
        ("", F),
        ("", builtin_nn),
        ("linalg_", torch.linalg),
        ("fft_", torch.fft),
        ("", torch.special),
        ("", torch),
        ("", builtins_of_torch),
        ("", torch.Tensor),
    ):
        for name in dir(home):
            function = getattr(home, name, None)
            if not callable(function) or isinstance(function, type) or name in _NO_OPS:
                continue
            yield function, _named(name if name.startswith("__") else prefix + name.removeprefix(prefix))


#: Callables in those namespaces that only make other callables or are Python machinery.
_NO_OPS: Final = frozenset(
    {"boolean_dispatch", "handle_torch_function", "has_torch_function", "has_torch_function_unary", "Callable",
     "has_torch_function_variadic", "assert_int_or_pair", "compile", "classproperty", "__init__", "__new__",
     "__class__"}
)  # fmt: skip
