"""Keeping samples in the table of a cache, and comparing those that another program has stored there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rustloader._core import CacheTable
from rustloader.caching.comparing import Outcome, are_equal, compare
from rustloader.caching.nodes import Origin
from rustloader.caching.usage import CacheUsage
from rustloader.caching.wrapper import Wrapper
from rustloader.sharing.pickling import dumps
from rustloader.system.generators import GeneratorStates

logger = logging.getLogger("rustloader")

MISSING = object()
# Bits of the events that are logged. Each is logged once, by one of the processes that use the cache.
_FULL, RANDOM, _REFUSED, _FAILED, EPOCH, INDEX = 1, 2, 4, 8, 16, 32
_T_co = TypeVar("_T_co", covariant=True)


def usage_of(table: CacheTable) -> CacheUsage:
    """Returns the usage of a cache."""
    return CacheUsage(**table.usage())


class Keeping(Wrapper[_T_co]):
    """The part of a cached dataset that keeps samples."""

    table: CacheTable
    _origin: Origin

    def _make_again(self, index: Any) -> Any:
        """Makes a sample a second time, for comparison."""
        return self.dataset[index]

    def _keep(self, row: int, index: Any, sample: Any) -> None:
        """Keeps a sample that was just made."""
        if self.table.takes(row):
            try:
                self._store(partial(self.table.put, row, sample, dumps))
            except Exception as error:
                self.table.never(row)
                if self.table.first_time(_REFUSED):
                    logger.warning(
                        "cache(): sample %d (%s) cannot be kept and is made each time: %s",
                        row,
                        type(sample).__name__,
                        f"{type(error).__name__}: {error}",
                    )
        if self.table.is_due(row):
            # Another program has stored this row in the meantime.
            self._compare(row, index, sample)

    def _store(self, store: Callable[[], str | None]) -> None:
        """Calls a function that stores samples, and logs why the cache accepts no more."""
        try:
            full = store()
        except MemoryError:
            # Only the cache lacks memory. The samples themselves have been made.
            return
        except OSError as error:
            if self.table.first_time(_FAILED):
                logger.warning("cache(): samples can no longer be written; the cache accepts no more: %s", error)
            return
        if full is not None and self.table.first_time(_FULL):
            self._log_full_cache(full)

    def _log_full_cache(self, why: str) -> None:
        usage = usage_of(self.table)
        kept = usage.samples_bytes
        if why == "full":
            text = (
                "cache(): the limit of %d bytes is reached: %d bytes of samples are kept; the others are made each time"
            )
            logger.info(text, usage.limit, kept)
        else:
            text = "cache(): no room for more samples: %d bytes of samples are kept; the others are made each time"
            logger.warning(text, kept)

    def _probe(self, row: int, index: Any, sample: Any) -> bool:
        """Makes one of the first samples a second time, and warns that the dataset is random if the two differ. Returns
        False if this sample is not one of the first, or is not kept."""
        if not (self.table.takes(row) and self.table.take_probe()):
            return False
        with GeneratorStates():
            try:
                again = self._make_again(index)
            except Exception as error:
                logger.debug("cache(): sample %d cannot be made a second time: %r", row, error)
                return True
        if not are_equal(sample, again):
            self._warn_of_randomness(row)
        return True

    def _warn_of_randomness(self, row: int) -> None:
        if self.table.first_time(RANDOM):
            logger.warning(
                "cache(): sample %d of %s differs when it is made again: the cache keeps the first result, so all "
                "epochs see the same sample. Move random steps into a function of the sample, and pass that as then=",
                row,
                type(self.dataset).__name__,
            )

    # Samples in a file that another program has stored

    def _due_sample(self, row: int, index: Any) -> Any:
        """Returns the sample of a row that must be compared before it is used."""
        if not self.table.is_due(row):
            return MISSING
        self._compare(row, index)
        return self.table.get(row, MISSING)

    def _compare(self, row: int, index: Any, made: Any = None) -> None:
        """Compares the sample of a row with that of the dataset, which may have ``made`` it already.

        Raises:
            ValueError: They differ, or two others did: the file belongs to another dataset.
        """
        table = self.table
        if (differing := table.differing_row) is None:
            start = time.perf_counter()
            kept = table.peek(row, MISSING)
            if kept is MISSING:
                return
            outcome = compare(kept, partial(self._make_again, index), made)
            table.compared(row, outcome is not Outcome.OTHER, time.perf_counter() - start)
            if outcome is Outcome.RANDOM:
                self._warn_of_randomness(row)
            if outcome is not Outcome.OTHER:
                return
            differing = row
        raise ValueError(
            f"{self._origin.path} is the cache of another dataset: sample {differing} of {type(self.dataset).__name__} "
            "differs there; give another path, or remove the file. Pass another version= whenever the samples change"
        )
