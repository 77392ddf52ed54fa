"""Functions that clean up after an error without hiding it."""

import logging
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("rustloader")


def clean_up_after(error: BaseException, clean: Callable[[], object]) -> None:
    """Calls ``clean``. The caller then raises ``error``. If ``clean`` raises an error, adds its text to ``error`` as a
    note; an interrupt such as KeyboardInterrupt propagates."""
    try:
        clean()
    except Exception as second:
        error.add_note(f"rustloader: cleaning up after this error also failed: {_text(second)}")


def quietly(step: Callable[..., object], *args: Any) -> None:
    """Runs one step of a shutdown. If the step raises an error, logs it, so that the other steps still run; an
    interrupt such as KeyboardInterrupt propagates."""
    try:
        step(*args)
    except Exception as error:
        logger.warning("a step of a DataLoader's shutdown failed: %s", _text(error))


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an error that will not be raised again, and those of its causes and contexts.

    If a function raises an error that one of its local variables also holds, its frame refers to the error, and the
    error to the frame. This cycle, and with it the variables of all callers, lives until the garbage collector runs. If
    one of these variables is an iterator, its workers would not end when the program drops its last reference to it.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and current.__traceback__ is not None:
            current.__traceback__ = None
            pending += [current.__cause__, current.__context__]


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
