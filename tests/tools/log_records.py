"""What was logged in a block: pytest's own plugin goes through every logger before and after each test."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def log_records(name: str | None = None, level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """The records that reach this logger, or the root, at this level or above."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = records.append  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
