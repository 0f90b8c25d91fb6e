"""What a static trace read of the model, and the cheap check that all of it still holds.

The check runs at every call, so it is a handful of C loops over flat lists: about 0.3 us a module. Compared are

- attributes that are no tensors (``training``, ``eps``, ``scale``) by value, lists and dicts with a copy; equal numbers
  of different types count as the same;
- children, and which tensor slots hold a parameter, a tensor or None (not which tensor: those are read at each call);
- classes and their ``forward``, methods overridden on an instance, attributes that were asked for and missing;
- hooks, global ones too; tied weights, still tied; shape or device of parameters, where they were asked for;
- globals and closure variables of the traced functions that are numbers, strings or None.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, call, contains, itemgetter
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from fxprec.torch_internals import global_hooks

__all__ = ["HOOKS", "Fact", "Guards", "Reads", "Slot"]

#: Attributes of a module that hold hooks which run when it is called.
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Slot(NamedTuple):
    """Where a tensor lives: the attributes, parameters or buffers of a module, the name among them, and its path."""

    owner: dict[str, Any]
    name: str
    path: str

    def tensor(self) -> Any:
        return self.owner.get(self.name)


#: Something that was asked of the tensor in a slot, and the answer.
Fact = tuple[Slot, Callable[[Tensor], Any], Any]


@dataclass(eq=False)
class Reads:
    """What was read of one module: ``values`` and ``tensors`` of the instance, ``on_class`` of its class.

    ``missing``: names found on the class that the instance must not override. ``absent``: names found nowhere.
    """

    path: str
    module: nn.Module
    called: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    on_class: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def label(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


class Guards:
    """``failing()`` is None while everything that tracing read is as it was."""

    def __init__(
        self,
        root: nn.Module,
        reads: Sequence[Reads],
        plain: Sequence[tuple[Any, dict[str, Any]]] = (),
        ties: Sequence[tuple[Slot, Slot]] = (),
        facts: Sequence[Fact] = (),
    ) -> None:
        # The root's own class and hooks are the caller's: a converted module's class is swapped, and its hooks run
        # around the graph.
        inner = [read for read in reads if read.module is not root]
        self._checks: list[_Check] = [
            _Classes(inner),
            _Hooks([read for read in inner if read.called]),
            _Missing(reads),
            _Values([*_values_of(reads, root), *_plain_values(plain)]),
            _Slots(reads),
        ]
        identical = [
            (Slot(vars(read.module), name, read.label(name)), tensor)
            for read in reads
            for name, tensor in read.tensors.items()
        ]
        if identical or ties or facts:
            self._checks.append(_Tensors(identical, ties, facts))

    def failing(self) -> str | None:
        """What changed, from what to what; None if nothing did."""
        for check in self._checks:
            try:
                if check.holds():
                    continue
            except Exception:  # a value that is gone, or now cannot even be compared
                pass
            return check.change()
        return None


class _Check(Protocol):
    def holds(self) -> bool: ...

    def change(self) -> str: ...


class _Classes:
    def __init__(self, reads: Sequence[Reads]) -> None:
        self._reads = reads
        self._modules = [read.module for read in reads]
        self._classes = [type(read.module) for read in reads]
        self._distinct = list(dict.fromkeys(self._classes))
        self._forward = attrgetter("forward")
        self._forwards = [cls.forward for cls in self._distinct]

    def holds(self) -> bool:
        return [*map(type, self._modules)] == self._classes and [*map(self._forward, self._distinct)] == self._forwards

    def change(self) -> str:
        for read, cls in zip(self._reads, self._classes, strict=True):
            if type(read.module) is not cls:
                return f"the class of {read.path} changed from {cls.__name__} to {type(read.module).__name__}"
        changed = [c.__name__ for c, f in zip(self._distinct, self._forwards, strict=True) if c.forward is not f]
        return f"{changed[0]}.forward was replaced"


class _Hooks:
    def __init__(self, called: Sequence[Reads]) -> None:
        self._labels = [*global_hooks, *(read.label(name) for read in called for name in HOOKS)]
        self._hooks = [*global_hooks.values(), *(vars(read.module)[name] for read in called for name in HOOKS)]

    def holds(self) -> bool:
        return not any(self._hooks)

    def change(self) -> str:
        return next(f"{label} got a hook" for label, hooks in zip(self._labels, self._hooks, strict=True) if hooks)


class _Missing:
    def __init__(self, reads: Sequence[Reads]) -> None:
        names = [(vars(read.module), name, read) for read in reads for name in sorted(read.missing)]
        for read in reads:
            for name in sorted(read.absent):
                attributes = vars(read.module)
                scopes = (attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"])
                names += [(scope, name, read) for scope in scopes]
        self._labels = [read.label(name) for _, name, read in names]
        self._scopes = [scope for scope, _, _ in names]
        self._names = [name for _, name, _ in names]

    def holds(self) -> bool:
        return not any(map(contains, self._scopes, self._names))

    def change(self) -> str:
        found = map(contains, self._scopes, self._names)
        return next(f"{label} was set" for label, is_there in zip(self._labels, found, strict=True) if is_there)


class _Values:
    """(where, scope, expected): one ``itemgetter`` call and one tuple comparison, identity first, a scope."""

    def __init__(self, expected: Sequence[tuple[str, Mapping[str, Any], dict[str, Any]]]) -> None:
        expected = [entry for entry in expected if entry[2]]
        self._where = [where for where, _, _ in expected]
        self._scopes = [scope for _, scope, _ in expected]
        self._names = [tuple(values) for _, _, values in expected]
        # the first name twice: of a single name itemgetter would give no tuple
        self._getters = [itemgetter(names[0], *names) for names in self._names]
        self._values = [(next(iter(values.values())), *values.values()) for _, _, values in expected]

    def holds(self) -> bool:
        return [*map(call, self._getters, self._scopes)] == self._values  # type: ignore[arg-type]

    def change(self) -> str:
        for where, scope, names, (_, *values) in zip(self._where, self._scopes, self._names, self._values, strict=True):
            for name, value in zip(names, values, strict=True):
                if (text := _difference(f"{where}.{name}" if where else name, scope, name, value)) is not None:
                    return text
        return "an attribute changed"


class _Slots:
    """Parameters and buffers: the type in each slot, NoneType for none, so that a changed bias or a DTensor shows."""

    def __init__(self, reads: Sequence[Reads]) -> None:
        owners = [
            (read, slots)
            for read in reads
            for slots in (vars(read.module)["_parameters"], vars(read.module)["_buffers"])
        ]
        owners = [(read, slots) for read, slots in owners if slots]
        self._slots = [slots for _, slots in owners]
        self._labels = [read.label(name) for read, slots in owners for name in slots]
        self._types = [*map(type, self._now())]

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._slots))

    def holds(self) -> bool:
        return [*map(type, self._now())] == self._types

    def change(self) -> str:
        now = [*map(type, self._now())]
        if len(now) != len(self._types):
            return "a parameter or buffer was added or deleted"
        changes = zip(self._labels, self._types, now, strict=True)
        return next(f"{label} changed from {a.__name__} to {b.__name__}" for label, a, b in changes if a is not b)


class _Tensors:
    """Tensors that are attributes but no buffers, tied slots, shapes and other facts that the forward asked for."""

    def __init__(
        self,
        identical: Sequence[tuple[Slot, Tensor]],
        ties: Sequence[tuple[Slot, Slot]],
        facts: Sequence[Fact],
    ) -> None:
        self._identical, self._ties, self._facts = identical, ties, facts

    def holds(self) -> bool:
        return (
            all(slot.tensor() is tensor for slot, tensor in self._identical)
            and all(one.tensor() is other.tensor() for one, other in self._ties)
            and all(ask(slot.tensor()) == fact for slot, ask, fact in self._facts)
        )

    def change(self) -> str:
        for slot, tensor in self._identical:
            if slot.tensor() is not tensor:
                return f"the tensor {slot.path} was replaced"
        for one, other in self._ties:
            if one.tensor() is not other.tensor():
                return f"{one.path} and {other.path} are no longer the same tensor"
        for slot, ask, fact in self._facts:
            tensor = slot.tensor()
            if not isinstance(tensor, Tensor):
                return f"{slot.path} is no tensor any more"
            if ask(tensor) != fact:
                return f"{slot.path} changed from {fact} to {ask(tensor)}"
        raise AssertionError("nothing changed")


def _values_of(reads: Iterable[Reads], root: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    for read in reads:
        scope = vars(read.module)
        # Identical dicts compare as equal without a look inside, so a replaced dict of hooks shows, if it holds any.
        hooks = {name: scope[name] for name in HOOKS} if read.called and read.module is not root else {}
        children = {"_modules": dict(scope["_modules"])} if scope["_modules"] else {}
        yield read.path, scope, {**read.values, **hooks, **children}
        if read.on_class:
            yield type(read.module).__name__, _Lookup(partial(getattr, type(read.module))), read.on_class


def _plain_values(
    plain: Iterable[tuple[Any, dict[str, Any]]],
) -> Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    for owner, values in plain:
        if isinstance(owner, dict):
            yield "global", owner, values
        else:
            yield "closure", _Lookup(lambda _, cell=owner: cell.cell_contents), values


class _Lookup(Mapping[str, Any]):
    """The attributes of a class or the content of a closure cell, looked up as in a dict."""

    def __init__(self, get: Callable[[str], Any]) -> None:
        self._get = get

    def __getitem__(self, name: str) -> Any:
        try:
            return self._get(name)
        except (AttributeError, ValueError):  # deleted; an emptied cell
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _difference(label: str, scope: Mapping[str, Any], name: str, value: Any) -> str | None:
    if name not in scope:
        return f"{label} was deleted"
    now = scope[name]
    if now is value:
        return None
    if name == "_modules":
        children = [child for child in {**value, **now} if value.get(child) is not now.get(child)]
        prefix = label.removesuffix("_modules")
        return f"the submodule {prefix}{children[0]} was replaced, added or removed" if children else None
    try:
        if now == value:
            return None
    except Exception:  # for instance a tensor: reported as changed
        pass
    if name in HOOKS:
        return f"{label} got a hook"
    return f"{label} changed from {_shown(value)} to {_shown(now)}"


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else reprlib.repr(value)
