"""Say on stderr what takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

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
