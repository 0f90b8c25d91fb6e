"""At which of its callers a warning points: the user's line, however many frames of torch and of fxprec lie between."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

import torch

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES: Final = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS + os.sep)


def user_level() -> int:
    """``warnings.warn(..., stacklevel=user_level())``: the innermost caller that is neither torch's code nor ours."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level
