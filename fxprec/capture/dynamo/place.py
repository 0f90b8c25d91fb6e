"""Places in a user's code, as messages name them."""

from __future__ import annotations

import re
from typing import Final

#: What dynamo calls the rest of a function after a graph break (before torch 2.13 also in the stacks that it tells).
_REST: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


def place(file: str, line: int | str, function: str) -> str:
    """``model.py:12 in forward``."""
    name = _REST.sub(r"\1", function)
    return f"{file}:{line} in {name}"
