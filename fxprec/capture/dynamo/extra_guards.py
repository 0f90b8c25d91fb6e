"""Guards for what dynamo takes for granted and the interpreter looks up at each call.

====================================  ==================================================================================
``Block.attend = other``              the methods that classes have: it inlines them, and guards the object's class
``Block.attend.__code__ = other``     the code of functions, and their defaults
``max = clip`` in a module            that no global hides a builtin
``helper.scale = 2.0``                that a function, module or object has no attribute of a name that code mentions
``self.__dict__.get("scale")``        the same of the model's modules, where code reads ``__dict__`` or ``vars``
``vars(block)["weight"] = w``         that no attribute of an instance, or of its class, hides a parameter or child
``os.getenv("SCALE")``                the environment
``Shape.register(Square)``            what abstract classes are told of others
``size("sm")``, cleared              what a ``functools.lru_cache`` keeps: it is called, as the code would
====================================  ==================================================================================

Collected while dynamo compiles, from the functions that it inlines and the frames that it takes, and asked at each call
of the model: a few microseconds for 60 modules.

To change it safely: a guard too few leaves a stale graph in use, without an error; the rows of the table are tested one
by one in ``tests/capture/dynamo/test_extra_guards.py``. A guard that fails without a change captures the model again at
each call, until ``MOST_RESTARTS`` sends it to autocast: so nothing is compared here that is made anew at each look, as
what a descriptor gives, and nothing is guarded that ends with the call (``lasting``).
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from fxprec.capture.capturing import CAPTURING
from fxprec.capture.code_reads import names_in
from fxprec.capture.facts import (
    CapturedFacts,
    Expected,
    Fact,
    Lookups,
    Ties,
    as_expected,
    fact_of,
    function_parts,
    lacking,
    says,
    slots_of,
    unchanged_functions,
)
from fxprec.capture.guard_values import same
from fxprec.capture.user_code import is_library, is_torchs
from fxprec.torch_internals import raw_environment

_BUILTINS: Final = frozenset(vars(builtins))
#: What runs whenever a module is called.
_CALLED: Final = ("forward", "__call__")


class ExtraGuards:
    """Guards of one capture that dynamo does not make; ``failing()`` is None while all of them hold.

    Collecting needs the lock of captures.

    Args:
        model: whose parameters and modules may become, or no longer be, one; None: there is none.

    Attributes:
        kept: names of the locals, in the frame that dynamo compiles now, that hold the same object at each call.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._ties = None if model is None else Ties(slots_of(model))
        #: Code, and the id of its globals, that was looked at since the latest frame was taken.
        self._seen: set[tuple[CodeType, int]] = set()
        #: class -> name -> what it has there, inherited or not, before a descriptor makes anything of it.
        self._methods: dict[type, dict[str, Any]] = {}
        self._functions: dict[FunctionType, tuple[Any, Any, Any]] = {}
        #: namespace by its id, or that of its class -> itself, what to call it, and names that it has not.
        self._absent: dict[int, tuple[Mapping[str, Any], str, set[str]]] = {}
        self._modules: set[nn.Module] = set()
        self._lookups: list[Lookups] = []
        self.kept: Set[str] = frozenset()
        self._environment: dict[Any, Any] | None = None
        self._registered: object = None
        self._results: list[tuple[Callable[[], Any], str, Any]] = []
        self._facts: CapturedFacts | None = None

    def inlined(
        self,
        function: FunctionType | None,
        code: CodeType,
        scope: dict[str, Any],
        value: Any,
        owners: list[type],
        lasts: bool,
    ) -> None:
        """Guard a function that dynamo inlines.

        Args:
            function: None where it is made within the frame.
            code, scope: its code and globals.
            value: its first argument, where dynamo has it.
            owners: classes that it may have been found in: that of its first argument.
            lasts: whether that argument is there before the call and after it.
        """
        if function is not None:
            self._functions.setdefault(function, function_parts(function))
        # dynamo inlined what the class gave: another class in the order of lookup may give another one.
        for cls, name in (lookup for owner in owners for lookup in _lookups(owner, function)):
            # Before a descriptor makes anything of it: what that gives may be another object each time.
            found = inspect.getattr_static(cls, name, None)
            if found is None:
                self._lacks(cls.__qualname__, vars(cls), {name}, cls)
            else:
                self._methods.setdefault(cls, {}).setdefault(name, found)
        lasting = [
            *_contents((function.__closure__ or ()) if function is not None else ()),
            *([value] if lasts else ()),
        ]
        self._runs(code, scope, [value], lasting)

    def result(self, call: Callable[[], Any], name: str, value: Any) -> None:
        """Guard a plain value that a function gave which keeps its results: the graph has it as a constant."""
        self._facts = None
        self._results.append((call, name, value))

    def frame(self, code: CodeType, scope: dict[str, Any], variables: Mapping[str, Any]) -> None:
        """Guard what a frame may read that dynamo takes, with these globals and local variables."""
        modules = {name for name, value in variables.items() if isinstance(value, nn.Module)}
        self.kept = modules.union(code.co_freevars).intersection(variables)
        # Since the last one they may have lost a name.
        self._seen.clear()
        values = [*variables.values()]
        self._runs(code, scope, values, [variables[name] for name in self.kept])
        for value in values:
            if isinstance(value, nn.Module) and "_modules" in vars(value):  # not while it is made
                modules = [module for module in value.modules() if module not in self._modules]
                self._modules.update(modules)
                self._lookups += [Lookups(modules)] if modules else []

    def _runs(self, code: CodeType, scope: dict[str, Any], values: Iterable[Any], lasting: Iterable[Any]) -> None:
        """Guard what code may look up. ``lasting``: the objects that will still be there at the next call."""
        self._facts = None
        values, names = [*values], names_in(code)
        # Code that reads a namespace may find any name there that it mentions, as a name or as a string.
        if "__dict__" in names or "vars" in names:
            for value in values:
                for path, module in value.named_modules() if isinstance(value, nn.Module) else ():
                    self._lacks(path or type(module).__name__, vars(module), names.union(_strings(code)))
        for value in values:
            self._classes(value, names, set())
        if self._environment is None and not names.isdisjoint(("environ", "environb", "getenv")):
            self._environment = raw_environment(os.environ).copy()
        module = ModuleType(str(scope.get("__name__", "a module")))
        if is_library(module):
            return
        around: list[Any] = []
        if (code, id(scope)) not in self._seen:
            self._seen.add((code, id(scope)))
            self._lacks(module.__name__, scope, names & _BUILTINS)
            around = [scope[name] for name in names if name in scope]
        # Whatever the code leads to may get an attribute of a name that the code looks up.
        for value in (*around, *lasting):
            if isinstance(value, FunctionType | ModuleType) and not is_library(value):
                self._lacks(value.__name__, vars(value), names.union(_strings(code)))
            elif _has_attributes(value):
                self._lacks(type(value).__name__, vars(value), names.union(_strings(code)))
            if isinstance(value, abc.ABCMeta) and not is_library(value):
                self._registered = abc.get_cache_token()

    def _classes(self, value: Any, names: set[str], seen: set[int]) -> None:
        """Guard that no class before the one that gives a name now gets that name, of an object and what it leads to.

        ``seen``: ids of the objects that were looked at, since objects may hold each other.
        """
        cls = type(value)
        if id(value) in seen or not hasattr(value, "__dict__") or is_library(cls) or isinstance(value, Tensor | type):
            return
        seen.add(id(value))
        for name in names:
            has = [name in vars(base) for base in cls.__mro__]
            for base in cls.__mro__[: has.index(True)] if any(has) else ():
                self._lacks(base.__qualname__, vars(base), {name}, base)
        attributes = {**vars(value), **value._modules} if isinstance(value, nn.Module) else vars(value)
        for name in names & attributes.keys():
            self._classes(attributes[name], names, seen)

    def _lacks(self, label: str, scope: Mapping[str, Any], names: Set[str], owner: type | None = None) -> None:
        """Guard that a namespace, of a class for instance, has none of these names, unless it has them already."""
        absent = self._absent.setdefault(id(owner or scope), (scope, label, set()))[2]
        absent.update(names - scope.keys())

    def failing(self) -> str | None:
        """Return what is no longer so, or None."""
        facts = self._facts
        if facts is None:
            with CAPTURING:
                facts = self._facts = CapturedFacts(self._all_facts())
        return facts.failing()

    def _all_facts(self) -> Iterator[Fact]:
        if self._ties is not None:
            yield fact_of(self._ties)
        yield from unchanged_functions(self._functions)
        methods = [
            _Method(cls.__qualname__, cls, *found) for cls, names in self._methods.items() for found in names.items()
        ]
        yield from as_expected(each for each in methods if type(each.value) is FunctionType)
        for each in methods:
            # Compared before a descriptor makes anything of it: that may be another object at each look.
            if type(each.value) is not FunctionType:
                look_up = functools.partial(inspect.getattr_static, attr=each.name)
                yield Fact(look_up, each.scope, each.value, each.change)
        for scope, label, absent in self._absent.values():
            if absent:
                yield lacking(f"{label}.", scope, absent)
        yield from map(fact_of, self._lookups)
        if self._environment is not None:
            yield Fact(raw_environment, os.environ, self._environment, "the environment")
        for call, name, value in self._results:
            yield Fact(functools.partial(_gives, call), value, True, says(f"{name} gives another value"))
        if self._registered is not None:
            yield Fact(operator.call, abc.get_cache_token, self._registered, says("an abstract class got a class"))


class _Method(Expected):
    """A method of a class."""

    __slots__ = ()

    def change(self) -> str | None:
        now = inspect.getattr_static(self.scope, self.name, None)
        return None if now is self.value else f"{self.label}.{self.name} was replaced"


def _gives(call: Callable[[], Any], value: Any) -> bool:
    return same(call(), value)


def _lookups(owner: type, function: FunctionType | None) -> Iterator[tuple[type, str]]:
    """Yield where a function may have been found: classes, and the name in them."""
    if issubclass(owner, nn.Module):
        yield from ((owner, name) for name in _CALLED)
    elif is_library(owner):
        return
    for place, base in enumerate(owner.__mro__):
        for name, value in vars(base).items():
            if function is not None and _function_of(value) is function:
                yield owner, name
                if _function_of(getattr(owner, name)) is not function:  # by super(), from whichever class
                    yield from ((between, name) for between in owner.__mro__[1 : place + 1])
                return


def _function_of(value: Any) -> Any:
    """Return the function of a method, of a static or class method, or of a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value


def _strings(code: CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _strings(each)
        elif isinstance(each, str) and each.isidentifier():
            yield each


def _contents(closure: Iterable[CellType]) -> Iterator[Any]:
    for cell in closure:
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _has_attributes(value: Any) -> bool:
    """Return whether anybody may set an attribute on it; what a module lacks dynamo guards itself."""
    return (
        hasattr(value, "__dict__") and not isinstance(value, type | Tensor | nn.Module) and not is_torchs(type(value))
    )
