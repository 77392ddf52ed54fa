"""Functions that other packages register to run in ``next``."""

from collections.abc import Callable

# Run before `next` takes a batch: always on torch's iterator, and on the engine's while `_core.observed()`.
before_next: list[Callable[[], object]] = []


def run() -> None:
    # Iterates over a copy: functions may change the list.
    for function in list(before_next):
        function()
