"""The state that rustloader keeps for a loader from one iterator to the next.

Copies and pickles of a loader must include three parts of this state, so they are attributes of the loader: the options
that its constructor was given, the base seed and epoch count of ``seed_by``, and the number of workers that "auto" has
set. All other parts are in a `LoaderState` in a weak table, so that the loader has no further attributes that torch's
lacks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rustloader.system.protocols import IteratorLike, LoaderLike
from rustloader.system.weak_table import WeakTable

if TYPE_CHECKING:
    from rustloader._core import WarmPages

# The names of the options that the constructor was given. Without this list, an attribute or method of a subclass could
# be mistaken for an option of the same name.
GIVEN = "_rustloader_options"
# The base seed of the first epoch, and the number of epochs that have started. Only loaders with `seed_by` have this.
EPOCHS = "_rustloader_epochs"
# The number of workers that "auto" set last. If `num_workers` differs from it, the program has changed `num_workers`.
AUTO = "_rustloader_auto"


class LoaderState:
    """The part of a loader's state that is kept in this process as long as the loader or one of its iterators lives."""

    def __init__(self) -> None:
        # The `rustloader.auto.tuner.Tuner` of a loader with num_workers="auto".
        self.tuner: Any = None
        # The file and line that created the loader; None if its constructor has not recorded them.
        self.origin: tuple[str, int] | None = None
        self._logged: set[str] = set()

    @functools.cached_property
    def pages(self) -> WarmPages:
        """The pages of memory that are kept for the next epoch. They are freed together with this state, after the
        loader and its iterators are gone."""
        from rustloader._core import WarmPages

        return WarmPages()

    def first_time(self, text: str) -> bool:
        """Returns True if a message has not been logged for the loader yet. Records it as logged, so that a later call
        with the same message returns False."""
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new


_states: WeakTable[LoaderState] = WeakTable()


def of(source: object) -> LoaderState:
    """Returns the state of a loader; ``source`` is the loader or one of its iterators. Creates the state if there is
    none."""
    return _states.find(source) or _states.keep(source, LoaderState())


def find(source: object) -> LoaderState | None:
    """Returns the state of a loader, or None if there is none; ``source`` is the loader or one of its iterators."""
    return _states.find(source)


def share(iterator: IteratorLike, loader: LoaderLike) -> None:
    """Makes an iterator share the state of its loader. The iterator must hold the state itself, because it keeps no
    reference to the loader."""
    _states.keep(iterator, of(loader))


def given(loader: LoaderLike, name: str) -> Any:
    """Returns a loader's value of an option; None if the option was not given to the loader's constructor."""
    names = getattr(loader, GIVEN, ())
    return getattr(loader, name, None) if type(names) is tuple and name in names else None


def give(loader: LoaderLike, values: dict[str, Any]) -> None:
    """Sets options of a loader as its constructor does: as attributes, because frameworks rebuild loaders from them."""
    for name, value in values.items():
        setattr(loader, name, value)
    if values:
        setattr(loader, GIVEN, tuple(dict.fromkeys((*getattr(loader, GIVEN, ()), *values))))


def epochs(loader: LoaderLike) -> tuple[int, int] | None:
    """Returns a loader's base seed and the number of its next epoch; None before its first epoch with ``seed_by``."""
    return getattr(loader, "__dict__", {}).get(EPOCHS)


def set_epochs(loader: LoaderLike, base_seed: int, epoch: int) -> None:
    # Not `setattr`, because the loader's class may refuse new attributes.
    object.__setattr__(loader, EPOCHS, (base_seed, epoch))


def forget_epochs(loader: LoaderLike) -> None:
    """Makes the next epoch of a loader its first one, with a new base seed."""
    vars(loader).pop(EPOCHS, None)


def has_auto(loader: LoaderLike) -> bool:
    """Returns True if a loader was created with "auto", and the program has not set another number of workers since."""
    return type(number := getattr(loader, AUTO, None)) is int and number == loader.num_workers


def forget_auto(loader: LoaderLike) -> None:
    """Turns "auto" off for a loader, which keeps its current number of workers."""
    vars(loader).pop(AUTO, None)


def set_auto(loader: LoaderLike, count: int) -> None:
    """Sets the number of workers of a loader with "auto"."""
    loader.num_workers = count
    setattr(loader, AUTO, count)
