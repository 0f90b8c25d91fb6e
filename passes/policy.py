"""Policies: a level, rows for custom ops, and overrides of which the last match wins.

A policy only answers questions; ``decide`` asks one a node::

    Policy.preset("O1").override(modules={"encoder.*.attn": torch.float32})
        .resolve("linear", node, "encoder.layers.0.attn", rule_of("linear"))
    -> (torch.float32, "override modules 'encoder.*.attn' = float32")

Matching: ``ops`` are canonical op names, ``nodes`` are graph node names, ``modules`` are dotted paths or module classes
(by object, or by name in a string); strings may hold the wildcards ``*``, ``?`` and ``[...]``, and ``*`` crosses dots.
What matches a module covers everything below it. A module override leaves KEEP and unknown ops alone (random numbers,
FFTs and linalg have no low kernels); one that names the op or the node, and ``where``, is obeyed as it stands.
At O0 nothing is changed, overrides included: that level is equal to the original bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import torch
from torch.fx import Node

from fxprec.errors import PolicyError
from fxprec.passes.ir import CASTABLE, Rule, clean_path, dtype_name
from fxprec.passes.op_table import OpRule

__all__ = ["LEVELS", "CustomRule", "Level", "Override", "Policy", "nearest", "parse_precision", "registered_autocast"]

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)

Kind = Literal["ops", "modules", "nodes", "where"]
Resolved: TypeAlias = "Rule | torch.dtype"
Predicate: TypeAlias = Callable[[Node], "Resolved | str | None"]

_DTYPES: Final = {dtype_name(dtype): dtype for dtype in sorted(CASTABLE, key=str)}


@dataclass(frozen=True, slots=True)
class Override:
    """One override. ``precision`` is None for ``where`` only, whose pattern (the predicate) gives it; ``source``: where it was written."""

    kind: Kind
    pattern: str | type | Predicate
    precision: Resolved | None
    source: str = ""

    def __str__(self) -> str:
        name = getattr(self.pattern, "__name__", None) or self.pattern
        value = "" if self.precision is None else f" = {precision_name(self.precision)}"
        return f"{self.kind} {name!r}{value}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class CustomRule:
    """A row for an op that the table does not know."""

    op: str
    rule: Rule
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """What to lower: see the module's docstring. Every method that changes something returns a new policy."""

    level: Level = "O1"
    overrides: tuple[Override, ...] = ()
    rules: tuple[CustomRule, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            near = nearest(str(self.level).upper().replace("0", "O", 1), LEVELS)
            raise PolicyError(
                f"unknown level {self.level!r}: levels are {', '.join(LEVELS)} (the letter O, a digit){near}"
            )
        for row in self.rules:
            _refuse_table_op(row)
        for override in self.overrides:
            if override.kind == "ops":
                self._check_op(override)

    @classmethod
    def preset(cls, level: str) -> Policy:
        """The level as DESIGN and the README describe it, without overrides."""
        return cls(cast(Level, level))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy file; examples/policy.toml explains the format."""
        from fxprec.passes.policy_toml import load

        return load(path)

    def to_toml(self) -> str:
        """The text of a file that ``from_toml`` reads back; a predicate has no such text and is refused."""
        from fxprec.passes.policy_toml import dump

        return dump(self)

    def override(
        self,
        *,
        ops: Mapping[str, Resolved | str] | None = None,
        modules: Mapping[str | type, Resolved | str] | None = None,
        nodes: Mapping[str, Resolved | str] | None = None,
        where: Predicate | None = None,
        source: str = "",
    ) -> Policy:
        """Add overrides after the present ones, in the order ops, modules, nodes, where: the last that matches wins.

        A precision is torch.float32, torch.float16, torch.bfloat16, or a rule ("low" is whatever dtype ``convert`` lowers to).
        """
        groups: tuple[tuple[Kind, Mapping[Any, Resolved | str]], ...] = (
            ("ops", ops or {}),
            ("modules", modules or {}),
            ("nodes", nodes or {}),
        )
        added = [_override(kind, key, value, source) for kind, group in groups for key, value in group.items()]
        if where is not None:
            if not callable(where):
                raise PolicyError(f"where must be a function of a node that returns a dtype or None, not {where!r}")
            added.append(Override("where", where, None, source))
        return replace(self, overrides=(*self.overrides, *added))

    def with_rule(self, op: str, rule: Rule | str, why: str, *, source: str = "") -> Policy:
        """Add the row of a custom op, named as torch registers it ("namespace::name"); a later row for the same op wins."""
        if not isinstance(op, str) or not op:
            raise PolicyError(f"with_rule wants the op's name, such as 'mylib::op', not {op!r}")
        found = parse_precision(rule, f"rule of op {op!r}")
        if not isinstance(found, Rule):
            raise PolicyError(f"rule of op {op!r} is {precision_name(found)!r}, but must be one of {', '.join(Rule)}")
        return replace(self, rules=(*self.rules, CustomRule(op, found, why, source)))

    def rule_of(
        self, op_name: str, table_rule: OpRule | None = None, device: str | None = None
    ) -> tuple[Resolved | None, str]:
        """What is known of an op before levels and overrides: custom row, table row, autocast registration, or None."""
        for row in reversed(self.rules):
            if row.op == op_name:
                return row.rule, row.why
        if table_rule is not None:
            return table_rule.rule, table_rule.why
        dtype = registered_autocast(op_name, device)
        if dtype is not None and dtype in CASTABLE:
            return dtype, f"torch.library.register_autocast says {dtype_name(dtype)}"
        return None, "unknown op: original dtype (Policy.with_rule adds a row)"

    def resolve(
        self, op_name: str, node: Node, module_path: str, table_rule: OpRule | None, device: str | None = None
    ) -> tuple[Resolved, str]:
        """Rule or dtype of a node, and why. ``device`` is that of the parameters (autocast registrations differ by it)."""
        if self.level == "O0":
            return Rule.KEEP, "level O0 changes nothing"
        known, why = self.rule_of(op_name, table_rule, device)
        for override in reversed(self.overrides):
            found = _match(override, op_name, node, module_path)
            if found is None:
                continue
            if override.kind == "modules" and known in (None, Rule.KEEP):
                continue
            text = f"override {override}" if override.precision else f"override {override} says {precision_name(found)}"
            return found, text
        if known is None:
            return Rule.KEEP, why
        if self.level == "O3" and known is Rule.FULL:
            return Rule.LOW, f"level O3 lowers it all the same ({why})"
        return known, why

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
        """Raise if an override matched nothing in what was converted; the caller collects the names from all graphs.

        ``modules``: path -> module (``dict(model.named_modules())``) or its class; bare paths serve where no class is named.
        """
        ops, nodes = set(op_names), set(node_names)
        paths = dict(modules) if isinstance(modules, Mapping) else dict.fromkeys(modules)
        complaints = [
            complaint
            for override in self.overrides
            if (complaint := _unmatched(override, ops, paths, nodes)) is not None
        ]
        complaints += [
            f"rule for op {row.op!r}{f' ({row.source})' if row.source else ''}: no such op in the model, nor registered with torch"
            + nearest(row.op, ops)
            for row in self.rules
            if row.op not in ops and not _is_registered(row.op)
        ]
        if complaints:
            raise PolicyError(
                "the policy says things that match nothing in this model:\n  "
                + "\n  ".join(complaints)
                + "\nCorrect or remove them; print(fxprec.report(model)) of a conversion without them lists all names."
            )

    def _check_op(self, override: Override) -> None:
        from fxprec.passes.op_table import OP_TABLE

        pattern = str(override.pattern)
        known = [*OP_TABLE, *(row.op for row in self.rules)]
        if pattern in known or any(fnmatchcase(name, pattern) for name in known) or _is_registered(pattern):
            return
        raise PolicyError(
            f"override {override}: no op has this name{nearest(pattern, known)}; ops are named as in docs/precision.md, "
            "a custom op as 'namespace::name' (import what registers it first, or give it a row with Policy.with_rule)"
        )


def parse_precision(value: object, where: str) -> Resolved:
    """A rule or a float dtype from what users write: ``torch.float32``, ``"float32"``, ``"keep"``, ``Rule.KEEP``."""
    if isinstance(value, torch.dtype):
        if value in CASTABLE:
            return value
    elif isinstance(value, str):
        text = value.removeprefix("torch.")
        if text in _DTYPES:
            return _DTYPES[text]
        if text in tuple(Rule):
            return Rule(text)
    choices = [*_DTYPES, *Rule]
    shown = dtype_name(value) if isinstance(value, torch.dtype) else value
    near = nearest(shown, choices) if isinstance(shown, str) else ""
    raise PolicyError(f"{where}: {shown!r} is no precision: use one of {', '.join(choices)}{near}")


def precision_name(precision: Resolved) -> str:
    """``float32`` or ``keep``."""
    return str(precision.value) if isinstance(precision, Rule) else dtype_name(precision)


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'a', 'b'?)`` or nothing."""
    candidates = sorted(set(known))
    found = get_close_matches(name, candidates, n=3, cutoff=0.5)
    return f" (did you mean {', '.join(map(repr, found))}?)" if found else ""


def registered_autocast(op_name: str, device: str | None = None) -> torch.dtype | None:
    """The dtype that ``torch.library.register_autocast`` was given for an op on a device type (None: on any), or None.

    torch offers no way to ask: ``custom_op`` definitions keep it in ``_autocast_dtype``, ops of a ``Library`` in the
    closure of their Python kernel. What another version of torch does not show counts as not registered.
    """
    if "::" not in op_name:
        return None
    devices = ("cuda", "cpu", "xpu") if device is None else (device,)
    definition = _definition(op_name)
    registered = getattr(definition, "_autocast_dtype", {})
    kernels = getattr(_overload(op_name), "py_kernels", {})
    for device_type in devices:
        key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}", None)
        dtype = registered.get(device_type) or _closure(kernels.get(key)).get("cast_inputs")
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def _override(kind: Kind, pattern: object, value: object, source: str) -> Override:
    if not isinstance(pattern, str) and not (kind == "modules" and isinstance(pattern, type)):
        wanted = "a dotted path, a class name or a module class" if kind == "modules" else "a name"
        raise PolicyError(f"override of {kind}: {pattern!r} is not {wanted}")
    name = pattern if isinstance(pattern, str) else pattern.__name__
    place = f" ({source})" if source else ""
    return Override(kind, pattern, parse_precision(value, f"override of {kind} {name!r}{place}"), source)


def _refuse_table_op(row: CustomRule) -> None:
    from fxprec.passes.op_table import OP_TABLE

    if row.op in OP_TABLE:
        raise PolicyError(f"op {row.op!r} has a row already: use override(ops={{{row.op!r}: ...}}) to decide otherwise")


def _match(override: Override, op_name: str, node: Node, module_path: str) -> Resolved | None:
    pattern = override.pattern
    if override.kind == "where":
        found = cast(Predicate, pattern)(node)
        return None if found is None else parse_precision(found, f"override {override}, node {node.name!r}")
    if override.kind == "modules":
        hit = _match_module(pattern, node, module_path)
    else:
        hit = fnmatchcase(op_name if override.kind == "ops" else node.name, str(pattern))
    return override.precision if hit else None


def _match_module(pattern: object, node: Node, module_path: str) -> bool:
    if any(_path_matches(path, pattern) for path in _with_parents(module_path)):
        return True
    return any(
        _class_matches(kind, pattern) or any(_path_matches(each, pattern) for each in _with_parents(path))
        for path, kind in _stack(node)
    )


def _stack(node: Node) -> Iterator[tuple[str, object]]:
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        path, kind = value if isinstance(value, tuple) and len(value) == 2 else (key, value)
        yield clean_path(str(path)), kind


@lru_cache(maxsize=4096)
def _with_parents(path: str) -> tuple[str, ...]:
    """``a.b.c`` -> ``a.b.c``, ``a.b``, ``a``, and the root ``""``."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[:length]) for length in range(len(parts), -1, -1))


def _path_matches(path: str, pattern: object) -> bool:
    return isinstance(pattern, str) and fnmatchcase(path, pattern)


def _class_matches(kind: object, pattern: object) -> bool:
    """``kind``: a class, or its qualified name as torch.export records it."""
    if isinstance(kind, type):
        if isinstance(pattern, type):
            return issubclass(kind, pattern)
        return any(base.__name__ == pattern for base in kind.__mro__)
    if isinstance(kind, str):
        return kind.rpartition(".")[2] == (pattern.__name__ if isinstance(pattern, type) else pattern)
    return False


def _unmatched(override: Override, ops: set[str], modules: Mapping[str, object], nodes: set[str]) -> str | None:
    pattern = override.pattern
    name = pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
    if override.kind == "where":
        return None  # a predicate may rightly find nothing
    if override.kind == "modules":
        kinds = [
            value if isinstance(value, type | str) else type(value) for value in modules.values() if value is not None
        ]
        if any(_path_matches(path, pattern) for path in modules) or any(
            _class_matches(kind, pattern) for kind in kinds
        ):
            return None
        candidates = {kind.__name__ if isinstance(kind, type) else kind.rpartition(".")[2] for kind in kinds} | set(
            modules
        )
        return f"override {override}: no module has this path or class{nearest(name, candidates)}"
    names = ops if override.kind == "ops" else nodes
    if any(fnmatchcase(each, name) for each in names):
        return None
    return f"override {override}: the model has no such {override.kind.removesuffix('s')}{nearest(name, names)}"


def _is_registered(op_name: str) -> bool:
    return _overload(op_name) is not None


def _overload(op_name: str) -> object | None:
    namespace, separator, name = op_name.partition("::")
    if not separator:
        return None
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def _definition(op_name: str) -> object | None:
    from torch._library.custom_ops import OPDEFS

    return OPDEFS.get(op_name)


def _closure(function: object) -> dict[str, object]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code and cells else {}
