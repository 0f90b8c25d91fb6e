"""Write what commands tell: results as text or JSON, and on stderr what takes longer than two seconds."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

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


T = TypeVar("T")

#: Seconds that pass in silence, and between lines where stderr is no terminal.
_SILENT: Final = 2.0


class Waiting:
    """Context of long work: ``waiting.say("capturing")``, ``waiting.count("batches", batches)``."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def say(self, what: str) -> None:
        """Set the text of what is done now."""
        self._text = what

    def count(self, what: str, each: Sequence[T]) -> Iterator[T]:
        """Yield these one by one, and say how many were taken."""
        for number, one in enumerate(each, 1):
            self.say(f"{what}: {number} of {len(each)}")
            yield one
        self.say(f"{what}: done, adding up")

    def _show(self) -> None:
        started = time.monotonic()
        while not self._over.wait(_SILENT):
            line = f"{self._text} ({time.monotonic() - started:.0f} s)"
            # A terminal overwrites one line; a log gets a line only when the text has changed.
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{line}")
            elif self._text != self._shown:
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            self._shown = self._text
