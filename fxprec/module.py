"""A converted module: the user's own object, of a subclass of its class whose forward runs the rewritten graph.

As FSDP2 does, the object's class is swapped for a dynamic subclass. isinstance, attributes, parameter identity, keys,
hooks and ``super().forward`` stay as they were; the subclass keeps the names of the class and the signature of forward,
and pickles and copies as the original plus the conversion to redo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.fx import Graph, GraphModule

from fxprec.conversion import Conversion
from fxprec.errors import CaptureError, ConversionError, PolicyError
from fxprec.settings import Settings

__all__ = ["attach", "conversion_of", "graph_module", "graphs", "is_converted", "original", "revert"]

_STATE = "_fxprec"


def is_converted(module: object) -> bool:
    """Whether ``module`` itself was converted."""
    return isinstance(module, torch.nn.Module) and _STATE in module.__dict__


def conversion_of(module: object) -> Conversion:
    """The state of a converted module.

    Raises:
        ConversionError: it is not converted.
    """
    if not is_converted(module):
        raise ConversionError(
            f"{type(module).__name__} is not converted: call fxprec.convert(model) first, and pass the module that it returned"
        )
    return module.__dict__[_STATE]  # type: ignore[attr-defined]


def attach(module: torch.nn.Module, settings: Settings) -> Conversion:
    """Swap the class of ``module``; nothing is captured yet."""
    conversion = Conversion(settings, module)
    module.__dict__[_STATE] = conversion
    module.__class__ = _converted_class(type(module), hasattr(module, "graph"))
    return conversion


def revert(module: torch.nn.Module) -> torch.nn.Module:
    """Undo ``convert``: class and forward are the original's again. Parameters stay (at O3: low). Returns the module."""
    conversion = conversion_of(module)
    if type(module).__dict__.get("_fxprec_original") is not conversion.original_class:
        raise ConversionError(
            f"{type(module).__name__} was wrapped after it was converted (fully_shard changes the class too): "
            "revert before wrapping"
        )
    del module.__dict__[_STATE]
    module.__class__ = conversion.original_class
    if conversion.instance_forward is not None:
        module.__dict__["forward"] = conversion.instance_forward
    conversion.store.clear()
    return module


@contextlib.contextmanager
def original(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
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
    return conversion_of(module).active(module)


def graphs(module: torch.nn.Module) -> tuple[GraphModule, ...]:
    """All rewritten graphs so far: one a set of flags (train and eval), argument pattern, or piece between breaks."""
    conversion = conversion_of(module)
    conversion.active(module)
    return tuple(conversion.graphs)


def _converted_class(cls: type[torch.nn.Module], has_graph: bool) -> type[torch.nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _enter(self, args, kwargs)

    _hide_from_dynamo(forward)

    def train(self: torch.nn.Module, mode: bool = True) -> Any:
        self.__dict__[_STATE].store.mark_stale()
        return cls.train(self, mode)

    def load_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        conversion: Conversion = self.__dict__[_STATE]
        conversion.refuse_if_frozen("load_state_dict")
        result = cls.load_state_dict(self, *args, **kwargs)
        conversion.store.mark_stale()
        return result

    def reduce_ex(self: torch.nn.Module, protocol: Any) -> Any:
        return _reduce(self, cls, protocol)

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        "_fxprec_original": cls,
        "forward": forward,
        "train": functools.wraps(cls.train)(train),
        "load_state_dict": functools.wraps(cls.load_state_dict)(load_state_dict),
    }
    if not has_graph:
        namespace["graph"] = _GraphAttribute()
    return type(cls)(cls.__name__, (cls,), namespace)


class _GraphAttribute:
    """``model.graph``: the rewritten torch.fx graph. No data descriptor: a model may still set a ``graph`` of its own."""

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Graph | _GraphAttribute:
        return self if module is None else graph_module(module).graph


def _enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    conversion: Conversion = module.__dict__[_STATE]
    outer = set_eval_frame(None)
    try:
        return conversion(module, args, kwargs)
    except (CaptureError, PolicyError):
        if not conversion.settled:
            revert(module)  # refused at its first call: put back as it was
        raise
    finally:
        set_eval_frame(outer)


def _hide_from_dynamo(function: Any) -> None:
    """An outer torch.compile breaks here and keeps our graphs; a strict torch.export says what to do.

    What torch._dynamo.disable does, without importing dynamo: a flag for its inliner, the frame itself skipped, and (in
    _enter) its callback taken off while ours run.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = (
        "a model converted by fxprec captures its own graphs; to export or compile one, use fxprec.graph_module(model)"
    )
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, skip)


_hide_from_dynamo(_enter)


def _reduce(module: torch.nn.Module, cls: type[torch.nn.Module], protocol: Any) -> Any:
    """Pickle as an object of the original class, then convert again: classes made at run time have no importable name."""
    make, args, *rest = cls.__reduce_ex__(module, protocol)
    args = tuple(cls if argument is type(module) else _without_state(argument) for argument in args)
    state = [_without_state(part) for part in rest]
    return (_rebuild, (conversion_of(module).settings, make, args), *state)


def _without_state(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != _STATE} if isinstance(value, dict) and _STATE in value else value


def _rebuild(settings: Settings, make: Callable[..., Any], args: tuple[Any, ...]) -> torch.nn.Module:
    module = make(*args)
    attach(module, settings)
    return module
