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

from fxprec.capture.guard_values import PARTS, Lookups, same
from fxprec.capture.originals import original_class
from fxprec.capture.symbolic.surroundings import Expected, Held, Lacking, has_attributes
from fxprec.capture.ties import Ties
from fxprec.capture.trusted import is_torchs
from fxprec.torch_internals import global_hooks

#: Attributes of a module that hold hooks which run when it is called.
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Of the attributes of a module, a tuple of them.
hooks_of: Final = itemgetter(*HOOKS)


class Slot(NamedTuple):
    """Place of a tensor: the dict of a module that holds it, its name there, and its path in the model."""

    owner: dict[str, Any]
    name: str
    path: str

    def tensor(self) -> Any:
        return self.owner.get(self.name)


_PARTS_OF_PROGRAMS: Final = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_code_of = attrgetter("__code__")
_forward_of = attrgetter("forward")
_END: Final = object()

#: Something that was asked of the tensor in a slot, and the answer.
Fact = tuple[Slot, Callable[[Tensor], Any], Any]


@dataclass(eq=False)
class Reads:
    """Record of what was read of one module: ``values`` and ``tensors`` of the instance.

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
        absent: Iterable[Lacking] = (),
        ties: Sequence[tuple[Slot, Slot]] = (),
        facts: Sequence[Fact] = (),
    ) -> None:
        # The root's own class and hooks are the caller's: a converted module's class is swapped, and its hooks run
        # around the graph.
        inner = [read for read in reads if read.module is not root]
        called = [read for read in inner if read.called]
        values = [*_values_of(reads), *expected]
        slots = [
            (Slot(vars(read.module), name, read.label(name)), tensor)
            for read in reads
            for name, tensor in read.tensors.items()
        ]
        self._checks: list[_Check] = [
            *_classes(inner),
            _hooks(called),
            _missing(reads),
            _Values(
                values,
                [part for read in reads for part in _parts_of(read, hooked=read.called and read.module is not root)],
            ),
            _Slots(reads),
            *_walked(reads),
            Lookups(read.module for read in reads),
            *_code(functions, absent),
            *_tensors(slots, ties, facts),
        ]
        #: For people: what the user's own code read, but for children, hooks, functions, classes and modules.
        self.read_by_user = tuple(
            dict.fromkeys(
                [each.label for each in values if each.exact and not isinstance(each.value, _PARTS_OF_PROGRAMS)]
                + [slot.path for slot, _ in slots]
            )
        )

    def failing(self) -> str | None:
        """Return what changed, from what to what; None if nothing did."""
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


class _Same:
    """A list of things that must be as they were; ``say`` tells of the one at a place what it was, and is."""

    def __init__(
        self, now: Callable[[], list[Any]], say: Callable[[int, Any, Any], str], then: list[Any] | None = None
    ) -> None:
        self._now, self._then, self._say = now, now() if then is None else then, say

    def holds(self) -> bool:
        return self._now() == self._then

    def change(self) -> str:
        pairs = zip(self._then, self._now(), strict=True)
        return next(self._say(place, then, now) for place, (then, now) in enumerate(pairs) if now != then)


class _NoneOf:
    """A list of things none of which must be; ``words`` of each what is the case if it is."""

    def __init__(self, found: Callable[[], Iterable[Any]], words: Callable[[], Iterable[str]]) -> None:
        self._found, self._words = found, words

    def holds(self) -> bool:
        return not any(self._found())

    def change(self) -> str:
        return next(text for text, found in zip(self._words(), self._found(), strict=True) if found)


def _classes(reads: Sequence[Reads]) -> Iterator[_Check]:
    modules = [read.module for read in reads]
    distinct = [*dict.fromkeys(map(original_class, modules))]
    yield _Same(
        lambda: [*map(type, modules)],
        lambda place, then, now: f"the class of {reads[place].path} changed from {then.__name__} to {now.__name__}",
    )
    yield _Same(
        lambda: [*map(_forward_of, distinct)],
        lambda place, _then, _now: f"{distinct[place].__name__}.forward was replaced",
    )


def _hooks(called: Sequence[Reads]) -> _Check:
    hooks = [*global_hooks.values(), *chain.from_iterable(hooks_of(vars(read.module)) for read in called)]
    return _NoneOf(
        lambda: hooks,
        lambda: (
            f"{label} got a hook"
            for label in chain(global_hooks, (read.label(name) for read in called for name in HOOKS))
        ),
    )


def _missing(reads: Sequence[Reads]) -> _Check:
    names = [(vars(read.module), name, read) for read in reads for name in sorted(read.missing)]
    for read in reads:
        attributes, classes = vars(read.module), original_class(read.module).__mro__
        for name in sorted(read.absent):
            scopes = (attributes, *map(attributes.__getitem__, PARTS), *map(vars, classes))
            names += [(scope, name, read) for scope in scopes]
    scopes, wanted = [scope for scope, _, _ in names], [name for _, name, _ in names]
    return _NoneOf(
        lambda: map(contains, scopes, wanted), lambda: (f"{read.label(name)} was set" for _, name, read in names)
    )


def _walked(reads: Sequence[Reads]) -> Iterator[_Check]:
    """The names of children, parameters or buffers, and their order, of modules that the forward walked through."""
    parts = [(vars(read.module)[name], read.label(name)) for read in reads for name in sorted(read.walked)]
    if parts:
        yield _Same(
            lambda: [[*part] for part, _ in parts],
            lambda place, then, now: f"{parts[place][1]} changed from {_shown(then)} to {_shown(now)}",
        )


class _Values:
    """Guard of values: one ``itemgetter`` call a scope, one comparison of all values, identity first.

    ``==`` takes 1 for True, -0.0 for 0.0, "a" for a member of a ``(str, Enum)``, and a frozen dataclass for another
    whose fields differ where they do not compare. So what other code than torch's own reads must also be the very same
    object; a new one is compared by its type and value, and is the one to be there from then on. Functions, methods,
    classes and modules are equal only to themselves.
    """

    def __init__(self, expected: Sequence[Expected], parts: Sequence[Expected]) -> None:
        self._parts = parts
        self._containers = [each for each in expected if isinstance(each.value, Held)]
        self._expected = [each for each in expected if not isinstance(each.value, Held)]
        of_scopes: dict[int, list[Expected]] = {}
        for each in (*self._expected, *parts):
            of_scopes.setdefault(id(each.scope), []).append(each)
        groups = of_scopes.values()
        self._scopes = [group[0].scope for group in groups]
        self._getters = [_getter(group[0].scope, [each.name for each in group]) for group in groups]
        self._values = [
            group[0].value if len(group) == 1 else tuple([each.value for each in group]) for group in groups
        ]
        exact = [e for e in self._expected if e.exact and not isinstance(e.value, (*_PARTS_OF_PROGRAMS, nn.Module))]
        self._of_exact = [_getter(each.scope, (each.name,)) for each in exact]
        self._exact_scopes = [each.scope for each in exact]
        self._exact = [each.value for each in exact]

    def holds(self) -> bool:
        if [*map(call, self._getters, self._scopes)] != self._values:  # type: ignore[arg-type]
            return False
        if self._exact:
            values = [*map(call, self._of_exact, self._exact_scopes)]  # type: ignore[arg-type]
            if not all(map(is_, values, self._exact)):
                if not all(map(same, values, self._exact)):
                    return False
                self._exact = values
        held = [(each.now(), each.value) for each in self._containers]
        return all([now is then.container and same(now, then.snapshot) for now, then in held])

    def change(self) -> str:
        changes = chain(map(_difference, (*self._expected, *self._containers)), map(_change_of_part, self._parts))
        return next(filter(None, changes), "an attribute changed")


def _getter(scope: Any, names: Sequence[Any]) -> Callable[[Any], Any]:
    return attrgetter(*names) if has_attributes(scope) else itemgetter(*names)


def _parts_of(read: Reads, hooked: bool) -> Iterator[Expected]:
    """Yield guards of a module's children, as a copy, of the dicts of its tensors, and of its hooks if it was called.

    Identical dicts compare as equal without a look inside, so a replaced dict of hooks shows, if it holds any.
    """
    attributes = vars(read.module)
    for name in (*PARTS, *(HOOKS if hooked else ())):
        part = attributes[name]
        if part or name in HOOKS:
            yield Expected(read.label(name), attributes, name, dict(part) if name == "_modules" else part)


def _change_of_part(part: Expected) -> str | None:
    now = part.scope.get(part.name)
    if part.name == "_modules":
        of_child = part.label.removesuffix(part.name)
        changed = (
            child for child in {**part.value, **(now or {})} if part.value.get(child) is not (now or {}).get(child)
        )
        return next((f"the submodule {of_child}{child} was replaced, added or removed" for child in changed), None)
    if part.name not in part.scope:
        return f"{part.label} was deleted"
    if part.name in HOOKS:
        return f"{part.label} got a hook" if now != part.value else None
    return f"{part.label} was replaced" if now is not part.value else None


def _code(functions: Sequence[FunctionType], absent: Iterable[Lacking]) -> Iterator[_Check]:
    """The code of functions, which some tools replace in place, their defaults, and what was asked for in vain.

    And torch's default dtype.
    """
    defaults = [(f, f.__defaults__, f.__kwdefaults__) for f in functions if f.__defaults__ or f.__kwdefaults__]
    hidden = [(each.scope.keys(), frozenset(each.names), each.label) for each in absent if each.names]
    yield _Same(
        lambda: [*map(_code_of, functions)],
        lambda place, _then, _now: f"the code of {functions[place].__qualname__} was replaced",
    )
    if defaults:
        yield _NoneOf(
            lambda: [f.__defaults__ is not one or f.__kwdefaults__ is not two for f, one, two in defaults],
            lambda: (f"the defaults of {function.__qualname__} were replaced" for function, _, _ in defaults),
        )
    if hidden:
        yield _NoneOf(
            lambda: [not held.isdisjoint(names) for held, names, _ in hidden],
            lambda: (f"{label}{min(names & held, default='')} was set" for held, names, label in hidden),
        )
    yield _Same(
        lambda: [torch.get_default_dtype()],
        lambda _place, then, now: f"torch's default dtype changed from {then} to {now}",
    )


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


def _tensors(
    identical: Sequence[tuple[Slot, Tensor]], ties: Sequence[tuple[Slot, Slot]], facts: Sequence[Fact]
) -> Iterator[_Check]:
    """Tensors that are attributes but no buffers, tied slots, shapes and other facts that the forward asked for."""
    if identical:
        yield _NoneOf(
            lambda: [slot.tensor() is not tensor for slot, tensor in identical],
            lambda: (f"the tensor {slot.path} was replaced" for slot, _ in identical),
        )
    if ties:
        yield _NoneOf(
            lambda: [one.tensor() is not other.tensor() for one, other in ties],
            lambda: (f"{one.path} and {other.path} are no longer the same tensor" for one, other in ties),
        )
    if facts:
        yield _Same(
            lambda: [ask(tensor) if isinstance(tensor := slot.tensor(), Tensor) else _END for slot, ask, _ in facts],
            lambda place, then, now: (
                f"{facts[place][0].path} "
                + ("is no tensor any more" if now is _END else f"changed from {then} to {now}")
            ),
            [fact for _, _, fact in facts],
        )


def _values_of(reads: Iterable[Reads]) -> Iterator[Expected]:
    for read in reads:
        scope = vars(read.module)
        where = f"{read.path}." if read.path else ""
        exact = not is_torchs(type(read.module))
        for name, value in read.values.items():
            yield Expected(where + name, scope, name, value, exact and name != "training")


def _difference(each: Expected) -> str | None:
    label, value = each.label, each.value
    try:
        now = each.now()
    except (LookupError, AttributeError, ValueError):
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
