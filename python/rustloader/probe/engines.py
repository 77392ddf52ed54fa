"""The two engines that commands put a loader of the user's on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rustloader

__all__ = ["ENGINES", "on_torch"]


@contextlib.contextmanager
def on_torch() -> Iterator[None]:
    """torch's iterator for every loader, for those of our class as well."""
    from rustloader.dataloader import DataLoader

    ours = DataLoader._get_iterator
    del DataLoader._get_iterator
    try:
        yield
    finally:
        DataLoader._get_iterator = ours  # type: ignore[method-assign]


# By the names under which results are told.
ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "torch": on_torch,
    "rustloader": rustloader.installed,
}
