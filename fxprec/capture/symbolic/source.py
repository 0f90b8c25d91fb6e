"""Which line of the user's code runs: the text for ``node.meta["stack_trace"]`` and for the reasons of a decline."""

from __future__ import annotations

import linecache
import os
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Final

import torch

from fxprec.capture.symbolic.handlers import catches, has_handlers

#: Why ops within an activation checkpoint are not traced.
CHECKPOINTS: Final = "uses activation checkpointing"

_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB: Final = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_CHECKPOINT_FILE: Final = os.path.join(_TORCH, "utils", "checkpoint.py")

#: What a frame is to the search for the user's line; most are nothing.
_NOTHING, _USER, _USER_WITH_HANDLERS, _CHECKPOINT, _FORWARD, _STOP = range(6)


class SourceLines:
    """Finds the innermost frame of user code below ``stop`` (the code object that calls the traced forward).

    fx's own ``record_stack_traces`` formats whole stacks, which costs more than the rest of tracing; one line is enough
    to say where a node comes from, and the lines repeat.
    """

    def __init__(self, stop: CodeType) -> None:
        self._stop = stop
        #: id of a code object -> what its frames are, and the code object: it must live as long as its id is a key.
        self._kinds: dict[int, tuple[int, CodeType]] = {id(stop): (_STOP, stop)}
        self._texts: dict[tuple[str, int], str] = {}

    def is_user(self, code: CodeType) -> bool:
        """Return whether code is neither torch's, nor the standard library's, nor that of the capture."""
        known = self._kinds.get(id(code))
        return (self._kind(code) if known is None else known[0]) in (_USER, _USER_WITH_HANDLERS)

    def user_frame(self, frame: FrameType | None) -> tuple[FrameType | None, str | None]:
        """The innermost user frame from ``frame`` outwards, and why no op can be recorded here, if so.

        An activation checkpoint lies on the way, or a handler that would catch what the op raises. In models made of
        torch's own modules only, no frame is the user's: the innermost ``forward`` stands in.
        """
        found: FrameType | None = None
        forward: FrameType | None = None
        why: str | None = None
        kinds = self._kinds  # at hand: this loop runs over some ten frames for every node
        while frame is not None:
            known = kinds.get(id(frame.f_code))
            kind = self._kind(frame.f_code) if known is None else known[0]
            if kind == _STOP:
                break
            if kind == _CHECKPOINT:
                why = CHECKPOINTS
            elif kind == _FORWARD:
                forward = forward or frame
            elif kind:
                found = found or frame
                if kind == _USER_WITH_HANDLERS and why is None and (caught := catches(frame)) is not None:
                    why = f"catches {caught} around ops"
            frame = frame.f_back
        return found or forward, why

    def _kind(self, code: CodeType) -> int:
        file = code.co_filename
        installed = "site-packages" in file or "dist-packages" in file
        library = file.startswith((_TORCH, _OURS, "<frozen")) or (file.startswith(_STDLIB) and not installed)
        if not library:
            kind = _USER_WITH_HANDLERS if has_handlers(code) else _USER
        elif file == _CHECKPOINT_FILE:
            kind = _CHECKPOINT
        else:
            kind = _FORWARD if code.co_name == "forward" else _NOTHING
        self._kinds[id(code)] = kind, code
        return kind

    def stack_trace(self, frame: FrameType) -> str:
        """Return one entry in the form of ``traceback``: file, line, function and the source line."""
        code, line = frame.f_code, frame.f_lineno
        key = (code.co_filename, line)
        text = self._texts.get(key)
        if text is None:
            source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            text = f'File "{code.co_filename}", line {line}, in {code.co_name}\n    {source}'
            self._texts[key] = text
        return text

    def place(self, frame: FrameType, line: int) -> str:
        """``model.py:12 `x = self.fc(x)```, for a reason."""
        file = frame.f_code.co_filename
        source = linecache.getline(file, line, frame.f_globals).strip()
        return f"{os.path.basename(file)}:{line}" + (f" `{source}`" if source else "")

    def place_of_error(self, trace: TracebackType | None) -> str:
        """The innermost user line below ``stop`` that an exception passed through; '' if there is none."""
        place = ""
        inside = False
        for frame, line in traceback.walk_tb(trace):
            inside = inside or frame.f_code is self._stop
            if inside and self.is_user(frame.f_code):
                place = self.place(frame, line)
        return place
