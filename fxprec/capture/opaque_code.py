"""Stop a trace before it executes what no graph can hold, such as ``time.time()`` or ``global count; count += 1``.

Where such code lies is known before a function is called (see ``surroundings``); whether a trace gets there, only the
interpreter tells: by ``sys.settrace``, for these functions alone, and only in a model that has any. A debugger's or
coverage's own function goes on being called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["OpaqueCode"]


class OpaqueCode:
    """A context: within it ``decline`` is called, in this thread, before a place is executed that was named to it."""

    def __init__(self, decline: Callable[[str], Any]) -> None:
        self._decline = decline
        self._places: dict[int, tuple[CodeType, dict[int, str]]] = {}
        self._inside = self._watching = False
        self._before: Callable[..., Any] | None = None

    def stop_at(self, code: CodeType, offsets: tuple[int, ...], why: str) -> None:
        """Decline before one of these offsets of ``code`` is executed; with none, when it is called."""
        places = self._places.setdefault(id(code), (code, {}))[1]
        for offset in offsets or (-1,):
            places.setdefault(offset, why)
        self._watch()

    def __enter__(self) -> None:
        self._inside = True
        self._watch()

    def __exit__(self, *_error: object) -> None:
        self._inside = False
        if self._watching:
            self._watching = False
            sys.settrace(self._before)

    def _watch(self) -> None:
        if self._inside and self._places and not self._watching:
            self._before = sys.gettrace()
            self._watching = True
            sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        theirs = None if self._before is None else self._before(frame, event, argument)
        found = self._places.get(id(frame.f_code))
        if found is None:
            return theirs
        places = found[1]
        if -1 in places:
            self._decline(places[-1])
        frame.f_trace_opcodes = True

        def executing(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal theirs
            if event == "opcode" and (why := places.get(frame.f_lasti)) is not None:
                self._decline(why)
            if theirs is not None and (event != "opcode"):
                theirs = theirs(frame, event, argument)
            return executing

        return executing
