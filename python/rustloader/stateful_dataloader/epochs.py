"""The epochs of a StatefulDataLoader with workers: each starts at a position, and has a state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import BACK_BATCHES, Death, Engine, Snapshot
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import adaptation
from rustloader.iterator.epochs import Epochs
from rustloader.iterator.torch_messages import timed_out
from rustloader.settings.config import LoaderConfig
from rustloader.stateful_dataloader.origin import Origin
from rustloader.stateful_dataloader.sampling import Sampling
from rustloader.stateful_dataloader.schema import DatasetState, Draws
from rustloader.stateful_dataloader.set_epoch import EpochRecorder
from rustloader.stateful_dataloader.stateful_epoch import StatefulEpoch, ordinals, own_copy, worker_after
from rustloader.system.protocols import LoaderLike, StatefulLoaderLike, WorkersIterator
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import SnapshotPolicy, WorkerStart, read, read_error


class StatefulEpochs(StatefulEpoch, Epochs):
    """Epochs that start at a position.

    Args:
        loader: The loader.
        origin: The origin of the first epoch.
        dataset: The description of the dataset for states.
        epoch_recorder: The recorder of the dataset's ``set_epoch``; None if workers need none.
    """

    # The snapshots of each worker, kept when the engine ends; None while it runs.
    _kept_snapshots: list[list[Snapshot]] | None = None
    # True once all workers have started.
    _started = False
    # The index batches of the next epoch that remain after those to replay; None if they can be drawn again.
    _sampling_begun: Sampling | None = None
    # True once the engine has begun the epoch.
    _has_begun = False

    def __init__(
        self, loader: StatefulLoaderLike, origin: Origin, dataset: DatasetState, epoch_recorder: EpochRecorder | None
    ) -> None:
        super().__init__(loader, origin, dataset)
        # The origin of the next epoch, until that epoch has begun.
        self._next: Origin | None = origin
        self._epoch_recorder = epoch_recorder
        # For a map-style dataset without a state, the position is enough.
        self._has_states = dataset.is_iterable or bool(dataset.stateful)
        self._wants_snapshots = self._has_states or loader.worker_init_fn is not None
        # If workers were replaced between epochs, the states of their datasets would be lost.
        self.may_change_workers = not dataset.stateful

    def adapted(self, loader: LoaderLike, config: LoaderConfig) -> LoaderConfig:
        config = super().adapted(loader, config)
        if self.dataset.stateful:
            config = adaptation.round_robin(loader, config, "a stateful dataset")
        return config.changed(snapshots=self._wants_snapshots)

    def seed(self, it: WorkersIterator, loader: LoaderLike, config: LoaderConfig) -> None:
        self.seed_from(Seeding.of(loader, config, int(it._base_seed)))

    # An epoch begins.

    def begin_next_at(self, it: WorkersIterator, origin: Origin) -> None:
        """Sets the origin of a persistent loader's next epoch."""
        self._next = dataclasses.replace(origin, base_seed=int(it._base_seed))

    def beginning(self, it: WorkersIterator) -> None:
        origin = self._next_origin(it)
        if self.failures is not None:
            # The loader counts the epochs, so a resumed epoch keeps its number.
            self.failures.next_epoch, self.failures.next_earlier = origin.epoch, origin.failures

    def _next_origin(self, it: WorkersIterator) -> Origin:
        """Returns the origin of the epoch that is about to begin; after a failed start, the same origin again."""
        if self._next is None:
            self._next = Origin(base_seed=int(it._base_seed), epoch=self.origin.epoch + 1)
        origin = self._next
        if not self.on_engine and it._dataset_kind == _DatasetKind.Iterable:
            # torch's workers start at the first sample, so the batches before the position are dropped.
            return Origin(base_seed=origin.base_seed, epoch=origin.epoch, drop=origin.yielded + origin.drop)
        return origin

    def first_worker(self, it: WorkersIterator) -> int:
        return self.origin.first_worker if self.origin.num_workers == it._num_workers else 0

    def index_batches(self, it: WorkersIterator, torch_iterator: Iterator[Any]) -> Any:
        # From here on, states describe the new epoch. None of the program's code has run since the counters were reset.
        origin = self._next_origin(it)
        begun, self._sampling_begun = self._sampling_begun, None
        self.sampling = begun or self.sample_from(it, origin, torch_iterator, origin.low)
        self._kept_snapshots = None
        self._started = self._has_begun = False
        self.origin, self.raised, it._num_yielded = origin, 0, origin.yielded
        return self.sampling.iterator

    def message(self, loader: LoaderLike) -> dict[str, Any]:
        message = super().message(loader)
        set_epoch = None if self._epoch_recorder is None else self._epoch_recorder.since_last_epoch()
        return message if set_epoch is None else message | {"set_epoch": set_epoch}

    def next_message(self) -> dict[str, Any] | None:
        # An epoch must not begin early with a `set_epoch`: if the program then passes another epoch, the dataset cannot
        # undo the call.
        has_set_epoch = self._epoch_recorder is not None and self._epoch_recorder.in_force is not None
        return None if has_set_epoch else super().next_message()

    def engine_begun(self, it: WorkersIterator, engine: Engine, is_first: bool) -> None:
        if is_first and it._worker_init_fn is not None:
            self._raise_failed_start(it, engine)
        elif not is_first and self._has_states:
            # The states that persistent workers keep from the last epoch are only in their first snapshots.
            self._await_started(it, engine)
        if self._epoch_recorder is not None:
            self._epoch_recorder.note_begun()

    def begun(self, it: WorkersIterator) -> None:
        self._has_begun, self._next = True, None

    def owes_an_epoch(self) -> bool:
        # The engine may already have begun the new epoch, and there would be no exact state for its batches.
        return not self._has_begun

    def _await_started(self, it: WorkersIterator, engine: Engine) -> None:
        if engine.wait_started(it._timeout) is None:
            raise timed_out(it)

    def _raise_failed_start(self, it: WorkersIterator, engine: Engine) -> None:
        """Waits until all workers have started. Raises the error if worker_init_fn or iter(dataset) failed.

        All workers are shut down before the error is raised.
        """
        self._await_started(it, engine)
        for worker in range(it._num_workers):
            snapshot = engine.snapshot(worker, 0)
            if snapshot is None or not snapshot.is_error:
                continue
            error, of_state = read_error(snapshot.payload)
            if not of_state:
                it._shutdown_workers()
                error.reraise()

    # Workers.

    def complete(self, job: Job) -> None:
        job.epoch = self.origin.epoch if self._next is None else self._next.epoch
        if self._wants_snapshots:
            job.snapshots = SnapshotPolicy(self.every, self.origin.low)

    def complete_first(self, it: WorkersIterator, job: Job) -> None:
        self._kept_snapshots, origin = None, self._next
        # If there is no origin, a persistent loader is starting new processes, for an epoch from its beginning.
        if origin is not None and origin.workers and self._has_states:
            job.starts = self._starts(it, origin)

    def complete_next(self, job: Job) -> None:
        # Sends the call for this epoch, because the program may already have called `set_epoch` for a later epoch.
        job.set_epoch_call = None if self._epoch_recorder is None else self._epoch_recorder.in_force

    def _starts(self, it: WorkersIterator, origin: Origin) -> list[WorkerStart | None]:
        """Returns the start of each worker. For a map-style dataset, a start includes the index batches to replay."""
        if it._dataset_kind == _DatasetKind.Iterable:
            return [*origin.workers]
        wanted = [_last_ordinals(origin, worker) for worker in range(it._num_workers)]
        oldest = min((numbers[0] for numbers in wanted if numbers), default=origin.low)
        begun = self.sample_from(it, origin, iter(it._index_sampler), oldest)
        drawn = zip(range(oldest, origin.low), begun.iterator, strict=False)
        batches = {ordinal: own_copy(batch) for ordinal, batch in drawn}
        if not begun.is_repeatable:
            self._sampling_begun = begun
        return [
            dataclasses.replace(start, replay=[batches[ordinal] for ordinal in numbers if ordinal in batches])
            for start, numbers in zip(origin.workers, wanted, strict=True)
        ]

    def start_after(self, it: WorkersIterator, engine: Engine, death: Death) -> WorkerStart | None:
        if not self._has_states:
            return super().start_after(it, engine, death)
        worker, answers = death.worker_id, death.answers
        snapshot = engine.snapshot(worker, answers)
        while snapshot is not None and snapshot.is_error:
            # This snapshot has an error instead of a state, so an earlier snapshot is used.
            snapshot = engine.snapshot(worker, snapshot.answers - 1) if snapshot.answers else None
        count, state = (0, None) if snapshot is None else (snapshot.answers, read(snapshot.payload))
        after = worker_after(self._start_of(worker), answers, count, state)
        if it._dataset_kind == _DatasetKind.Map:
            # The index batches of earlier answers are no longer known, so they cannot be replayed.
            after.replay = 0
        return after.resumed()

    def _start_of(self, worker: int) -> WorkerStart:
        starts = self.origin.workers
        return starts[worker] if starts else WorkerStart()

    # The state.

    def ended(self, it: WorkersIterator) -> None:
        self.warn_if_empty(it)

    def state_at(
        self, it: WorkersIterator, back: int, finished: bool, draws: Draws | None, before_error: bool = False
    ) -> dict[str, Any]:
        """Returns the state after the last delivered batch. The arguments are those of the iterator's ``state``."""
        origin = self.origin
        # Read only once, because another thread may be in `next`.
        yielded = it._num_yielded
        answers = self.answers(yielded) - before_error
        if not self.on_engine and back:
            raise ValueError("back must be 0: this loader runs on torch's own iterator")
        if not self.on_engine or not self._has_begun:
            # Until the engine has begun this epoch, its position is still that of the last epoch.
            tasks, beyond, counts, last = answers, [], [0] * it._num_workers, None
        else:
            position = it._engine().position(answers, back)
            it._engine().note_saved(answers - back)
            tasks, beyond, counts, last = position.low, position.ahead, position.per_worker, position.last_worker
            if it._dataset_kind == _DatasetKind.Iterable:
                # Tasks that found no data do not count: their number depends on how far ahead the workers were.
                tasks, beyond = sum(counts), []
        low, ahead = ordinals(origin, tasks, beyond)
        if last is None:
            last = (self.first_worker(it) - 1) % it._num_workers
        has_records = self._has_states and self.on_engine
        workers = self._workers_after(it, counts, finished) if has_records else [WorkerStart()] * it._num_workers
        sampled_at = low
        if it._dataset_kind == _DatasetKind.Map and not ahead:
            sampled_at -= it._num_workers * max(worker.replayed for worker in workers)
        yielded -= back
        return self.state(
            it,
            low=low,
            ahead=ahead,
            yielded=yielded,
            last_worker=last,
            finished=finished,
            sampler=self.sampling.state(max(sampled_at, 0)),
            workers=workers,
            has_records=has_records,
            failures=self._failures_after(yielded),
            next=draws,
        )

    def _failures_after(self, yielded: int) -> int:
        if self.failures is None or not self._has_begun:
            return self.origin.failures
        return self.failures.count_after(yielded)

    def _workers_after(self, it: WorkersIterator, counts: list[int], finished: bool) -> list[WorkerStart]:
        """Returns the start of each worker at the position at which the workers have given ``counts`` answers.

        A start is the worker's newest snapshot up to the position, and the number of its answers since.
        """
        if not self._started and self._kept_snapshots is None and self._has_begun:
            # If a worker does not start in time, the state that it was given is saved.
            self._started = bool(it._engine().wait_started(it._timeout))
        workers = []
        for worker, answers in enumerate(counts):
            start = self._start_of(worker)
            has_ended = not start.ended and (finished or self._has_passed_end(it, worker, counts))
            count, state = self._snapshot(it, worker, answers + has_ended)
            if not it._in_order and not has_ended and it._dataset_kind == _DatasetKind.Iterable:
                # Without an order, a position is past the end of a worker's data once the worker has reported the end.
                at_end, last = self._snapshot(it, worker, answers + 1)
                if last is not None and last.exhausted and at_end == answers + 1:
                    count, state = at_end, last
            if state is not None:
                self.warn_if_frozen(it, state)
            after = worker_after(start, answers, count, state)
            if it._dataset_kind == _DatasetKind.Map and (not it._in_order or self.origin.ahead):
                # It is unknown which worker made which batch.
                after.replay = 0
            workers.append(after)
        return workers

    def _has_passed_end(self, it: WorkersIterator, worker: int, counts: list[int]) -> bool:
        """Returns True if a position is past the end of a worker's data, assuming that no data follows its answers.

        In round robin, this is so if another worker has answered a task after the one for which this worker would have
        found no data.
        """
        if not it._in_order or it._dataset_kind == _DatasetKind.Map:
            return False
        first, turn = self.first_worker(it), counts[worker] + 1

        def place(worker_id: int) -> int:
            return (worker_id - first) % it._num_workers

        return any((count, place(other)) > (turn, place(worker)) for other, count in enumerate(counts))

    def failed_to_resume(self, it: WorkersIterator) -> bool:
        """Returns True if no batch was delivered because a worker failed to load the state of the epoch's start."""
        if not (self.origin.kind == "resumed" and self.raised and self._has_states and self.on_engine):
            return False
        if it._num_yielded > self.origin.yielded:
            return False
        snapshots = (self._snapshot_or_error(it, worker, 0) for worker in range(it._num_workers))
        return any(snapshot is not None and snapshot.is_error for snapshot in snapshots)

    def _snapshot_or_error(self, it: WorkersIterator, worker: int, answers: int) -> Snapshot | None:
        """Returns a worker's newest snapshot after at most ``answers`` of its answers; None if there is none.

        The snapshot may contain an error instead of a state.
        """
        if not self._has_begun:
            return None
        if self._kept_snapshots is None:
            return it._engine().snapshot(worker, answers)
        return next((kept for kept in reversed(self._kept_snapshots[worker]) if kept.answers <= answers), None)

    def _snapshot(self, it: WorkersIterator, worker: int, answers: int) -> tuple[int, WorkerStart | None]:
        """Returns the number of answers before a worker's newest snapshot, and the snapshot.

        Only snapshots after at most ``answers`` of its answers count. Returns 0 and None if there is none. Raises the
        error if ``state_dict`` failed.
        """
        snapshot = self._snapshot_or_error(it, worker, answers)
        if snapshot is None:
            return 0, None
        if not snapshot.is_error:
            return snapshot.answers, read(snapshot.payload)
        error, of_state = read_error(snapshot.payload)
        if not of_state:
            # The worker failed to start. `next` raises this error instead of each of the worker's batches.
            return 0, None
        error.reraise()
        raise AssertionError("an error that was not raised")

    def before_shutdown(self, it: WorkersIterator, engine: Engine) -> None:
        if self._kept_snapshots is None and self._has_states and not self.is_deleted:
            self._kept_snapshots = self._all_snapshots(it, engine)

    def _all_snapshots(self, it: WorkersIterator, engine: Engine) -> list[list[Snapshot]]:
        """Returns the snapshots of each worker that a state may need after the engine has ended."""
        answers = self.answers(it._num_yielded)
        positions = []
        for back in range(BACK_BATCHES + 1):
            with contextlib.suppress(ValueError):
                positions.append(engine.position(answers, back).per_worker)
        snapshots: list[list[Snapshot]] = [[] for _ in range(it._num_workers)]
        for worker, counts in enumerate(zip(*positions, strict=True)):
            # One more answer: the snapshot at the end of the data.
            wanted = [*counts, max(counts) + 1]
            # From the newest to the oldest, each only once, because snapshots may be large.
            while wanted and (snapshot := engine.snapshot(worker, max(wanted))) is not None:
                snapshots[worker].insert(0, snapshot)
                wanted = [count for count in wanted if count < snapshot.answers]
        return snapshots


def _last_ordinals(origin: Origin, worker: int) -> list[int]:
    """Returns the ordinals of the index batches that a worker replays, in order.

    The loader that wrote the state assigned batches to its workers in round robin.
    """
    count = origin.workers[worker].replay
    if not isinstance(count, int):
        return []
    step = origin.num_workers
    last = origin.low - 1 - (origin.first_worker - 1 - worker) % step
    return [ordinal for ordinal in range(last - (count - 1) * step, last + 1, step) if ordinal >= 0]
