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
each call, until it was captured ``MOST_RESTARTS`` times (``model/entry_point.py``) and is left to autocast. So nothing
is compared here that is made anew at each look, as what a descriptor gives; and no attribute is guarded of an object
that ends with the call.

An object *lasts* if the next call meets the same one: a module among the local variables of a frame, what a closure
holds, a global. Any other, such as an argument, may be a new one each time.
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
        lasting_names: of the local variables, in the frame that dynamo compiles now, that hold what lasts.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        # Which weights and modules of the model are one: of a tied weight dynamo reads one place for all.
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
        self.lasting_names: Set[str] = frozenset()
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
            lasts: whether that argument is an object that lasts.
        """
        if function is not None:
            self._functions.setdefault(function, function_parts(function))
        # dynamo inlined what a class gave: it must give the same at the next call, and so must those before it.
        for cls, name in (lookup for owner in owners for lookup in _where_found(owner, function)):
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
        of_modules = {name for name, value in variables.items() if isinstance(value, nn.Module)}
        self.lasting_names = of_modules.union(code.co_freevars).intersection(variables)
        # Namespaces may have lost names since the last frame was compiled: all code is looked at again.
        self._seen.clear()
        values = [*variables.values()]
        self._runs(code, scope, values, [variables[name] for name in self.lasting_names])
        for value in values:
            if isinstance(value, nn.Module) and "_modules" in vars(value):  # not while it is made
                modules = [module for module in value.modules() if module not in self._modules]
                self._modules.update(modules)
                self._lookups += [Lookups(modules)] if modules else []

    def _runs(self, code: CodeType, scope: dict[str, Any], values: Iterable[Any], lasting: Iterable[Any]) -> None:
        """Guard what code may look up: of ``values``, which it gets, their classes; of ``lasting`` their attributes."""
        self._facts = None
        values, names = [*values], names_in(code)
        for value in values:
            self._guard_classes(value, names, set())
        if "__dict__" in names or "vars" in names:
            self._guard_namespaces(values, names.union(_strings(code)))
        if self._environment is None and not names.isdisjoint(("environ", "environb", "getenv")):
            self._environment = raw_environment(os.environ).copy()
        # A module made up to ask of its name. What libraries look up beside that is not expected to change.
        module = ModuleType(str(scope.get("__name__", "a module")))
        if is_library(module):
            return
        of_globals: list[Any] = []
        if (code, id(scope)) not in self._seen:
            self._seen.add((code, id(scope)))
            self._lacks(module.__name__, scope, names & _BUILTINS)
            of_globals = [scope[name] for name in names if name in scope]
        for value in (*of_globals, *lasting):
            self._guard_new_attributes(value, names.union(_strings(code)))
            if isinstance(value, abc.ABCMeta) and not is_library(value):
                self._registered = abc.get_cache_token()

    def _guard_namespaces(self, values: Iterable[Any], names: Set[str]) -> None:
        """Guard what code may find by a name or string of its own where it reads ``__dict__`` of modules."""
        for value in values:
            for path, module in value.named_modules() if isinstance(value, nn.Module) else ():
                self._lacks(path or type(module).__name__, vars(module), names)

    def _guard_new_attributes(self, value: Any, names: Set[str]) -> None:
        """Guard that an object that lasts gets no attribute of a name that the code mentions."""
        if isinstance(value, FunctionType | ModuleType) and not is_library(value):
            self._lacks(value.__name__, vars(value), names)
        elif _has_attributes(value):
            self._lacks(type(value).__name__, vars(value), names)

    def _guard_classes(self, value: Any, names: set[str], seen: set[int]) -> None:
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
            self._guard_classes(attributes[name], names, seen)

    def _lacks(self, label: str, scope: Mapping[str, Any], names: Set[str], owner: type | None = None) -> None:
        """Guard that a namespace, of a class for instance, has none of these names, unless it has them already."""
        # ``vars(cls)`` is another object at each look: a class's namespace goes by the class.
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
        # A class gives a plain function as it is: the look-up above, which runs in C, serves. A descriptor may make
        # another object at each look: it is compared itself.
        for each in methods:
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


def _where_found(owner: type, function: FunctionType | None) -> Iterator[tuple[type, str]]:
    """Yield where a function may have been found: classes, and the name in them.

    With ``class B(A): def scale(self): return super().scale()``, for the function of A and the owner B: A's is what
    ``super()`` gives. So B.scale and A.scale must stay, and all classes between these must go on lacking the name.
    """
    if issubclass(owner, nn.Module):
        yield from ((owner, name) for name in _CALLED)
    elif is_library(owner):
        return
    for place, base in enumerate(owner.__mro__):
        for name, value in vars(base).items():
            if function is not None and _function_of(value) is function:
                yield owner, name
                # The class itself gives another one, so this one came by super().
                if _function_of(getattr(owner, name)) is not function:
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
