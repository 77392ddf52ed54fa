"""The worker process: seeds, dataset, fetcher and loop, as in torch's ``_worker_loop``."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import pickle
import random
import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.random  # imported by the main process, once for all forked workers
import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, _utils

from rustloader._core import EARLY, LEAVE, RESUME, REWIND, UNREADABLE, Port, WorkerStopped, seed_words
from rustloader.fetch import tables, torch_fetcher
from rustloader.fetch.failures import EmptyBatch, EmptyBatchError, Failure, put_note
from rustloader.fetch.guard import Guard
from rustloader.fetch.seeds import MAX_SEED, Seeds
from rustloader.fetch.step import Step
from rustloader.fetch.threads import Pool
from rustloader.system.formatting import name_of
from rustloader.workers import converting, resuming, serialize
from rustloader.workers.announcements import Announcements
from rustloader.workers.bootstrap import Job, Payload
from rustloader.workers.context import WorkerContext
from rustloader.workers.snapshots import Publisher, Snapshots, WorkerStart


def run(payload: Payload) -> None:
    """Runs a worker in a process that the main process has started on this machine."""
    connection, job = payload.connection, payload.job
    if payload.cores is not None:
        os.sched_setaffinity(0, payload.cores)
    port = connection.open()
    context = WorkerContext()
    try:
        _utils.signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        if job.sigterm_seconds is not None:
            port.survive_group_signal(connection.main, job.sigterm_seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, job.unblock)
        _Worker(port, context, payload.take_dataset(), job, payload.worker_id).loop()
    except (KeyboardInterrupt, WorkerStopped):
        # The main process also receives the Ctrl-C, and raises KeyboardInterrupt.
        pass
    finally:
        # This must come first: it makes the worker ignore Ctrl-C from now on.
        port.leave()
        context.restore()


def serve(port: Port, dataset: Any, job: Job, worker_id: int) -> None:
    """Runs a worker for a main process on another machine, in a process that other code started and owns."""
    context = WorkerContext()
    try:
        worker = _Worker(port, context, dataset, job, worker_id)
        # Only the worker may keep the dataset alive.
        del dataset
        port.ready()
        worker.loop()
    except (KeyboardInterrupt, WorkerStopped):
        pass
    finally:
        port.leave()
        context.restore()


def _seeds_of(job: Job, worker_id: int, start: WorkerStart | None) -> tuple[int, list[int]]:
    """Returns the seed for torch and Python, and the seed for NumPy.

    The first process in a slot gets the seeds of torch's worker. So does a replacement that, in the first epoch, starts
    again with the worker's first batch, because the worker has given no answer, or its iterable dataset has no state
    to load. Any other replacement gets different seeds, because it makes different batches. With ``seed_by``, all
    processes get torch's seeds, because each batch or sample has its own seed.
    """
    from_first = job.answers == 0 or (job.dataset_kind == _DatasetKind.Iterable and not (start and start.has_state))
    if job.generation == 0 or job.seeding is not None or (job.first_task == 0 and from_first):
        return job.base_seed + worker_id, _utils.worker._generate_state(job.base_seed, worker_id)
    first, second, *_ = seed_words(job.base_seed & MAX_SEED, 0, 0, worker_id, job.generation)
    return first & MAX_SEED, _utils.worker._generate_state(second & MAX_SEED, worker_id)


class _Worker:
    """The loop of one worker and its state."""

    def __init__(self, port: Port, context: WorkerContext, dataset: Any, job: Job, worker_id: int) -> None:
        self.port = port
        self.dataset = dataset
        self.job = job
        self.worker_id = worker_id
        self.where = f"in DataLoader worker process {worker_id}"
        # Number of the task for batch 0 of the epoch. It may be negative in a resumed epoch.
        self.first_task = job.first_task - (0 if job.snapshots is None else job.snapshots.first_ordinal)
        # An error from worker_init_fn or iter(dataset). It replaces every batch of this worker.
        self.broken: ExceptionWrapper | None = None
        self.init_failed = False
        self.exhausted = False
        # True if batches may contain an `ArrayTensor` instead of a tensor.
        self.converts = False
        # Sends snapshots of the dataset's state, if the loader can resume.
        self.publisher: Publisher | None = None
        # Number of batches of an iterable dataset to fetch and drop before the first task.
        self.replay = 0
        # See `resuming.Loading`.
        self.before: bytes | None = None
        self.announcements = Announcements()
        # The garbage collector also runs when garbage keeps blocks alive. After this call it skips the objects that
        # exist now, so their pages stay shared with the main process until one side writes to them.
        gc.freeze()

        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        start = job.take_start(worker_id)
        seed, numpy_seed = _seeds_of(job, worker_id, start)
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(numpy_seed)
        info = _utils.worker.WorkerInfo(id=worker_id, num_workers=job.config.num_workers, seed=seed, dataset=dataset)
        context.install(port, info)
        self.step = Step(dataset, job.dataset_kind, job.auto_collation)
        try:
            if job.init_fn is not None:
                job.init_fn(worker_id)
        except Exception:
            self.broken = ExceptionWrapper(where=self.where)
            self.init_failed = True
        else:
            # This must follow worker_init_fn, which may replace torch's fetcher with another one.
            self.step = self.make_step(worker_id)
            self.make_fetcher(start, job.set_epoch_call)
        policy = job.snapshots
        if policy is not None:
            snapshots = Snapshots(policy, job.config.num_workers, job.dataset_kind, self.step.seeds)
            offset = policy.first_ordinal - job.first_task
            self.publisher = Publisher(port, snapshots, offset, self.where, job.answers)
            self.publisher.first(self.broken, self.step.fetcher, dataset, self.before)
        # This comes last: arrays that exist by now live long and stay outside the arena, and user code may have set its
        # own memory handler for NumPy, which this call then respects.
        if job.numpy_arena:
            self.port.use_numpy_arena()
        if start is not None and self.broken is None:
            self.begin_replay(start.replay, worker_id)

    def make_step(self, worker_id: int) -> Step:
        """Creates the step, which makes the batches."""
        job, config, seeds, guard = self.job, self.job.config, None, None
        if job.seeding is not None:
            number = worker_id + 1 if job.dataset_kind == _DatasetKind.Iterable else 0
            seeds = Seeds(job.seeding, number, job.first_task)
        if not config.raises and torch_fetcher.is_original(job.dataset_kind):
            guard = self.make_guard(worker_id)
        has_threads = config.worker_threads > 1
        # Several threads make the samples in no fixed order.
        places = job.poison is not None and job.dataset_kind == _DatasetKind.Map and not has_threads
        return Step(
            self.dataset,
            job.dataset_kind,
            job.auto_collation,
            seeds,
            guard,
            make_pool=self.make_pool if has_threads else None,
            # Lets a shutdown end the fetch between two samples.
            wrap_indices=functools.partial(self.port.stoppable, shows_places=places, traces=not has_threads),
        )

    def make_guard(self, worker_id: int) -> Guard:
        """Creates the guard, which decides what to do about samples that fail."""
        job, seeding = self.job, self.job.seeding
        base_seed, epoch = (job.base_seed, job.epoch) if seeding is None else (seeding.base_seed, seeding.epoch)
        return Guard(
            job.config.on_error,
            self.dataset,
            base_seed=base_seed,
            epoch=epoch,
            worker_id=worker_id,
            limit=job.max_errors,
            poison=job.poison,
            check=self.port.check_stop,
            # Threads make several samples at the same time, so a death cannot be attributed to one of them.
            at_sample=None if job.poison is None or job.config.worker_threads > 1 else self.port.at_sample,
        )

    def make_fetcher(self, start: WorkerStart | None = None, set_epoch_call: Any = None) -> None:
        """Creates torch's fetcher for a new epoch. For an iterable dataset, this calls ``iter(dataset)``. An error is
        not raised, but kept in ``broken``.

        Args:
            start: The starting point in a resumed epoch, or None.
            set_epoch_call: Arguments of the dataset's ``set_epoch``, or None.
        """
        job, step = self.job, self.step
        is_torchs_own = torch_fetcher.is_original(job.dataset_kind)
        self.converts = is_torchs_own and job.numpy_arena and converting.is_torchs_own(job.collate_fn)
        collate_fn = converting.converter(self.port) if self.converts else job.collate_fn
        collate_fn = step.collating(collate_fn)
        if is_torchs_own:
            collate_fn = self.port.timed(collate_fn)
        try:
            if set_epoch_call is not None:
                args, kwargs = set_epoch_call
                self.dataset.set_epoch(*args, **kwargs)
            loading = None if start is None else resuming.Loading(self.dataset, start)
            self.before = None if loading is None else loading.before
            if step.seeds is not None:
                step.seeds.begin_iterator()
            fetcher = _DatasetKind.create_fetcher(
                job.dataset_kind, self.dataset, job.auto_collation, collate_fn, job.drop_last
            )
            if start is not None and loading is not None:
                loading.load_iterator(fetcher)
                resuming.load_counters(step.seeds, start)
            iterate = functools.partial(self.port.stoppable, traces=True)
            gathers = self.port.gather, self.port.gather_cached
            step.use(fetcher, lambda: tables.use(fetcher, job.collate_fn, *gathers, iterate))
            self.broken = None
        except Exception:
            self.broken = ExceptionWrapper(where=self.where)

    def make_pool(self) -> Pool:
        """Creates the threads that make the samples of a batch."""
        return Pool(self.job.config.worker_threads, self.port.check_stop, self.port.enter_thread)

    def loop(self) -> None:
        """Processes tasks until the main process ends the worker or is gone."""
        port, step = self.port, self.step
        while True:
            code, task, index = port.receive()
            if code == LEAVE:
                return
            if code in (RESUME, REWIND):
                self.announcements.forget(is_canceled=code == REWIND)
                self.port.resumed()
                self.begin_epoch(task, index)
                continue
            if code == EARLY:
                self.announcements.add(task, index)
                continue
            if (early := self.announcements.take(task)) is not None:
                self.begin_epoch(*early)
            if self.exhausted:
                continue
            if self.broken is not None:
                self.send_error(task, self.broken)
                continue
            if code == UNREADABLE:
                error = index
                error.add_note("The worker could not load an index that the sampler or batch_sampler yielded.")
                self.send_error(task, ExceptionWrapper((type(error), error, error.__traceback__), where=self.where))
                del error, index
                continue
            try:
                if self.replay:
                    self.end_replay(index)
                data = step.fetch(task, index)
                if type(data) is ExceptionWrapper:
                    # The dataset itself returned a wrapped error. torch's loader also raises such an error.
                    self.send_error(task, data)
                    del data, index
                    continue
                if step.guard is not None:
                    if self.converts and step.guard.has_failures():
                        data = converting.tensors_of(data)
                    data = step.guard.with_failures(data)
            except EmptyBatchError as error:
                self.send_empty(task, error.failures)
            except Exception as error:
                if isinstance(error, StopIteration) and self.job.dataset_kind == _DatasetKind.Iterable:
                    self.exhausted = True
                    if self.publisher is not None:
                        self.publisher.at_end(self.step.fetcher, self.dataset)
                    port.exhausted(task)
                else:
                    wrapper = ExceptionWrapper(self.explained(error), where=self.where)
                    put_note(wrapper, self.worker_id, task - self.first_task, index, error)
                    self.send_error(task, wrapper)
            else:
                if self.publisher is not None:
                    self.publisher.after(task, self.step.fetcher, self.dataset)
                # The list must hold the only reference to the batch: tensors that nothing else in the worker references
                # are sent without a copy.
                batch = [data]
                del data
                self.send(task, batch)
                # From now on, only the main process decides when the blocks are free.
                del batch
            del index

    def explained(self, error: Exception) -> tuple[type[Exception], Exception, Any]:
        """Returns the error of a fetch in the form of ``sys.exc_info``. If the allocation of an array was refused, a
        MemoryError that names the limit replaces NumPy's error, whose class cannot be constructed from a message."""
        refusal = self.port.take_refusal() if isinstance(error, MemoryError) else None
        # A plain MemoryError with a message comes from the dataset itself.
        if refusal is None or (type(error) is MemoryError and error.args):
            return type(error), error, error.__traceback__
        refusal.__cause__ = error
        return MemoryError, refusal, None

    def begin_epoch(self, first_task: int, pickled: bytes) -> None:
        """Begins another epoch of a persistent loader."""
        message: dict[str, Any] = pickle.loads(pickled) if pickled else {}
        self.exhausted = False
        self.first_task = first_task
        self.replay = 0
        if self.step.seeds is not None:
            self.step.seeds.begin_epoch(message["epoch"], first_task)
        if self.step.guard is not None:
            self.step.guard.epoch = message["epoch"]
        if not self.init_failed:
            self.make_fetcher(set_epoch_call=message.get("set_epoch"))
        if self.publisher is not None:
            self.publisher.begin_epoch(first_task)
            self.publisher.first(self.broken, self.step.fetcher, self.dataset)

    def begin_replay(self, batches: int | list[Any], worker_id: int) -> None:
        """Fetches again the batches that a map-style dataset made after its state was saved. For an iterable dataset,
        postpones this until the first task, whose index batch shows the batch size."""
        if isinstance(batches, int):
            self.replay = batches
        else:
            first_ordinal = 0 if self.job.seeding is None else self.job.seeding.first_ordinal
            tasks = resuming.earlier_tasks(len(batches), worker_id, self.job.config.num_workers, first_ordinal)
            self.fetch_again(zip(tasks, batches, strict=True))

    def end_replay(self, index: Any) -> None:
        """Fetches again the batches that an iterable dataset made after its state was saved. All of them have the same
        index batch."""
        batches, self.replay = self.replay, 0
        self.fetch_again(itertools.repeat((0, index), batches))

    def fetch_again(self, batches: Iterable[tuple[int, Any]]) -> None:
        """Fetches batches and drops them. A shutdown ends the replay between two samples. ``stall_timeout`` applies to
        each batch separately."""

        def fetch(batch: tuple[int, Any]) -> object:
            self.port.check_stop()
            self.port.progress()
            return self.step.fetch(*batch)

        resuming.replay(self.step.fetcher, batches, self.job.dataset_kind, fetch)
        self.port.progress(ends=True)

    def send(self, task: int, batch: list[Any]) -> None:
        """Sends a batch, given as the only item of a list, or the error that prevents this. May empty the list."""
        kind = converting.kind_of(batch[0])
        try:
            if not self.send_plain(task, batch):
                self.send_pickle(task, batch[0])
        except Exception:
            where = f"{self.where} (pid {os.getpid()}), which could not send its batch of type {name_of(kind)}"
            self.port.send_error(task, serialize.dumps_error(ExceptionWrapper(where=where)))

    def send_plain(self, task: int, batch: list[Any]) -> bool:
        """Sends a batch, given as the only item of a list, if it is a plain tree, and returns True. Otherwise returns
        False and leaves the batch in the list, ready to be pickled."""
        leaves_are_ours = serialize.leaves_are_ours()
        if self.port.send(task, batch, leaves_are_ours):
            return True
        tensors = converting.tensors_of(batch[0]) if self.converts else batch[0]
        if tensors is batch[0]:
            return False
        batch[0] = tensors
        return self.port.send(task, batch, leaves_are_ours)

    def send_pickle(self, task: int, batch: Any) -> None:
        """Sends a batch that is not a plain tree."""
        if not self.port.send_pickle(task, *self.portable(*serialize.dumps(batch))):
            # Tensors share memory at offsets that views cannot express.
            if not self.port.send_pickle(task, *self.portable(*serialize.dumps(batch, views=False))):
                raise RuntimeError("the storages of this batch cannot be sent")

    def portable(self, pickled: bytes, objects: list[Any], tied: bool) -> tuple[bytes, list[Any], bool]:
        """Returns a pickled batch unchanged, or raises an error if the receiver cannot unpickle it."""
        if tied and self.port.is_remote:
            raise RuntimeError(
                "it has an object that only processes on the same machine can share (a descriptor, a connection, "
                "device memory, or an object with a custom reducer in multiprocessing); return tensors, arrays or "
                "plain objects"
            )
        return pickled, objects, tied

    def send_empty(self, task: int, failures: list[Failure]) -> None:
        """Sends the result of a task whose samples all failed. It is sent as an error, so that it counts as an answer
        but not as a batch."""
        if self.publisher is not None:
            self.publisher.after(task, self.step.fetcher, self.dataset)
        self.port.send_error(task, serialize.dumps_alone(EmptyBatch(failures)))

    def send_error(self, task: int, error: ExceptionWrapper) -> None:
        """Sends an error as the result of a task."""
        if self.publisher is not None:
            self.publisher.after(task, self.step.fetcher, self.dataset)
        self.port.send_error(task, serialize.dumps_error(error))
