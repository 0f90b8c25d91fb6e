"""Tells the user's code from that of torch, of installed packages and of fxprec: for warnings, messages and guards."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
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


#: What dynamo calls the rest of a function after a graph break (before torch 2.13 also in the stacks that it tells).
_REST: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

#: Where installed code lies, and this package's own, which may lie in a checkout.
_INSTALLED: Final = (
    *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")},
    _OURS,
)


def is_installed(file: str) -> bool:
    """Return whether code of this file is of an installed package, and not the user's own."""
    return file.startswith(_INSTALLED)


def place(file: str, line: int | str, function: str) -> str:
    """``model.py:12 in forward``."""
    name = _REST.sub(r"\1", function)
    return f"{file}:{line} in {name}"
