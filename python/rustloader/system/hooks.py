"""Functions that other modules register to run in ``next``."""

from collections.abc import Callable

# Called before `next` takes a batch: always on torch's iterator, on the engine's iterator while `_core.observed()`.
before_next: list[Callable[[], object]] = []


def run() -> None:
    """Calls the registered functions."""
    # A copy, because the functions may change the list.
    for function in list(before_next):
        function()
