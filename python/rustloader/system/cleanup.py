"""Cleans up without hiding the error that made it necessary."""

import logging
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("rustloader")


def clean_up_after(error: BaseException, clean: Callable[[], object]) -> None:
    """Cleans up before ``error`` is raised. A second error becomes a note of ``error``; an interrupt is raised."""
    try:
        clean()
    except Exception as second:
        error.add_note(f"rustloader: cleaning up after this error also failed: {_text(second)}")


def quietly(step: Callable[..., object], *args: Any) -> None:
    """Runs one step of a shutdown. Logs its error, so that the other steps still run; an interrupt is raised."""
    try:
        step(*args)
    except Exception as error:
        logger.warning("a step of a DataLoader's shutdown failed: %s", _text(error))


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is not raised again, and of its causes and contexts.

    If a frame has raised the value of a local variable, the frame refers to the error, and the error to the frame. Such
    a cycle lives until the garbage collector runs, together with the variables of all callers. An iterator among these
    would not end with its last other reference.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and current.__traceback__ is not None:
            current.__traceback__ = None
            pending += [current.__cause__, current.__context__]


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
