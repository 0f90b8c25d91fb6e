"""What both placements ask of a node before they decide it: its rule, its data ports, the bodies it calls.

A *site* is one call as the policy sees it. ``data`` are the float arguments on the ports that carry the rule's dtype,
``kept`` the others (a norm's weight), which arrive in their original dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.ir import UNKNOWN, DTypeInfo, Op, Rule, is_castable, module_path
from fxprec.passes.op_table import OpRule, rule_of

__all__ = ["Site", "bodies", "carries_float", "dtype_reference", "is_metadata", "operands", "original", "site_of"]

#: Higher-order ops that run their body once, there and then: its nodes are decided as part of the caller's graph.
TRANSPARENT: Final = frozenset(
    f"higher_order::{name}"
    for name in ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "invoke_subgraph",
                 "wrap_with_set_grad_enabled", "wrap_with_autocast", "strict_mode", "hints_wrapper")
)  # fmt: skip

#: Branches and loops: bodies are decided alone, and what enters and leaves them has its original dtype.
BOUNDED: Final = frozenset(
    f"higher_order::{name}" for name in ("cond", "while_loop", "scan", "associative_scan", "map", "map_impl")
)

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
    def promotes(self) -> bool:
        """Whether the eager kernel takes mixed inputs."""
        return self.row is not None and self.row.native_promotion

    def has_mixed_kernel(self, context: Context) -> bool:
        """Whether an eager kernel reads and writes low, and computes in FP32 inside."""
        return context.native_mixed and self.row is not None and context.device in self.row.mixed


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


def bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """The graphs that a higher-order op calls."""
    found = (_body(source, gm) for source in node.all_input_nodes if source.op == "get_attr")
    return [body for body in found if body is not None]


def operands(node: Node, gm: GraphModule) -> list[object]:
    """What a higher-order op hands to its one body, in the order of the body's placeholders."""
    leaves = list(_leaves(node.args))
    first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Node) and _body(leaf, gm) is not None), -1)
    return [leaf for leaf in leaves[first + 1 :] if not isinstance(leaf, str)]


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
