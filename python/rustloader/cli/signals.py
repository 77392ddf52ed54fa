"""Signals that end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["Terminated", "terminable"]


class Terminated(BaseException):
    """SIGTERM or SIGHUP; the argument is the signal's number."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``Terminated``, so that the processes of a command end with it."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
