"""The worker process: seeds, dataset, fetcher and loop, as torch's ``_worker_loop`` has them."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.random  # in the main process, not in each worker
import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, _utils
from torch.utils.data import dataloader as torch_dataloader

from rustloader._core import LEAVE, RESUME, UNREADABLE, Engine, Port, WorkerStopped
from rustloader.iterator.compat import is_torchs
from rustloader.workers import serialize
from rustloader.workers.collate import use_arena

__all__ = ["Connection", "Job", "Parcel", "run"]


class Connection:
    """The descriptors and numbers with which a worker opens its port.

    Under fork the worker inherits the engine with its mapping; under spawn and forkserver the descriptors travel
    with the pickle, and the port is opened as soon as they have arrived: the dataset, which is unpickled after that,
    may take its time or hang.
    """

    def __init__(self, engine: Engine, worker_id: int) -> None:
        self._engine = engine
        self._shipment = engine.shipment()
        self._worker_id = worker_id
        self._port: Port | None = None
        self.main = os.getpid()

    def __getstate__(self) -> Any:
        memfd, doorbell, geometry, parent = self._shipment
        return [reduction.DupFd(fd) for fd in (memfd, doorbell)], geometry, parent, self._worker_id

    def __setstate__(self, state: Any) -> None:
        descriptors, geometry, parent, worker_id = state
        self.main, _ = parent
        memfd, doorbell = (fd.detach() for fd in descriptors)
        for fd in (memfd, doorbell):
            os.set_inheritable(fd, False)
        self._port = _guarded(Port(memfd, doorbell, geometry, worker_id, serialize.load_index), parent)

    def open(self) -> Port:
        """The port, in the worker."""
        if self._port is None:
            *_, parent = self._shipment
            self._port = _guarded(Port.inherit(self._engine, self._worker_id, serialize.load_index), parent)
        return self._port


def _guarded(port: Port, parent: tuple[int, int]) -> Port:
    """Ends this process with the main process, and lets that see where it is stuck. Before any code of the user's."""
    port.watch(parent)
    port.offer_stack()
    return port


@dataclass
class Job:
    """What a worker works with; the same for all workers of an iterator."""

    dataset_kind: int
    auto_collation: bool
    collate_fn: Any
    drop_last: bool
    base_seed: int
    init_fn: Any
    num_workers: int
    # Where the main process has a handler for SIGTERM, one that goes to the whole process group is for it to react to;
    # one that no other worker has got within so many seconds was meant for this one. None: it has no handler.
    sigterm_seconds: float | None
    # Signals that were blocked for the start, so that they find the worker ready for them.
    unblock: list[int]


class Parcel:
    """What a worker is given: its connection, its position and the dataset, with a job.

    To a fresh interpreter it goes through a file in memory. multiprocessing writes what it sends into a pipe, which
    holds 64 KiB: with a larger dataset each start would wait until the interpreter has imported torch and reads on, one
    worker after the other.
    """

    def __init__(self, connection: Connection, dataset: Any, job: Job, worker_id: int) -> None:
        self.connection, self.job, self.worker_id = connection, job, worker_id
        self._dataset = [dataset]
        self._file: Any = None

    def __reduce__(self) -> Any:
        self.close()
        self._file = os.fdopen(os.memfd_create("rustloader-start", os.MFD_CLOEXEC), "wb")
        # The connection first: it is unpickled before the dataset.
        contents = self.connection, *self._dataset, self.job, self.worker_id
        reduction.dump(contents, self._file)
        self._file.flush()
        return _received, (reduction.DupFd(self._file.fileno()),)

    def close(self) -> None:
        """Gives the file back; after the start, which it has to last for."""
        if self._file is not None:
            # What could not be written has been an error before.
            with contextlib.suppress(OSError):
                self._file.close()

    def take_dataset(self) -> Any:
        """The dataset, once: nothing here is to hold it any longer than the worker does."""
        return self._dataset.pop()


def _received(duplicate: Any) -> Parcel:
    """A parcel, in a fresh interpreter."""
    with os.fdopen(duplicate.detach(), "rb") as file:
        file.seek(0)
        return Parcel(*pickle.load(file))


def run(parcel: Parcel) -> None:
    """The target of a worker's process."""
    connection, job = parcel.connection, parcel.job
    port = connection.open()
    try:
        _utils.signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        if job.sigterm_seconds is not None:
            port.survive_group_signal(connection.main, job.sigterm_seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, job.unblock)
        _Worker(port, parcel.take_dataset(), job, parcel.worker_id).loop()
    except (KeyboardInterrupt, WorkerStopped):
        # The main process gets the Ctrl-C as well, and raises it.
        pass
    finally:
        # First of all: a Ctrl-C has no effect after it.
        port.leave()
        _utils.worker._worker_info = None


class _Worker:
    """One worker's loop and what it works with."""

    def __init__(self, port: Port, dataset: Any, job: Job, worker_id: int) -> None:
        self.port = port
        self.dataset = dataset
        self.job = job
        self.where = f"in DataLoader worker process {worker_id}"
        # An error of worker_init_fn or of iter(dataset): it stands in the place of each batch of this worker.
        self.broken: ExceptionWrapper | None = None
        self.init_failed = False
        self.exhausted = False
        self.fetcher: Any = None
        # Its method, if that is torch's own.
        self.torchs_fetch: Any = None
        # The collector is called when blocks hang on garbage. What exists already is no garbage, and is shared with the
        # main process for as long as nobody writes to it.
        gc.freeze()

        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        seed = job.base_seed + worker_id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(_utils.worker._generate_state(job.base_seed, worker_id))
        _utils.worker._worker_info = _utils.worker.WorkerInfo(
            id=worker_id, num_workers=job.num_workers, seed=seed, dataset=dataset
        )
        use_arena(port)
        try:
            if job.init_fn is not None:
                job.init_fn(worker_id)
        except Exception:
            self.broken = ExceptionWrapper(where=self.where)
            self.init_failed = True
        else:
            self.make_fetcher()

    def make_fetcher(self) -> None:
        """torch's fetcher of a new epoch; for an iterable dataset this calls ``iter(dataset)``."""
        job = self.job
        collate_fn = job.collate_fn
        is_torchs_own = _is_torchs_own_fetcher(job.dataset_kind)
        if is_torchs_own:
            collate_fn = self.port.timed(collate_fn)
        try:
            self.fetcher = _DatasetKind.create_fetcher(
                job.dataset_kind, self.dataset, job.auto_collation, collate_fn, job.drop_last
            )
            self.torchs_fetch = type(self.fetcher).fetch if is_torchs_own else None
            self.broken = None
        except Exception:
            self.broken = ExceptionWrapper(where=self.where)

    def loop(self) -> None:
        """Answers tasks until the main process says that it is enough, or is gone."""
        port = self.port
        while True:
            code, task, index = port.receive()
            if code == LEAVE:
                return
            if code == RESUME:
                port.resumed()
                self.exhausted = False
                if not self.init_failed:
                    self.make_fetcher()
                continue
            if self.exhausted:
                continue
            if self.broken is not None:
                self.send_error(task, self.broken)
                continue
            if code == UNREADABLE:
                error = index
                self.send_error(task, ExceptionWrapper((type(error), error, error.__traceback__), where=self.where))
                del error, index
                continue
            try:
                data = self.fetcher.fetch(self.stoppable(index))
            except Exception as error:
                if isinstance(error, StopIteration) and self.job.dataset_kind == _DatasetKind.Iterable:
                    self.exhausted = True
                    port.exhausted(task)
                else:
                    self.send_error(task, ExceptionWrapper(where=self.where))
            else:
                self.send(task, data)
                # Its blocks are free as soon as the main process has done with them.
                del data
            del index

    def stoppable(self, index: Any) -> Any:
        """An index batch that ends the fetch between two samples on shutdown, where torch's fetcher will only
        iterate over it."""
        if not self.job.auto_collation or type(self.fetcher).fetch is not self.torchs_fetch:
            return index
        if self.job.dataset_kind == _DatasetKind.Map and getattr(self.dataset, "__getitems__", None):
            return index
        return self.port.stoppable(index)

    def send(self, task: int, data: Any) -> None:
        """Sends a batch, or in its place the error that keeps it from being sent."""
        try:
            if not self.port.send(task, data, serialize.leaves_are_ours()):
                self.send_pickle(task, data)
        except Exception:
            where = f"{self.where} (pid {os.getpid()}), which could not send its batch of type {_type_name(data)}"
            self.send_error(task, ExceptionWrapper(where=where))

    def send_pickle(self, task: int, data: Any) -> None:
        """Sends a batch that is no plain tree."""
        if not self.port.send_pickle(task, *serialize.dumps(data)):
            # Tensors at odd places of memory that they share.
            if not self.port.send_pickle(task, *serialize.dumps(data, views=False)):
                raise RuntimeError("a batch whose storages cannot be sent")

    def send_error(self, task: int, error: ExceptionWrapper) -> None:
        """Sends an exception in the place of a batch."""
        try:
            payload = serialize.dumps_alone(error)
        except Exception as reason:
            where = f"{error.where} (pid {os.getpid()}; its class cannot be pickled: {reason})"
            substitute = ExceptionWrapper((RuntimeError, RuntimeError(), None), where=where)
            substitute.exc_msg = error.exc_msg
            payload = serialize.dumps_alone(substitute)
        self.port.send_error(task, payload)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_torchs_own_fetcher(dataset_kind: int) -> bool:
    """Whether the fetcher will be torch's, in its class and its ``fetch``; libraries replace them."""
    fetch = _utils.fetch
    kind = fetch._MapDatasetFetcher if dataset_kind == _DatasetKind.Map else fetch._IterableDatasetFetcher
    return (
        is_torchs(_DatasetKind.create_fetcher, torch_dataloader)
        and kind.__module__ == fetch.__name__
        and is_torchs(kind.fetch, fetch)
    )
