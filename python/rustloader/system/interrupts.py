"""Distinguishes errors that signal handlers raise from errors that the interrupted code raises."""

from __future__ import annotations

import inspect
import sys
import traceback
from types import FrameType
from typing import Any

# Stands for the error that the caller of `is_interrupt` is handling.
_CURRENT: Any = object()
# Before Python 3.13, a function's frame keeps the dict of its variables that reading `f_locals` creates.
_CACHES_LOCALS = sys.version_info < (3, 13)


def is_interrupt(error: BaseException | None, handled: BaseException | None = _CURRENT) -> bool:
    """Returns True if a signal handler raised ``error`` or an error in its context chain.

    Python passes the interrupted frame to a handler as an argument, and this frame is also the handler's caller. Other
    functions do not take their caller's frame as an argument, so this argument identifies a handler, even one that was
    uninstalled before it raised. Python's own handler for Ctrl-C has no Python frame, but it raises KeyboardInterrupt.

    Args:
        error: The error.
        handled: The error at which the search along the context chain stops (default: the error that is being handled).
            A caller that is handling ``error`` itself must pass the error that was being handled before.
    """
    # Without a stop, the chain could continue with an error that the caller of `next` is handling.
    if handled is _CURRENT:
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
    """Returns True if one of the arguments of a frame's function is the frame of its caller."""
    if frame.f_back is None:
        return False
    names, varargs, _, values = inspect.getargvalues(frame)
    arguments = [values.get(name) for name in names]
    if varargs is not None:
        arguments.extend(values.get(varargs) or ())
    if _CACHES_LOCALS and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # The frame keeps this dict of its variables. If the error is one of them, the dict would create a cycle.
        values.clear()
    return any(value is frame.f_back for value in arguments)
