"""Functions that other modules register to be called by ``next``."""

from collections.abc import Callable

# Called before `next` takes a batch: on torch's iterator always, on the engine's iterator only while `_core.observed()`
# returns True.
before_next: list[Callable[[], object]] = []


def run() -> None:
    """Calls the registered functions."""
    # Iterates over a copy, because the functions may change the list.
    for function in list(before_next):
        function()
