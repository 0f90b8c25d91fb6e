"""Places in code: as messages name them, and whether they are the user's own."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Final

#: What dynamo calls the rest of a function after a graph break (before torch 2.13 also in the stacks that it tells).
_REST: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

#: Where installed code lies, and this package's own, which may lie in a checkout.
_INSTALLED: Final = (
    *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")},
    str(Path(__file__).parents[2]),
)


def is_installed(file: str) -> bool:
    """Return whether code of this file is of an installed package, and not the user's own."""
    return file.startswith(_INSTALLED)


def place(file: str, line: int | str, function: str) -> str:
    """``model.py:12 in forward``."""
    name = _REST.sub(r"\1", function)
    return f"{file}:{line} in {name}"
