"""The iterator: torch's ``_MultiProcessingDataLoaderIter`` on top of the engine."""

from __future__ import annotations

import functools
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from rustloader._core import BATCH, DEAD, END, ERROR, NO_PIN_THREAD, TIMED_OUT, VACANT, Death, Engine, observed
from rustloader.auto import tuner
from rustloader.device import pinning
from rustloader.errors import LoaderTimeoutError
from rustloader.fetch.failures import EmptyBatch, EmptyBatchError, Failure, Reported
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import compat, failures, fallback, fetching, indices, vacancies
from rustloader.metrics import ledger
from rustloader.remote.context import is_remote
from rustloader.settings import config as settings
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig
from rustloader.settings.limits import EXIT_GRACE
from rustloader.system import hooks, moved_storages
from rustloader.system.cleanup import clean_up_after, quietly
from rustloader.system.torch_side import (
    TORCHS_INIT,
    TORCHS_NEXT,
    IterType,
    TorchIter,
    forget_locals,
    in_torch,
    is_torchs,
)
from rustloader.workers import affinity, deaths, process
from rustloader.workers.bootstrap import Job
from rustloader.workers.group import WorkerGroup, interrupt_again
from rustloader.workers.restarts import Restarts
from rustloader.workers.snapshots import WorkerStart

# None if a program replaced torch's method before this import. Comparing with it spares most batches a further check.
_torchs_next_index: Any = _BaseDataLoaderIter._next_index
if not is_torchs(_torchs_next_index, torch_dataloader):
    _torchs_next_index = None

_TOO_LONG = (
    "Length of IterableDataset {} was reported to be {}(when accessing len(dataloader)), but {} samples have been "
    "fetched. "
)
_LENGTH_WARNING = (
    f"{_TOO_LONG}For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)
# In older versions of torch this warning points into torch's file.
_LENGTH_WARNING_POINTS_TO_THE_CALLER = ("stacklevel",) in _BaseDataLoaderIter.__next__.__code__.co_consts


def warn_of_length(iterator: Any, text: str = _TOO_LONG, frames: int = 3) -> None:
    """Warns that an iterable dataset has more samples than its length. ``frames``: from here to the program."""
    text = text.format(iterator._dataset, iterator._IterableDataset_len_called, iterator._num_yielded)
    if _LENGTH_WARNING_POINTS_TO_THE_CALLER:
        warnings.warn(text, stacklevel=frames)
    else:
        in_torch(TORCHS_NEXT, "warn", warnings.warn, text, None, 1)


class _Streams(_BaseDataLoaderIter):
    """Follows torch's iterator in the MRO, so that torch's own ``_reset`` makes an index stream, too."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._sampler_iter = self._index_batches(self._sampler_iter)

    def _index_batches(self, torchs: Any) -> Any:
        """The index batches of the epoch that begins; ``torchs`` is torch's iterator over the sampler."""
        return indices.stream(self._index_sampler, torchs)


class _MultiProcessingDataLoaderIter(TorchIter, _Streams, metaclass=IterType):
    """Iterates over a loader with worker processes.

    ``__init__`` first chooses one of two modes. Normally the engine does the work: workers, order and transport. Where
    it cannot behave as torch does (`fallback.why_not` lists the cases, and the system may have no memfd), every method
    is torch's own, and the logger ``rustloader`` warns once per loader and reason.
    """

    # Defaults for methods that may run before `__init__` has finished, or without it.
    _group: WorkerGroup | None = None
    _passthrough = False
    _shutdown = False
    _workers: list[Any] = []  # noqa: RUF012
    _context: Any = None
    # Makes the error that every later `next` raises once the epoch has ended or a worker has died.
    _last: Callable[[], BaseException] | None = None
    # An answer that a signal handler kept from the caller. The next call returns it.
    _rescued: list[Any] | None = None
    # The seeds of the epoch, unless they are torch's.
    _seeding: Seeding | None = None
    # The cores of each worker, also of those that follow a death.
    _cores: list[list[int]] | None = None
    # Counts failed samples. None counts nothing.
    _failures: failures.FailureCount | None = None
    # Failures of an empty batch that are yet to be counted. A signal handler that raises leaves them to the next call.
    _uncounted: list[Failure] | None = None
    # Number of answers in this epoch that were no batch: errors, and batches that had no samples left.
    _raised = 0
    # The worker that gets the first task of the epoch.
    _first_worker = 0
    # Decides about the number of workers, with num_workers="auto".
    _tuner: tuner.Tuner | None = None
    # Decides about deaths, with `max_restarts`.
    _restarts: Restarts | None = None

    def __init__(self, loader: Any) -> None:
        if _MultiProcessingDataLoaderIter not in type(self).__mro__:
            # A class made before `install()` calls its base by the name in torch's module.
            TorchIter.__init__(self, loader)
            return
        ledger.open_for(self, loader)
        loader_state.share(self, loader)
        config = settings.resolve(loader)
        tuned = tuner.follow(loader, config)
        if tuned is not None:
            self._tuner = tuned
            config = config.changed(num_workers=tuned.count)
        fetching.check(loader)
        self._set_up(settings.torchs_view(loader, config), config)
        settings.keep_iterator(loader, config, self)

    def _set_up(self, loader: Any, config: LoaderConfig) -> None:
        reason = fallback.why_not(type(self), _MultiProcessingDataLoaderIter, loader)
        core = None
        # The comparison raises torch's TypeError for values of other types.
        if reason is None and not (config.num_workers <= 0 or config.prefetch_factor <= 0):
            self._config = config = self._adapted(loader, config)
            core, reason = fallback.make_engine(config)
        if reason is not None:
            fallback.fall_back(self, reason, fallback.context_of(loader))
            fallback.tell_lost_options(self, config)
            self._passthrough = True
            try:
                self._init_torchs(super().__init__, loader)
            except BaseException as error:
                clean_up_after(error, self._abandon_torchs)
                raise
            return
        self._init_torchs(functools.partial(_BaseDataLoaderIter.__init__, self), loader)
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        if core is None:
            name = "num_workers" if self._num_workers <= 0 else "prefetch_factor"
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
        self._workers = []
        self._own(core)
        auto = None if self._tuner is None else self._tuner.count
        ledger.of(self).serve(fetching.scheduling(loader, self, config, auto))
        self._context = fallback.context_of(loader)
        self._worker_init_fn = loader.worker_init_fn
        seeding = self._first_seeding(loader)
        if seeding is not None:
            self._seeding = seeding
        if not config.raises:
            self._failures = failures.of(loader, config.max_errors, ledger.of(self).faults)
        self._start_workers()
        self._reset(loader, first_iter=True)

    # Parts of the construction that a subclass may change.

    def _adapted(self, loader: Any, config: LoaderConfig) -> LoaderConfig:
        """The settings that the engine and the workers get. Logs once which options have no effect."""
        if loader._dataset_kind == _DatasetKind.Iterable:
            config = fallback.round_robin(self, config, "an iterable dataset")
        return fetching.adapted(loader, config)

    def _init_torchs(self, init: Callable[[Any], None], loader: Any) -> None:
        """Calls torch's constructor, which draws the base seed."""
        in_torch(TORCHS_INIT, "__init__", init, loader)

    def _first_seeding(self, loader: Any) -> Seeding | None:
        return fetching.seeding(loader, self._config, int(self._base_seed))

    def _make_job(self) -> Job:
        return Job(
            dataset_kind=self._dataset_kind,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=self._worker_init_fn,
            config=self._config,
            seeding=self._seeding,
            max_errors=None if self._failures is None else self._failures.allowed,
            epoch=0 if self._failures is None else self._failures.epoch,
            poison=None if self._restarts is None else {},
            cores=self._cores,
        )

    def _first_job(self) -> Job:
        """The job of the workers that begin with the engine's first epoch."""
        return self._make_job()

    def _next_job(self, death: Death) -> Job:
        """The job of the process that follows a death, in the engine's present epoch."""
        job = self._make_job()
        job.generation, job.first_task, job.answers = death.generation + 1, death.first_task, death.answers
        if self._restarts is not None:
            job.poison = self._restarts.poison.get(death.worker_id, {})
        job.starts = [None] * self._num_workers
        job.starts[death.worker_id] = self._start_after(death)
        return job

    def _start_after(self, death: Death) -> WorkerStart | None:
        """Where a worker goes on after a death. An iterable dataset makes its batches again up to there."""
        if self._dataset_kind != _DatasetKind.Iterable or not death.answers:
            return None
        return WorkerStart(replay=death.answers)

    def _epoch_message(self) -> dict[str, Any]:
        """What the workers of a persistent loader are told when an epoch begins."""
        if self._seeding is not None:
            return {"epoch": self._seeding.epoch}
        return {} if self._failures is None else {"epoch": self._failures.epoch}

    def _abandon_torchs(self) -> None:
        """Ends what torch's failed constructor started: torch's clean-up needs attributes that it had yet to set."""
        try:
            super()._shutdown_workers()
        except Exception as error:
            for worker in self._workers:
                quietly(process.kill, worker)
            if not isinstance(error, AttributeError):
                raise

    def _own(self, core: Engine) -> None:
        """Takes an engine without workers."""
        self._group = WorkerGroup(core, self._workers, weakref.WeakMethod(self._note_exit))

    def _note_exit(self) -> None:
        """Records that the interpreter's exit has ended the workers."""
        self._shutdown = True

    def _start_workers(self) -> None:
        group = self._group
        assert group is not None
        core = group.engine
        moved_storages.watch()
        ledger.of(self).add(core.meter)
        core.belongs_to(loader_state.of(self).pages)
        limit = self._config.max_restarts
        if limit:
            passes_over = self._failures is not None and self._dataset_kind == _DatasetKind.Map
            self._restarts = Restarts(limit, passes_over)
        try:
            if not is_remote(self._context):  # those elsewhere have other cores
                cores = affinity.of_workers(self._config.worker_affinity, self._num_workers)
                if cores is not None:
                    self._cores = cores
            group.start(self._context, self._dataset, self._first_job(), counts_oom_kills=limit > 0)
            if not is_remote(self._context):
                ledger.of(self).start_workers([worker.pid for worker in self._workers], core.meter)
            if self._pin_memory:
                pinner = pinning.Pinner(self._pin_memory_device)
                core.start_pinning(begin=pinner.begin, plain=pinner.plain, pin=pinner.pin, failure=pinner.failure)
                self._pin_memory_thread = pinning.Thread(core)  # type: ignore[assignment]
                self._pin_memory_thread_done_event = pinning.DoneEvent(core)  # type: ignore[assignment]
        except BaseException as error:
            # An incomplete set of workers is useless. A further iter() of a persistent loader starts all again.
            clean_up_after(error, self._shutdown_workers)
            raise

    def _restart(self) -> None:
        """Starts new workers for a persistent loader whose workers died or were shut down."""
        self._shutdown_workers()
        core, reason = fallback.make_engine(self._config)
        if core is None:
            raise RuntimeError(f"the workers of the DataLoader cannot be started again: {reason}")
        self._workers.clear()
        self._own(core)
        self._shutdown = False
        self._last = None
        self._start_workers()

    @property
    def _core(self) -> Engine | None:
        return None if self._group is None else self._group.engine

    def _engine(self) -> Engine:
        group = self._group
        if group is None:
            raise AssertionError("the DataLoader iterator was not initialized")
        return group.engine

    @property
    def engine_batches(self) -> int:
        """Number of batches that the Rust engine has delivered; 0 when torch's own iterator does the work."""
        return 0 if self._group is None else self._group.engine.batches

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._passthrough:
            super()._reset(loader, first_iter)
            return
        core, is_first = self._engine(), first_iter
        if not first_iter:
            self._retune(loader)
        _Streams._reset(self, loader, first_iter)
        if self._last is StopIteration:
            self._last = None
        if self._failures is not None:
            self._failures.begin_epoch()
            self._uncounted = None
        told: dict[str, Any] = {}
        if not first_iter:
            if self._seeding is not None:
                self._seeding = fetching.next_epoch(loader, self._seeding)
            told = self._epoch_message()
        if not first_iter and (self._shutdown or self._last is not None or not core.is_ours):
            self._restart()
            core = self._engine()
            first_iter = True
        self._rescued = None
        if self._restarts is not None:
            self._restarts.begin_epoch()
        answer: list[Any] = [None, None]
        message = pickle.dumps(told) if told else b""
        core.begin(answer, self._draw(), first_iter, message, self._first_worker)
        while answer[0] == VACANT:
            vacancies.fill(self, answer[1], self._next_job)
            core.begin(answer, self._draw(), first_iter, message, self._first_worker)
        code, value = answer
        if code != END:
            self._died_or_late(code, value)
        self._epoch_begun(is_first)
        if self._seeding is not None:
            fetching.note_begun(loader, self._seeding)
        if self._failures is not None:
            self._failures.next_epoch += 1
        self._workers_status = [True] * self._num_workers
        if self._tuner is not None:
            self._tuner.watch(self)

    def _epoch_begun(self, is_first: bool) -> None:
        """Called when the engine has begun an epoch, which counts unless this raises."""

    def _retune(self, loader: Any) -> None:
        """Takes the number of workers that a persistent loader with num_workers="auto" is to have. If it has changed,
        the workers leave, so that the epoch starts others."""
        if not self._may_retune():
            return
        self._note_memory()
        tuned = tuner.follow(loader, self._config)
        self._tuner = tuned
        if tuned is None or tuned.count == self._num_workers:
            return
        self._shutdown_workers()
        self._num_workers = tuned.count
        self._config = self._config.changed(num_workers=tuned.count)
        ledger.of(self).note_workers(tuned.count)

    def _may_retune(self) -> bool:
        """Whether the workers of a persistent loader may be replaced by others."""
        return True

    def _note_memory(self) -> None:
        """Lets the tuner read the memory of workers that run on this machine."""
        if self._tuner is not None and not self._shutdown and not is_remote(self._context):
            self._tuner.note_memory(worker.pid for worker in self._workers)

    def _draw(self) -> Iterator[Any] | Callable[[], Any]:
        """The source of the next index. Without a Python frame in between, an interrupt cannot lose an index."""
        next_index = type(self)._next_index
        if next_index is _torchs_next_index or is_torchs(next_index, torch_dataloader):
            return self._sampler_iter
        return self._next_index

    def __next__(self) -> Any:
        if self._passthrough:
            hooks.run()
            return self._torchs_next()
        if observed():
            hooks.run()
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._counted_next()
        return self._counted_next()

    def _torchs_next(self) -> Any:
        return super().__next__()

    def _counted_next(self) -> Any:
        if self._sampler_iter is None:
            self._reset()  # type: ignore[call-arg]
        data = self._next_data()
        self._num_yielded += 1
        # No call here either, as in `_next_data`.
        length: Any = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            warn_of_length(self, _LENGTH_WARNING, 4)
        return data

    def _next_data(self, is_unwrapped: bool = True) -> Any:
        if self._passthrough:
            return super()._next_data()
        if self._failures is not None and is_unwrapped:
            return self._unwrap(self._failures)
        last = self._last
        if last is not None:
            raise last()
        if self._shutdown:
            if self._core is not None:
                self._core.stay()
            # As in torch, which has then marked all workers as unavailable.
            raise StopIteration
        answer, self._rescued = self._rescued, None
        if answer is None:
            answer = [None, None]
            core = self._engine()
            try:
                core.next(answer, self._draw())
                while answer[0] == VACANT:
                    death, answer[0] = answer[1], None
                    vacancies.fill(self, death, self._next_job)
                    core.next(answer, self._draw())
                if self._dataset_kind == _DatasetKind.Iterable:
                    self._workers_status[:] = core.active() or self._workers_status
            except BaseException as error:
                if answer[0] is not None and answer[0] != VACANT:
                    # A signal handler raised just after the answer arrived. The next call returns it.
                    self._rescued = answer
                elif isinstance(error, RuntimeError):
                    # Another thread may have reached the end, or found a death, while this one waited.
                    last = self._last
                    if last is not None:
                        raise last()  # noqa: B904
                raise
        # No call may come between here and the return: a signal handler could run in it, and the batch would be lost.
        code, value = answer
        if code == BATCH:
            return value
        if code == ERROR:
            self._raised += 1
            if value.__class__ is EmptyBatch:
                self._uncounted = value.failures
            try:
                value.reraise()
            except BaseException as error:
                forget_locals(error)
                raise
        if code == END:
            self._note_end()
            self._last = StopIteration
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        self._died_or_late(code, value)
        raise AssertionError(f"the engine returned an unknown code: {code}")

    def _unwrap(self, count: failures.FailureCount) -> Any:
        """The next batch under ``on_error``. Passes over those without samples, and counts failures."""
        while True:
            if self._uncounted is not None:
                self._count_failures(count, self._uncounted, is_empty=True)
                self._uncounted = None
            try:
                data = _MultiProcessingDataLoaderIter._next_data(self, is_unwrapped=False)
            except EmptyBatchError:
                continue
            # Before any call: a signal handler could run in it, and the batch would be lost.
            self._rescued = [BATCH, data]
            if isinstance(data, Reported):
                self._count_failures(count, data.failures)
                data = data.batch
            self._rescued = None
            return data

    def _count_failures(self, count: failures.FailureCount, found: list[Failure], is_empty: bool = False) -> None:
        """Raises beyond ``max_errors``, now and at each later call."""
        error = count.add(found, self._num_yielded + 1, is_empty)
        if error is not None:
            self._last, self._rescued, self._uncounted = error, None, None
            self._engine().close()
            raise error()

    def _note_end(self) -> None:
        """Called at the end of an epoch."""

    def _died_or_late(self, code: int, value: Any) -> None:
        if code == TIMED_OUT:
            raise LoaderTimeoutError(f"DataLoader timed out after {self._timeout} seconds")
        core = self._engine()
        if code == DEAD:
            self._last = vacancies.error_of(self, value)
            core.close()
            raise self._last()
        if code == NO_PIN_THREAD:
            self._last = deaths.pin_thread_error(value)
            core.close()
            # The thread reports its failure just before it ends.
            core.join_pinning(EXIT_GRACE)
            raise self._last()

    def _shutdown_workers(self) -> None:
        """Ends the workers. They exit between two samples; after ``torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL``
        seconds (5), one deadline for all, signals end them.

        Safe from any thread, from a signal handler, more than once, and after a failed construction. Does nothing
        while the interpreter exits, and in a forked child.
        """
        if self._passthrough:
            super()._shutdown_workers()
            return
        group = self._group
        if group is None or self._shutdown or not group.engine.is_ours or group.exiting():
            return
        try:
            self._before_end()
            self._note_memory()
        finally:
            self._shutdown = True
            self._workers_status = [False] * self._num_workers
            ledger.end_workers(self)
            group.end(_utils.MP_STATUS_CHECK_INTERVAL)

    def _before_end(self) -> None:
        """Called before the workers are told to leave."""

    def __del__(self) -> None:
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:
            interrupt_again()

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        if self._passthrough:
            super()._mark_worker_as_unavailable(worker_id, shutdown)
        else:
            self._dismiss(worker_id)

    def _dismiss(self, worker_id: int) -> None:
        """Marks a worker as dismissed by a copied shutdown routine. Once all are, the workers exit."""
        self._workers_status[worker_id] = False
        if not any(self._workers_status):
            self._engine().close()


compat.add_parts(_MultiProcessingDataLoaderIter)
