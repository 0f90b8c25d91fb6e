"""What traced functions read outside of the modules of the model: to guard, to put back, or to stop at.

A trace runs Python once; whatever it read is a constant of the graph. The modules' attributes are watched while the
trace runs (see ``recorder``). Globals, closure variables, defaults, and what is reached through them (a class, a module
of the user's, a dict) are found in the bytecode, before a function is called:

====================================  ==========================================================================
``DEBUG``, ``config.scale``           its value is guarded: the same object, or an equal one of the same type
``TABLE["a"]``                        the contents of the container are guarded, and put back if the trace wrote
``helper(x)``, ``utils.helper(x)``    the function is guarded, and looked through in the same way
``Settings.scale``, ``Helper()``      the class is guarded, attributes and functions alike
``rng.random()``, ``time.time()``     opaque: the trace stops there, if it comes there, before that is executed
``global count; count += 1``          likewise
====================================  ==========================================================================

A value that code gets hold of is looked through (``look_at``): of a function its code is read, of a class the
attributes that code may ask for are guarded, of a container what is in it. Each of these may lead to further values.
Wherever the walk ends at something that may change unseen, it says why, and the trace must not get there. For example::

    class Settings:
        scale = 2.0
        rng = random.Random(0)

    def helper(x, settings):
        return x * settings.scale          # may name Settings.scale; with .rng in its place: opaque

    def forward(self, x):
        return helper(self.fc(x), Settings)

    look_at(forward)     its code reads the globals ``helper`` and ``Settings``
    look_at(helper)      its code mentions the name "scale"; fact: the global ``helper`` is this function
    look_at(Settings)    facts: the global ``Settings`` is this class, and ``Settings.scale`` is 2.0; no code so far
                         mentions "rng", whose value is opaque

Which attributes of a class matter depends on the names in all code that the trace may run, since code may get a class
in many ways. Names and classes come up in any order:

- Each class is compared with the names that are known when it is met, and each later name with the classes met before
  (``_may_name``). What a class has under a name is a fact; that it lacks a name is one, too (``absent``).
- A class that has something opaque under a known name is opaque: the trace stops where code reads the class.
- Where the class came first, the trace has let it pass: then it stops at code that mentions the name, in the function
  with which it comes up and in each one after that.

Code of large packages leads to thousands of functions that a forward never calls. So the walk reads the code of some
functions at once; that of others is read when the trace calls them, before their first instruction.

To change it safely: what ends as opaque costs a slower capture by dynamo; what passes unguarded gives a stale graph, or
a number built in, without an error. Read through dicts (``_namespace``), and not by ``getattr``, which would run the
user's properties once more than the model does. What was found harmless on the way to something opaque may have been
found so by way of a circle, and is looked at again (``_forget``).
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from fxprec.capture.code_reads import Key, Read, code_reads, strings_in
from fxprec.capture.facts import Expected, Fact, lacking, remembered
from fxprec.capture.guard_values import CONTAINERS, contents, is_container, is_plain
from fxprec.capture.symbolic.opaque_code import Why, unpatched
from fxprec.capture.symbolic.questions import questions, wrong_answer
from fxprec.capture.symbolic.source import ends_errors
from fxprec.capture.untouched import Contents
from fxprec.capture.user_code import is_library, is_stdlib, is_torchs, is_trusted

#: Attributes that hand out what an object holds, a tensor too, past everything that watches.
_INSIDE: Final = frozenset(
    "__dict__ __globals__ __closure__ __code__ __defaults__ __kwdefaults__ __func__ __self__ __getattribute__ "
    "__subclasses__ f_back f_locals f_globals gi_frame cell_contents "
    "tolist numpy data_ptr untyped_storage storage __array__ __dlpack__".split()
)
#: In the namespace of every class, and of no interest.
_OF_CLASSES: Final = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __firstlineno__ __static_attributes__ __parameters__ __orig_bases__ __abstractmethods__ "
    "_abc_impl __match_args__ __dataclass_params__ __dataclass_fields__ __slots__ __hash__".split()
)
#: What a metaclass runs when a class is made, and not when it is used.
_OF_NEW_CLASSES: Final = frozenset({"__new__", "__init__", "__prepare__"})
_BUILTINS: Final = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_made: Final = make_dataclass("_made", [("listed", list, field(default_factory=list))])
#: The object that a generated ``__init__`` has as the default of a field with a factory.
_FACTORY: Final = inspect.signature(_made).parameters["listed"].default
#: Objects of the standard library that cannot change.
_UNCHANGING: Final[tuple[Any, ...]] = (
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
    re.Pattern,
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    type(typing.Any),
    type(typing.Optional[int]),  # noqa: UP045
    type(vars(NamedTuple("_", [("field", int)]))["field"]),
    types.MemberDescriptorType,  # a slot
    type(_FACTORY),
)
_MISSING: Final = object()
#: How far the walk goes from value to value, and how many it looks at.
_DEEPEST: Final = 40
_MOST: Final = 20_000
#: The code of so many functions is read before they are called: to watch calls slows a trace by half.
_AT_ONCE: Final = 100
_IMPURE: Final = "which looks at more than its arguments"


def _content(cell: types.CellType) -> Any:
    """Return what a closure cell holds; ``_MISSING`` where it was emptied."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


class Surroundings:
    """Collects what the functions of one trace read.

    Args:
        stop_at: called with a code object, offsets in it (none: its very start) and a reason: the trace must not get
            there (or, where the reason is a function of the frame, if it gives one).
        when_called: called with a code object and a function to call before the trace executes it.

    Attributes:
        functions: those of the user's that were met.
        contents: what containers held before the trace.
        asks_types: a function asks for the class of something.
        tensors: those that are no attributes, by id, with what people call them: a graph may hold their shapes.
    """

    def __init__(
        self,
        stop_at: Callable[[types.CodeType, tuple[int, ...], Why], None],
        when_called: Callable[[types.CodeType, Callable[[], None]], None],
    ) -> None:
        self._stop_at = stop_at
        self._when_called = when_called
        # Each guard once, by where it looks: the first look, before the trace runs, is the one that counts.
        self._expected: dict[tuple[int, Any], Expected] = {}
        # Values by id, with why they are opaque (so far None for those that are being looked at), and with the object,
        # so that its id stays its own.
        self._looked_at: dict[int, tuple[Any, str | None]] = {}
        self._looks = 0
        # Values that were met once more while they were being looked at: they lead back to themselves.
        self._in_circles: set[int] = set()
        self._being_looked_at: set[int] = set()
        self._codes: dict[tuple[int, int, tuple[int, ...]], None] = {}
        # With why code must not get hold of a class, by the names that were known when it was met.
        self._classes: dict[type, str | None] = {}
        # Names that came up when a class had passed that has something opaque under them, and why.
        self._opaque_names: dict[str, str] = {}
        # By the globals that must not hide them.
        self._builtins: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._names: set[str] = set()
        self.functions: list[types.FunctionType] = []
        self.contents = Contents()
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self._depth = 0
        # What code may ask that names in it do not tell. Each is set where such code is read; the end of the trace,
        # which knows all classes and functions, guards what may have been asked (``guard_model_classes``, ``absent``).
        self.asks_types = False  # type(self).scale
        self._makes_names = False  # getattr(type(self), f"scale{i}")
        self._asks_functions = False  # hasattr(function, "scale")

    @property
    def expected(self) -> list[Expected]:
        """Return the values outside of the modules for which alone the graph holds."""
        return [*self._expected.values()]

    @property
    def absent(self) -> list[Fact]:
        """Return names that code asked for in vain, or may have: globals, and attributes of classes and functions."""
        lacks = [("the global ", scope, names) for scope, names in self._builtins.values()]
        owners = [*self._classes, *(self.functions if self._asks_functions else ())]
        lacks += [
            (f"{each.__qualname__}.", vars(each), self._names - vars(each).keys() - _OF_CLASSES) for each in owners
        ]
        return [lacking(label, scope, names) for label, scope, names in lacks if names]

    # Values: what traced code gets hold of.

    def look_at(self, value: Any, label: str = "") -> str | None:
        """Look through a value that traced code gets hold of. None, or why it is opaque: "an object (Random) ...".

        Functions are followed into their code. ``label``: what people call it.
        """
        if is_plain(value):
            return self._may_name(frozenset(strings_in(value))) if isinstance(value, str | tuple) else None
        if isinstance(value, Tensor | nn.Module | Proxy):
            if isinstance(value, Tensor):
                self.tensors[id(value)] = label or "a tensor", value
            return None
        key = id(value)
        known = self._looked_at.get(key)
        if known is not None:
            if key in self._being_looked_at:
                self._in_circles.add(key)
            return known[1]
        # A function ends the walk there: its code is read when it is called.
        too_deep = self._depth >= _DEEPEST and type(value) is not types.FunctionType
        if too_deep or self._looks >= _MOST:
            return f"{label or 'an object'}, through more objects than a trace is checked for"
        # It may hold itself: whoever meets it within takes it for harmless until the walk is done with it.
        self._looked_at[key] = value, None
        self._being_looked_at.add(key)
        before = len(self._looked_at), len(self._codes), len(self._classes)
        self._looks += 1
        self._depth += 1
        try:
            why = self._look_through(value, label)
        finally:
            self._depth -= 1
            self._being_looked_at.discard(key)
        if why is not None and key in self._in_circles:
            self._forget(*before)
        self._looked_at[key] = value, why
        return why

    def _forget(self, *before: int) -> None:
        """Forget all but so many values, code objects and classes: those since were looked at on the way to another.

        That one turned out to be opaque, and whatever led back to it took it for harmless. (Guards that were made stay:
        they are right.)
        """
        for known, count in zip((self._looked_at, self._codes, self._classes), before, strict=True):
            while len(known) > count:
                known.popitem()

    def _look_through(self, value: Any, label: str) -> str | None:
        """Do what ``look_at`` does for one value that was not met before, by its kind.

        A kind that is missing here ends at the last line, as opaque: a trace too few, and no wrong graph.
        """
        kind = type(value)
        # What leads further: code, and what containers and callables hold.
        if kind is types.FunctionType:
            return self._function(value)
        if is_container(value):
            self.contents.add(value, label)
            return self._look_at_all(contents(value))
        if isinstance(value, type):
            self.asks_types = self.asks_types or value is type
            return self.guard_class(value)
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            return self._may_name(frozenset(strings_in(value.__reduce__()[1])))
        if isinstance(value, types.MethodType):
            return self._guard_held((value.__func__, value.__self__), label)
        if isinstance(value, functools.partial):
            return self._guard_held((value.func, *value.args, value.keywords), label)
        if isinstance(value, staticmethod | classmethod):
            return self.look_at(value.__func__)
        if isinstance(value, property):
            return self._look_at_all(each for each in (value.fget, value.fset, value.fdel) if each is not None)
        if isinstance(value, functools.cached_property):
            return self.look_at(value.func)
        # What ends the walk: it cannot change, or torch's own functions record what they do with it.
        if isinstance(value, types.ModuleType):
            return None if is_trusted(value) else f"the module {value.__name__}, which may change inside"
        if isinstance(value, _UNCHANGING):
            return None
        if isinstance(value, _BUILTINS):
            return self._builtin(value)
        if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            # Its fields are guarded all the same: object.__setattr__ writes to a frozen one.
            attributes = getattr(value, "__dict__", {})
            for name in attributes:
                self._guard(f"{label}.{name}", attributes, name, attributes[name])
            return self._guard_held((kind, *(getattr(value, field.name, None) for field in fields(kind))), label)
        if is_torchs(kind) and is_trusted(kind) and not isinstance(value, torch.Generator):
            return None
        if kind.__module__ == "numpy" and not hasattr(value, "__setitem__"):  # a dtype, a scalar, a ufunc
            return None
        return f"an object ({kind.__name__}) that may change inside"

    def _look_at_all(self, values: Iterable[Any]) -> str | None:
        """Look at all of these, and return the first reason why one is opaque, or None."""
        return next((why for why in [self.look_at(value) for value in values] if why is not None), None)

    def _guard_held(self, values: Iterable[Any], label: str) -> str | None:
        """Guard the containers among values that an object holds for good, which may change inside; look at all."""
        values = [*values]
        for value in values:
            if is_container(value) and not is_plain(value):
                # In a scope of our own: the object goes on holding it, and only what is in it may change.
                self._guard(f"what {label} holds", {label: value}, label, value)
        return self._look_at_all(values)

    def _builtin(self, value: Any) -> str | None:
        self._makes_names = self._makes_names or value is getattr
        self._asks_functions = self._asks_functions or value in (getattr, hasattr)
        owner = getattr(value, "__self__", None)
        # A bound method, such as cache.append.
        if type(owner) in CONTAINERS:
            return self._guard_held([owner], getattr(value, "__qualname__", ""))
        return None if is_trusted(value) else f"{getattr(value, '__qualname__', value)}, {_IMPURE}"

    # Functions: what their code reads, writes and asks.

    def _function(self, function: types.FunctionType) -> str | None:
        if not is_trusted(function):
            if is_library(function):
                return f"{function.__module__}.{function.__qualname__}, {_IMPURE}"
            self.functions.append(function)
            if vars(function):
                self.contents.add(vars(function))
            if len(self._codes) < _AT_ONCE and self._depth < _DEEPEST:
                self._function_of_user(function)
            else:
                # What it reads is then as it was before the trace: whatever the trace wrote to until then was reached
                # from code that had been read, so that it was noted, or stopped the trace.
                self._when_called(function.__code__, functools.partial(self._function_of_user, function))
        else:
            self._trusted_function(function)
        wrapped = vars(function).get("__wrapped__")
        return None if wrapped is None else self.look_at(wrapped)

    def _function_of_user(self, function: types.FunctionType) -> None:
        code, keywords = function.__code__, function.__kwdefaults__ or {}
        if (
            why := self._guard_held((*(function.__defaults__ or ()), *keywords.values()), function.__qualname__)
        ) is not None:
            self._stop_at(code, (), f"has a default that is {why}")
        for name, default in keywords.items():
            self._guard(f"the default {name} of {function.__qualname__}", keywords, name, default)
        self._look_through_code(code, function.__globals__, _cells_of(function))

    def _trusted_function(self, function: types.FunctionType) -> None:
        """Look at a trusted function: it is not followed, but for a user's function in a decorator of torch's."""
        scope = function.__globals__
        for cell in _cells_of(function).values():
            held = _content(cell)
            if isinstance(held, types.FunctionType) and not is_trusted(held):
                self.look_at(held)
        # The code of torch's layers looks functions up in a module, where a user may have put another one.
        if scope.get("__name__", "").startswith("torch.nn.modules."):
            for read in code_reads(function.__code__).reads:
                owner = scope.get(read.name)
                if isinstance(owner, types.ModuleType) and len(read.chain) == 1:
                    self._patchable(owner, str(read.chain[0]))

    def _patchable(self, owner: types.ModuleType, name: str) -> None:
        """Guard ``F.linear`` in the code of ``nn.Linear``, the same function still, or one that the user put there."""
        function = vars(owner).get(name)
        if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
            self._guard(f"{owner.__name__}.{name}", vars(owner), name, function)
            if not is_trusted(function):
                self.look_at(function)

    def _look_through_code(
        self, code: types.CodeType, scope: dict[str, Any], outer: Mapping[str, types.CellType]
    ) -> None:
        """Guard what a code object reads outside of itself, and stop the trace where it reads what cannot be guarded.

        Args:
            code: of a function that was found before the trace calls it.
            scope: its globals.
            outer: those cells of its closure that were there before the trace. Variables of a traced function around it
                are made by the trace itself.
        """
        key = id(code), id(scope), tuple(map(id, outer.values()))
        if key in self._codes:
            return
        self._codes[key] = None
        found = code_reads(code)
        # What it reads outside is guarded, or stops the trace where it is read; what it writes there always does.
        for read in found.reads:
            if (why := self._guard_read(read, scope, outer)) is not None:
                self._stop_at(code, read.offsets[-1:], f"reads {read}: {why}")
        for write in found.writes:
            if write.kind == "global" or write.name in outer:
                self._stop_at(code, write.offsets, f"sets the {write.kind} variable {write.name}")
        # A graph raises when it runs and not when it is traced, and a proxy answers some questions otherwise.
        if ends_errors(code):
            self._stop_at(code, (), "may end an error that an op raises")
        for question in questions(code):
            self._stop_at(code, (question.offset,), functools.partial(wrong_answer, question))
        # Past these names a trace sees nothing; the names in the code are those that it may ask classes for.
        for name in _INSIDE.intersection(found.names):
            self._stop_at(code, found.names[name], f"reads {name}, past all that is watched")
        if "__class__" in outer and (why := self.look_at(_content(outer["__class__"]))) is not None:
            self._stop_at(code, (), f"uses super(), and may read {why}")
        if (why := self._may_name(found.names.keys() | found.strings)) is not None:
            self._stop_at(code, (), f"may read {why}")
        for nested in found.nested:
            self._look_through_code(nested, scope, {name: outer[name] for name in nested.co_freevars if name in outer})

    def _may_name(self, names: Set[str]) -> str | None:
        """Note attributes that traced code may read of any class; return why it must not, or None."""
        new = names - self._names
        self._names |= new
        self.asks_types = self.asks_types or "__class__" in new
        for cls in (*self._classes,) if new else ():
            for name, why in (self._guard_attributes(cls, new) | _of_metaclass(cls, new)).items():
                self._opaque_names.setdefault(name, why)
        return next((self._opaque_names[name] for name in sorted(names & self._opaque_names.keys())), None)

    # Names: what stands in globals, closures and modules, and attributes from there on.

    def _guard_read(self, read: Read, scope: dict[str, Any], outer: Mapping[str, types.CellType]) -> str | None:
        """Guard the variable that code reads, and the attributes on from it; return why that cannot be, or None."""
        if read.kind == "import":
            return self._imported(read, scope)
        if read.kind == "closure":
            # A variable of the traced function around.
            if read.name not in outer:
                return None
            cell = outer[read.name]
            return self._guard_variable(
                f"the closure variable {read.name}", cell, "cell_contents", _content(cell), read
            )
        if read.name in scope:
            value = scope[read.name]
            return self._guard_variable(f"the global {read.name}", scope, read.name, value, read)
        # A builtin, which a global of that name would hide.
        self._builtins.setdefault(id(scope), (scope, set()))[1].add(read.name)
        value = vars(builtins).get(read.name, _MISSING)
        if value is _MISSING:
            return None
        self._guard(f"the builtin {read.name}", vars(builtins), read.name, value)
        return self._guard_path(read.name, value, read.chain)

    def _guard_variable(self, label: str, scope: Any, name: str, value: Any, read: Read) -> str | None:
        """Guard a variable with a value and its path, or nothing where that is opaque: it stops the trace instead."""
        if value is _MISSING:
            return None
        why = self._guard_path(label, value, read.chain)
        if why is None:
            self._guard(label, scope, name, value)
        return why

    def _imported(self, read: Read, scope: dict[str, Any]) -> str | None:
        package = scope.get("__package__") or ""
        for name in (read.name, f"{package}.{read.name}" if read.name else package):
            module = sys.modules.get(name)
            if module is not None:
                if read.chain and not hasattr(module, str(read.chain[0])):
                    module = sys.modules[name.partition(".")[0]]  # import a.b as c
                return self._guard_path(name, module, read.chain)
        return "a module that is imported only then"

    def _guard_path(self, label: str, value: Any, chain: tuple[str | Key, ...]) -> str | None:
        """Guard attribute after attribute of a path (``config.scale``) while no code runs; return why not, or None.

        The path is not followed further, and what was reached by then is looked at and guarded, where an element is not
        there, at an attribute of a tensor or a container, and at one that code may give (a property). Of members of an
        Enum nothing is guarded, nor of parts of torch that are made when they are asked for.
        """
        # Guards are made only once the end of the chain turned out to be harmless: (scope, label, name) of each step.
        steps: list[tuple[Any, str, Any]] = []
        for name in chain:
            if isinstance(name, Key):
                if type(value) not in CONTAINERS or not _has(value, name.value):
                    break
                label = f"{label}{name}"
                steps.append((value, label, name.value))
                value = value[name.value]
                continue
            if is_plain(value) or isinstance(value, Tensor | nn.Module) or type(value) in CONTAINERS:
                break
            # Members of an Enum stay what they are.
            if isinstance(value, type) and issubclass(value, enum.Enum):
                return None
            if isinstance(value, type) and not is_trusted(type(value)):
                return f"an attribute of {value.__qualname__}, whose metaclass {type(value).__qualname__} may run code"
            scope = _namespace(value, name)
            if scope is None:
                self._asks_functions = self._asks_functions or isinstance(value, types.FunctionType)
                # A part of torch that is made when it is asked for, such as torch._VF.
                if isinstance(value, types.ModuleType) and is_trusted(value):
                    return None
                break
            label = f"{label.removeprefix('the global ')}.{name}"
            found = scope[name]
            if isinstance(value, types.FunctionType):
                self.contents.add(vars(value))
            elif isinstance(value, type) and isinstance(found, classmethod):
                # It gets the class itself.
                if (why := self.guard_class(value)) is not None:
                    return why
            if _may_be_patched(value):
                steps.append((value if isinstance(value, type) else scope, label, name))
            value = found
        why = self.look_at(value, label)
        for scope, label, name in steps if why is None else ():
            expected = Expected(label, scope, name, None)
            if not isinstance(scope, type) or _plainly_read(scope, name):
                self._guard(label, scope, name, expected.now())
        return why

    def _guard(self, label: str, scope: Any, name: Any, value: Any) -> None:
        """Have the graph serve only while ``scope[name]``, of a class or cell its attribute, is this value."""
        key = id(scope), name
        if key not in self._expected:
            self._expected[key] = Expected(label, scope, name, remembered(unpatched(value)))

    # Classes: what traced code may ask them for.

    def guard_class(self, cls: type) -> str | None:
        """Guard the attributes of a class that code gets hold of; return why it must not get it, or None.

        All attributes of a class of the user's; of a module or an Enum, which may have hundreds, those named in code.
        """
        if issubclass(cls, torch.Generator):
            return "torch.Generator, whose numbers are other ones each time"
        own = [base for base in cls.__mro__ if not is_trusted(base)]
        if any(map(is_stdlib, own)):
            return f"the class {cls.__qualname__}, {_IMPURE}"
        if opaque := _of_metaclass(cls, self._names):
            return opaque[min(opaque)]
        for base in own:
            if base not in self._classes:
                self._classes[base] = None  # it may lead back to itself
                self.contents.add(base)
                names = self._names if issubclass(base, nn.Module | enum.Enum) else vars(base).keys()
                reasons = self._guard_attributes(base, names)
                self._classes[base] = next((why for name, why in reasons.items() if name in self._names), None)
                # What ``cls`` gives for an inherited name of now. For names that come up later, and for other classes
                # with this base, two facts together say the same: what ``base`` has, and that no class before it has
                # the name (``absent``).
                for name in self._names & vars(base).keys() - _OF_CLASSES if base is not cls else ():
                    self._guard_attribute(cls, name)
        return next(filter(None, map(self._classes.get, own)), None)

    def guard_model_classes(self, classes: Collection[type]) -> str | None:
        """Guard what traced code may ask the model's classes and functions for; return why that cannot be, or None."""
        for function in [*self.functions] if self._asks_functions else ():
            for name in self._names & vars(function).keys():
                if (why := self._guard_path(function.__qualname__, function, (name,))) is not None:
                    return why
        if not self.asks_types:
            return None
        if self._makes_names:
            own = {base for cls in classes for base in cls.__mro__ if not is_trusted(base)}
            self._may_name(frozenset().union(*map(vars, own)) - _OF_CLASSES)
        return next(filter(None, [self.guard_class(cls) for cls in classes]), None)

    def look_at_attribute(self, cls: type, name: str) -> str | None:
        """Look at what a class has under ``name``, read of an object of it. Return why it is opaque, or None."""
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        if base is None:
            return None
        raw = vars(base)[name]
        if isinstance(raw, classmethod) and (why := self.guard_class(cls)) is not None:
            return why
        if (why := self.look_at(raw, f"{cls.__qualname__}.{name}")) is None and not is_torchs(base):
            self._guard_attribute(cls, name)
        return why

    def _guard_attributes(self, cls: type, names: Collection[str]) -> dict[str, str]:
        """Guard those of these attributes that a class itself has; return which cannot be, and why."""
        opaque: dict[str, str] = {}
        for name in sorted(set(names) & vars(cls).keys() - _OF_CLASSES):
            why = self.look_at(vars(cls)[name], f"{cls.__qualname__}.{name}")
            if why is None:
                self._guard_attribute(cls, name)
            else:
                opaque[name] = f"{cls.__qualname__}.{name}: {why}"
        return opaque

    def _guard_attribute(self, cls: type, name: str) -> None:
        if _plainly_read(cls, name):
            self._guard(f"{cls.__qualname__}.{name}", cls, name, getattr(cls, name))


def _namespace(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return the dict that an attribute is found in; None where code would run, or there is no such attribute."""
    if isinstance(value, type):
        return next((vars(base) for base in value.__mro__ if name in vars(base)), None)
    if not isinstance(type(value).__getattribute__, types.WrapperDescriptorType):  # one in Python
        return None
    if any(hasattr(vars(base).get(name), "__set__") for base in type(value).__mro__):
        return None  # a property
    attributes = getattr(value, "__dict__", {})
    return attributes if name in attributes else None


def _of_metaclass(cls: type, names: Set[str]) -> dict[str, str]:
    """Return what a metaclass of the user's may run when code uses a class, each with why it must not be used.

    These are attributes with one of these names (``C.scale``), and special methods, which need none in the code:
    ``__call__`` for ``C()``, ``__getitem__`` for ``C[0]``, ``__instancecheck__`` for ``isinstance(x, C)``.
    """
    found: dict[str, str] = {}
    for kind in () if type(cls) is type else inspect.getmro(type(cls)):
        for name in () if is_trusted(kind) else vars(kind).keys() - _OF_CLASSES - _OF_NEW_CLASSES:
            if name in names or (name.startswith("__") and name.endswith("__")):
                found[name] = f"{cls.__qualname__}.{name}, of its metaclass"
    return found


def _plainly_read(cls: type, name: str) -> bool:
    """Return whether reading an attribute of the class runs no code of the user's."""
    raw = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    return not hasattr(raw, "__get__") or is_trusted(type(raw))


def _has(container: Any, key: Any) -> bool:
    try:
        container[key]
    except (LookupError, TypeError):
        return False
    return not hasattr(type(container), "__missing__") or key in container


def _may_be_patched(owner: Any) -> bool:
    """Return whether the attributes of an object are worth a guard: not those of torch's own objects and classes."""
    if isinstance(owner, types.ModuleType):
        return True
    if isinstance(owner, type | types.FunctionType):
        return not is_trusted(owner)
    return not is_torchs(type(owner))
