"""Reminders that a part of a converted model runs in FP32: by a method that was not named, or called by itself.

A module whose weights graphs lower is called through one, in the way that torch has for ``module.compile()``: that is
no hook, which would decline static capture, and no part of copies and pickles. Graphs never call it. The first run of
such a module outside of everything that lowers warns, once a model; so does what is left of a model that is gone (a
wrapper that gave back what it held, such as PEFT's ``merge_and_unload``).
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Set
from types import FrameType
from typing import Final

import torch
from torch import nn

from fxprec.capture.reminder import Reminder
from fxprec.capture.symbolic.guards import hooks_of
from fxprec.capture.user_line import user_level
from fxprec.errors import NotLoweredWarning
from fxprec.kernels.launch.observers import FX, SCRIPT, TRACING, watcher
from fxprec.model.net import inside_net
from fxprec.torch_internals import CALLED_THROUGH, is_module_call

#: Modules of torch's whose weights every level lowers that lowers any: known before there is a graph.
_LOWERED: Final = (
    *(nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_OF_MODULES: Final = frozenset(dir(nn.Module))


def _of_what_is_left(name: str, device: str) -> Callable[[nn.Module], None]:
    """What says, once, that a part of a model which is gone, of a class of this name, runs in FP32."""
    given = threading.Lock()

    def remind(module: nn.Module) -> None:
        if given.locked() or not _runs_full(module, device) or not given.acquire(blocking=False):
            return
        text = (
            f"a {type(module).__name__} that was lowered as a part of a converted {name} runs in FP32: that "
            f"{name} is gone, and its conversion with it. Convert what remains: fxprec.convert(model). Said once"
        )
        warnings.warn(text, category=NotLoweredWarning, stacklevel=user_level())

    return remind


class Reminders:
    """Those of one converted model.

    Args:
        model: of which.
        device: where torch.autocast would lower.
        methods: the methods of the conversion.
        meant: whether FP32 is meant to run now.
    """

    def __init__(self, model: nn.Module, device: str, methods: Collection[str], meant: Callable[[], bool]) -> None:
        self._model = weakref.ref(model)
        self._name, self._device, self._methods, self._meant = type(model).__name__, device, frozenset(methods), meant
        self._covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._given = threading.Lock()  # taken for good by the thread that warns
        self._left = _of_what_is_left(self._name, device)

    def replace_outlived(self) -> None:
        """Take those of conversions that are gone away from the model: it is converted now."""
        model = self._model()
        for module in model.modules() if model is not None else ():
            reminder = module.__dict__.get(CALLED_THROUGH)
            if isinstance(reminder, Reminder) and reminder.outlived:
                del module.__dict__[CALLED_THROUGH]

    def cover(self, lowered: Set[int], expected: Callable[[str], bool]) -> None:
        """Remind of the submodules that have weights which are lowered.

        Of those with hooks only what can be known before the first graph: dynamo looks at what they are called
        through, and would compile again.

        Args:
            lowered: ids of these weights.
            expected: of the path of a module of torch's: whether its weights will be, by graphs that are not there yet.
        """
        model = self._model()
        for path, module in model.named_modules() if model is not None else ():
            attributes = module.__dict__
            low = any(id(weight) in lowered for weight in attributes.get("_parameters", {}).values())
            if not low and not isinstance(module, _LOWERED):
                continue
            if module is model or f"{path}.forward" in self._methods or attributes.get(CALLED_THROUGH) is not None:
                continue
            hooked = any(hooks_of(attributes))
            if (low and not hooked) or (isinstance(module, _LOWERED) and expected(path)):
                attributes[CALLED_THROUGH] = Reminder(module, self._remind, self._left)
                self._covered.add(module)

    def remove(self) -> None:
        """Take all reminders away. Only where no thread runs the model: one may be between looking and calling."""
        for module in [*self._covered]:
            if isinstance(module.__dict__.get(CALLED_THROUGH), Reminder):
                del module.__dict__[CALLED_THROUGH]
        self._covered.clear()

    def _remind(self, module: nn.Module) -> None:
        model = self._model()
        if self._given.locked() or model is None or self._meant() or not _runs_full(module, self._device):
            return
        paths = {id(part): path for path, part in model.named_modules()}
        if id(module) in paths and self._given.acquire(blocking=False):  # no replica, and not taken out of the model
            text = self._text(*_who(sys._getframe(2), paths))
            warnings.warn(text, category=NotLoweredWarning, stacklevel=user_level())

    def _text(self, method: str | None, called: str) -> str:
        if method in self._methods or (method is None and not called):
            own = self._name if method in (None, "forward") else f"{self._name}.{method}"
            return (
                f"{own} runs in FP32, not through its graphs: it was taken from the model before convert, or something "
                "stands in its place that convert does not know. Take it from the converted model, set other "
                "functions by assignment (model.forward = f), or convert afterwards. Said once a model"
            )
        if method is None:
            what = f"the submodule {called!r} of {self._name} was called by itself and runs in FP32"
            cure = f"methods=({called!r},)"
        else:
            what = f"{self._name}.{method} runs {called!r} in FP32, outside of the graphs of forward"
            cure = f"methods=({method!r},)" + (f", or ({called!r},) for that submodule alone" if called else "")
        return (
            f"{what}. To lower it: fxprec.convert(model, {cure}); where FP32 is meant, call it within "
            "fxprec.original(model). Said once a model; fxprec.report lists such methods"
        )


def _runs_full(module: nn.Module, device: str) -> bool:
    """Whether a call of the module computes in FP32 now."""
    if not any(parameter.dtype is torch.float32 for parameter in module.parameters(recurse=False)):
        return False
    return not (inside_net() or torch.is_autocast_enabled(device) or watcher(FX, SCRIPT, TRACING) is not None)


def _who(frame: FrameType | None, paths: dict[int, str]) -> tuple[str | None, str]:
    """The method that runs a submodule, as it would be named, and the submodule; None: it was called by itself.

    Of methods that call each other (``fit``, ``encode``, ``_encode``) the innermost public one is meant. "forward" is
    the model's own, that runs though the model was not called.
    """
    frames = []
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in paths:
            frames.append((code, owner, paths[id(owner)]))
        frame = frame.f_back
    methods: list[str] = []
    for code, owner, path in reversed(frames):
        name = code.co_name
        if name == "forward" and not path:
            return name, path
        if is_module_call(code) or name == "forward":
            public = [name for name in methods if not name.rpartition(".")[2].startswith("_")]
            return (public or methods or [None])[-1], path
        if name not in _OF_MODULES and inspect.getattr_static(type(owner), name, None) is not None:
            methods.append(f"{path}.{name}" if path else name)
    return None, ""
