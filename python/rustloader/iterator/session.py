"""The iterator mode in which the engine does the work: workers, order and transport."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from rustloader._core import BATCH, DEAD, END, ERROR, NO_PIN_THREAD, TIMED_OUT, VACANT, Death, Engine
from rustloader.auto import tuner
from rustloader.auto.tuner import Tuner
from rustloader.device import pinning
from rustloader.fetch.failures import BatchWithFailures, EmptyBatch, EmptyBatchError, Failure, add_note
from rustloader.iterator import early_epochs, failures, fallback
from rustloader.iterator.epochs import Epochs
from rustloader.iterator.failures import FailureCount
from rustloader.iterator.torch_messages import TOO_LONG_WITH_WORKERS, timed_out, warn_of_length
from rustloader.metrics import ledger
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig
from rustloader.settings.limits import EXIT_GRACE
from rustloader.supervision import deaths
from rustloader.supervision.restarts import Restarts
from rustloader.supervision.supervisor import Supervisor
from rustloader.system import hooks, moved_storages
from rustloader.system.cleanup import clean_up_after
from rustloader.system.protocols import LoaderLike, WorkersIterator
from rustloader.system.torch_side import forget_locals, is_defined_in
from rustloader.tracing import core as tracing
from rustloader.workers import affinity
from rustloader.workers.bootstrap import Job
from rustloader.workers.group import WorkerGroup

# torch's method; None if a program replaced it before this module was imported. A comparison with it is enough for most
# batches, and is cheaper than `is_defined_in`.
_torch_next_index: Any = _BaseDataLoaderIter._next_index
if not is_defined_in(_torch_next_index, torch_dataloader):
    _torch_next_index = None


class Session:
    """The engine and the workers of an iterator, from the iterator's construction to its end.

    Methods take the iterator as an argument. The session keeps no reference to it, because dropping the last reference
    to the iterator ends its workers.

    Args:
        it: The iterator, after torch's constructor has set its attributes.
        loader: The iterator's loader.
        config: The loader's settings.
        engine: An engine without workers.
        epochs: Decides how each epoch starts.
        auto_tuner: Decides the number of workers; None unless the loader has ``num_workers="auto"``.

    Attributes:
        last: A function that makes the exception that every later ``next`` raises; None until the epoch ends or fails.
        rescued: An answer, as a code and a value, that did not reach the caller because a signal handler raised. The
            next call of ``next`` delivers it.
    """

    # The cores of each worker and its replacements; None if workers may run on any core.
    _cores: list[list[int]] | None = None
    # The failures of an empty batch, until they are counted. If a signal handler raises before that, the next call of
    # `next` counts them.
    _uncounted: list[Failure] | None = None

    def __init__(
        self,
        it: WorkersIterator,
        loader: LoaderLike,
        config: LoaderConfig,
        engine: Engine,
        epochs: Epochs,
        auto_tuner: Tuner | None,
    ) -> None:
        self.config, self.epochs, self._tuner = config, epochs, auto_tuner
        self.counters, self._state = ledger.of(it), loader_state.of(it)
        self._context = fallback.context_of(loader)
        self.last: Callable[[], BaseException] | None = None
        self.rescued: list[Any] | None = None
        self._adopt(it, engine)
        self.counters.serve(ledger.settings(loader, it, config, None if auto_tuner is None else auto_tuner.count))
        epochs.seed(it, loader, config)
        if not config.raises:
            epochs.failures = failures.of(loader, config.max_errors, self.counters.faults)
        self._predictor = early_epochs.predictor(it, loader, config, epochs, is_tuned=auto_tuner is not None)

    def _adopt(self, it: WorkersIterator, engine: Engine) -> None:
        """Makes ``engine`` the session's engine. It must not have any workers yet."""
        config, on_exit = self.config, weakref.WeakMethod(it._note_exit)
        may_skip_samples = not config.raises and it._dataset_kind == _DatasetKind.Map
        restarts = Restarts(config.max_restarts, may_skip_samples) if config.max_restarts else None
        self.group = WorkerGroup(engine, it._workers, self._context, it._dataset, on_exit)
        self.supervisor = Supervisor(
            self.group, self.counters, self._state, restarts, new_streams=config.seed_by == "worker"
        )

    @property
    def engine(self) -> Engine:
        return self.group.engine

    def traced_as(self) -> tuple[object, str, int]:
        """Returns how a trace identifies the loader: see `tracing.Traceable`."""
        return self._state, self.config.name, self.config.num_workers

    @property
    def batches(self) -> int:
        """Number of batches that the engine has delivered."""
        return self.engine.batches

    @property
    def has_ended(self) -> bool:
        """True if the epoch has ended."""
        return self.last is StopIteration

    @property
    def has_failed(self) -> bool:
        """True if every later ``next`` raises an error other than StopIteration."""
        return self.last not in (None, StopIteration)

    # Workers.

    def start(self, it: WorkersIterator, loader: LoaderLike) -> None:
        """Starts the workers and the first epoch."""
        self._start_workers(it)
        it._reset(loader, first_iter=True)

    def _start_workers(self, it: WorkersIterator) -> None:
        engine = self.engine
        try:
            it._shutdown = False
            self.last = None
            moved_storages.watch()
            self.counters.add(engine.meter)
            engine.belongs_to(self._state.pages)
            tracing.follow(self)
            if not is_remote(self._context):  # other machines have other cores
                cores = affinity.of_workers(self.config.worker_affinity, it._num_workers)
                if cores is not None:
                    self._cores = cores
            self.group.start(self._first_job(it), counts_oom_kills=self.config.max_restarts > 0)
            if not is_remote(self._context):
                self.counters.start_workers([worker.pid for worker in it._workers], engine.meter)
            if it._pin_memory:
                pinner = pinning.Pinner(it._pin_memory_device)
                engine.start_pinning(begin=pinner.begin, plain=pinner.plain, pin=pinner.pin, failure=pinner.failure)
                it._pin_memory_thread = pinning.Thread(engine)
                it._pin_memory_thread_done_event = pinning.DoneEvent(engine)
        except BaseException as error:
            # An incomplete set of workers is useless. The next iter() of a persistent loader starts a new set.
            clean_up_after(error, it._shutdown_workers)
            raise

    def _start_again(self, it: WorkersIterator) -> None:
        """Replaces the engine and all workers of a persistent loader whose workers died or were shut down."""
        it._shutdown_workers()
        engine, reason = fallback.make_engine(self.config)
        if engine is None:
            raise RuntimeError(f"the workers of the DataLoader cannot be restarted: {reason}")
        it._workers.clear()
        self._adopt(it, engine)
        self._start_workers(it)

    def _job(self, it: WorkersIterator) -> Job:
        count = self.epochs.failures
        job = Job(
            dataset_kind=it._dataset_kind,
            auto_collation=it._auto_collation,
            collate_fn=it._collate_fn,
            drop_last=it._drop_last,
            base_seed=int(it._base_seed),
            init_fn=it._worker_init_fn,
            config=self.config,
            seeding=self.epochs.seeding,
            max_errors=None if count is None else count.allowed,
            epoch=0 if count is None else count.epoch,
            poison={} if self.supervisor.restarts_workers else None,
            cores=self._cores,
        )
        self.epochs.complete(job)
        return job

    def _first_job(self, it: WorkersIterator) -> Job:
        """Returns the job of the workers that start with the engine's first epoch."""
        job = self._job(it)
        self.epochs.complete_first(it, job)
        return job

    def _next_job(self, it: WorkersIterator, death: Death) -> Job:
        """Returns the job of the process that replaces a dead worker in the engine's current epoch."""
        job = self._job(it)
        job.generation, job.first_task, job.answers = death.generation + 1, death.first_task, death.answers
        job.poison = self.supervisor.poison_of(death.worker_id)
        job.starts = [None] * it._num_workers
        job.starts[death.worker_id] = self.epochs.start_after(it, self.engine, death)
        self.epochs.complete_next(job)
        return job

    def _replace_dead(self, it: WorkersIterator, death: Death) -> None:
        self.supervisor.replace_dead(death, lambda death: self._next_job(it, death))

    # Epochs.

    def begin(self, it: WorkersIterator, loader: LoaderLike, is_first: bool) -> None:
        """Starts an epoch."""
        if self.last is _not_begun:
            self.last = None
        self.epochs.beginning(it)
        try:
            if not is_first:
                self._retune(it, loader)
            self._begin(it, loader, is_first)
            self.epochs.begun(it)
        except BaseException:
            if self.epochs.owes_an_epoch() and self.last is None:
                self.last = _not_begun
            raise

    def _begin(self, it: WorkersIterator, loader: LoaderLike, is_first: bool) -> None:
        epochs, count = self.epochs, self.epochs.failures
        it._reset_base(loader, is_first)
        if self.last is StopIteration:
            self.last = None
        if count is not None:
            count.begin_epoch()
            self._uncounted = None
        content = {} if is_first else epochs.message(loader)
        begins_engine = is_first
        if not is_first and (it._shutdown or self.last is not None or not self.engine.is_ours):
            self._start_again(it)
            begins_engine = True
        self.rescued = None
        self.supervisor.begin_epoch()
        engine, first_worker = self.engine, epochs.first_worker(it)
        answer: list[Any] = [None, None]
        message, predictor = early_epochs.encoded(content), self._predictor
        if predictor is not None:
            predictor.before_epoch()
        # Created before the first tasks are submitted: the time they take belongs to this epoch.
        watch = None if self._tuner is None else tuner.Watch(it, self._tuner.count)
        engine.begin(answer, index_source(it), begins_engine, message, first_worker, predictor)
        while answer[0] == VACANT:
            self._replace_dead(it, answer[1])
            engine.begin(answer, index_source(it), begins_engine, message, first_worker, predictor)
        code, value = answer
        if code != END:
            self._raise_for(it, code, value)
        if self._tuner is not None:
            self._tuner.watch = watch
        if predictor is not None:
            predictor.after_start(value)
            self.counters.note_settings(overlap_epochs=not predictor.has_stopped)
        epochs.engine_begun(it, engine, is_first)
        if epochs.seeding is not None:
            epochs.seeding.note_begun(loader)
        if count is not None:
            count.next_epoch += 1
        it._workers_status = [True] * it._num_workers

    def _retune(self, it: WorkersIterator, loader: LoaderLike) -> None:
        """Applies the decision of ``num_workers="auto"`` to a persistent loader. If the number of workers changes, ends
        the current workers, so that the epoch starts new ones."""
        if not self.epochs.may_change_workers:
            return
        self._note_memory(it)
        self._tuner = tuned = tuner.follow(loader, self.config)
        if tuned is None or tuned.count == it._num_workers:
            return
        it._shutdown_workers()
        it._num_workers = tuned.count
        self.config = self.config.changed(num_workers=tuned.count)
        self.counters.note_settings(auto_workers=tuned.count)

    def _note_memory(self, it: WorkersIterator) -> None:
        """Lets the tuner read how much memory the workers use, if they run on this machine."""
        if self._tuner is not None and not it._shutdown and not is_remote(self._context):
            self._tuner.note_memory(worker.pid for worker in it._workers)

    # Batches.

    @staticmethod
    def next(it: WorkersIterator) -> Any:
        """Returns the next batch, and counts it as torch does."""
        if it._sampler_iter is None:
            it._reset()  # type: ignore[call-arg]
        data = it._next_data()
        it._num_yielded += 1
        # No calls from here to the return, except for a warning: if a signal handler raised during a call, the batch
        # would be lost (see `call_into`).
        length = it._IterableDataset_len_called
        if length is not None and it._num_yielded > length and it._dataset_kind == _DatasetKind.Iterable:
            warn_of_length(it, TOO_LONG_WITH_WORKERS)
        return data

    @staticmethod
    def next_observed(it: WorkersIterator) -> Any:
        """Runs the hooks, and returns the next batch within a profiler record, as torch does."""
        hooks.run()
        with torch.autograd.profiler.record_function(it._profile_name):
            return Session.next(it)

    def next_data(self, it: WorkersIterator) -> Any:
        """Returns the next batch. Raises the error that takes its place, or StopIteration at the end of the epoch."""
        if self.epochs.failures is not None:
            return self._unwrap(it, self.epochs.failures)
        return self._answer(it)

    def _answer(self, it: WorkersIterator) -> Any:
        """Returns the engine's next batch. If the answer is an error, raises it; at the end of the epoch, raises
        StopIteration."""
        last = self.last
        if last is not None:
            raise last()
        if it._shutdown:
            self.engine.stay()
            # torch raises it here too, because its shutdown marks all workers as unavailable.
            raise StopIteration
        answer, self.rescued = self.rescued, None
        if answer is None:
            answer = [None, None]
            engine = self.group.engine
            try:
                engine.next(answer, index_source(it), self._predictor)
                while answer[0] == VACANT:
                    death, answer[0] = answer[1], None
                    self._replace_dead(it, death)
                    engine.next(answer, index_source(it), self._predictor)
                if it._dataset_kind == _DatasetKind.Iterable:
                    it._workers_status[:] = engine.active() or it._workers_status
            except BaseException as error:
                if answer[0] is not None and answer[0] != VACANT:
                    # A signal handler raised just after the answer arrived. The next call delivers the answer.
                    self.rescued = answer
                elif isinstance(error, RuntimeError):
                    # While this thread waited, another one may have reached the end or found a dead worker.
                    last = self.last
                    if last is not None:
                        raise last()  # noqa: B904
                raise
        code, value = answer
        if code == BATCH:
            # Atomic for signal handlers, from the answer's arrival on: see `call_into`.
            return value
        if code == ERROR:
            self.epochs.raised += 1
            if value.__class__ is EmptyBatch:
                self._uncounted = value.failures
            try:
                value.reraise()
            except BaseException as error:
                forget_locals(error)
                add_note(error, value)
                raise
        if code == END:
            self.epochs.ended(it)
            self.last = StopIteration
            if not it._persistent_workers:
                it._shutdown_workers()
            raise StopIteration
        self._raise_for(it, code, value)
        raise AssertionError(f"the engine returned an unknown code: {code}")

    def _unwrap(self, it: WorkersIterator, count: FailureCount) -> Any:
        """Returns the next batch of a loader whose ``on_error`` is not "raise". Counts the failures, and skips batches
        that have lost all their samples."""
        while True:
            if self._uncounted is not None:
                self._count_failures(it, count, self._uncounted, is_empty=True)
                self._uncounted = None
            try:
                data = self._answer(it)
            except EmptyBatchError:
                continue
            # No calls before this statement: if a signal handler raised during a call, the batch would be lost.
            self.rescued = [BATCH, data]
            if isinstance(data, BatchWithFailures):
                self._count_failures(it, count, data.failures)
                data = data.batch
            self.rescued = None
            return data

    def _count_failures(
        self, it: WorkersIterator, count: FailureCount, failed: list[Failure], is_empty: bool = False
    ) -> None:
        """Counts the failures of a batch. If they exceed ``max_errors``, raises the error now, and again in each later
        call of ``next``."""
        error = count.add(failed, it._num_yielded + 1, is_empty)
        if error is not None:
            self.last, self.rescued, self._uncounted = error, None, None
            self.engine.close()
            raise error()

    def _raise_for(self, it: WorkersIterator, code: int, value: Any) -> None:
        """Raises the error for an answer that reports a timeout, a dead worker or a dead pin thread. Does nothing for
        any other answer."""
        if code == TIMED_OUT:
            raise timed_out(it)
        engine = self.engine
        if code == DEAD:
            self.last = self.supervisor.error_of(value)
            engine.close()
            raise self.last()
        if code == NO_PIN_THREAD:
            self.last = deaths.pin_thread_error(value)
            engine.close()
            # The thread reports its failure just before it ends, so the wait is short.
            engine.join_pinning(EXIT_GRACE)
            raise self.last()

    # The end.

    def shut_down(self, it: WorkersIterator) -> None:
        """Ends the workers: see the iterator's ``_shutdown_workers``."""
        group = self.group
        if it._shutdown or not group.engine.is_ours or group.exiting():
            return
        begin = time.monotonic()
        try:
            self.epochs.before_shutdown(it, group.engine)
            self._note_memory(it)
        finally:
            it._shutdown = True
            it._workers_status = [False] * it._num_workers
            ledger.end_workers(it)
            group.end(_utils.MP_STATUS_CHECK_INTERVAL)
            self.counters.turn_around(begin)

    def dismiss(self, it: WorkersIterator, worker_id: int, shutdown: bool) -> None:
        """Records that a copied shutdown routine has dismissed a worker. Once all are dismissed, they exit."""
        it._workers_status[worker_id] = False
        if not any(it._workers_status):
            self.engine.close()


def _not_begun() -> RuntimeError:
    return RuntimeError("this epoch has not begun, because iter() raised an error: call iter() on the loader again")


def index_source(it: WorkersIterator) -> Iterator[Any] | Callable[[], Any]:
    """Returns the object from which the engine draws index batches: ``it._next_index`` if a program has overridden it,
    otherwise the sampler's iterator. With no Python frame between the engine and the sampler's iterator, an interrupt
    cannot lose an index batch."""
    next_index = type(it)._next_index
    if next_index is _torch_next_index or is_defined_in(next_index, torch_dataloader):
        source: Iterator[Any] = it._sampler_iter
        return source
    method: Callable[[], Any] = it._next_index
    return method
