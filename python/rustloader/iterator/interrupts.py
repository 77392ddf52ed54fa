"""Distinguishes errors raised by signal handlers from errors of the interrupted code."""

from __future__ import annotations

import functools
import signal
import traceback
import types
from typing import Any


def is_interrupt(error: BaseException | None) -> bool:
    """Whether a signal handler raised an error or one in its context chain.

    The traceback then has a frame of an installed handler. Python's own handler for Ctrl-C has no frame, but raises
    KeyboardInterrupt.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _code_of(handler: Any) -> types.CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    # SIG_DFL and SIG_IGN are integers.
    if callable(handler) and not isinstance(handler, (types.FunctionType, types.MethodType)):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
