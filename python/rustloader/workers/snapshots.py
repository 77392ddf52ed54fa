"""Snapshots of a dataset's state: their schedule, their content, and their transport.

``read`` reads one: the start of a worker that goes on after it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic, thread_time
from typing import Any, TypeGuard

from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind

from rustloader._core import Port
from rustloader.fetch.guard import unguarded
from rustloader.fetch.inline import StepFetcher
from rustloader.fetch.seeds import Seeds
from rustloader.settings.limits import FROZEN_AFTER, SNAPSHOT_ALLOWANCE, SNAPSHOT_SHARE
from rustloader.system.protocols import HasState
from rustloader.workers import by_value, serialize

# The source of the errors of states, as opposed to those of a worker's start.
OF_STATE = "in the state of the dataset"


@dataclass(frozen=True)
class SnapshotPolicy:
    """The schedule of snapshots.

    Attributes:
        every: Batches of the loader from one snapshot to the next; 0: only at the start and the end of an epoch.
        first_ordinal: Number of the epoch's first batch.
    """

    every: int
    first_ordinal: int = 0


@dataclass
class WorkerStart:
    """The start of a worker in a resumed epoch; also the content of a snapshot.

    Attributes:
        dataset_state: For ``load_state_dict`` of the dataset, or None.
        iterator_state: For ``load_state_dict`` of its iterator, or None.
        ended: Whether the iterable dataset had ended. It is not asked again.
        replay: Batches to fetch and drop: their number for an iterable dataset, or their index batches.
        batches: The counter of ``Seeds`` at the snapshot.
        samples: The same for samples.
        delivered: Number of the worker's answers before the position.
        frozen: Whether the state of an iterable dataset stays the same while batches are made.
    """

    dataset_state: Any = None
    iterator_state: Any = None
    ended: bool = False
    replay: int | list[Any] = 0
    batches: int = 0
    samples: int = 0
    delivered: int = 0
    frozen: bool = False

    @property
    def has_state(self) -> bool:
        """True if there is a state to load."""
        return self.dataset_state is not None or self.iterator_state is not None

    @property
    def replayed(self) -> int:
        """Number of batches to fetch and drop."""
        return self.replay if isinstance(self.replay, int) else len(self.replay)

    def resumed(self) -> WorkerStart:
        """Returns this start, which has ended only if no batches follow its snapshot."""
        return replace(self, ended=self.ended and self.replayed == 0)

    def __reduce__(self) -> Any:
        # Under spawn, multiprocessing's reducers would move the state's tensors into memory that the workers share.
        return _start_of, (by_value.dumps(self.__dict__),)


def _start_of(fields: bytes) -> WorkerStart:
    return WorkerStart(**pickle.loads(fields))


def is_stateful(obj: Any) -> TypeGuard[HasState]:
    """Returns True if an object can save and load its state, as torchdata's ``Stateful`` says."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def read(snapshot: bytes) -> WorkerStart:
    """Reads what ``Snapshots`` made."""
    states, *more = pickle.loads(snapshot)
    iterator_state, dataset_state = pickle.loads(states)
    return WorkerStart(dataset_state, iterator_state, *more)


class Snapshots:
    """Decides when a snapshot is made, and makes it.

    Args:
        policy: The schedule in the first epoch.
        num_workers: Number of workers that take turns.
        kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
        seeds: Seeds of the worker; in the main process the fetcher has them.

    Attributes:
        has_state: Whether the dataset or its iterator has a state, once ``first`` was called.
    """

    has_state = False

    def __init__(self, policy: SnapshotPolicy, num_workers: int, kind: int, seeds: Seeds | None = None) -> None:
        self._policy_every, self._turns = policy.every, max(num_workers, 1)
        self._is_iterable = kind == _DatasetKind.Iterable
        self._seeds = seeds
        # 0: no snapshot is due any more.
        self._every = 0
        self._began = self._not_before = 0.0
        self._spent = 0.0
        # Number of the last batch, and the state that was pickled last for comparison, after which batch.
        self._ordinal = self._compared_at = -1
        self._compared = b""
        self._is_frozen = False

    def first(self, fetcher: Any, dataset: Any) -> bytes:
        """Begins an epoch with the snapshot of its start."""
        self.stop()
        self._began = self._not_before = monotonic()
        self._spent = 0.0
        self._compared, self._is_frozen = b"", False
        self.has_state = any(map(is_stateful, self._sources(fetcher, dataset)))
        with self.charged():
            payload = self.make(fetcher, dataset)
        if self.has_state:
            self._every = self._policy_every
        return payload

    def after(self, ordinal: int, fetcher: Any, dataset: Any) -> bytes | None:
        """Returns the snapshot after the batch with this number. None: it is not due, or a state cannot be made or
        pickled; then this epoch has no more.
        """
        if not self.is_due(ordinal):
            return None
        with self.charged():
            try:
                return self.make(fetcher, dataset)
            except Exception:
                self.stop()
                return None

    def is_due(self, ordinal: int) -> bool:
        """Returns True if the policy asks for a snapshot after the batch with this number, and the last one's cost
        leaves CPU time for it. As in torchdata, each worker makes one during the last turn before a multiple of
        ``every``."""
        self._ordinal = ordinal
        every = self._every
        return every > 0 and ordinal % every + self._turns >= every and monotonic() >= self._not_before

    def stop(self) -> None:
        """Makes no snapshot due until the next epoch."""
        self._every = 0

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Counts the CPU time of the body as that of a snapshot, and puts off the next until it can cost as much."""
        before = thread_time()
        try:
            yield
        finally:
            cost = thread_time() - before
            self._spent += cost
            self._not_before = self._began + (self._spent + cost - SNAPSHOT_ALLOWANCE) / SNAPSHOT_SHARE

    def make(self, fetcher: Any, dataset: Any) -> bytes:
        """Makes a snapshot now. Raises what ``state_dict`` or pickling raises."""
        # The states apart: their bytes are compared.
        states = by_value.dumps(self._states(fetcher, dataset))
        if self._is_iterable and self.has_state:
            self._compare(states)
        return by_value.dumps((states, *self._extra_fields(fetcher)))

    def state(self, fetcher: Any, dataset: Any) -> WorkerStart:
        """Returns the content of a snapshot made now."""
        iterator_state, dataset_state = states = self._states(fetcher, dataset)
        if self._is_iterable and self.has_state and self._is_compared_now():
            self._compare(by_value.dumps(states))
        return WorkerStart(dataset_state, iterator_state, *self._extra_fields(fetcher))

    def _states(self, fetcher: Any, dataset: Any) -> list[Any]:
        return [source.state_dict() if is_stateful(source) else None for source in self._sources(fetcher, dataset)]

    def _is_compared_now(self) -> bool:
        return not self._compared or self._ordinal - self._compared_at >= FROZEN_AFTER * self._turns

    def _compare(self, states: bytes) -> None:
        """Notes a state that stays the same while batches are made: the position is not in it."""
        if self._is_compared_now():
            self._is_frozen = self._compared == states
            self._compared, self._compared_at = states, self._ordinal

    def _sources(self, fetcher: Any, dataset: Any) -> tuple[Any, Any]:
        """Returns the iterator and the dataset, as far as each has a state of its own."""
        if not self._is_iterable:
            return None, dataset
        iterator = unguarded(getattr(fetcher, "dataset_iter", None))
        return iterator, None if iterator is dataset else dataset

    def _extra_fields(self, fetcher: Any) -> tuple[Any, ...]:
        """Returns the fields of a snapshot after the states."""
        seeds = fetcher.seeds if isinstance(fetcher, StepFetcher) else self._seeds
        counters = (0, 0) if seeds is None else (seeds.batches, seeds.samples)
        ended = self._is_iterable and getattr(fetcher, "ended", False)
        return ended, 0, *counters, 0, self._is_frozen


class Publisher:
    """Sends the snapshots of a worker, and counts the answers that they name.

    Args:
        port: The worker's port.
        snapshots: Makes the snapshots.
        offset: The difference from a task's number to the number of its batch, in the first epoch.
        where: The place that errors name.
        answers: Answers of the worker's earlier processes in this epoch.
    """

    def __init__(self, port: Port, snapshots: Snapshots, offset: int, where: str, answers: int = 0) -> None:
        self._port, self._snapshots, self._where = port, snapshots, where
        self._offset = offset
        self._answers = answers
        # True if this epoch's error was sent. There is one at most.
        self._failed = False

    def begin_epoch(self, first_task: int) -> None:
        """Begins another epoch, whose batches are the tasks from ``first_task``. ``first`` has to follow."""
        self._offset, self._answers, self._failed = -first_task, 0, False

    def first(self, error: ExceptionWrapper | None, fetcher: Any, dataset: Any) -> None:
        """Sends the snapshot of the epoch's start, or the error that the worker has in its place. A process that goes
        on in the middle of an epoch sends neither: the main process has the snapshot that it starts from."""
        if error is None:
            self._send(self._snapshots.first, self._answers, fetcher, dataset, is_wanted=not self._answers)
        elif not self._answers:
            self._fail(error, self._answers)

    def after(self, task: int, fetcher: Any, dataset: Any) -> None:
        """Counts an answer, and sends the snapshot after it if one is due. Comes before the answer itself: when the
        main process has that, it has the snapshot, too."""
        self._answers += 1
        if self._snapshots.is_due(task + self._offset):
            with self._snapshots.charged():
                self._send(self._snapshots.make, self._answers, fetcher, dataset)

    def at_end(self, fetcher: Any, dataset: Any) -> None:
        """Sends the snapshot of an iterable dataset that has ended, without regard to its cost. It counts one answer
        more: the state of a position before the end does not depend on whether the worker has found the end yet."""
        # torch's fetcher notes this only where it makes batches.
        fetcher.ended = True
        if not self._failed:
            self._send(self._snapshots.make, self._answers + 1, fetcher, dataset)

    def _send(self, make: Any, answers: int, fetcher: Any, dataset: Any, is_wanted: bool = True) -> None:
        try:
            payload = make(fetcher, dataset)
        except Exception:
            self._fail(ExceptionWrapper(where=f"{OF_STATE}, {self._where}"), answers)
            return
        if is_wanted:
            self._port.send_snapshot(answers, payload, False)

    def _fail(self, error: ExceptionWrapper, answers: int) -> None:
        self._failed = True
        self._snapshots.stop()
        self._port.send_snapshot(answers, serialize.dumps_error(error), True)
