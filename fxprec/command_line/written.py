"""Write the output of commands: text and JSON, to files that were checked before the work."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

#: What ``--json`` is called with to print.
STDOUT: Final = Path("-")


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command's arguments."""
    tells = "write all of it there as JSON; -: to stdout, and nothing else"
    command.add_argument("--json", type=writable, metavar="FILE", help=tells)


def writable(name: str) -> Path:
    """Return a path that can be written to, checked before the work."""
    path = Path(name)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def tell(options: argparse.Namespace, found: Any, text: str = "") -> None:
    """Print a result, or write it as ``--json`` asks; ``found``: None, what JSON takes, or what has a ``to_dict``."""
    data = json.dumps(found.to_dict() if hasattr(found, "to_dict") else found, indent=1, allow_nan=False)
    if options.json == STDOUT:
        print(data)
        return
    if options.json is not None:
        options.json.write_text(data + "\n", encoding="utf-8")
    print(text or found)
