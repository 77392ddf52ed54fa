"""Captures the log messages of this package."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Yields a list that collects the messages that this package logs at WARNING or above."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rustloader")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
