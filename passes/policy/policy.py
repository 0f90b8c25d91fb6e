"""Policies: a level, rows for custom ops, and overrides of which the last match wins.

A policy only answers questions; ``decide`` asks one a node::

    policy = Policy.preset("O1").override(modules={"encoder.*.attn": torch.float32})
    policy.resolve("linear", node, "encoder.layers.0.attn", rule_of("linear"))
    -> (torch.float32, "override modules 'encoder.*.attn' = float32")

Matching: ``ops`` are canonical op names, ``nodes`` are graph node names, ``modules`` are dotted paths or module classes
(the class itself, or its name in a string). Strings may hold the wildcards ``*``, ``?`` and ``[...]``; ``*`` crosses
dots. What matches a module covers everything below it. A module override leaves KEEP and unknown ops alone (random
numbers, FFTs, linalg have no low kernels); one that names the op or the node, and ``where``, is obeyed as it stands.
At O0 nothing is changed, whatever the overrides say: that level equals the original bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Final, cast

from torch.fx import Node

from fxprec.errors import PolicyError
from fxprec.passes.graph.annotations import CASTABLE, Rule
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.custom import registered, registered_autocast
from fxprec.passes.ops.table import OP_TABLE, OpRule
from fxprec.passes.policy.terms import (
    CustomRule,
    Kind,
    Level,
    Override,
    Predicate,
    Resolved,
    did_you_mean,
    parse_level,
    precision_name,
)
from fxprec.passes.policy.toml import dump, load

#: How the reason begins of an op that the table has FULL, and level O3 lowers.
LOWERED: Final = "level O3 lowers it all the same"


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of a conversion: what is lowered. Every method that changes something returns a new one."""

    level: Level = "O1"
    overrides: tuple[Override, ...] = ()
    rules: tuple[CustomRule, ...] = ()

    def __post_init__(self) -> None:
        parse_level(self.level)
        known = [*OP_TABLE, *(row.op for row in self.rules)]
        for override in self.overrides:
            named = override.kind != "ops" or any(fnmatchcase(name, override.name) for name in known)
            if not named and registered(override.name) is None:
                raise PolicyError(
                    f"override {override}: no op has this name{did_you_mean(override.name, known)}; docs/precision.md "
                    "lists them. A custom op is 'namespace::name': import what registers it first, or add a row with "
                    "Policy.with_rule"
                )

    @classmethod
    def preset(cls, level: str) -> Policy:
        """A level without overrides: O0 (nothing lowered), O1, O2, O3."""
        return cls(parse_level(level))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy file; examples/policy.toml explains the format."""
        level, overrides, rules = load(path)
        return cls(level, overrides, rules)

    def to_toml(self) -> str:
        """The text of a file that ``from_toml`` reads back; what has no such text (a predicate) is refused."""
        return dump(self.level, self.overrides, self.rules)

    def override(
        self,
        *,
        ops: Mapping[str, Resolved | str] | None = None,
        modules: Mapping[str | type, Resolved | str] | Mapping[str, Resolved | str] | None = None,
        nodes: Mapping[str, Resolved | str] | None = None,
        where: Predicate | None = None,
    ) -> Policy:
        """Add overrides after the present ones, in the order ops, modules, nodes, where: the last that matches wins.

        A precision is torch.float32, torch.float16, torch.bfloat16 or a rule ("low": the dtype ``convert`` lowers to),
        or its name.
        """
        groups: dict[Kind, Mapping[Any, Any]] = {"ops": ops or {}, "modules": modules or {}, "nodes": nodes or {}}
        added = [Override(kind, pattern, value) for kind, group in groups.items() for pattern, value in group.items()]
        if where is not None:
            added.append(Override("where", where, None))
        return replace(self, overrides=(*self.overrides, *added))

    def with_rule(self, op: str, rule: Rule | str, why: str) -> Policy:
        """Add the row of a custom op, named as torch registers it ("namespace::name"); a later row of the op wins."""
        return replace(self, rules=(*self.rules, CustomRule(op, cast(Rule, rule), why)))

    def resolve(
        self, op_name: str, node: Node, module_path: str, table_rule: OpRule | None, device: str | None = None
    ) -> tuple[Resolved, str]:
        """Rule or dtype of a node, and why. ``device``: where the parameters are (autocast registrations differ)."""
        if self.level == "O0":
            return Rule.KEEP, "level O0 changes nothing"
        known, why = self.row(op_name, table_rule, device)
        for override in reversed(self.overrides):
            found = override.match(op_name, node, module_path)
            if found is not None and not (override.kind == "modules" and known is Rule.KEEP):
                value = "" if override.precision else f" = {precision_name(found)}"
                return found, f"override {override}{value}"
        if self.level == "O3" and known is Rule.FULL and (table_rule is None or table_rule.low_kernel):
            return Rule.LOW, f"{LOWERED} ({why})"
        return known, why

    def of_module(self, path: str, modules: Mapping[str, object]) -> Resolved | None:
        """Return what overrides say of the module at ``path``, or None. ``modules``: path -> module, of all."""
        overrides = (each for each in reversed(self.overrides) if each.matches_module(path, modules))
        return next((each.precision for each in overrides), None)

    def row(self, op_name: str, table_rule: OpRule | None, device: str | None = None) -> tuple[Resolved, str]:
        """Return what is known of an op before level and overrides count."""
        for row in reversed(self.rules):
            if row.op == op_name:
                return row.rule, row.why
        if table_rule is not None:
            return table_rule.rule, table_rule.why
        dtype = registered_autocast(op_name, device)
        if dtype in CASTABLE:
            return dtype, f"torch.library.register_autocast says {dtype_name(dtype)}"
        return Rule.KEEP, "unknown op: keeps its dtypes (Policy.with_rule adds a row)"

    @property
    def has_tables(self) -> bool:
        """Flag of a policy whose overrides of a kind stand together, as the tables of a file do."""
        kinds = [kind for kind, _ in groupby(each.kind for each in self.overrides)]
        return len(kinds) == len({*kinds})

    @property
    def lowers_sources(self) -> bool:
        """Float inputs and embeddings become low on entry, so that the residual stream is low (O2 and O3)."""
        return self.level in ("O2", "O3")

    @property
    def lowers_parameters(self) -> bool:
        """The parameters themselves become low (O3)."""
        return self.level == "O3"

    def check_matches(
        self, op_names: Iterable[str], modules: Mapping[str, object] | Iterable[str], node_names: Iterable[str]
    ) -> None:
        """Raise if an override matched nothing in what was converted; the caller collects the names of all graphs.

        ``modules``: path -> module (``dict(model.named_modules())``) or class; bare paths where no class is known.
        """
        ops, nodes = set(op_names), set(node_names)
        paths = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        complaints = [found for each in self.overrides if (found := each.complaint(ops, paths, nodes))]
        complaints += [
            f"rule of op {row.op!r}{f' ({row.source})' if row.source else ''}: neither the model nor torch has this op"
            + did_you_mean(row.op, ops)
            for row in self.rules
            if row.op not in ops and registered(row.op) is None
        ]
        if complaints:
            raise PolicyError(
                "the policy says things that match nothing in this model:\n  "
                + "\n  ".join(complaints)
                + "\nCorrect or remove them; fxprec.report of a model converted without them lists every name."
            )
