"""Implements the option ``worker_threads``: several threads of a worker make the samples of a batch."""

from __future__ import annotations

import logging
import operator
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("rustloader")

# Seconds between checks for a shutdown while threads make samples. A stuck thread delays a shutdown by no more than
# this.
_STOP_CHECK = 0.1


class ThreadedDataset:
    """A dataset whose samples are made by threads. torch's fetcher calls its ``__getitems__`` once per batch.

    Args:
        dataset: Map-style dataset.
        pool: The threads.
        before_sample: If not None, called in the thread before each sample, with the sample's position in the batch.
    """

    def __init__(self, dataset: Any, pool: Pool, before_sample: Callable[[int], None] | None) -> None:
        self._dataset, self._pool, self._before_sample = dataset, pool, before_sample

    def __getitems__(self, indices: Any) -> list[Any]:
        return self._pool.fetch(_Batch(self._dataset, indices, self._before_sample))


class Pool:
    """The threads of a worker, which start with the first batch.

    They are daemons: neither a shutdown nor the worker's exit waits for one that is stuck in a sample.

    Args:
        size: Number of threads.
        check: Raises an error if the worker has to stop; called every 0.1 s while threads make samples.
        on_thread_start: Called in each thread before its first sample.
    """

    def __init__(self, size: int, check: Callable[[], object], on_thread_start: Callable[[], object]) -> None:
        self._size, self._check, self._on_thread_start = size, check, on_thread_start
        self._started = 0
        self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()

    def fetch(self, batch: _Batch) -> list[Any]:
        """Returns a batch's samples in order, or raises the error of the first failed sample in that order."""
        self._start(batch.size)
        # No thread works on another batch: `fetch` has waited for the previous one.
        batch.threads = self._started
        for _ in range(self._started):
            self._batches.put(batch)
        while not batch.finished.wait(_STOP_CHECK):
            self._check()
        return batch.take()

    def _start(self, samples: int) -> None:
        """Starts the pool's threads, but no more than there are samples."""
        while self._started < min(self._size, max(samples, 1)):
            name = f"rustloader-sample-{self._started}"
            try:
                arguments = self._batches, self._on_thread_start
                threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()
            except RuntimeError as error:
                if not self._started:
                    raise
                logger.warning("worker_threads=%d: a worker uses only %d, because %s", self._size, self._started, error)
                self._size = self._started
            else:
                self._started += 1


def _serve(batches: queue.SimpleQueue[_Batch], on_thread_start: Callable[[], object]) -> None:
    on_thread_start()
    while True:
        # The batch is not bound to a name, because an idle thread must not keep its samples.
        batches.get().work()


class _Batch:
    """A batch from which threads take one sample after another."""

    def __init__(self, dataset: Any, indices: Iterable[Any], before_sample: Callable[[int], None] | None) -> None:
        self._dataset, self._before_sample = dataset, before_sample
        self.size = operator.length_hint(indices, sys.maxsize)
        self._indices = iter(indices)
        self._lock = threading.Lock()
        self._samples: list[Any] = []
        # The error at the lowest position, with that position. After an error, no further samples are started.
        self._error: tuple[int, BaseException] | None = None
        # Number of threads that are not done with the batch.
        self.threads = 0
        self.finished = threading.Event()

    def work(self) -> None:
        """Makes samples until there are no more."""
        while self._make_next():
            pass
        with self._lock:
            self.threads -= 1
            if self.threads == 0:
                self.finished.set()

    def _make_next(self) -> bool:
        with self._lock:
            place = len(self._samples)
            if self._error is not None:
                return False
            try:
                # In a worker, the iterator of indices checks for a shutdown and raises an error when there is one.
                index = next(self._indices)
            except StopIteration:
                return False
            except BaseException as error:
                self._error = place, error
                return False
            self._samples.append(None)
        try:
            if self._before_sample is not None:
                self._before_sample(place)
            self._samples[place] = self._dataset[index]
        except BaseException as error:
            self._keep_if_first(place, error)
        return True

    def _keep_if_first(self, place: int, error: BaseException) -> None:
        """Keeps an error unless one at a lower position is already kept."""
        with self._lock:
            if self._error is None or place < self._error[0]:
                self._error = place, error

    def take(self) -> list[Any]:
        """Returns the samples of a finished batch and drops its references to them, or raises the error at the lowest
        position."""
        samples, self._samples = self._samples, []
        error, self._error = self._error, None
        if error is None:
            return samples
        try:
            raise error[1]
        finally:
            # A frame that refers to its error forms a reference cycle.
            del error, samples
