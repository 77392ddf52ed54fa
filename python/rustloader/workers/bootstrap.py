"""The payload that a worker starts with: its connection, its job and the dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any

from rustloader._core import Engine, Port
from rustloader.fetch.seeds import Seeding
from rustloader.settings.config import LoaderConfig
from rustloader.workers import arguments, definitions, pickled_once
from rustloader.workers.arguments import Reports
from rustloader.workers.definitions import Pickling
from rustloader.workers.gates import Gate
from rustloader.workers.pickled_once import PickledOnce
from rustloader.workers.preparation import Call
from rustloader.workers.snapshots import SnapshotPolicy, WorkerStart


class Connection:
    """The descriptors and parameters that a worker needs to open its port.

    Under fork the worker inherits the engine with its memory mapping. Under spawn and forkserver the descriptors are
    sent with the pickle. Unpickling opens the port at once, because unpickling the dataset afterwards may be slow or
    hang.
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
        self._port = _guarded(Port(memfd, doorbell, geometry, worker_id, pickle.loads), parent)

    def open(self) -> Port:
        """Opens the port in the worker, unless unpickling has already opened it, and returns it."""
        if self._port is None:
            *_, parent = self._shipment
            self._port = _guarded(Port.inherit(self._engine, self._worker_id, pickle.loads), parent)
        return self._port


def _guarded(port: Port, parent: tuple[int, int]) -> Port:
    """Makes this worker end when the main process ends, and lets the main process request a dump of the worker's stacks
    for stall warnings. Must run before any user code."""
    port.watch(parent)
    port.offer_stack()
    return port


@dataclass
class Job:
    """The settings of workers. Workers that start together share one job."""

    dataset_kind: int
    auto_collation: bool
    collate_fn: Any
    drop_last: bool
    base_seed: int
    init_fn: Any
    config: LoaderConfig
    # None if workers use torch's seeds.
    seeding: Seeding | None = None
    # True if NumPy allocates its arrays in the worker's region.
    numpy_arena: bool = True
    # Set if the main process handles SIGTERM. Workers then survive a SIGTERM to the process group: a worker dies of the
    # signal only if no other worker receives one within this number of seconds.
    sigterm_seconds: float | None = None
    # Signals that are blocked while the worker starts. The worker unblocks them when it can handle them.
    unblock: list[int] = field(default_factory=list)
    # Set if workers send snapshots of their datasets.
    snapshots: SnapshotPolicy | None = None
    # The starting point of each worker, in a resumed epoch or after a restart.
    starts: list[WorkerStart | None] | None = None
    # Number of earlier processes in the worker's slot.
    generation: int = 0
    # Number of the first task of the epoch.
    first_task: int = 0
    # Number of answers from the worker's earlier processes in this epoch.
    answers: int = 0
    # Maximum number of samples that may fail in the epoch; None if there is no limit or it is unknown.
    max_errors: int | None = None
    # Number of the epoch in which the worker starts, counted by the iterator.
    epoch: int = 0
    # The poison samples: for each task number and position in the task's index batch, the message of the error that
    # replaces the sample. None if dead workers are not replaced.
    poison: dict[int, dict[int, str]] | None = None
    # Arguments of the last known call of the dataset's `set_epoch`, for a process that replaces a dead one; None if no
    # call is known.
    set_epoch_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    # The cores of each worker; None if workers use those of the main process.
    cores: list[list[int]] | None = None

    def of_worker(self, worker_id: int) -> Job:
        """Returns the job without the starting points of other workers, which may be large."""
        if self.starts is None:
            return self
        own: list[WorkerStart | None] = [None] * self.config.num_workers
        own[worker_id] = self.starts[worker_id]
        return dataclasses.replace(self, starts=own)

    def take_start(self, worker_id: int) -> WorkerStart | None:
        """Returns the starting point of a worker, and drops all references to starting points."""
        start = None if self.starts is None else self.starts[worker_id]
        self.starts = None
        return start


class Payload:
    """The argument of a worker process: its connection, the dataset, its job and its worker ID.

    A fresh interpreter receives it in a memfd. multiprocessing would write it to a pipe, which holds 64 KiB. With a
    larger dataset, each start would then block until the new interpreter has imported torch, so the workers would
    import torch one after another.

    Args:
        common: The dataset and the job, pickled once for all workers; None if each worker gets its own pickle.
        gate: Makes a spawned worker wait for its turn to import torch.
        reports: The file in which a worker reports that it cannot load the dataset or the job.
        pickling: Pickles the dataset and the job.
    """

    def __init__(
        self,
        connection: Connection,
        dataset: Any,
        job: Job,
        worker_id: int,
        common: PickledOnce | None = None,
        gate: Gate | None = None,
        reports: Reports | None = None,
        pickling: Pickling | None = None,
    ) -> None:
        self.connection, self.job, self.worker_id = connection, job, worker_id
        self._dataset = [dataset]
        # The cores to which a forked worker moves when it runs. Other workers move before their first import.
        self.cores = None if job.cores is None else job.cores[worker_id]
        self._common, self._gate, self._reports = common, gate, reports
        self._pickling = pickling
        self._file: Any = None

    def __reduce__(self) -> Any:
        self.close()
        self._file = os.fdopen(os.memfd_create("rustloader-start", os.MFD_CLOEXEC), "wb")
        # The connection comes first, so that it is unpickled before the dataset.
        reduction.dump(self.connection, self._file)
        if self._common is None:
            job = self.job.of_worker(self.worker_id)
            pickling = self._pickling or definitions.Pickling()
            pickling.dump(arguments.marked(self._dataset[0], job, job), self._file)
        self._file.flush()
        own, common = reduction.DupFd(self._file.fileno()), self._common and self._common.for_child()
        gate_fds = self._gate.for_child() if self._gate else []
        reports = self._reports and self._reports.for_child()
        return _receive, (own, common, gate_fds, self.worker_id, reports)

    @property
    def has_first_calls(self) -> bool:
        """True if ``first_calls`` returns any calls."""
        return self.cores is not None or self._gate is not None or bool(definitions.first_calls())

    def first_calls(self) -> list[Call]:
        """Returns the calls that a worker makes before its first import, if it is not forked."""
        calls = definitions.first_calls()
        if self.cores is not None:
            calls.append(Call(os.sched_setaffinity, 0, self.cores))
        return calls if self._gate is None else [*calls, *self._gate.calls()]

    def close(self) -> None:
        """Closes the file, which must stay open until the worker has been started."""
        if self._file is not None:
            # A failed write has already raised its error.
            with contextlib.suppress(OSError):
                self._file.close()

    def take_dataset(self) -> Any:
        """Returns the dataset and drops the reference to it, because only the worker may keep it alive. May be called
        only once."""
        return self._dataset.pop()


def _receive(duplicate: Any, common: Any, gate_fds: list[int], worker_id: int, reports: Any) -> Payload:
    """Reads the payload in a fresh interpreter."""
    with os.fdopen(duplicate.detach(), "rb") as file:
        file.seek(0)
        connection = pickle.load(file)
        # All imports are done, so the next worker may begin its own. It must not wait until this worker has unpickled
        # the dataset.
        for fd in gate_fds:
            os.close(fd)
        with arguments.reporting(reports, worker_id):
            contents = pickle.load(file) if common is None else pickled_once.load(common)
        dataset, job = arguments.unmarked(contents)
        payload = Payload(connection, dataset, job, worker_id)
        payload.cores = None
        return payload
