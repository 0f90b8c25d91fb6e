"""What a static trace read of the model, and the cheap check that all of it still holds.

The check runs at every call, so it is a handful of C loops over flat lists: about 0.3 us a module. Compared are

- attributes that are no tensors (``training``, ``eps``, ``scale``), globals, closure variables, attributes of classes:
  the very same object, or one of the same type that no program can tell from it; containers with all that is in them;
- children, and which tensor slots hold a parameter, a tensor or None (not which tensor: those are read at each call);
- classes and their ``forward``, methods overridden on an instance, attributes that were asked for and missing, names
  of tensors and children that an attribute of the instance or of its class hides;
- hooks, global ones too; tied weights, still tied; shape or device of parameters, where they were asked for;
- the code of the functions that were traced, and torch's default dtype.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, contains, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fxprec.capture.guard_values import same
from fxprec.capture.lookups import Lookups
from fxprec.capture.originals import original_class
from fxprec.capture.symbolic.surroundings import Expected, Held
from fxprec.capture.ties import Ties
from fxprec.capture.trusted import is_torchs
from fxprec.torch_internals import global_hooks

#: Attributes of a module that hold hooks which run when it is called.
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Of the attributes of a module, a tuple of them.
hooks_of: Final = itemgetter(*HOOKS)


class Slot(NamedTuple):
    """Where a tensor lives: the attributes, parameters or buffers of a module, the name among them, and its path."""

    owner: dict[str, Any]
    name: str
    path: str

    def tensor(self) -> Any:
        return self.owner.get(self.name)


_PARTS_OF_PROGRAMS: Final = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_code_of = attrgetter("__code__")
_END: Final = object()
_Getter = Callable[[Any], Any]

#: Something that was asked of the tensor in a slot, and the answer.
Fact = tuple[Slot, Callable[[Tensor], Any], Any]


@dataclass(eq=False)
class Reads:
    """What was read of one module: ``values`` and ``tensors`` of the instance.

    ``missing``: names found on the class that the instance must not override. ``absent``: names found nowhere.
    ``walked``: which of ``_modules``, ``_parameters``, ``_buffers`` were read as a whole (``children()``, ``len``).
    """

    path: str
    module: nn.Module
    called: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    walked: set[str] = field(default_factory=set)

    def label(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


class Guards:
    """``failing()`` is None while everything that tracing read is as it was."""

    def __init__(
        self,
        root: nn.Module,
        reads: Sequence[Reads],
        expected: Sequence[Expected] = (),
        functions: Sequence[FunctionType] = (),
        absent: Iterable[tuple[dict[str, Any], set[str]]] = (),
        ties: Sequence[tuple[Slot, Slot]] = (),
        facts: Sequence[Fact] = (),
    ) -> None:
        # The root's own class and hooks are the caller's: a converted module's class is swapped, and its hooks run
        # around the graph.
        inner = [read for read in reads if read.module is not root]
        values = [*_values_of(reads), *expected]
        self._checks: list[_Check] = [
            _Classes(inner),
            _Hooks([read for read in inner if read.called]),
            _Missing(reads),
            _Values(values, [_Parts.of(read, hooked=read.called and read.module is not root) for read in reads]),
            _Slots(reads),
            _Walked(reads),
            Lookups(read.module for read in reads),
            _Code(functions, absent),
        ]
        identical = [
            (Slot(vars(read.module), name, read.label(name)), tensor)
            for read in reads
            for name, tensor in read.tensors.items()
        ]
        if identical or ties or facts:
            self._checks.append(_Tensors(identical, ties, facts))
        #: For people: what the user's own code read, but for children, hooks, functions, classes and modules.
        self.read_by_user = tuple(
            dict.fromkeys([each.label for each in values if _is_users(each)] + [slot.path for slot, _ in identical])
        )

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
        self._distinct = list(dict.fromkeys(original_class(read.module) for read in reads))
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
        self._called = called
        self._hooks = [*global_hooks.values(), *chain.from_iterable(hooks_of(vars(read.module)) for read in called)]

    def holds(self) -> bool:
        return not any(self._hooks)

    def change(self) -> str:
        labels = [*global_hooks, *(read.label(name) for read in self._called for name in HOOKS)]
        return next(f"{label} got a hook" for label, hooks in zip(labels, self._hooks, strict=True) if hooks)


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


class _Walked:
    """The names of children, parameters or buffers, and their order, of modules that the forward walked through."""

    def __init__(self, reads: Sequence[Reads]) -> None:
        self._parts = [(vars(read.module)[name], read.label(name)) for read in reads for name in sorted(read.walked)]
        self._names = [[*part] for part, _ in self._parts]
        self._dicts = [part for part, _ in self._parts]
        self._all = [*chain.from_iterable(self._dicts)]

    def holds(self) -> bool:
        return [*chain.from_iterable(self._dicts)] == self._all

    def change(self) -> str:
        for (part, label), names in zip(self._parts, self._names, strict=True):
            if [*part] != names:
                return f"{label} changed from {_shown(names)} to {_shown([*part])}"
        raise AssertionError("nothing changed")


class _Values:
    """One ``itemgetter`` call a scope, one comparison of all values, identity first.

    ``==`` takes 1 for True and -0.0 for 0.0. So numbers and tuples that other code than torch's own reads must also be
    the very same objects; a new one is compared by its type and value, and is the one to be there from then on.
    """

    def __init__(self, expected: Sequence[Expected], parts: Sequence[_Parts]) -> None:
        self._parts = parts
        self._containers = [each for each in expected if isinstance(each.value, Held)]
        self._expected = [each for each in expected if not isinstance(each.value, Held)]
        scopes = _Scopes()
        for each in self._expected:
            scopes.add(each.scope, (each.name,), (each.value,))
        for part in parts:
            if part.children:
                scopes.add(part.attributes, ("_modules",), (part.children,))
            if part.dicts:
                scopes.add(part.attributes, [*part.dicts], [*part.dicts.values()])
        self._getters, self._scopes, self._values = scopes.getters(), scopes.scopes, scopes.all_values()
        numbers = [e for e in self._expected if e.exact and isinstance(e.value, int | float | complex | tuple)]
        self._of_numbers = [_getter(each.scope, (each.name,)) for each in numbers]
        self._number_scopes = [each.scope for each in numbers]
        self._numbers = [each.value for each in numbers]

    def holds(self) -> bool:
        if [*map(call, self._getters, self._scopes)] != self._values:  # type: ignore[arg-type]
            return False
        if self._numbers:
            numbers = [*map(call, self._of_numbers, self._number_scopes)]  # type: ignore[arg-type]
            if not all(map(is_, numbers, self._numbers)):
                if not all(map(same, numbers, self._numbers)):
                    return False
                self._numbers = numbers
        return not self._containers or all([_holds(each.now(), each.value) for each in self._containers])

    def change(self) -> str:
        for each in (*self._expected, *self._containers):
            if (text := _difference(each)) is not None:
                return text
        for part in self._parts:
            if (text := part.change()) is not None:
                return text
        return "an attribute changed"


def _holds(now: Any, then: Held) -> bool:
    return now is then.container and same(now, then.snapshot)


class _Scopes:
    """For each scope what gets the values of all names in it, the scope, and the values, as it gives them."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self._names: dict[int, list[Any]] = {}
        self._values: dict[int, list[Any]] = {}

    def add(self, scope: Any, names: Sequence[Any], values: Sequence[Any]) -> None:
        if id(scope) not in self._names:
            self.scopes.append(scope)
            self._names[id(scope)], self._values[id(scope)] = [], []
        self._names[id(scope)] += names
        self._values[id(scope)] += values

    def getters(self) -> list[_Getter]:
        return [*map(_getter, self.scopes, self._names.values())]

    def all_values(self) -> list[Any]:
        return [values[0] if len(values) == 1 else tuple(values) for values in self._values.values()]


def _getter(scope: Any, names: Sequence[Any]) -> _Getter:
    return attrgetter(*names) if isinstance(scope, type) else itemgetter(*names)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a module the children, as a copy, the dicts of its tensors, and those of hooks, where it was called.

    Identical dicts compare as equal without a look inside, so a replaced dict of hooks shows, if it holds any.
    """

    attributes: dict[str, Any]
    label: Callable[[str], str]
    children: dict[str, Any]
    dicts: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, read: Reads, hooked: bool) -> _Parts:
        attributes = vars(read.module)
        dicts = {name: attributes[name] for name in ("_parameters", "_buffers") if attributes[name]}
        if hooked:
            dicts.update(zip(HOOKS, hooks_of(attributes), strict=True))
        return cls(attributes, read.label, dict(attributes["_modules"]), dicts)

    def change(self) -> str | None:
        now = self.attributes.get("_modules") or {}
        for child in {**self.children, **now} if self.children else ():
            if self.children.get(child) is not now.get(child):
                return f"the submodule {self.label(child)} was replaced, added or removed"
        for name, then in self.dicts.items():
            if name not in self.attributes:
                return f"{self.label(name)} was deleted"
            if name in HOOKS and self.attributes[name] != then:
                return f"{self.label(name)} got a hook"
            if name not in HOOKS and self.attributes[name] is not then:
                return f"{self.label(name)} was replaced"
        return None


class _Code:
    """The code of functions, which some tools replace in place, their defaults, builtins that no global hides.

    And torch's default dtype.
    """

    def __init__(self, functions: Sequence[FunctionType], absent: Iterable[tuple[dict[str, Any], set[str]]]) -> None:
        self._absent = [(scope.keys(), frozenset(names)) for scope, names in absent]
        self._functions = functions
        self._codes = [function.__code__ for function in functions]
        self._defaults = [
            (f, f.__defaults__, f.__kwdefaults__) for f in functions if f.__defaults__ or f.__kwdefaults__
        ]
        self._dtype = torch.get_default_dtype()

    def holds(self) -> bool:
        return (
            torch.get_default_dtype() is self._dtype
            and [*map(_code_of, self._functions)] == self._codes
            and (not self._absent or all([names.isdisjoint(hiding) for names, hiding in self._absent]))
            and (
                not self._defaults
                or all([f.__defaults__ is one and f.__kwdefaults__ is two for f, one, two in self._defaults])
            )
        )

    def change(self) -> str:
        for function, code in zip(self._functions, self._codes, strict=True):
            if function.__code__ is not code:
                return f"the code of {function.__qualname__} was replaced"
        for function, one, two in self._defaults:
            if function.__defaults__ is not one or function.__kwdefaults__ is not two:
                return f"the defaults of {function.__qualname__} were replaced"
        for names, hiding in self._absent:
            if found := names & hiding:
                return f"the global {min(found)} was set"
        return f"torch's default dtype changed from {self._dtype} to {torch.get_default_dtype()}"


class _Slots:
    """Parameters and buffers: the type in each slot, NoneType for none, so that a changed bias or a DTensor shows.

    And which of them are one tensor. As long as they are the very tensors of the capture, which its graph keeps,
    nothing else is asked.
    """

    def __init__(self, reads: Sequence[Reads]) -> None:
        owners: list[tuple[str, dict[str, Any]]] = [
            (read.label(""), slots)
            for read in reads
            for slots in (vars(read.module)["_parameters"], vars(read.module)["_buffers"])
            if slots
        ]
        self._slots = [slots.values() for _, slots in owners]
        self._labels = [prefix + name for prefix, slots in owners for name in slots]
        self._ended = [*self._slots, (_END,)]  # one tensor less shows
        self._tensors = [*chain.from_iterable(self._ended)]
        self._types = [*map(type, self._now())]
        self._ties = Ties(lambda: owners)

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(self._slots)

    def holds(self) -> bool:
        if all(map(is_, chain.from_iterable(self._ended), self._tensors)):
            return True
        return [*map(type, self._now())] == self._types and self._ties.hold()

    def change(self) -> str:
        now = [*map(type, self._now())]
        if len(now) != len(self._types):
            return "a parameter or buffer was added or deleted"
        for label, a, b in zip(self._labels, self._types, now, strict=True):
            if a is not b:
                return f"{label} changed from {a.__name__} to {b.__name__}"
        return self._ties.change() or "a parameter or buffer was replaced"


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


def _values_of(reads: Iterable[Reads]) -> Iterator[Expected]:
    for read in reads:
        scope = vars(read.module)
        where = f"{read.path}." if read.path else ""
        # Identical dicts compare as equal without a look inside, so a replaced dict of hooks shows, if it holds any.
        exact = not is_torchs(type(read.module))
        for name, value in read.values.items():
            yield Expected(where + name, scope, name, value, exact and name != "training")


def _is_users(each: Expected) -> bool:
    return each.exact and not isinstance(each.value, _PARTS_OF_PROGRAMS)


def _difference(each: Expected) -> str | None:
    label, value = each.label, each.value
    try:
        now = each.now()
    except (LookupError, AttributeError):
        return f"{label} was deleted"
    if isinstance(value, Held):
        if same(now, value.snapshot):
            return None if now is value.container else f"{label} was replaced by an equal one"
        return f"{label} changed from {_shown(value.snapshot)} to {_shown(now)}"
    if same(now, value):
        return None
    return f"{label} changed from {_shown(value)} to {_shown(now)}"


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else reprlib.repr(value)
