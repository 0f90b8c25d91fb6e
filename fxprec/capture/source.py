"""Which line of the user's code runs: the text for ``node.meta["stack_trace"]`` and for the reasons of a decline."""

from __future__ import annotations

import linecache
import os
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Final

import torch

__all__ = ["SourceLines"]

_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB: Final = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_CHECKPOINT: Final = os.path.join(_TORCH, "utils", "checkpoint.py")


class SourceLines:
    """Finds the innermost frame of user code below ``stop`` (the code object that calls the traced forward).

    fx's own ``record_stack_traces`` formats whole stacks, which costs more than the rest of tracing; one line is enough
    to say where a node comes from, and the lines repeat.
    """

    def __init__(self, stop: CodeType) -> None:
        self._stop = stop
        self._is_user: dict[str, bool] = {}
        self._texts: dict[tuple[str, int], str] = {}

    def is_user(self, code: CodeType) -> bool:
        """Whether this is neither torch's code, nor the standard library's, nor that of the capture."""
        file = code.co_filename
        user = self._is_user.get(file)
        if user is None:
            installed = "site-packages" in file or "dist-packages" in file
            library = file.startswith((_TORCH, _OURS, "<frozen")) or (file.startswith(_STDLIB) and not installed)
            user = self._is_user[file] = not library
        return user

    def user_frame(self, frame: FrameType | None) -> tuple[FrameType | None, bool]:
        """The innermost user frame from ``frame`` outwards, and whether an activation checkpoint lies on the way.

        In models made of torch's own modules only, no frame is the user's: the innermost ``forward`` stands in.
        """
        found: FrameType | None = None
        forward: FrameType | None = None
        checkpoint = False
        known = self._is_user  # at hand: this loop runs over some 20 frames for every node
        while frame is not None and frame.f_code is not self._stop:
            code = frame.f_code
            user = known.get(code.co_filename)
            if user or (user is None and self.is_user(code)):
                found = found or frame
            elif code.co_filename == _CHECKPOINT:
                checkpoint = True
            elif forward is None and code.co_name == "forward":
                forward = frame
            frame = frame.f_back
        return found or forward, checkpoint

    def stack_trace(self, frame: FrameType) -> str:
        """One entry in the form of ``traceback``: file, line, function and the source line."""
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
