"""Functions that ``next`` of the iterators calls for other packages, which register them here."""

from __future__ import annotations

from collections.abc import Callable

# Called before `next` takes a batch: at each `next` of torch's iterator, and of the engine's while `_core.observed()`.
before_next: list[Callable[[], object]] = []


def run() -> None:
    """Calls the registered functions."""
    # A copy: a function may register others, or itself out.
    for function in list(before_next):
        function()
