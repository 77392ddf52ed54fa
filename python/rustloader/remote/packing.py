"""Marks a thread that pickles something for other machines, where no memory of this one can be reached."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _State(threading.local):
    depth = 0


_state = _State()


def is_packing() -> bool:
    """Returns True if this thread is pickling something for another machine."""
    return _state.depth > 0


@contextlib.contextmanager
def packing() -> Iterator[None]:
    """Marks the pickles that are made in the body as going to another machine."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
