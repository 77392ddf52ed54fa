"""Distinguishes errors raised by signal handlers from errors of the interrupted code."""

from __future__ import annotations

import inspect
import sys
import traceback
from types import FrameType
from typing import Any

# The error that the caller of `is_interrupt` handles.
_PRESENT: Any = object()
# Before Python 3.13 a frame of a function keeps the dict that `f_locals` makes of its variables.
_CACHES_LOCALS = sys.version_info < (3, 13)


def is_interrupt(error: BaseException | None, handled: BaseException | None = _PRESENT) -> bool:
    """Returns True if a signal handler raised an error or one in its context chain.

    A caller that handles ``error`` itself gives the error that was handled before.

    Python calls a handler with the interrupted frame, which is the handler's own caller; no other function gets that.
    So a handler is recognised even if it was uninstalled before it raised. Python's own handler for Ctrl-C is not
    written in Python and has no frame, but raises KeyboardInterrupt.
    """
    # The chain may continue with an error that the caller of `next` handles just now.
    if handled is _PRESENT:
        handled = sys.exception()
    seen: set[int] = set()
    while error is not None and error is not handled and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        if any(_is_handler(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _is_handler(frame: FrameType) -> bool:
    if frame.f_back is None:
        return False
    names, varargs, _, values = inspect.getargvalues(frame)
    arguments = [values.get(name) for name in names]
    if varargs is not None:
        arguments.extend(values.get(varargs) or ())
    if _CACHES_LOCALS and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # The frame keeps this copy of its variables. With the error among them it would be a cycle.
        values.clear()
    return any(value is frame.f_back for value in arguments)
