"""Cleans up without hiding the error that made it necessary."""

import logging
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("rustloader")


def clean_up_after(error: BaseException, clean: Callable[[], object]) -> None:
    """Cleans up before ``error`` is raised. A second error becomes a note of the first; an interrupt is raised."""
    try:
        clean()
    except Exception as second:
        error.add_note(f"rustloader: cleaning up after this error also failed: {_text(second)}")


def quietly(step: Callable[..., object], *args: Any) -> None:
    """Runs one step of a shutdown. Logs an error, so that the other steps follow; an interrupt is raised."""
    try:
        step(*args)
    except Exception as error:
        logger.warning("a step of a DataLoader's shutdown failed: %s", _text(error))


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
