"""What every pass shares: the node annotations, the pass protocol, and the one-line-a-node text form.

Annotations live in ``node.meta``, one key a fact, each written by one pass:

=============  ==============  ==================================================================================
key            written by      value
=============  ==============  ==================================================================================
``memory``     capture         equal for inputs, parameters and buffers that share memory; absent where nothing does
``written``    canonicalize    the graph writes to the memory of this input, parameter or buffer; absent where not
``op``         canonicalize    ``Op(name, in_place)``: the canonical op; absent on placeholder, get_attr, output
``dtype``      propagate       dtype of the node's value in the *original* FP32 program: a ``torch.dtype``,
                               ``UNKNOWN`` (nobody can tell without inputs), ``NON_TENSOR``, or a tuple of these
``numel``      propagate       elements of the value where shapes are known, else None (a tuple: of its elements)
``wide``       propagate       positions of the results that are FP32 whatever arrives; absent where there are none
``scalar``     propagate       whether the value is known to be a 0-dim tensor
``precision``  decide          ``Precision``: what the node reads, computes and puts out, and why
=============  ==============  ==================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

__all__ = [
    "CASTABLE",
    "NON_TENSOR",
    "UNKNOWN",
    "DTypeInfo",
    "Op",
    "PassResult",
    "Precision",
    "Rule",
    "Special",
    "arg_nodes",
    "clean_path",
    "dtype_name",
    "format_graph",
    "is_castable",
    "is_scalar",
    "module_path",
    "weight_path",
]

#: Dtypes that a policy may change. float64, integers, bool and complex are never touched.
CASTABLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Rule(StrEnum):
    """What a policy says of an op (DESIGN: the op table)."""

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    PROMOTE = "promote"
    KEEP = "keep"


class Special(StrEnum):
    """Stand-ins for a dtype where a value has none, or none that can be known."""

    UNKNOWN = "unknown"
    NON_TENSOR = "-"


UNKNOWN: Final = Special.UNKNOWN
NON_TENSOR: Final = Special.NON_TENSOR

DTypeInfo: TypeAlias = "torch.dtype | Special | tuple[DTypeInfo, ...]"


_REDUCTIONS: Final = frozenset({"sum", "mean", "prod", "max", "min", "amax", "amin", "norm", "std", "var"})
_POINTWISE: Final = frozenset({"add", "sub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "to", "clamp", "abs"})


class Op(NamedTuple):
    """Canonical op of a node: one name for all spellings. ``in_place``: the first argument is written."""

    name: str
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Precision:
    """What ``decide`` says of one node.

    Attributes:
        reads: dtype that the node's float data ports take (None: whatever arrives, nothing is cast).
        compute: dtype the arithmetic runs in (FP32 inside a mixed kernel that reads low); None for non-float nodes.
        output: dtype of the float result(s); None where there is none.
        rule: the rule that applied.
        why: one clause for the report.
    """

    reads: torch.dtype | None
    compute: torch.dtype | None
    output: torch.dtype | None
    rule: Rule
    why: str


class PassResult(NamedTuple):
    """What a pass hands back. ``declined``: 'node: reason' for every rewrite it saw and did not make."""

    gm: GraphModule
    changed: bool
    declined: tuple[str, ...] = ()


Pass: TypeAlias = Callable[[GraphModule, Any], PassResult]


def is_castable(info: DTypeInfo | None) -> bool:
    """Whether a value of this original dtype is (or, when unknown, may be) a float that a policy can cast."""
    return info is UNKNOWN or (isinstance(info, torch.dtype) and info in CASTABLE)


def dtype_name(dtype: object) -> str:
    """``float16`` for ``torch.float16``; specials and None by their own short names."""
    if dtype is None:
        return "-"
    if isinstance(dtype, tuple):
        return "(" + ", ".join(dtype_name(element) for element in dtype) + ")"
    return str(dtype).removeprefix("torch.")


def arg_nodes(node: Node) -> Iterator[tuple[int | str, Node]]:
    """(port, node) for every node among the arguments, nested ones under the port of their container."""
    for port, argument in (*enumerate(node.args), *node.kwargs.items()):
        if isinstance(argument, Node):
            yield port, argument
        elif isinstance(argument, tuple | list | dict | slice):
            found: list[Node] = []
            map_aggregate(argument, lambda leaf, into=found: into.append(leaf) if isinstance(leaf, Node) else leaf)  # type: ignore[misc]
            for source in found:
                yield port, source


def is_scalar(node: Node) -> bool:
    """Whether the value is known to be a 0-dim tensor: those do not take part in type promotion.

    Without shapes a tensor counts as dimensioned, unless the op that made it reduces over everything. ``propagate``
    records the answer as ``meta["scalar"]``, so that a question never walks further than the arguments.
    """
    known = node.meta.get("scalar")
    if known is not None:
        return known
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    if node.op == "get_attr":
        return node.meta.get("ndim") == 0
    op: Op | None = node.meta.get("op")
    if op is None:
        return False
    if op.name in _REDUCTIONS:
        return len(node.args) == 1 and not ({"dim", "axis"} & node.kwargs.keys())
    sources = node.all_input_nodes
    return op.name in _POINTWISE and bool(sources) and all(source.meta.get("scalar", False) for source in sources)


def module_path(node: Node) -> str:
    """Dotted path of the module whose forward made the node; '' at the root or where nobody recorded it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))
    name = path[0] if isinstance(path, tuple) else next(reversed(stack))
    return clean_path(str(name))


def weight_path(node: Node) -> str:
    """Path in the model of the tensor that a get_attr node reads: a graph module cannot have every name."""
    return node.meta.get("path") or str(node.target)


def clean_path(name: str) -> str:
    """dynamo writes ``L['self']._modules['fc']`` or ``L['self'].fc``: make it ``fc``."""
    name = re.sub(r"^L\['\w+'\]|^self\b", "", name)
    return re.sub(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]", r".\1\2", name).strip(".")


def format_graph(gm: GraphModule) -> str:
    """One line a node: name, dtype and call, as the snapshot tests and docstrings write it.

    >>> %linear: bfloat16 = linear(%x_low, %weight_low, %bias_low)
    """
    return "\n".join(_line(node) for node in gm.graph.nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op in ("placeholder", "get_attr"):
        call = f"{node.op}[{node.target}]" if node.op == "get_attr" else "placeholder"
        return f"%{node.name}: {dtype_name(_shown(node))} = {call}"
    op = node.meta.get("op")
    name = (op.name + ("_" if op.in_place else "")) if op else getattr(node.target, "__name__", str(node.target))
    parts = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"%{node.name}: {dtype_name(_shown(node))} = {name}({', '.join(parts)})"


def _shown(node: Node) -> object:
    if "puts_out" in node.meta:
        return node.meta["puts_out"]
    precision = node.meta.get("precision")
    if precision is not None and precision.output is not None:
        return precision.output
    return node.meta.get("dtype")


def _text(argument: object) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, tuple | list):
        inner = ", ".join(_text(a) for a in argument)
        return f"({inner})" if isinstance(argument, tuple) else f"[{inner}]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in argument.items()) + "}"
    if isinstance(argument, torch.dtype):
        return str(argument)
    return repr(argument)
