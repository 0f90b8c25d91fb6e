"""What both placements ask of a node before they decide it: its rule, its data ports, what its dtype depends on.

A *site* is one call as the policy sees it. ``data`` are the float arguments on the ports that carry the rule's dtype,
``kept`` the others (a norm's weight), which arrive in their original dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import NO_OP, UNKNOWN, Arrival, DTypeInfo, Rule, is_castable, module_path, notes
from fxprec.passes.ops.table import OpRule, facts_of, rule_of


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
        return base_of(self.node)

    @property
    def facts(self) -> OpRule:
        """Its row; where it has none, one that states nothing."""
        return facts_of(self.name) if self.row is None else self.row

    @property
    def promotes(self) -> bool:
        """Whether the eager kernel takes mixed inputs."""
        return self.row is not None and self.row.native_promotion

    def has_mixed_kernel(self, context: Context) -> bool:
        """Whether an eager kernel reads and writes low, and computes in FP32 inside."""
        return self.dtype is None and context.native_mixed and self.row is not None and context.device in self.row.mixed

    def accumulates_wide(self, context: Context, asked: torch.dtype | None) -> bool:
        """Whether the kernel takes a dtype to compute in, so that it may read low: ours, or one that the user gave."""
        if self.dtype is not None or not context.native_mixed or self.row is None:
            return False
        if asked is None:  # float64 may arrive where nobody knows: a dtype would narrow it
            return self.row.dtype_keyword and notes(self.node).dtype is not UNKNOWN
        return asked is torch.float32 and "dtype" in self.node.kwargs


def site_of(node: Node, context: Context) -> Site:
    """Ask the table and the policy about one call."""
    annotations = notes(node)
    op, info = annotations.op, annotations.dtype
    name = op.name or getattr(node.target, "__name__", str(node.target))
    row = rule_of(name) if op is not NO_OP else None
    rule, why = context.policy.resolve(name, node, module_path(node), row, context.device)
    if annotations.autocast is False:
        rule, why = Rule.KEEP, "inside autocast(enabled=False)"
    elif isinstance(info, torch.dtype) and info.is_complex:
        rule, why = Rule.KEEP, "complex numbers are never touched"
    elif _takes_wide(node):
        rule, why = Rule.KEEP, "of its results that are used one is FP32 whatever arrives"
    dtype = None
    if isinstance(rule, torch.dtype):
        dtype, rule = rule, Rule.FULL if rule is torch.float32 else Rule.LOW
    data: list[Node] = []
    kept: list[Node] = []
    ports = row.ports if row is not None else None
    for port, argument in (*enumerate(node.args), *node.kwargs.items()):
        bucket = data if ports is None or port in ports else kept
        bucket.extend(source for source in _nodes(argument) if carries_float(notes(source).dtype))
    return Site(node, name, row, rule, dtype, why, op.in_place, tuple(data), tuple(kept))


def _takes_wide(node: Node) -> bool:
    """Whether anybody uses a result that stays wide where the op is lowered (the logsumexp of an attention kernel)."""
    wide = notes(node).wide
    return bool(wide) and any(
        user.target is not operator.getitem or (user.args[1] in wide and bool(user.users)) for user in node.users
    )


def base_of(node: Node) -> Node:
    """The first argument of a call, the node itself where that is no node."""
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return first if isinstance(first, Node) else node


def is_metadata(site: Site) -> bool:
    """Whether only sizes, flags and the like come out: then any dtype may go in."""
    row = site.row
    return row is not None and row.result == "none" and row.rule is Rule.KEEP and not row.reads_values


def carries_float(info: DTypeInfo | None) -> bool:
    """Whether a value is, holds, or may be a float that a policy can cast."""
    return any(map(carries_float, info)) if isinstance(info, tuple) else is_castable(info)


def assumed_original(info: DTypeInfo | None) -> torch.dtype:
    """The original dtype of a castable value (of the first castable element); FP32 where nobody can know it."""
    if isinstance(info, tuple):
        return assumed_original(next(element for element in info if carries_float(element)))
    return info if isinstance(info, torch.dtype) and info is not UNKNOWN else torch.float32


def dtype_reference(node: Node) -> Node | None:
    """The tensor whose dtype a call asks for: ``x.to(y.dtype)``, ``zeros(n, dtype=y.dtype)``, ``x.type_as(y)``."""
    for source in _nodes((node.args, node.kwargs)):
        op = notes(source).op
        if op.name == "getattr" and source.args[1] == "dtype" and isinstance(source.args[0], Node):
            return source.args[0]
    op = notes(node).op
    if op.name == "to":
        return next((s for s in _nodes((node.args[1:], node.kwargs)) if carries_float(notes(s).dtype)), None)
    return None


def reads_of(node: Node, rule: Rule, reads: torch.dtype | None) -> torch.dtype | Arrival:
    """What a node with this rule reads. ``reads``: the dtype that it asks for; None: none."""
    if facts_of(notes(node).op.name).arrives or not node.all_input_nodes:
        return Arrival.AS_IT_ARRIVES
    if reads is None:
        return Arrival.ORIGINAL if rule is Rule.KEEP else Arrival.AS_IT_ARRIVES
    return reads


def leaves(argument: object) -> Iterator[object]:
    """What nested arguments are made of."""
    if isinstance(argument, tuple | list):
        for element in argument:
            yield from leaves(element)
    elif isinstance(argument, dict):
        yield from leaves(list(argument.values()))
    elif isinstance(argument, slice):
        yield from leaves([argument.start, argument.stop, argument.step])
    else:
        yield argument


def _nodes(argument: object) -> Iterable[Node]:
    if isinstance(argument, Node):
        return (argument,)
    if isinstance(argument, tuple | list | dict | slice):
        return [leaf for leaf in leaves(argument) if isinstance(leaf, Node)]
    return ()
