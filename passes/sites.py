"""What both placements ask of a node before they decide it: its rule, its data ports, the bodies it calls.

A *site* is one call as the policy sees it. ``data`` are the float arguments on the ports that carry the rule's dtype,
``kept`` the others (a norm's weight), which arrive in their original dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.ir import UNKNOWN, DTypeInfo, Op, Rule, is_castable, is_scalar, module_path
from fxprec.passes.op_table import OpRule, rule_of

__all__ = [
    "Site",
    "bind_operands",
    "bodies",
    "body_calls",
    "carries_float",
    "dtype_reference",
    "is_metadata",
    "is_zero_dim",
    "may_be_container",
    "original",
    "runs_bodies",
    "site_of",
]

#: Higher-order ops that run their body once, there and then: its nodes are decided as part of the caller's graph.
_TRANSPARENT: Final = frozenset(
    f"higher_order::{name}"
    for name in ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "invoke_subgraph",
                 "wrap_with_set_grad_enabled", "wrap_with_autocast", "strict_mode", "hints_wrapper")
)  # fmt: skip

#: Branches and loops: bodies are decided alone, and what enters and leaves them has its original dtype.
_BOUNDED: Final = frozenset(
    f"higher_order::{name}" for name in ("cond", "while_loop", "scan", "associative_scan", "map", "map_impl")
)

#: Reductions that give a 0-dim tensor unless they are told a dimension (``is_scalar`` looks).
_REDUCE_ALL: Final = frozenset({"sum", "mean", "prod", "max", "min", "amax", "amin", "norm", "std", "var"})

#: Methods without a tensor result that still read the values.
_READ_VALUES: Final = frozenset({"numpy", "tolist", "item", "storage", "typed_storage", "untyped_storage", "data_ptr"})


@dataclass(frozen=True, slots=True)
class Site:
    """One call.

    Attributes:
        name: canonical op, or the callee's name where it is no op.
        row: its row of the table.
        rule: what the policy says; LOW or FULL where it names a dtype.
        dtype: the dtype that the policy names, else None.
        why: the policy's reason.
        in_place: the first argument is written.
        data: float arguments on the ports that carry the rule's dtype, in order.
        kept: the other float arguments.
    """

    node: Node
    name: str
    row: OpRule | None
    rule: Rule
    dtype: torch.dtype | None
    why: str
    in_place: bool
    data: tuple[Node, ...]
    kept: tuple[Node, ...]

    @property
    def base(self) -> Node:
        """The first argument: what a view looks at, a write writes, a cast casts."""
        first = self.node.args[0] if self.node.args else next(iter(self.node.kwargs.values()))
        return first if isinstance(first, Node) else self.node

    @property
    def promotes(self) -> bool:
        """Whether the eager kernel takes mixed inputs."""
        return self.row is not None and self.row.native_promotion

    def has_mixed_kernel(self, context: Context) -> bool:
        """Whether an eager kernel reads and writes low, and computes in FP32 inside."""
        return self.dtype is None and context.native_mixed and self.row is not None and context.device in self.row.mixed

    def accumulates_wide(self, context: Context, asked: torch.dtype | None) -> bool:
        """Whether the kernel takes a dtype to compute in, so that it may read low: ours, or one that the user asked for."""
        if self.dtype is not None or not context.native_mixed or self.row is None:
            return False
        if asked is None:
            return self.row.dtype_keyword
        return asked is torch.float32 and "dtype" in self.node.kwargs


def site_of(node: Node, context: Context) -> Site:
    """Ask the table and the policy about one call."""
    op: Op | None = node.meta.get("op")
    name = op.name if op is not None else getattr(node.target, "__name__", str(node.target))
    row = rule_of(name) if op is not None else None
    rule, why = context.policy.resolve(name, node, module_path(node), row, context.device)
    if node.meta.get("autocast") is False:
        rule, why = Rule.KEEP, "inside autocast(enabled=False)"
    dtype = None
    if isinstance(rule, torch.dtype):
        dtype, rule = rule, Rule.FULL if rule is torch.float32 else Rule.LOW
    data: list[Node] = []
    kept: list[Node] = []
    ports = row.ports if row is not None else None
    for port, argument in (*enumerate(node.args), *node.kwargs.items()):
        bucket = data if ports is None or port in ports else kept
        bucket.extend(source for source in _nodes(argument) if carries_float(source.meta.get("dtype")))
    return Site(node, name, row, rule, dtype, why, op is not None and op.in_place, tuple(data), tuple(kept))


def is_metadata(site: Site) -> bool:
    """Whether only sizes, flags and the like come out: then any dtype may go in."""
    row = site.row
    return row is not None and row.result == "none" and row.rule is Rule.KEEP and site.name not in _READ_VALUES


def carries_float(info: DTypeInfo | None) -> bool:
    """Whether a value is, holds, or may be a float that a policy can cast."""
    return any(map(carries_float, info)) if isinstance(info, tuple) else is_castable(info)


def original(info: DTypeInfo | None) -> torch.dtype:
    """The original dtype of a castable value (of the first castable element); FP32 where nobody can know it."""
    if isinstance(info, tuple):
        return original(next(element for element in info if carries_float(element)))
    return info if isinstance(info, torch.dtype) and info is not UNKNOWN else torch.float32


def dtype_reference(node: Node) -> Node | None:
    """The tensor whose dtype a call asks for at run time: ``x.to(y.dtype)``, ``zeros(n, dtype=y.dtype)``, ``x.type_as(y)``."""
    for source in _nodes((node.args, node.kwargs)):
        op: Op | None = source.meta.get("op")
        if op is not None and op.name == "getattr" and source.args[1] == "dtype" and isinstance(source.args[0], Node):
            return source.args[0]
    op = node.meta.get("op")
    if op is not None and op.name == "to":
        return next((s for s in _nodes((node.args[1:], node.kwargs)) if carries_float(s.meta.get("dtype"))), None)
    return None


def may_be_container(node: Node) -> bool:
    """Whether an input of unknown dtype is read like a list or dict: then it may be no tensor, and is left alone."""
    return node.meta.get("dtype") is UNKNOWN and any(
        (op := user.meta.get("op")) is not None and op.name == "getitem" and isinstance(user.args[1], int | str)
        for user in node.users
    )


def is_zero_dim(node: Node, known: Container[Node]) -> bool:
    """``is_scalar`` for one node after the other: what it needs of the earlier ones is ``known``, nothing is walked."""
    op: Op | None = node.meta.get("op")
    if op is None or "val" in node.meta or op.name in _REDUCE_ALL:
        return is_scalar(node)
    sources = node.all_input_nodes
    return bool(sources) and all(source in known for source in sources) and is_scalar(node)


def bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """The graphs that a higher-order op calls."""
    if not isinstance(node.target, HigherOrderOperator):
        return []
    return [body for source in node.all_input_nodes if (body := _body(source, gm)) is not None]


def body_calls(gm: GraphModule) -> Counter[int]:
    """How often each body (by id) is called from this graph."""
    found = ((_body(node, gm), node) for node in gm.graph.find_nodes(op="get_attr"))
    return Counter({id(body): len(node.users) for body, node in found if body is not None})


def runs_bodies(node: Node) -> bool:
    """Whether a higher-order op just runs its bodies, so that what is in them is ours to decide."""
    name = node.meta["op"].name if "op" in node.meta else ""
    if node.meta.get("autocast") is False or (name.endswith("wrap_with_autocast") and node.args[2] is False):
        return False
    return name in _TRANSPARENT or name in _BOUNDED


def bind_operands(node: Node, gm: GraphModule) -> dict[Node, Node] | None:
    """Placeholder of the one body -> the caller's operand; None where the op does not simply hand them on."""
    if node.meta["op"].name not in _TRANSPARENT:
        return None
    leaves = [leaf for leaf in _leaves(node.args) if not isinstance(leaf, str)]
    at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Node) and _body(leaf, gm) is not None)
    given = leaves[at + 1 :]
    inputs = list(bodies(node, gm)[0].graph.find_nodes(op="placeholder"))
    if len(inputs) != len(given):
        return None
    return {into: operand for into, operand in zip(inputs, given, strict=True) if isinstance(operand, Node)}


def _body(source: Node, gm: GraphModule) -> GraphModule | None:
    value = getattr(gm, str(source.target), None) if source.op == "get_attr" and "." not in str(source.target) else None
    return value if isinstance(value, GraphModule) else None


def _leaves(argument: object) -> Iterator[object]:
    if isinstance(argument, tuple | list):
        for element in argument:
            yield from _leaves(element)
    elif isinstance(argument, dict):
        yield from _leaves(list(argument.values()))
    elif isinstance(argument, slice):
        yield from _leaves([argument.start, argument.stop, argument.step])
    else:
        yield argument


def _nodes(argument: object) -> Iterable[Node]:
    if isinstance(argument, Node):
        return (argument,)
    if isinstance(argument, tuple | list | dict | slice):
        return [leaf for leaf in _leaves(argument) if isinstance(leaf, Node)]
    return ()
