"""What a worker is started with: its connection, its job and the dataset, on their way to the worker."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any

from rustloader._core import Engine, Port
from rustloader.workers import serialize


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
    # one that no other worker has received after this many seconds was meant for this one. None: it has no handler.
    sigterm_seconds: float | None = None
    # Signals that were blocked for the start, so that they find the worker ready for them.
    unblock: list[int] = field(default_factory=list)


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
