"""The iterator of a StatefulDataLoader with workers: the engine's, with a position."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import BACK_BATCHES, TIMED_OUT, Death, Snapshot
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import fallback
from rustloader.iterator.core import _MultiProcessingDataLoaderIter
from rustloader.settings.config import LoaderConfig
from rustloader.stateful_dataloader.positioned import Positioned, ordinals, own_copy
from rustloader.stateful_dataloader.sampling import Sampling
from rustloader.stateful_dataloader.schema import DatasetState, Draws
from rustloader.stateful_dataloader.set_epoch import EpochRecorder
from rustloader.stateful_dataloader.state import Plan
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import OF_STATE, SnapshotPolicy, WorkerStart, read


class _StatefulMultiProcessingIter(Positioned, _MultiProcessingDataLoaderIter):
    """Iterates with workers."""

    # The snapshots of each worker, once its engine has ended.
    _frozen: list[list[Snapshot]] | None = None
    _started = False
    _is_deleted = False
    # Whether torch's iterator, which does the work, has ended.
    _ended = False
    # The index batches of the epoch, if those that are made again were taken from them.
    _begun: Sampling | None = None
    # Whether the engine has begun the epoch.
    _has_begun = False
    # Has the epochs that the program tells its dataset.
    _told_epoch: EpochRecorder | None = None

    def __init__(self, loader: Any, plan: Plan, about_dataset: DatasetState, told: EpochRecorder | None) -> None:
        self._prepare(loader, plan, about_dataset)
        self._told_epoch = told
        # A map-style dataset without a state needs its position alone.
        self._has_states = about_dataset.is_iterable or bool(about_dataset.stateful)
        self._wants_snapshots = self._has_states or loader.worker_init_fn is not None
        super().__init__(loader)

    @property
    def finished(self) -> bool:
        return self._ended or self._last is StopIteration

    # The parts of the construction that differ.

    def _adapted(self, loader: Any, config: LoaderConfig) -> LoaderConfig:
        config = super()._adapted(loader, config)
        if self._about_dataset.stateful:
            config = fallback.round_robin(self, config, "a dataset with a state of its own")
        return config.changed(snapshots=self._wants_snapshots)

    def _may_retune(self) -> bool:
        # Workers that leave would take the state of their dataset along.
        return not self._about_dataset.stateful

    def _init_torchs(self, init: Callable[[Any], None], loader: Any) -> None:
        self._call_torchs_init(init, loader)

    def _first_seeding(self, loader: Any) -> Seeding | None:
        return self._seeds_from_here(super()._first_seeding(loader))

    def _make_job(self) -> Job:
        job = super()._make_job()
        plan = self._plan
        job.epoch = self.origin.epoch if plan is None else plan.epoch
        if self._wants_snapshots:
            job.snapshots = SnapshotPolicy(self._every, self.origin.low)
        return job

    def _first_job(self) -> Job:
        job, plan = super()._first_job(), self._plan
        # None: the process of a persistent loader begins again, with an epoch from its beginning.
        if plan is not None and plan.workers and self._has_states:
            job.starts = self._starts(plan)
        return job

    def _next_job(self, death: Death) -> Job:
        job = super()._next_job(death)
        # The program may have told its dataset another epoch since this one began.
        job.told = None if self._told_epoch is None else self._told_epoch.in_force
        return job

    def _start_after(self, death: Death) -> WorkerStart | None:
        if not self._has_states:
            return super()._start_after(death)
        worker, answers = death.worker_id, death.answers
        starts = self.origin.workers
        start = starts[worker] if starts else WorkerStart()
        found = self._engine().snapshot(worker, answers)
        while found is not None and found.is_error:
            # The error in place of a state. An earlier one serves as well.
            found = self._engine().snapshot(worker, found.answers - 1) if found.answers else None
        count, made = (0, None) if found is None else (found.answers, read(found.payload))
        after = self._worker_after(start, answers, count, made)
        if self._dataset_kind == _DatasetKind.Map:
            # The index batches of its earlier answers are gone.
            after.replay = 0
        return after.resumed()

    def _starts(self, plan: Plan) -> list[WorkerStart | None]:
        """What each worker starts from. For a map-style dataset this takes the index batches that they fetch again."""
        if self._dataset_kind == _DatasetKind.Iterable:
            return [*plan.workers]
        wanted = [_last_ordinals(plan, worker) for worker in range(self._num_workers)]
        oldest = min((found[0] for found in wanted if found), default=plan.low)
        begun = self._sample_from(plan, iter(self._index_sampler), oldest)
        drawn = zip(range(oldest, plan.low), begun.iterator, strict=False)
        again = {ordinal: own_copy(batch) for ordinal, batch in drawn}
        if not begun.is_repeatable:
            self._begun = begun
        return [
            dataclasses.replace(start, replay=[again[ordinal] for ordinal in found if ordinal in again])
            for start, found in zip(plan.workers, wanted, strict=True)
        ]

    def _start_workers(self) -> None:
        self._frozen = None
        super()._start_workers()

    def _next_plan(self) -> Plan:
        """What the epoch that begins starts from. One that failed to begin is begun again."""
        if self._plan is None:
            self._plan = Plan(base_seed=int(self._base_seed), epoch=self.origin.epoch + 1)
        plan = self._plan
        if self._passthrough and self._dataset_kind == _DatasetKind.Iterable:
            # torch's workers begin at the beginning.
            return Plan(base_seed=plan.base_seed, epoch=plan.epoch, drop=plan.yielded + plan.drop)
        return plan

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._last is _not_begun:
            self._last = None
        plan = self._next_plan()
        if self._failures is not None:
            # Counted by the loader, so that a resumed epoch has its number.
            self._failures.next_epoch, self._failures.next_earlier = plan.epoch, plan.failures
        self._first_worker = plan.first_worker if plan.num_workers == self._num_workers else 0
        try:
            super()._reset(loader, first_iter)
            self._has_begun, self._plan = True, None
        except BaseException:
            if self._last is None and not self._has_begun:
                # The engine may be in the new epoch, whose batches would have no exact state.
                self._last = _not_begun
            raise
        if self._passthrough:
            # torch begins with the first batches in between.
            self._num_yielded = plan.yielded

    def _epoch_begun(self, is_first: bool) -> None:
        if is_first and self._worker_init_fn is not None:
            self._raise_failed_start()
        elif not is_first and self._has_states:
            # What persistent workers carry over from the last epoch is in their first snapshots alone.
            self._await_started()
        if self._told_epoch is not None:
            self._told_epoch.note_begun()

    def _await_started(self) -> None:
        if self._engine().wait_started(self._timeout) is None:
            self._died_or_late(TIMED_OUT, None)

    def _index_batches(self, torchs: Any) -> Any:
        # From here on states are of the new epoch. No code of the program has run since the counters were reset.
        plan = self._next_plan()
        begun, self._begun = self._begun, None
        self.sampling = begun or self._sample_from(plan, torchs, plan.low)
        self._frozen = None
        self._started = self._ended = self._has_begun = False
        self.origin, self._raised, self._num_yielded = plan, 0, plan.yielded
        return self.sampling.iterator

    def _epoch_message(self) -> dict[str, Any]:
        message = super()._epoch_message()
        told = None if self._told_epoch is None else self._told_epoch.since_last_epoch()
        return message if told is None else message | {"set_epoch": told}

    def _raise_failed_start(self) -> None:
        """Raises an error of worker_init_fn or iter(dataset)."""
        core = self._engine()
        self._await_started()
        for worker in range(self._num_workers):
            found = core.snapshot(worker, 0)
            error = pickle.loads(found.payload) if found is not None and found.is_error else None
            if error is not None and not error.where.startswith(OF_STATE):
                self._shutdown_workers()
                error.reraise()

    def _torchs_next(self) -> Any:
        try:
            return super()._torchs_next()
        except StopIteration:
            self._note_end()
            self._ended = True
            raise
        except Exception:
            self._raised += 1
            raise

    # The state.

    def state(
        self, back: int, finished: bool, draws: Draws | None = None, *, before_error: bool = False
    ) -> dict[str, Any]:
        """The state after the last batch that was delivered, or ``back`` batches before.

        ``draws``: Those of the next epoch. ``before_error``: Without the last answer, which is an error.
        """
        origin = self.origin
        # Once: another thread may be in `next`.
        yielded = self._num_yielded
        answers = yielded - origin.yielded + self._raised - before_error
        if self._passthrough and back:
            raise ValueError("back must be 0: this loader runs on torch's own iterator")
        if self._passthrough or not self._has_begun:
            # In the latter case the engine is still at the last epoch.
            tasks, beyond, counts, last = answers, [], [0] * self._num_workers, None
        else:
            position = self._engine().position(answers, back)
            tasks, beyond, counts, last = position.low, position.ahead, position.per_worker, position.last_worker
        low, ahead = ordinals(origin, tasks, beyond)
        if last is None:
            last = (self._first_worker - 1) % self._num_workers
        sampled_at, workers = low, None
        if self._has_states and not self._passthrough:
            workers = self._workers_after(counts)
            if self._dataset_kind == _DatasetKind.Map and not ahead:
                sampled_at -= self._num_workers * max(worker.replayed for worker in workers)
        sampler = self.sampling.state(max(sampled_at, 0))
        return self._state(low, ahead, yielded - back, finished, draws, sampler, workers, last)

    def _workers_after(self, counts: list[int]) -> list[WorkerStart]:
        """The newest snapshots that are no younger than the position, and what was delivered after them."""
        if not self._started and self._frozen is None and self._has_begun:
            # The state of a worker that does not start in time is the one that it starts from.
            self._started = bool(self._engine().wait_started(self._timeout))
        starts = self.origin.workers
        found = []
        for worker, answers in enumerate(counts):
            start = starts[worker] if starts else WorkerStart()
            count, made = self._snapshot(worker, answers)
            if made is not None:
                self._warn_if_frozen(made)
            after = self._worker_after(start, answers, count, made)
            if self._dataset_kind == _DatasetKind.Map and (not self._in_order or self.origin.ahead):
                # Which worker made a batch is not known.
                after.replay = 0
            found.append(after)
        return found

    def _failures_after(self, yielded: int) -> int:
        if self._failures is None or not self._has_begun:
            return self.origin.failures
        return self._failures.count_after(yielded)

    def failed_to_resume(self) -> bool:
        if self._num_yielded > self.origin.yielded or not self._raised or not self._has_states or self._passthrough:
            return False
        starts = (self._found(worker, 0) for worker in range(self._num_workers))
        return any(found is not None and found.is_error for found in starts)

    def _found(self, worker: int, answers: int) -> Snapshot | None:
        """A worker's newest snapshot, or the error in its place, after at most that many of its answers."""
        if not self._has_begun:
            return None
        if self._frozen is None:
            return self._engine().snapshot(worker, answers)
        return next((it for it in reversed(self._frozen[worker]) if it.answers <= answers), None)

    def _snapshot(self, worker: int, answers: int) -> tuple[int, WorkerStart | None]:
        """A worker's newest snapshot after at most that many of its answers."""
        found = self._found(worker, answers)
        if found is None:
            return 0, None
        if not found.is_error:
            return found.answers, read(found.payload)
        made = pickle.loads(found.payload)
        if not made.where.startswith(OF_STATE):
            # Of the worker's start: `next` raises it in place of every batch of this worker.
            return 0, None
        made.reraise()
        raise AssertionError("an error that was not raised")

    def _before_end(self) -> None:
        # Nothing can ask for a state of an iterator that is deleted.
        if self._frozen is None and self._has_states and not self._is_deleted:
            self._frozen = self._all_snapshots()

    def _all_snapshots(self) -> list[list[Snapshot]]:
        """All snapshots that a state can need. They are gone with the engine."""
        core, answers = self._engine(), self._num_yielded - self.origin.yielded + self._raised
        counts: list[list[int]] = [[] for _ in range(self._num_workers)]
        for back in range(BACK_BATCHES, -1, -1):
            try:
                position = core.position(answers, back)
            except ValueError:
                continue
            for worker, count in enumerate(position.per_worker):
                counts[worker].append(count)
        found: list[list[Snapshot]] = [[] for _ in range(self._num_workers)]
        for worker, asked in enumerate(counts):
            # From the newest on, each once: they may be large.
            while asked and (snapshot := core.snapshot(worker, max(asked))) is not None:
                found[worker].insert(0, snapshot)
                asked = [count for count in asked if count < snapshot.answers]
        return found

    def __del__(self) -> None:
        self._is_deleted = True
        super().__del__()


def _not_begun() -> RuntimeError:
    return RuntimeError("this epoch has not begun, because iter() raised an error: call iter() of the loader again")


def _last_ordinals(plan: Plan, worker: int) -> list[int]:
    """The ordinals of the index batches that a worker fetches again, in order; worker i mod N made them."""
    count = plan.workers[worker].replay
    if not isinstance(count, int):
        return []
    step = plan.num_workers
    last = plan.low - 1 - (plan.first_worker - 1 - worker) % step
    return [ordinal for ordinal in range(last - (count - 1) * step, last + 1, step) if ordinal >= 0]
