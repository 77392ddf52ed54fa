"""The iterator of a StatefulDataLoader without workers: torch's iterator, started at a position."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from rustloader._core import BACK_BATCHES, call_into, observed
from rustloader.fetch.failures import EmptyBatchError, Failure
from rustloader.fetch.inline import StepFetcher
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import adaptation, fetches
from rustloader.iterator.single import prepare_fetcher
from rustloader.iterator.torch_messages import warn_of_length
from rustloader.settings.config import resolve
from rustloader.stateful_dataloader.origin import Origin
from rustloader.stateful_dataloader.schema import DatasetState, Draws, copied
from rustloader.stateful_dataloader.stateful_epoch import StatefulEpoch, ordinals, own_copy, worker_after
from rustloader.system.interrupts import is_interrupt
from rustloader.system.protocols import StatefulLoaderLike
from rustloader.workers import resuming
from rustloader.workers.snapshots import SnapshotPolicy, Snapshots, WorkerStart, read


class _StatefulSingleProcessIter(_SingleProcessDataLoaderIter):
    """The iterator of a StatefulDataLoader without workers."""

    finished = False
    # Number of answers before the index batch in `_drawn`.
    _drawn_at = -1

    def __init__(self, loader: StatefulLoaderLike, origin: Origin, about_dataset: DatasetState) -> None:
        self._epoch = StatefulEpoch(loader, origin, about_dataset)
        self._start = start = origin.workers[0] if origin.workers else WorkerStart()
        # The index batch that is being fetched. After an interrupt, it remains here for the next call.
        self._drawn: list[Any] = []
        # The batch whose failures are being counted.
        self._kept: list[Any] = []
        # The failures that are being counted: those of the batch or, if there is none, of a batch that has lost all its
        # samples. None if they are still to be read. After an interrupt, the next call counts the rest.
        self._uncounted: list[Failure] | None = None
        # For each error, the number of answers before it.
        self._errors: list[int] = []
        # The latest snapshots, each with the number of answers before it.
        self._snapshots: list[tuple[int, bytes]] = []
        loading = resuming.Loading(loader.dataset, start)
        self._epoch.init_torch_iterator(self, super().__init__, loader)
        loading.load_iterator(self._dataset_fetcher)
        self._snapshot_maker = Snapshots(SnapshotPolicy(self._epoch.every, origin.low), 1, self._dataset_kind)
        config = adaptation.adapted(loader, resolve(loader).changed(worker_threads=1))
        self._epoch.seed_from(Seeding.of(loader, config, int(self._base_seed)))
        # The count of failed samples; None if `on_error` is "raise".
        self._failures = prepare_fetcher(self, loader, config, self._epoch.seeding, origin.epoch)
        if self._failures is not None:
            self._failures.next_earlier = origin.failures
            self._failures.begin_epoch()
        if isinstance(self._dataset_fetcher, StepFetcher):
            resuming.load_counters(self._dataset_fetcher.seeds, start)
        self._sampler_iter = self._resume_sampler(self._sampler_iter, loading.before)
        self._num_yielded = origin.yielded
        fetches.observe(self, loader, config)

    def _resume_sampler(self, torch_iterator: Iterator[Any], before: bytes | None) -> Iterator[Any]:
        """Takes the first snapshot, with ``Loading.before``. Replays the batches between the saved snapshot and the
        position. Returns the remaining index batches."""
        start, low = self._start, self.origin.low
        fetcher, count = self._dataset_fetcher, start.replayed
        with contextlib.suppress(Exception):  # `state` raises the error again
            first = self._snapshot_maker.first(fetcher, self._dataset, before)
            if self._snapshot_maker.has_state:
                self._snapshots.append((0, first))
        is_map = self._dataset_kind == _DatasetKind.Map
        self._epoch.sampling = sampling = self._epoch.sample_from(
            self, self.origin, torch_iterator, low - count if is_map else low
        )
        if count:
            if is_map:
                batches: Any = [own_copy(batch) for batch in itertools.islice(sampling.iterator, count)]
            else:
                # The index batches of an iterable dataset are all the same.
                batches = itertools.repeat(next(iter(self._index_sampler)), count)
            resuming.replay(fetcher, batches, self._dataset_kind)
        return sampling.iterator

    @property
    def origin(self) -> Origin:
        """The origin of the epoch."""
        return self._epoch.origin

    @property
    def raised(self) -> int:
        """Number of answers in the epoch that were errors. A prefetcher reads it."""
        return self._epoch.raised

    def delivered_nothing(self) -> bool:
        """Returns True if the epoch has delivered nothing, and has not ended."""
        return self._epoch.delivered_nothing(self) and not self.finished

    def __next__(self) -> Any:
        if observed():
            with torch.autograd.profiler.record_function(self._profile_name):
                data = self._next_data()
        else:
            data = self._next_data()
        # No calls from here on (see `call_into`): if a signal handler raised during a call, a batch that was already
        # counted as delivered would be lost.
        self._num_yielded += 1
        length: Any = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            warn_of_length(self)
        return data

    def _next_data(self) -> Any:
        count = self._failures
        if count is None:
            return self._next_answer()
        while count.error is None:
            if not self._kept and self._uncounted is None:
                with contextlib.suppress(EmptyBatchError):
                    self._kept = [self._next_answer()]
            if self._uncounted is None:
                self._uncounted = self._dataset_fetcher.step.guard.failures()
            count.add(self._uncounted, self._num_yielded + 1, is_empty=not self._kept)
            if self._kept and count.error is None:
                # Atomic for signal handlers.
                data, self._kept, self._uncounted = self._kept[0], [], None
                return data
            self._uncounted = None
        self._kept = []
        raise count.error()

    def _next_answer(self) -> Any:
        """Fetches the next batch."""
        answers = self._epoch.answers(self._num_yielded)
        if self._drawn_at != answers:
            if answers == 0:
                self._renew_first_snapshot()
            self._drawn.clear()
            self._drawn_at = answers
        elif self._drawn and isinstance(self._dataset_fetcher, StepFetcher):
            self._dataset_fetcher.number = answers
        if not self._drawn:
            try:
                call_into(self._drawn, next, self._sampler_iter)
            except StopIteration:
                self._end()
                raise
        handled = sys.exception()
        try:
            data = self._dataset_fetcher.fetch(self._drawn[0])
            if self._pin_memory:
                data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            # If a signal handler raised the error, the next call fetches the batch again.
            if not is_interrupt(error, handled):
                self._errors.append(answers)
                lost = error.failures if isinstance(error, EmptyBatchError) else None
                # Atomic for signal handlers.
                self._uncounted = lost
                self._epoch.raised += 1
            raise
        if self._snapshot_maker.has_state:
            self._keep_snapshot(answers)
        return data

    def _end(self) -> None:
        if not self.finished:
            self._epoch.warn_if_empty(self)
        self.finished = True

    def _renew_first_snapshot(self) -> None:
        """Makes the sampler's draws, and then the first snapshot again: a generator that they change may be part of it.

        Comes before ``_drawn_at`` is set, because from then on other threads use the snapshot.
        """
        is_map = self._dataset_kind == _DatasetKind.Map
        if is_map and self._snapshot_maker.has_state and not self._start.has_state:
            with contextlib.suppress(Exception):  # `next` or `state` raises the error again
                self._epoch.sampling.draw()
                self._snapshots = [(0, self._snapshot_maker.make(self._dataset_fetcher, self._dataset))]

    def _keep_snapshot(self, answers: int) -> None:
        made = self._snapshot_maker.after(self.origin.low + answers, self._dataset_fetcher, self._dataset)
        if made is None:
            return
        kept = self._snapshots
        # Keeps the newest snapshot at or before the oldest position for which a state can be requested, and all later
        # snapshots.
        first = 0
        while first + 1 < len(kept) and kept[first + 1][0] <= answers - BACK_BATCHES:
            first += 1
        # A new list, because another thread may be reading the old list.
        self._snapshots = [*kept[first:], (answers + 1, made)]

    def _answers_before(self, answers: int, back: int) -> int:
        """Returns the number of answers before the last ``back`` batches among the first ``answers`` answers."""
        if back > BACK_BATCHES:
            raise ValueError(f"back must be {BACK_BATCHES} or less, got {back}")
        while back:
            answers -= 1
            if answers < 0:
                raise ValueError(
                    "back must not be larger than the number of batches delivered since the epoch began or was resumed"
                )
            back -= answers not in self._errors
        return answers

    def state(
        self, back: int, finished: bool, draws: Draws | None = None, *, before_error: bool = False
    ) -> dict[str, Any]:
        """Returns the state after the last delivered batch. The arguments are as for the iterator with workers."""
        # Read only once, because another thread may be in `next`.
        yielded = self._num_yielded
        answers = self._epoch.answers(yielded) - before_error
        if back:
            answers = self._answers_before(answers, back)
        low, ahead = ordinals(self.origin, answers, [])
        # The draws come before the dataset's state, which may include the state of a generator.
        self._epoch.sampling.draw()
        worker = self._worker(answers, back == 0 and not before_error, finished)
        sampler = self._epoch.sampling.state(low - worker.replayed if self._dataset_kind == _DatasetKind.Map else low)
        yielded -= back
        return self._epoch.state(
            self,
            low=low,
            ahead=ahead,
            yielded=yielded,
            finished=finished,
            sampler=sampler,
            workers=[worker],
            has_records=True,
            failures=self._failures_after(yielded),
            next=draws,
        )

    def _worker(self, answers: int, is_last: bool, finished: bool) -> WorkerStart:
        """Returns the start from which the dataset and the fetcher resume after a number of answers.

        ``is_last`` is True if these are all answers so far.
        """
        maker, start, snapshot = self._snapshot_maker, self._start, None
        is_at_start = answers == 0 and start.has_state and not finished
        if is_last and maker.has_state and not is_at_start and (finished or self._drawn_at != answers):
            snapshot = maker.state(self._dataset_fetcher, self._dataset)
            snapshot.dataset_state = copied(snapshot.dataset_state)
            snapshot.iterator_state = copied(snapshot.iterator_state)
            if not finished and self._drawn_at == answers:
                # Meanwhile, another thread has begun the next batch, so the snapshot may include a part of it.
                snapshot = None
        if snapshot is not None:
            # The snapshot includes the replayed batches.
            worker = worker_after(start, answers, answers + finished, snapshot)
            worker.replay = 0
        else:
            worker = worker_after(start, answers, *self._newest_snapshot(answers))
        self._epoch.warn_if_frozen(self, worker)
        if not maker.has_state:
            if self._dataset_kind == _DatasetKind.Map:
                worker.replay = 0
            elif is_last:
                worker.ended = bool(getattr(self._dataset_fetcher, "ended", False))
        return worker

    def _failures_after(self, yielded: int) -> int:
        return self.origin.failures if self._failures is None else self._failures.count_after(yielded)

    def _newest_snapshot(self, answers: int) -> tuple[int, WorkerStart | None]:
        """Returns the number of answers before the newest snapshot, and the snapshot.

        Only snapshots after at most ``answers`` answers count. Returns 0 and None if there is none.
        """
        for after, payload in reversed(self._snapshots):
            if after <= answers:
                return after, read(payload)
        return 0, None
