"""At which of its callers a warning points: the user's line, however many frames of torch and of fxprec lie between."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

import torch

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: What is no code of the user's; "<frozen runpy>" calls those of `python -m`.
_LIBRARIES: Final = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS + os.sep, "<frozen ")


def user_level() -> int:
    """``warnings.warn(..., stacklevel=user_level())``: the innermost caller that is neither torch's code nor ours."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def user_line() -> tuple[str, int]:
    """File and number of the line where the innermost caller is that is neither torch's code nor ours; or ("", 0)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
