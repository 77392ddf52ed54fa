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


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is not raised again, and of those behind it.

    A frame that raised its own variable refers to the error, which refers to the frame. Such a cycle lives until the
    collector comes, with the variables of all callers: an iterator among them would not end with its last reference.
    """
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
