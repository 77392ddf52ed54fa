"""What the loader logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["warnings"]


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """The lines that the loader logs at WARNING."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("rustloader")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
