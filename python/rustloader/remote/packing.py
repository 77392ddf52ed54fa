"""Marks a thread that pickles objects for other machines, which cannot access this machine's shared memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _State(threading.local):
    depth = 0


_state = _State()


def is_packing() -> bool:
    """Returns True if this thread is pickling objects for another machine."""
    return _state.depth > 0


@contextlib.contextmanager
def packing() -> Iterator[None]:
    """Marks this thread as pickling objects for another machine while the body of a ``with`` statement runs."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
