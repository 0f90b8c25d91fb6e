"""Puts a subclass in the place of the user's class: of a converted model, and of modules in it whose methods it runs.

As FSDP2 does, an object's class is swapped for a dynamic subclass. isinstance, attributes, parameter identity, keys,
hooks and ``super().forward`` stay as they were; the subclass keeps the names of the class and the signature of forward,
and pickles and copies as the original plus the conversion to redo.

A function that somebody sets on the instance in the place of a method (``model.forward = f``) is followed: it gets an
entry point of its own, and what ran before goes on under the names by which others kept it. Whether such a function
enters autocast is read from its closure.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fxprec.capture.originals import NOT_TRACED, ORIGINAL, mark, original_class, original_function, unbound_method
from fxprec.capture.user_code import user_level
from fxprec.errors import CaptureError, ConversionError, FxprecError, NotLoweredWarning, PolicyError
from fxprec.model.conversion import STATE, Conversion, conversion_of, is_converted
from fxprec.model.entry_point import ENTRY, EntryPoint, entry_of
from fxprec.model.graphs import graph_module
from fxprec.model.unscaled import expect_scaling
from fxprec.settings import Settings
from fxprec.torch_internals import hide_from_dynamo, set_eval_frame

_Module = TypeVar("_Module", bound=nn.Module)

#: In the namespace of a host's class: a weak reference to the conversion.
_CONVERSION: Final = "_fxprec_conversion"
#: In the namespace of each class: attribute -> the name of the method in the model.
_METHODS: Final = "_fxprec_methods"
#: The subclasses that there are. Objects of one class that are converted alike get one subclass, for code that compares
#: classes (``torch.func.stack_module_state``).
_made: Final[weakref.WeakValueDictionary[tuple[object, ...], type]] = weakref.WeakValueDictionary()
#: Packages whose metaclasses make a class without side effects.
_PLAIN_METACLASSES: Final = ("builtins", "abc", "typing", "torch")


def attach(
    module: nn.Module, settings: Settings, frozen: frozenset[str] | None = None, packs: bool = False
) -> Conversion:
    """Swap the class of ``module``; nothing is captured yet.

    Args:
        module: to be converted.
        settings: of the conversion.
        frozen: of a model that was frozen (``fxprec.freeze``), the weights that became low; else None.
        packs: it runs on packed copies of its weights, as a frozen model may.
    """
    conversion = Conversion(settings, module, frozen, packs)
    swap_class(module, _Converted, conversion, "", _namespace(module))
    module.__dict__[STATE] = conversion
    follow_all(module)
    swap_hosts(conversion, module)
    if settings.scales and settings.dtype is torch.float16:
        expect_scaling(conversion)
    return conversion


def revert(module: _Module) -> _Module:
    """Undo ``convert``: the class and forward of the original. Parameters stay (at O3: low). Returns the module."""
    conversion_of(module)
    take_off(module)
    return module


class Swapped:
    """First base of every dynamic subclass; the user's class is the second."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing, so that the user's ``__init_subclass__``, which may register subclasses, does not see ours."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        followed = name in type(self)._fxprec_methods  # asked first: name may be __class__
        super().__setattr__(name, value)
        if followed:
            _follow(self, name, just_set=True)


class _Converted(Swapped):
    """A module that was converted."""

    def train(self: Any, mode: bool = True) -> Any:
        # Some models write weights when the mode changes, past the version counters: adapters are merged into them.
        self.__dict__[STATE].store.mark_stale()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        applied = super()._apply(*args, **kwargs)  # type: ignore[misc]
        # ``to`` may have given the weights other memory: their shadows would keep the old one alive.
        self.__dict__[STATE].store.forget_moved()
        return applied

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        conversion: Conversion = self.__dict__[STATE]
        conversion.refuse_if_frozen("load_state_dict")
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            conversion.store.mark_stale()

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle as an object of the original class, to be converted again: a class made at run time has no name."""
        conversion = conversion_of(self)
        cls = conversion.original_class
        make, args, *rest = super().__reduce_ex__(protocol)
        args = tuple(cls if argument is type(self) else without_conversion(argument) for argument in args)
        packs = conversion.packed is not None
        return (_rebuild, (conversion.settings, conversion.frozen, make, args, packs), *map(without_conversion, rest))

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        follow_all(self)
        swap_hosts(conversion_of(self), self)

    def __prepare_scriptable__(self: Any) -> NoReturn:
        raise ConversionError(
            f"torch.jit.script of the converted {type(self).__name__} would compile the original forward, in FP32: "
            "torch.jit.trace it, or script it before it is converted"
        )


def _namespace(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the dynamic subclass that depend on the class."""
    cls = type(module)
    # Only what the class has: a method that it lacks must not appear by its conversion.
    namespace: dict[str, Any] = {} if hasattr(module, "graph") else {"graph": _GraphAttribute(), "__dir__": _names}
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = lambda self, memo: _copied(self, lambda module: module.__deepcopy__(memo))
    if hasattr(cls, "__copy__"):
        namespace["__copy__"] = lambda self: _copied(self, lambda module: module.__copy__())
    if issubclass(cls, GraphModule):
        namespace["recompile"] = _recompile
    return namespace


class _GraphAttribute:
    """``model.graph``: the rewritten torch.fx graph. No data descriptor: a model may set a ``graph`` of its own."""

    def __get__(self, module: nn.Module | None, owner: type) -> Graph | _GraphAttribute:
        return self if module is None else graph_module(module).graph


def _names(module: nn.Module) -> list[str]:
    """Return the names for ``dir``, with ``graph`` only if there is one: tools read every name that they find there."""
    names = [name for name in original_class(module).__dir__(module) if name != "graph"]
    with contextlib.suppress(FxprecError):
        if conversion_of(module).captured and module.graph:
            names.append("graph")
    return names


def _copied(module: nn.Module, copy: Callable[[Any], Any]) -> Any:
    """Convert the copy of a module of a class that copies itself (a GraphModule), too."""
    conversion = conversion_of(module)
    with as_original(module):
        result = copy(module)
    # A copy that went by __reduce_ex__ is converted already.
    if isinstance(result, nn.Module) and not is_converted(result):
        attach(result, conversion.settings, conversion.frozen, conversion.packed is not None)
    return result


def _recompile(module: GraphModule) -> Any:
    """Recompile the original class, to which a GraphModule writes its code; new code is traced again."""
    conversion = conversion_of(module)
    # Whoever calls recompile may have changed nothing: then no graph is out of date.
    before = module.code
    with as_original(module):
        result = module.recompile()
    if module.code != before:
        conversion.start_over()
    return result


def _rebuild(
    settings: Settings, frozen: frozenset[str] | None, make: Callable[..., Any], args: tuple[Any, ...], packs: bool
) -> nn.Module:
    module = make(*args)
    attach(module, settings, frozen, packs)
    return module


class _Host(Swapped):
    """A module within a converted model some of whose methods run its graphs."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle as an object of the original class: a copied model swaps the classes of its own parts."""
        make, args, *rest = super().__reduce_ex__(protocol)
        cls = original_class(self)
        args = tuple(cls if argument is type(self) else without_conversion(argument) for argument in args)
        return (operator.call, (make, *args), *map(without_conversion, rest))


def swap_class(
    module: nn.Module, base: type[Swapped], conversion: Conversion, path: str, namespace: dict[str, Any]
) -> None:
    """Make ``module``, at ``path`` of the model, one of a subclass whose methods enter the conversion."""
    cls = type(module)
    entries = [entry for entry in conversion.methods.values() if entry.name.path == path]
    for entry in entries:
        entry.adopt(module)
    keys = {entry.name.name: entry.key for entry in entries}
    own = [name for name in keys if hasattr(cls, name)]  # others only the instance has
    alike = _key_of_alike(cls, base, keys, [unbound_method(cls, name) for name in own], namespace)
    known = None if alike is None else _made.get(alike)
    if known is not None:
        # This conversion did not make the wrappers that it takes, and must be told of them.
        conversion.wrappers.share(vars(known)[name] for name in own)
    else:
        wrappers = {name: conversion.wrappers.of_class(cls, name, partial(_enter, keys[name])) for name in own}
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, ORIGINAL: cls}
        known = _subclass(cls, base, {**names, **wrappers, _METHODS: keys, **namespace})
        if alike is not None:
            _made[alike] = known
    module.__class__ = known


def _key_of_alike(
    cls: type, base: type[Swapped], keys: dict[str, str], originals: list[Any], namespace: dict[str, Any]
) -> tuple[object, ...] | None:
    """Return a key of the objects that share one subclass; None where something in it belongs to one object alone."""
    # The class of a host refers to its conversion; an original that is no function may be bound to something.
    if _CONVERSION in namespace or not all(isinstance(original, FunctionType) for original in originals):
        return None
    # The class is part of the key: a metaclass with a hash of its own may take two classes for one.
    if type(cls).__hash__ is not type.__hash__:
        return None
    return (cls, base, *keys.items(), *originals, *sorted(namespace))


def _subclass(cls: type[nn.Module], base: type[Swapped], namespace: dict[str, Any]) -> type:
    """Make a subclass without running a metaclass of the user's, which may register classes or want its own arguments.

    The subclass is of that metaclass all the same; only the nearest standard ``__new__`` (of ``type``, ``ABCMeta``)
    runs.
    """
    kind = type(cls)
    plain = (meta for meta in kind.__mro__ if meta.__module__.partition(".")[0] in _PLAIN_METACLASSES)
    return next(meta for meta in plain if "__new__" in vars(meta)).__new__(kind, cls.__name__, (base, cls), namespace)


def swap_hosts(conversion: Conversion, model: nn.Module) -> None:
    """Swap the classes of the submodules whose methods the conversion runs; those that are not there yet are left."""
    for path in dict.fromkeys(entry.name.path for entry in conversion.methods.values() if entry.name.path):
        try:
            host = model.get_submodule(path)
        except AttributeError:
            continue
        # A submodule that a shallow copy of the model shares belongs to the first model already.
        if not is_host(host):
            swap_class(host, _Host, conversion, path, {_CONVERSION: weakref.ref(conversion)})
            follow_all(host)


def is_host(module: nn.Module) -> bool:
    """Return whether a conversion around this module runs methods of it; one that is gone does not count."""
    return not _restore_orphan(module) and hasattr(type(module), _CONVERSION)


def _restore_orphan(module: nn.Module) -> bool:
    """Restore the class of a host whose conversion is gone, and return True; False where there is none to restore."""
    gives = getattr(type(module), _CONVERSION, None)
    if gives is None or gives() is not None or is_wrapped(module):
        return False
    _restore_class(module)
    return True


def take_off(model: nn.Module) -> None:
    """Give a converted model and its hosts their classes and functions back.

    Raises:
        ConversionError: another class stands around one of ours by now; nothing was changed.
    """
    conversion: Conversion = model.__dict__[STATE]
    # First all are looked at: a refusal must leave everything as it is.
    owners = {id(owner): owner for entry in conversion.methods.values() if (owner := entry.owner()) is not None}
    for owner in owners.values():
        if is_wrapped(owner):
            raise ConversionError(
                f"{type(owner).__name__} was wrapped after it was converted (fully_shard changes the class too): "
                "revert before wrapping"
            )
    del model.__dict__[STATE]
    for owner in owners.values():
        _restore_class(owner)
    conversion.store.clear()


def _restore_class(module: nn.Module) -> None:
    module.__dict__.update(without_conversion({name: module.__dict__[name] for name in _followed(module)}))
    module.__class__ = original_class(module)


def put_back(model: nn.Module) -> None:
    """Revert a conversion that was refused after all: the model is exactly as it was, at O3 too."""
    undo = model.__dict__[STATE].undo
    take_off(model)
    if undo is not None:
        undo()


@contextlib.contextmanager
def as_original(model: nn.Module) -> Iterator[None]:
    """Have the model itself be as it was before its conversion, for a while."""
    swapped, attributes = model.__class__, model.__dict__
    kept = {name: attributes[name] for name in (STATE, *_followed(model))}
    plain = without_conversion(kept)
    model.__class__ = original_class(model)  # type: ignore[assignment]
    del attributes[STATE]
    attributes.update(plain)
    try:
        yield
    finally:
        attributes.update(kept)
        model.__class__ = swapped


def is_wrapped(module: nn.Module) -> bool:
    """Return whether somebody swapped the class again after us: ours cannot be taken away below that one."""
    return ORIGINAL not in vars(type(module))


def without_conversion(value: Any) -> Any:
    """Return a part of a module's state as it would be without its conversion."""
    if not isinstance(value, dict):
        return value
    plain = {name: part for name, part in value.items() if name != STATE}
    return {name: part if (entry := entry_of(part)) is None else entry.of_instance for name, part in plain.items()}


def follow_all(module: nn.Module) -> None:
    """Follow, as ``_follow`` does one, every function that has the place of a method."""
    for name in type(module)._fxprec_methods:  # type: ignore[attr-defined]
        _follow(module, name)


def _conversion_at(module: nn.Module) -> Conversion | None:
    own = module.__dict__.get(STATE)
    if own is not None:
        return own
    gives: Callable[[], Conversion | None] | None = getattr(type(module), _CONVERSION, None)
    found = gives() if gives is not None else None
    if gives is not None and found is None and _restore_orphan(module):
        warnings.warn(
            f"{type(module).__name__} runs in FP32: the converted model that ran its methods is gone. Keep the model, "
            "or convert this part by itself",
            category=NotLoweredWarning,
            stacklevel=user_level(),
        )
    return found


def _enter_function(entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enter the conversion by a call of a function that was set on the instance."""
    return _enter(entry, entry.owner(), args, kwargs)


def _enter(what: str | EntryPoint, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enter the conversion by a call. ``what``: the key of a method of the class, or the entry point of a function."""
    conversion = None if module is None else module.__dict__.get(STATE) or _conversion_at(module)
    # A method or function that was kept from before ``revert``, or outlives its module: as the user wrote it. A
    # function that was set on an instance does without the module, which may be gone.
    if module is None or conversion is None:
        if isinstance(what, EntryPoint):
            return what.unbound(module, *args, **kwargs)
        assert module is not None  # a method is called on one
        return unbound_method(original_class(module), what.rpartition(".")[2])(module, *args, **kwargs)
    entry = conversion.methods[what] if isinstance(what, str) else what
    tracing = conversion.wrappers.tracing
    # A static trace of ours runs in this thread, which must see what the user wrote.
    if tracing is not None and tracing == threading.get_ident():
        return entry.unbound(module, *args, **kwargs)
    # Without the dynamo of an outer ``torch.compile``: ours captures by itself.
    outer = set_eval_frame(None)
    try:
        return conversion(entry, module, args, kwargs)
    except (CaptureError, PolicyError):
        # Refused at its first call, the model becomes what it was. Not after a call went through (``settled``), nor in
        # ``convert``, which undoes it itself (``converting``), nor where another class is around ours by now.
        model = conversion.module()
        if model is not None and not conversion.settled and not conversion.converting and not is_wrapped(model):
            put_back(model)
        raise
    finally:
        set_eval_frame(outer)


def _follow(module: nn.Module, name: str, just_set: bool = False) -> None:
    """Wrap a function that the instance has in the place of a method, so that it enters the conversion.

    The class's own method, put back among the instance's attributes by hand, is deleted there instead.

    Args:
        just_set: a user set it a moment ago; it was not found there by ``convert`` or a copy. Then it is captured from
            its second call on, since some are set for one call (Lightning's redirection of forward).
    """
    function = module.__dict__.get(name)
    conversion = _conversion_at(module)
    if function is None or conversion is None or not callable(function):
        return
    known = entry_of(function)
    if known is not None and known.owner() is module:
        return
    key = type(module)._fxprec_methods[name]  # type: ignore[attr-defined]
    original = getattr(original_class(module), name, None)
    # The class's own method, put back by hand: nothing is special any more.
    if isinstance(function, MethodType) and function.__self__ is module:
        if original is not None and original_function(function.__func__) is original:
            del module.__dict__[name]
            return
    if enters_autocast(function):
        conversion.messages.warn_autocast("wrapped in")
    entry = conversion.entry_point(key)
    entry.adopt(module, function)
    entry.new = just_set
    module.__dict__[name] = wrapper = conversion.wrappers.of_instance(function, partial(_enter_function, entry))
    plain = getattr(wrapper, "__func__", wrapper)
    mark(plain, ENTRY, entry)
    conversion.captured.forget_with(plain, entry)


for _function in (_enter_function, _enter, _follow):
    hide_from_dynamo(_function, NOT_TRACED)


def _followed(module: nn.Module) -> Iterator[str]:
    """Yield the names of the functions of the instance that have entry points."""
    return (name for name in type(module)._fxprec_methods if entry_of(module.__dict__.get(name)) is not None)  # type: ignore[attr-defined]


#: Functions around functions that are looked through: frameworks put two or three around a forward.
_DEPTH: Final = 8


def enters_autocast(function: Callable[..., Any]) -> bool:
    """Return whether ``torch.autocast`` decorates a function, or a function that it wraps.

    ``torch.autocast("cpu")(forward)`` keeps the context in its closure, as does what Accelerate sets on a model.
    """
    return any(isinstance(value, torch.autocast) and value._enabled for value in _closure_values(function, _DEPTH))


def _closure_values(function: Any, depth: int) -> Iterator[Any]:
    """Yield what a function has in its closure, and what the functions there have."""
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    held = [getattr(function, "__wrapped__", None), getattr(function, "func", None)]  # the latter of a partial
    for cell in cells:
        with contextlib.suppress(ValueError):  # it is empty yet
            held.append(cell.cell_contents)
    for value in held:
        yield value
        if depth and callable(value) and not isinstance(value, type | nn.Module):
            yield from _closure_values(value, depth - 1)
