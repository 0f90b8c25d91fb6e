"""A converted module: the user's own object, of a subclass of its class whose forward runs the rewritten graph.

As FSDP2 does, the object's class is swapped for a dynamic subclass. isinstance, attributes, parameter identity, keys,
hooks and ``super().forward`` stay as they were; the subclass keeps the names of the class and the signature of forward,
and pickles and copies as the original plus the conversion to redo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.fx import Graph, GraphModule

from fxprec.capture.originals import original_class
from fxprec.errors import ConversionError, FxprecError
from fxprec.model.conversion import STATE, Conversion, conversion_of, is_converted
from fxprec.model.graphs import graph_module
from fxprec.model.swapped import Swapped, as_original, follow_all, portable, swap_class, swap_hosts, take_off
from fxprec.model.unscaled import expect_scaling
from fxprec.settings import Settings

_Module = TypeVar("_Module", bound=torch.nn.Module)


def attach(
    module: torch.nn.Module, settings: Settings, frozen: frozenset[str] | None = None, packs: bool = False
) -> Conversion:
    """Swap the class of ``module``; nothing is captured yet."""
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


class _Converted(Swapped):
    """A module that was converted."""

    def train(self: Any, mode: bool = True) -> Any:
        conversion: Conversion = self.__dict__[STATE]
        conversion.store.mark_stale()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        applied = super()._apply(*args, **kwargs)  # type: ignore[misc]
        conversion: Conversion = self.__dict__[STATE]
        conversion.store.forget_moved()
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
        # A class that was made at run time has no name by which it could be found again.
        make, args, *rest = super().__reduce_ex__(protocol)
        args = tuple(cls if argument is type(self) else portable(argument) for argument in args)
        packs = conversion.packed is not None
        return (_rebuild, (conversion.settings, conversion.frozen, make, args, packs), *map(portable, rest))

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        follow_all(self)
        swap_hosts(conversion_of(self), self)

    def __prepare_scriptable__(self: Any) -> NoReturn:
        raise ConversionError(
            f"torch.jit.script of the converted {type(self).__name__} would compile the original forward, in FP32: "
            "torch.jit.trace it, or script it before it is converted"
        )


def _namespace(module: torch.nn.Module) -> dict[str, Any]:
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

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Graph | _GraphAttribute:
        return self if module is None else graph_module(module).graph


def _names(module: torch.nn.Module) -> list[str]:
    """Return the names for ``dir``, with ``graph`` only if there is one: who goes through all reads it."""
    names = [name for name in original_class(module).__dir__(module) if name != "graph"]
    with contextlib.suppress(FxprecError):
        if conversion_of(module).captured and module.graph:
            names.append("graph")
    return names


def _copied(module: torch.nn.Module, copied: Callable[[Any], Any]) -> Any:
    """Convert the copy of a module of a class that copies itself (a GraphModule), too."""
    conversion = conversion_of(module)
    with as_original(module):
        result = copied(module)
    # A copy that went by __reduce_ex__ is converted already.
    if isinstance(result, torch.nn.Module) and not is_converted(result):
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
) -> torch.nn.Module:
    module = make(*args)
    attach(module, settings, frozen, packs)
    return module
