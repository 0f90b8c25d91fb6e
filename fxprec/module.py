"""A converted module: the user's own object, of a subclass of its class whose forward runs the rewritten graph.

As FSDP2 does, the object's class is swapped for a dynamic subclass. isinstance, attributes, parameter identity, keys,
hooks and ``super().forward`` stay as they were; the subclass keeps the names of the class and the signature of forward,
and pickles and copies as the original plus the conversion to redo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch.fx import Graph, GraphModule

from fxprec.capture.lazy_code import with_code
from fxprec.conversion import Conversion
from fxprec.errors import CaptureError, ConversionError, PolicyError
from fxprec.scaling.unscaled import expect_scaling, stop_expecting
from fxprec.settings import Settings
from fxprec.shapes import state_dtypes
from fxprec.torch_internals import hide_from_dynamo, set_eval_frame

__all__ = ["attach", "conversion_of", "graph_module", "graphs", "is_converted", "original", "put_back", "revert"]

_Module = TypeVar("_Module", bound=torch.nn.Module)

_STATE = "_fxprec"
#: What an outer ``torch.compile(fullgraph=True)`` says, which would break there, and a strict ``torch.export``.
_NOT_TRACED = (
    "a model converted by fxprec captures its own graphs; to export or compile one, use fxprec.graph_module(model)"
)
#: Where a forward of the instance travels in the state of a copy.
_FORWARD = "_fxprec_forward"


def is_converted(module: object) -> bool:
    """Whether ``module`` itself was converted."""
    return isinstance(module, torch.nn.Module) and _STATE in module.__dict__


def conversion_of(module: object) -> Conversion:
    """The state of a converted module.

    Raises:
        ConversionError: it is not converted.
    """
    if not is_converted(module):
        inner = getattr(module, "module", None)
        if is_converted(inner):
            raise ConversionError(
                f"{type(module).__name__} is a wrapper: pass the converted {type(inner).__name__} inside it, "
                "wrapped.module"
            )
        raise ConversionError(
            f"{type(module).__name__} is not converted: call fxprec.convert(model) first, "
            "and pass the module that it returned"
        )
    return module.__dict__[_STATE]  # type: ignore[attr-defined]


def attach(module: torch.nn.Module, settings: Settings, frozen: frozenset[str] | None = None) -> Conversion:
    """Swap the class of ``module``; nothing is captured yet."""
    converted = _converted_class(type(module), hasattr(module, "graph"))
    conversion = Conversion(settings, module, frozen)
    module.__class__ = converted
    module.__dict__[_STATE] = conversion
    if settings.scales and settings.dtype is torch.float16:
        expect_scaling(conversion)
    return conversion


def revert(module: _Module) -> _Module:
    """Undo ``convert``: the class and forward of the original. Parameters stay (at O3: low). Returns the module."""
    conversion = conversion_of(module)
    if _is_wrapped(module):
        raise ConversionError(
            f"{type(module).__name__} was wrapped after it was converted (fully_shard changes the class too): "
            "revert before wrapping"
        )
    del module.__dict__[_STATE]
    module.__class__ = conversion.original_class  # pyright: ignore[reportAttributeAccessIssue]
    if conversion.forward.of_instance is not None:
        module.__dict__.setdefault("forward", conversion.forward.of_instance)
    conversion.store.clear()
    stop_expecting(conversion)
    return module


def _is_wrapped(module: torch.nn.Module) -> bool:
    """Whether another class stands around ours by now, which cannot be taken away from below it."""
    return type(module).__dict__.get("_fxprec_original") is not conversion_of(module).original_class


def put_back(module: torch.nn.Module) -> None:
    """Revert a conversion that was refused after all: the module is exactly as it was, at O3 too."""
    undo = conversion_of(module).undo
    revert(module)
    if undo is not None:
        undo()


@contextlib.contextmanager
def original(module: _Module) -> Iterator[_Module]:
    """Within the block the module runs its untouched forward, in its own dtypes."""
    conversion = conversion_of(module)
    conversion.bypassed += 1
    try:
        yield module
    finally:
        conversion.bypassed -= 1


def graph_module(module: torch.nn.Module) -> GraphModule:
    """The active rewritten graph as a self-contained GraphModule: reads the module's own parameters, casts explicitly.

    Raises:
        NotCapturedError: nothing was captured yet (a forward that needs dynamo, without example inputs).
    """
    gm = conversion_of(module).active(module)
    state_dtypes(gm)
    with_code(gm)
    return gm


def graphs(module: torch.nn.Module) -> tuple[GraphModule, ...]:
    """All rewritten graphs so far: one a set of flags (train and eval), argument pattern, or piece between breaks."""
    conversion = conversion_of(module)
    conversion.active(module)
    found = tuple(captured.gm for captured in conversion.captured)
    for gm in found:
        state_dtypes(gm)
        with_code(gm)
    return found


class _Converted:
    """What every dynamic subclass has, before the class that it stands for."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing: a registry that the user's class keeps of its subclasses is no place for ours."""

    def train(self: Any, mode: bool = True) -> Any:
        conversion: Conversion = self.__dict__[_STATE]
        conversion.store.mark_stale()
        return super().train(mode)  # type: ignore[misc]

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        conversion: Conversion = self.__dict__[_STATE]
        conversion.refuse_if_frozen("load_state_dict")
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            conversion.store.mark_stale()

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """As an object of the original class, to be converted again: a class made at run time has no name to import."""
        conversion = conversion_of(self)
        cls = conversion.original_class
        make, args, *rest = super().__reduce_ex__(protocol)
        args = tuple(cls if argument is type(self) else _portable(argument, conversion) for argument in args)
        state = [_portable(part, conversion) for part in rest]
        return (_rebuild, (conversion.settings, conversion.frozen, make, args), *state)

    def __setstate__(self: Any, state: Any) -> None:
        if isinstance(state, dict) and _FORWARD in state:
            state = dict(state)
            conversion_of(self).forward.of_instance = state.pop(_FORWARD)
        super().__setstate__(state)  # type: ignore[misc]

    def __prepare_scriptable__(self: Any) -> NoReturn:
        raise ConversionError(
            f"torch.jit.script of the converted {type(self).__name__} would compile the original forward, in FP32: "
            "torch.jit.trace it, or script it before it is converted"
        )


def _converted_class(cls: type[torch.nn.Module], has_graph: bool) -> type[torch.nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _enter(self, args, kwargs)

    hide_from_dynamo(forward, _NOT_TRACED)
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_fxprec_original": cls,
        "forward": forward,
    }
    if not has_graph:
        namespace["graph"] = _GraphAttribute()
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = lambda self, memo: _copied(self, lambda module: module.__deepcopy__(memo))
    if hasattr(cls, "__copy__"):
        namespace["__copy__"] = lambda self: _copied(self, lambda module: module.__copy__())
    if issubclass(cls, GraphModule):
        namespace["recompile"] = _recompile
    return type(cls)(cls.__name__, (_Converted, cls), namespace)  # type: ignore[call-arg]


class _GraphAttribute:
    """``model.graph``: the rewritten torch.fx graph. No data descriptor: a model may set a ``graph`` of its own."""

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Graph | _GraphAttribute:
        return self if module is None else graph_module(module).graph


def _enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    conversion: Conversion | None = module.__dict__.get(_STATE)
    if conversion is None:  # a forward that was kept from before ``revert``
        return type(module).forward(module, *args, **kwargs)
    outer = set_eval_frame(None)
    try:
        return conversion(module, args, kwargs)
    except (CaptureError, PolicyError):
        if not conversion.settled and not conversion.converting and not _is_wrapped(module):
            put_back(module)  # refused at its first call
        raise
    finally:
        set_eval_frame(outer)


hide_from_dynamo(_enter, _NOT_TRACED)  # and there dynamo's callback is taken off while ours run


def _copied(module: torch.nn.Module, copied: Callable[[Any], Any]) -> Any:
    """For a class that copies itself (a GraphModule): the copy is converted too."""
    conversion = conversion_of(module)
    with conversion.as_original(module):
        result = copied(module)
    if isinstance(result, torch.nn.Module) and not is_converted(result):
        attach(result, conversion.settings, conversion.frozen)
    return result


def _recompile(module: GraphModule) -> Any:
    """A GraphModule writes its new code to its class: that must be the original one, and the code is traced again."""
    conversion = conversion_of(module)
    before = module.code
    with conversion.as_original(module):
        result = module.recompile()
    if module.code != before:
        conversion.start_over()
    return result


def _portable(value: Any, conversion: Conversion) -> Any:
    """A part of what ``__reduce_ex__`` gives without our state; the forward of the instance goes along."""
    if not isinstance(value, dict) or _STATE not in value:
        return value
    kept = {name: part for name, part in value.items() if name != _STATE}
    return kept if conversion.forward.of_instance is None else {**kept, _FORWARD: conversion.forward.of_instance}


def _rebuild(
    settings: Settings, frozen: frozenset[str] | None, make: Callable[..., Any], args: tuple[Any, ...]
) -> torch.nn.Module:
    module = make(*args)
    attach(module, settings, frozen)
    return module
