"""Counts the failed samples of an epoch in the main process. The epoch ends once there are more than ``max_errors``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import BACK_BATCHES
from rustloader.errors import ErrorLimitExceeded
from rustloader.fetch.failures import Failure
from rustloader.metrics.faults import KEPT_FAILURES, Faults
from rustloader.settings import names
from rustloader.system.limited_log import faults as fault_log
from rustloader.system.protocols import LoaderLike

# Number of failures that the error message lists.
_LISTED = 3
# Number of earlier counts that are kept: at most two for each batch that a state can go back, plus those of the current
# batch.
_KEPT_COUNTS = 2 * (BACK_BATCHES + 2)
# Minimum number of samples by which a fractional `max_errors` is multiplied if the number of samples in an epoch is
# unknown. Once more samples have been delivered, their number is used instead.
FEWEST_SAMPLES = 1000


class FailureCount:
    """The number of failed samples in an iterator's epoch, and its limit.

    Args:
        faults: The statistics that count the failures of all epochs.
        limit: The option ``max_errors``; None for no limit.
        samples: Number of samples in an epoch; None if unknown.
        batch_size: Number of samples per batch, used if the number of samples in an epoch is unknown.
        title: The name of the loader in log messages.

    Attributes:
        allowed: Number of samples that may fail in an epoch; None if there is no limit, or if the limit depends on the
            number of delivered batches.
        error: A function that makes the error that ended the epoch; None as long as the failures are within the limit.
        epoch: Number of the iterator's current epoch.
        next_epoch: Number of the epoch that starts next. If an epoch fails to start, the next one takes its number.
        next_earlier: Number of failures in the next epoch before the position at which it resumes.
    """

    def __init__(
        self,
        faults: Faults,
        limit: float | None,
        samples: int | None,
        batch_size: int,
        title: str = "a DataLoader",
    ) -> None:
        self._title = title
        self._faults, self._limit, self._batch_size = faults, limit, batch_size
        self._is_fraction = isinstance(limit, float)
        self.allowed: int | None = None
        if limit is not None and not (self._is_fraction and samples is None):
            self.allowed = _fraction_of(limit, samples) if self._is_fraction and samples is not None else int(limit)
        self.next_epoch = self.next_earlier = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Resets the counters for the next epoch."""
        self.error: Callable[[], ErrorLimitExceeded] | None = None
        self.epoch = self.next_epoch
        self._count, self.next_earlier = self.next_earlier, 0
        self._first: list[Failure] = []
        # Pairs (delivered batches, failures), the latest one last. The failures are those in the delivered batches and
        # in any empty batches directly after them.
        self._counts = [(0, self._count)]

    def count_after(self, batches: int) -> int:
        """Returns the number of failures in this epoch up to the position at which ``batches`` batches had been
        delivered."""
        counts = self._counts
        return next((count for after, count in reversed(counts) if after <= batches), counts[0][1])

    def add(
        self, failures: list[Failure], batches: int, is_empty: bool = False
    ) -> Callable[[], ErrorLimitExceeded] | None:
        """Counts and logs the failures of a batch. Removes each failure from the list once it is counted, so that the
        call can be repeated after an interrupt.

        Args:
            failures: The failures of one batch. The list is empty afterwards.
            batches: Number of batches delivered in this epoch, counting this batch or, if it is empty, the next one.
            is_empty: Whether the batch has lost all its samples and is not delivered.

        Returns:
            A function that makes the error that ends the epoch; None as long as the failures are within the limit.
        """
        while failures:
            failed = failures[0]
            self._faults.note_failure(failed)
            if self._limit is not None and len(self._first) < KEPT_FAILURES:
                self._first.append(failed)
            self._count += 1
            del failures[0]
            # Logging comes last: it takes the longest, so it is the call that a signal is most likely to interrupt.
            name = "a sample" if failed.index is None else f"sample {failed.index}"
            text = "%s: %s failed and was %s: %s"
            fault_log.warning(text, self._title, name, failed.action, failed.error_text)
        if self._counts[-1][1] != self._count:
            # Makes a new list, because another thread may be reading the old one.
            self._counts = [*self._counts[-_KEPT_COUNTS:], (batches - is_empty, self._count)]
        if self._limit is not None and self._count > self._allowed_after(batches):
            self.error = functools.partial(ErrorLimitExceeded, self._text(), tuple(self._first))
        return self.error

    def _allowed_after(self, batches: int) -> int:
        if self.allowed is not None:
            return self.allowed
        assert self._limit is not None
        return _fraction_of(self._limit, max(batches * self._batch_size, FEWEST_SAMPLES))

    def _text(self) -> str:
        listed = "; ".join(
            it.error_text if it.index is None else f"sample {it.index}: {it.error_text}" for it in self._first[:_LISTED]
        )
        more = "; ..." if self._count > min(len(self._first), _LISTED) else ""
        count = "1 sample has" if self._count == 1 else f"{self._count} samples have"
        return (
            f"{count} failed in this epoch, which is more than max_errors={self._limit} allows ({listed}{more}); "
            "fix the samples listed in rustloader.stats(loader).faults.failures, or set a larger max_errors"
        )


def _fraction_of(fraction: float, samples: int) -> int:
    """Returns a fraction of a number of samples, rounded down. Tolerates rounding errors of floats: 0.29 of 100 is 29,
    although the product of the floats is slightly less."""
    return math.floor(fraction * samples + 1e-9)


def of(loader: LoaderLike, limit: float | None, faults: Faults) -> FailureCount:
    """Returns the failure count for a new iterator of a loader. ``limit`` is the loader's ``max_errors``."""
    sampler = loader._index_sampler
    batch_size = getattr(sampler, "batch_size", 1) if loader._auto_collation else 1
    return FailureCount(
        faults,
        limit,
        _samples_of(loader),
        batch_size if isinstance(batch_size, int) else 1,
        names.title(names.given(loader)),
    )


def _samples_of(loader: LoaderLike) -> int | None:
    """Returns the number of samples in an epoch, or None if it is unknown."""
    source = loader.dataset
    if loader._dataset_kind == _DatasetKind.Map:
        sampler = loader._index_sampler
        if type(sampler) is BatchSampler:
            source = sampler.sampler
        elif not loader._auto_collation:
            source = sampler
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
