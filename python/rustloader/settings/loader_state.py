"""The state of a loader that rustloader keeps from one iterator to the next.

Parts that travel with copies and pickles of a loader are its attributes: the options that its constructor was given,
the epochs with ``seed_by``, and the number that "auto" has set. Everything else is a `LoaderState`, in a weak table: it
keeps the loader's attributes the same as torch's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rustloader.system.protocols import IteratorLike, LoaderLike
from rustloader.system.weak_table import WeakTable

if TYPE_CHECKING:
    from rustloader._core import WarmPages

# The options that the constructor was given. Programs have attributes and methods of these names of their own.
GIVEN = "_rustloader_options"
# The base seed of the first epoch, and the number of epochs that have begun. Only loaders with ``seed_by`` have it.
EPOCHS = "_rustloader_epochs"
# The number of workers that "auto" has last set. Another `num_workers` is the program's own.
AUTO = "_rustloader_auto"


class LoaderState:
    """The state of a loader that is kept as long as it lives in this process."""

    def __init__(self) -> None:
        # Of a loader with num_workers="auto": rustloader.auto.tuner.Tuner.
        self.tuner: Any = None
        # The file and the line that made the loader, if a constructor has noted them.
        self.origin: tuple[str, int] | None = None
        self._logged: set[str] = set()

    @functools.cached_property
    def pages(self) -> WarmPages:
        """Pages that wait for the next epoch. They go with the loader and its iterators, as this does."""
        from rustloader._core import WarmPages

        return WarmPages()

    def is_new(self, text: str) -> bool:
        """Returns True if a text was not yet logged for the loader, and notes it as logged."""
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new


_states: WeakTable[LoaderState] = WeakTable()


def of(source: object) -> LoaderState:
    """Returns the state of a loader, created if there is none, or of the loader of an iterator."""
    return _states.find(source) or _states.keep(source, LoaderState())


def find(source: object) -> LoaderState | None:
    """Returns the state of a loader, or of the loader of an iterator, if there is one."""
    return _states.find(source)


def share(iterator: IteratorLike, loader: LoaderLike) -> None:
    """Lets an iterator, which keeps no loader, have the state of its loader."""
    _states.keep(iterator, of(loader))


def given(loader: LoaderLike, name: str) -> Any:
    """Returns the value of an option that a loader's constructor was given, or None."""
    names = getattr(loader, GIVEN, ())
    return getattr(loader, name, None) if type(names) is tuple and name in names else None


def give(loader: LoaderLike, values: dict[str, Any]) -> None:
    """Sets options of a loader as its constructor does. Frameworks rebuild a loader from its attributes."""
    for name, value in values.items():
        setattr(loader, name, value)
    if values:
        setattr(loader, GIVEN, tuple(dict.fromkeys((*getattr(loader, GIVEN, ()), *values))))


def epochs(loader: LoaderLike) -> tuple[int, int] | None:
    """Returns the base seed of a loader and the number of the epoch that it begins next; None before its first epoch
    with ``seed_by``.
    """
    return getattr(loader, "__dict__", {}).get(EPOCHS)


def set_epochs(loader: LoaderLike, base_seed: int, epoch: int) -> None:
    # Past a class that refuses attributes.
    object.__setattr__(loader, EPOCHS, (base_seed, epoch))


def forget_epochs(loader: LoaderLike) -> None:
    """Makes the next epoch of a loader its first one: it takes a new base seed."""
    vars(loader).pop(EPOCHS, None)


def has_auto(loader: LoaderLike) -> bool:
    """Returns True if a loader was made with "auto", and its program has set no other number since."""
    return type(number := getattr(loader, AUTO, None)) is int and number == loader.num_workers


def forget_auto(loader: LoaderLike) -> None:
    """Makes the current number of workers of a loader its own."""
    vars(loader).pop(AUTO, None)


def set_auto(loader: LoaderLike, count: int) -> None:
    """Sets the number of workers of a loader with "auto"."""
    loader.num_workers = count
    setattr(loader, AUTO, count)
