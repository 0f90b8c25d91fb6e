"""Stops a trace before it executes what no graph can hold.

``torch.fx`` runs ``with torch.no_grad():`` while it traces and records nothing of it; the same goes for autocast
regions and for the forward of an autograd.Function, whose backward would be lost. Each passes through one function,
which tripwires replace while a trace runs.

Other code is the user's own, such as ``time.time()`` or ``global count; count += 1``. Where such code lies is known
before a function is called (see ``surroundings``); whether a trace gets there, only the interpreter tells, for these
functions alone, and only in a model that has any: by ``sys.monitoring`` (PEP 669), which Python has since 3.12, and
before by ``sys.settrace``. A debugger's or coverage's own function goes on being called.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import ClassMethodDescriptorType, CodeType, FrameType, FunctionType
from typing import Any, Final

import torch

from fxprec.capture.capturing import CaptureDeclined
from fxprec.torch_internals import function_apply, fx_tracer_file, grad_modes

_GRAD_MODE: Final = "sets or asks for the grad mode (no_grad, enable_grad, set_grad_enabled, inference_mode)"

_FUNCTION: Final = "calls a torch.autograd.Function"

#: (owner, attribute, what the forward does that calls it).
TRIPWIRES: Final[tuple[tuple[Any, str, str], ...]] = (
    *((owner, name, _GRAD_MODE) for owner, name in grad_modes),
    (torch, "is_grad_enabled", _GRAD_MODE),
    (torch, "is_inference_mode_enabled", _GRAD_MODE),
    (torch, "set_autocast_enabled", "enters a torch.autocast region"),
    (torch, "set_autocast_dtype", "sets the dtype of torch.autocast"),
    (torch.autograd.Function, "apply", _FUNCTION),
    (*function_apply, _FUNCTION),
)


def trips(target: Any) -> str | None:
    """Return what a function does that no graph can hold ("enters a torch.autocast region"), or None."""
    return next((what for owner, name, what in TRIPWIRES if vars(owner).get(name) is target), None)


def tripwires(decline: Callable[[str], Any]) -> list[tuple[Any, str, Any]]:
    """Return replacements that call ``decline`` in this thread; other threads go on as ever."""
    tracing = threading.get_ident()

    def wire(original: Any, what: str) -> Any:
        # The latter is written in C. ``tripped`` gets the class as its first argument, and binds the original by hand.
        of_class = isinstance(original, classmethod | ClassMethodDescriptorType)

        def tripped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                decline(what)
            if not of_class:
                return original(*args, **kwargs)
            cls, *rest = args
            return original.__get__(None, cls)(*rest, **kwargs)

        tripped.__wrapped__ = getattr(original, "__func__", original)  # type: ignore[attr-defined]
        return classmethod(tripped) if of_class else tripped

    return [(owner, name, wire(inspect.getattr_static(owner, name), what)) for owner, name, what in TRIPWIRES]


def unpatched(value: Any) -> Any:
    """Return the function that a patched one takes the place of while a trace runs, or the value itself."""
    if isinstance(value, FunctionType) and value.__code__.co_filename in (__file__, fx_tracer_file):
        return getattr(value, "__wrapped__", value)
    return value


_MONITORING: Final[Any] = getattr(sys, "monitoring", None)
#: Of the six tools that there can be at a time, those that PEP 669 names (debugger, coverage, profiler) come last.
_TOOLS: Final = (4, 3, 5, 2, 1, 0)
#: In the place of an offset, the start of the code: it must not even be called.
_START: Final = -1

#: A reason, or what tells it of the frame that gets there.
Why = str | Callable[[FrameType], str | None]


class OpaqueCode:
    """A context: within it ``decline`` is called, in this thread, before a place is executed that was named to it."""

    def __init__(self, decline: Callable[[str], Any]) -> None:
        self._decline = decline
        self._places: dict[int, tuple[CodeType, dict[int, Why]]] = {}
        self._before_calls: dict[int, list[Callable[[], None]]] = {}
        self._inside = False
        self._watch = (_Traced if _MONITORING is None else _Monitored)(self._reached)

    def stop_at(self, code: CodeType, offsets: tuple[int, ...], why: Why) -> None:
        """Decline before one of these offsets of ``code`` is executed; with none, when it is called.

        ``why`` may depend on the frame, and be None there: the trace goes on.
        """
        places = self._places_in(code)
        for offset in offsets or (_START,):
            places.setdefault(offset, why)

    def before_call(self, code: CodeType, run: Callable[[], None]) -> None:
        """Run a function once, before ``code`` is executed; it may name places in this very code."""
        self._places_in(code)
        self._before_calls.setdefault(id(code), []).append(run)

    def _places_in(self, code: CodeType) -> dict[int, Why]:
        """Watch a code object, and return what is named in it so far."""
        if self._inside:
            self._watch.add(code)
        return self._places.setdefault(id(code), (code, {}))[1]

    def __enter__(self) -> None:
        self._inside = True
        for code, _ in self._places.values():
            self._watch.add(code)

    def __exit__(self, *_error: object) -> None:
        self._inside = False
        self._watch.end()

    def _reached(self, code: CodeType, offset: int) -> bool:
        """Decline if this place was named; return whether the code has places behind its start."""
        if offset == _START:
            for run in self._before_calls.pop(id(code), ()):
                run()
        places = self._places[id(code)][1]
        why = places.get(offset)
        # Some reasons depend on the values in the frame that gets there, such as those of ``questions``.
        if callable(why):
            frame: Any = sys._getframe(1)
            while frame.f_code is not code:
                frame = frame.f_back
            why = why(frame)
        if why is not None:
            self._decline(why)
        return not places.keys() <= {_START}


class _Monitored:
    """By ``sys.monitoring``. It tells of every thread, and nothing of code that runs already when it is added."""

    def __init__(self, reached: Callable[[CodeType, int], bool]) -> None:
        self._reached = reached
        self._tool: int | None = None
        self._codes: dict[int, CodeType] = {}

    def add(self, code: CodeType) -> None:
        """Call ``reached`` before each instruction of this code, and when it is called."""
        events = _MONITORING.events
        if self._tool is None:
            self._tool = next((tool for tool in _TOOLS if _MONITORING.get_tool(tool) is None), None)
            if self._tool is None:
                raise CaptureDeclined("all tools of sys.monitoring are taken: what it executes cannot be watched")
            _MONITORING.use_tool_id(self._tool, "fxprec")
            thread = threading.get_ident()

            def executes(code: CodeType, offset: int) -> None:
                if threading.get_ident() == thread and not self._reached(code, offset) and offset == _START:
                    _MONITORING.set_local_events(self._tool, code, events.PY_START)

            _MONITORING.register_callback(self._tool, events.INSTRUCTION, executes)
            _MONITORING.register_callback(self._tool, events.PY_START, lambda code, _: executes(code, _START))
        # Of this code alone: events of all code would slow every thread.
        self._codes[id(code)] = code
        _MONITORING.set_local_events(self._tool, code, events.INSTRUCTION | events.PY_START)

    def end(self) -> None:
        """Be as if there had been nothing."""
        if self._tool is None:
            return
        for code in self._codes.values():
            _MONITORING.set_local_events(self._tool, code, 0)
        for event in (_MONITORING.events.INSTRUCTION, _MONITORING.events.PY_START):
            _MONITORING.register_callback(self._tool, event, None)
        _MONITORING.free_tool_id(self._tool)
        self._tool = None
        self._codes.clear()


class _Traced:
    """By ``sys.settrace``."""

    def __init__(self, reached: Callable[[CodeType, int], bool]) -> None:
        self._reached = reached
        self._codes: dict[int, CodeType] = {}
        self._before: Callable[..., Any] | None = None

    def add(self, code: CodeType) -> None:
        """Call ``reached`` before each instruction of this code, and when it is called."""
        if not self._codes:
            self._before = sys.gettrace()
            sys.settrace(self._called)
        self._codes[id(code)] = code

    def end(self) -> None:
        """Be as if there had been nothing."""
        if self._codes:
            self._codes.clear()
            sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        # A debugger goes on: its function is asked as if ours were not there.
        theirs = None if self._before is None else self._before(frame, event, argument)
        if id(frame.f_code) not in self._codes:
            return theirs
        if not self._reached(frame.f_code, _START):
            return theirs
        frame.f_trace_opcodes = True

        def executing(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal theirs
            if event == "opcode":
                self._reached(frame.f_code, frame.f_lasti)
            elif theirs is not None:
                theirs = theirs(frame, event, argument)
            return executing

        return executing
