"""The settings that a sweep varies: the number of workers, and options that torch does not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from rustloader.system.formatting import count_of

# Options that `bench` can sweep, with the headings of their columns.
SWEPT = {"dispatch": "dispatch", "reorder_window": "window", "worker_threads": "threads"}


class Setting(NamedTuple):
    """The settings of a loader.

    ``workers`` is None for the factory's num_workers. ``options`` are the swept options, as pairs of name and value.
    """

    workers: int | None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Formats the setting: "2 workers, dispatch=shared_queue"; empty if nothing is varied."""
        workers = () if self.workers is None else (count_of(self.workers, "worker"),)
        return ", ".join((*workers, *(f"{name}={value}" for name, value in self.options)))

    @property
    def keywords(self) -> str:
        """The setting as keyword arguments: "num_workers=2, dispatch='shared_queue'"."""
        return ", ".join(f"{name}={value!r}" for name, value in (("num_workers", self.workers), *self.options))


# The setting of torch's own loop, which has no options.
TORCH_LOOP = Setting(0)


def settings_of(arguments: Any) -> Iterator[Setting]:
    """Yields each combination of the values on the command line, and torch's own loop, which is always measured.

    The loop comes last, so that the first setting already reveals a loader that cannot be used.
    """
    varied = [[(name, value) for value in values] for name in SWEPT if (values := getattr(arguments, name))]
    for workers in arguments.workers or [None]:
        if workers != 0:
            yield from (Setting(workers, options) for options in itertools.product(*varied))
    yield TORCH_LOOP
