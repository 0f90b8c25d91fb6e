"""Facts that a capture read of Python's state, all of which one loop in C compares at each call.

A graph has what its capture read of Python built in, so it serves only while all of that is as it was. Both captures
write down what they read as a list of facts: a question, and the answer at capture. The loop takes about 0.3 us for
each module of the model; what changed is looked for only once the loop has found that something did.
"""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from torch import nn

from fxprec.capture.guard_values import is_container, is_plain, same, snapshot
from fxprec.capture.user_code import is_torchs

#: The dicts that nn.Module keeps its parts in.
PARTS: Final = ("_modules", "_parameters", "_buffers")
#: What is a part of the program, and no value that it computes with.
PARTS_OF_PROGRAMS: Final = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)

_ask: Any = call  # whose stub knows one signature only
_code_of = attrgetter("__code__")


class Fact(NamedTuple):
    """A question about Python's state, and its answer while a capture ran.

    Attributes:
        ask: answers the question, of a subject; at best a function in C, since each call runs it.
        subject: what it is asked of. One subject may stand for many, as a list of all functions does.
        expected: the answer, which must be the same object or an equal one.
        change: a function that says what has changed, or None if it cannot tell; or a label ("the environment"): the
            reason is then "the environment changed from OLD to NEW".
    """

    ask: Callable[[Any], Any]
    subject: Any
    expected: Any
    change: Callable[[], str | None] | str


class CapturedFacts:
    """The facts for all of which alone a graph is right."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._facts = [*facts]
        self._asks = [fact.ask for fact in self._facts]
        self._subjects = [fact.subject for fact in self._facts]
        self._expected = [fact.expected for fact in self._facts]

    def hold(self) -> bool:
        """Return whether everything is as it was."""
        try:
            return [*map(_ask, self._asks, self._subjects)] == self._expected
        except Exception:  # a value that is gone, or now cannot even be compared
            return False

    def failing(self) -> str | None:
        """Return what changed, from what to what; None if nothing did."""
        if self.hold():
            return None
        # Only now one by one, in Python: it is slower, and names what it was.
        for ask, subject, expected, change in self._facts:
            now: Any = None
            try:
                now = ask(subject)
                if now == expected:
                    continue
            except Exception:  # as in ``hold``
                pass
            if isinstance(change, str):
                return f"{change} changed from {shown(expected)} to {shown(now)}"
            return change() or "an attribute changed"
        return None


def fact_of(check: Any) -> Fact:
    """Return a fact that asks an object's own ``hold()``, and explains by its ``change()``, in Python."""
    return Fact(type(check).hold, check, True, check.change)


class Held(NamedTuple):
    """A container that must be the same one, and hold what it held."""

    container: Any
    snapshot: Any


def remembered(value: Any) -> Any:
    """Return a value as it is compared later: a container with what it holds now."""
    return Held(value, snapshot(value)) if is_container(value) and not is_plain(value) else value


@dataclass(frozen=True, slots=True)
class Expected:
    """A value that must still be there: ``scope[name]``, of a class or cell its attribute.

    Attributes:
        label: for people.
        exact: other code than torch's own reads it, to which True, 1 and 1.0 are not the same.
    """

    label: str
    scope: Any
    name: Any
    value: Any
    exact: bool = True

    def now(self) -> Any:
        """Return what is there; raise LookupError, AttributeError or ValueError if nothing is."""
        return getattr(self.scope, self.name) if has_attributes(self.scope) else self.scope[self.name]

    def change(self) -> str | None:
        """Return what it changed from and to, or None."""
        try:
            now = self.now()
        except (LookupError, AttributeError, ValueError):
            return f"{self.label} was deleted"
        then = self.value.snapshot if isinstance(self.value, Held) else self.value
        if not same(now, then):
            return f"{self.label} changed from {shown(then)} to {shown(now)}"
        replaced = isinstance(self.value, Held) and now is not self.value.container
        return f"{self.label} was replaced by an equal one" if replaced else None


def has_attributes(scope: Any) -> bool:
    """Return whether what is expected in a scope is an attribute, and no item."""
    return isinstance(scope, type | CellType)


def shown(value: object) -> str:
    """Return a value in a few words."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else reprlib.repr(value)


def as_expected(values: Iterable[Expected]) -> Iterator[Fact]:
    """Yield the facts that values are as they were: one a scope, and one each for what ``==`` cannot tell.

    ``==`` takes 1 for True, -0.0 for 0.0, "a" for a member of a ``(str, Enum)``, and a frozen dataclass for another
    whose fields differ where they do not compare. So what other code than torch's own reads must also be the very same
    object, or of the same type and value. Functions, methods, classes and modules are equal only to themselves.
    """
    of_scopes: dict[int, list[Expected]] = {}
    exact: list[Expected] = []
    held: list[Expected] = []
    for each in values:
        if isinstance(each.value, Held):
            held.append(each)
            continue
        of_scopes.setdefault(id(each.scope), []).append(each)
        if each.exact and not isinstance(each.value, (*PARTS_OF_PROGRAMS, nn.Module)):
            exact.append(each)
    # One look a scope gives all of its values.
    for group in of_scopes.values():
        scope, then = group[0].scope, [each.value for each in group]
        # A getter of one name gives no tuple.
        value = tuple(then) if len(then) > 1 else then[0]
        yield Fact(_getter(scope, [each.name for each in group]), scope, value, partial(_first_change, group))
    if exact:
        yield Fact(_Exact.hold, _Exact(exact), True, partial(_first_change, exact))
    if held:
        yield Fact(_hold_the_same, held, True, partial(_first_change, held))


def _getter(scope: Any, names: Sequence[Any]) -> Callable[[Any], Any]:
    return attrgetter(*names) if has_attributes(scope) else itemgetter(*names)


def _first_change(values: Iterable[Expected]) -> str | None:
    return next(filter(None, (each.change() for each in values)), None)


class _Exact:
    """Values that must be the very same objects, or of the same type and value, as ``same`` has it.

    Such another object becomes the one to compare with from then on, so that ``is`` serves at the next call.
    """

    def __init__(self, values: Sequence[Expected]) -> None:
        self._getters = [_getter(each.scope, (each.name,)) for each in values]
        self._scopes = [each.scope for each in values]
        self._values = [each.value for each in values]

    def hold(self) -> bool:
        now = [*map(_ask, self._getters, self._scopes)]
        if not all(map(is_, now, self._values)):
            if not all(map(same, now, self._values)):
                return False
            self._values = now
        return True


def _hold_the_same(held: Iterable[Expected]) -> bool:
    """Return whether containers are the same ones, and hold what they held."""
    values = [(each.now(), each.value) for each in held]
    return all([now is then.container and same(now, then.snapshot) for now, then in values])


def lacking(label: str, scope: Mapping[str, Any], names: Set[str]) -> Fact:
    """Return the fact that a namespace has none of these names; ``label``, for people, stands before one of them."""
    # A view, which is of the namespace as it is at each look.
    held = scope.keys()
    return Fact(held.isdisjoint, frozenset(names), True, lambda: f"{label}{min(names & held, default='')} was set")


def says(text: str) -> Callable[[], str]:
    """Return what says this of a change."""
    return lambda: text


def none_found(found: Callable[[], list[Any]], words: Callable[[Any], str]) -> Fact:
    """Return the fact that nothing is found that must not be; ``words`` say of the first such what it is."""
    return Fact(call, found, [], lambda: words(found()[0]))


#: Of a function: its code and its defaults.
function_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def unchanged_functions(functions: Mapping[FunctionType, tuple[Any, Any, Any]]) -> Iterator[Fact]:
    """Yield the facts that functions have the code, which some tools replace in place, and the defaults that they had.

    Args:
        functions: each with its ``function_parts`` at capture.
    """
    for function, (code, *_) in functions.items():
        yield Fact(_code_of, function, code, says(f"the code of {function.__qualname__} was replaced"))
    # Defaults are compared by identity: they may hold what cannot be compared.
    some = [(f, parts) for f, parts in functions.items() if (parts[1] or parts[2]) and not is_torchs(f)]
    if some:
        yield none_found(
            lambda: [f for f, (_, one, two) in some if f.__defaults__ is not one or f.__kwdefaults__ is not two],
            lambda function: f"the defaults of {function.__qualname__} were replaced",
        )


#: What holds tensors, or modules: a dict of a module, and the prefix of the names in it.
Slots = Sequence[tuple[str, Mapping[str, Any]]]


def slots_of(model: nn.Module) -> Callable[[], Slots]:
    """Return a function that gives all slots of a model, which it does not keep alive."""
    own = weakref.ref(model)

    def collect() -> Slots:
        modules = () if (now := own()) is None else now.named_modules()
        return [
            (f"{path}." if path else "", held)
            for path, module in modules
            for held in (module._parameters, module._buffers, module._modules)
            if held
        ]

    return collect


class Ties:
    """The slots that hold one tensor, or one module: a forward may ask (``is``, ``parameters()``) which do.

    Args:
        collect: gives the slots as they are now.
    """

    def __init__(self, collect: Callable[[], Slots]) -> None:
        self._collect = collect
        slots = collect()
        self._first = _first_of_each(slots)
        self._look_at(slots)

    def _look_at(self, slots: Slots) -> None:
        self._held = [held for _, held in slots]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return [*map(id, chain.from_iterable([held.values() for held in self._held]))]

    def hold(self) -> bool:
        """Return whether the ties are the same. As long as the things in the slots are, nothing else is asked."""
        # Ids of what is in the slots: no list of tensors is compared, whose == computes.
        if self._ids_now() == self._ids:
            return True
        slots = self._collect()
        if _first_of_each(slots) != self._first:
            return False
        # Other things, tied alike: they are the ones to be there from now on.
        self._look_at(slots)
        return True

    def change(self) -> str | None:
        """Return what was tied or untied, or None."""
        now = _first_of_each(self._collect())
        for label in {**self._first, **now}:
            before, after = self._first.get(label), now.get(label)
            if before == after:
                continue
            if before is None or after is None:
                return f"{label} was {'added' if before is None else 'deleted'}"
            if before == label:
                return f"{label} and {after} became one"
            return f"{label} and {before} are no longer one"
        return None


def _first_of_each(slots: Slots) -> dict[str, str]:
    """Return for each slot the first one that holds the same thing; a slot that holds None is alone."""
    first: dict[int, str] = {}
    return {
        f"{prefix}{name}": f"{prefix}{name}" if each is None else first.setdefault(id(each), f"{prefix}{name}")
        for prefix, held in slots
        for name, each in held.items()
    }


class Lookups:
    """The parameters, buffers and children of some modules that an attribute of the same name hides.

    ``nn.Module.__getattr__`` finds a parameter, buffer or child only where Python finds no attribute of the name. So
    ``vars(m)["weight"] = w`` and ``type(m).weight = w`` change what ``m.weight`` is, and no parameter. As long as
    instances and classes have as many attributes as they had, and the same one last, nothing else is asked.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if any(_parts(module))]
        bases = dict.fromkeys(base for cls in {*map(type, self._modules)} for base in cls.__mro__[:-1])
        self._namespaces = [*map(vars, self._modules), *map(vars, bases)]
        self._from_last = [namespace.__reversed__ for namespace in self._namespaces]
        self._hidden = [*map(_hidden, self._modules)]
        self._measure()

    def _measure(self) -> None:
        self._sizes = [*map(len, self._namespaces)]
        self._last = [*map(next, map(_ask, self._from_last))]

    def hold(self) -> bool:
        """Return whether the same names are hidden."""
        # A name that hides another is one more in its namespace; where another one left it, the new one is the last.
        same_sizes = [*map(len, self._namespaces)] == self._sizes
        if same_sizes and all(map(is_, map(next, map(_ask, self._from_last)), self._last)):
            return True
        if [*map(_hidden, self._modules)] != self._hidden:
            return False
        self._measure()
        return True

    def change(self) -> str | None:
        """Return what was hidden, or came to light, or None."""
        for module, then in zip(self._modules, self._hidden, strict=True):
            now = _hidden(module)
            if names := now[0] ^ then[0]:
                return f"another {min(names)} stands before a parameter, buffer or child of a {type(module).__name__}"
            if now != then:
                return f"a {type(module).__name__} looks its attributes up in another way"
        return None


def _parts(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of a module's parts; TorchScript's modules keep theirs elsewhere."""
    return [part for part in map(vars(module).get, PARTS) if isinstance(part, dict)]


def _hidden(module: nn.Module) -> tuple[set[str], Any, bool]:
    """Return hidden names, and what else a class looks names up by.

    Of ``__getattribute__`` only whether it is nn.Module's, which is a replacement while a trace runs.
    """
    attributes, cls = vars(module), type(module)
    names = {name for part in _parts(module) for name in part}
    found = names.intersection(attributes).union(*[names.intersection(vars(base)) for base in cls.__mro__])
    return found, cls.__getattr__, cls.__getattribute__ is nn.Module.__getattribute__
