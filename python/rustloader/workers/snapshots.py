"""Snapshots of a dataset's state: their schedule, their content, and their transport.

``read`` turns a snapshot into the starting point of a worker that continues from it.
"""

from __future__ import annotations

import contextlib
import functools
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


@dataclass(frozen=True)
class SnapshotPolicy:
    """The schedule of snapshots.

    Attributes:
        every: Number of the loader's batches from one snapshot to the next; 0 for snapshots only at the start of an
            epoch, and when an iterable dataset ends.
        first_ordinal: Ordinal of the batch that is the epoch's first task.
    """

    every: int
    first_ordinal: int = 0


@dataclass
class WorkerStart:
    """The starting point of a worker in a resumed epoch; also the content of a snapshot.

    Attributes:
        dataset_state: Argument of the dataset's ``load_state_dict``, or None.
        iterator_state: Argument of its iterator's ``load_state_dict``, or None.
        ended: Whether the iterable dataset had ended. If so, nothing more is fetched from it.
        replay: Batches to fetch and drop: their number; in a job for a map-style dataset, a list of index batches.
        batches: Number of batches that ``Seeds`` had counted at the snapshot.
        samples: Number of samples that ``Seeds`` had counted at the snapshot.
        delivered: Number of the worker's answers before the position.
        frozen: Whether the state of an iterable dataset stays the same while batches are made.
        exhausted: Whether the snapshot follows the last of the worker's batches.
        moved: Whether ``__iter__`` has changed the dataset's state since that state was loaded.
        shown: The snapshot whose states a saved state shows under torchdata's keys; None for this one.
    """

    dataset_state: Any = None
    iterator_state: Any = None
    ended: bool = False
    replay: int | list[Any] = 0
    batches: int = 0
    samples: int = 0
    delivered: int = 0
    frozen: bool = False
    exhausted: bool = False
    moved: bool = False
    shown: WorkerStart | None = None

    @property
    def has_state(self) -> bool:
        """True if there is a state to load."""
        return self.dataset_state is not None or self.iterator_state is not None

    @property
    def replayed(self) -> int:
        """Number of batches to fetch and drop."""
        return self.replay if isinstance(self.replay, int) else len(self.replay)

    def resumed(self) -> WorkerStart:
        """Returns a copy to resume from, in which ``ended`` is set only if no batches follow the snapshot."""
        return replace(self, ended=self.ended and self.replayed == 0, shown=None)

    def __reduce__(self) -> Any:
        # Under spawn, multiprocessing's reducers would move the state's tensors into memory that the workers share.
        return _start_of, (by_value.dumps(self.__dict__),)


def _start_of(fields: bytes) -> WorkerStart:
    return WorkerStart(**pickle.loads(fields))


def is_stateful(obj: Any) -> TypeGuard[HasState]:
    """Returns True if an object can save and load its state, with the methods of torchdata's ``Stateful``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def state_of(dataset: Any) -> bytes | None:
    """Returns the pickled state of a dataset; None if it has none, or if ``state_dict`` or pickling fails."""
    try:
        return by_value.dumps(dataset.state_dict()) if is_stateful(dataset) else None
    except Exception:
        return None


def read(snapshot: bytes) -> WorkerStart:
    """Reads a snapshot that ``Snapshots`` made."""
    states, fields = pickle.loads(snapshot)
    iterator_state, dataset_state = pickle.loads(states)
    return WorkerStart(dataset_state, iterator_state, **fields)


def read_error(snapshot: bytes) -> tuple[ExceptionWrapper, bool]:
    """Reads the error that a worker sent instead of a snapshot. Returns it, and whether the state of the dataset could
    not be saved. Otherwise the worker failed to start."""
    return pickle.loads(snapshot[1:]), bool(snapshot[0])


class Snapshots:
    """Decides when snapshots are due, and makes them.

    Args:
        policy: The schedule in the first epoch.
        num_workers: Number of workers that take turns.
        kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
        seeds: Seeds of the worker; None in the main process, where the fetcher has them.

    Attributes:
        has_state: Whether the dataset or its iterator has a state. ``first`` sets this.
    """

    has_state = False

    def __init__(self, policy: SnapshotPolicy, num_workers: int, kind: int, seeds: Seeds | None = None) -> None:
        self._policy_every, self._turns = policy.every, max(num_workers, 1)
        self._is_iterable = kind == _DatasetKind.Iterable
        self._seeds = seeds
        # 0 if no more snapshots are due in this epoch.
        self._every = 0
        self._began = self._not_before = 0.0
        self._spent = 0.0
        # Ordinals of the last batch, and of the batch after which states were last compared.
        self._ordinal = self._compared_at = -1
        # Pickle of the states at that comparison.
        self._compared = b""
        self._is_frozen = False

    def first(self, fetcher: Any, dataset: Any, before: bytes | None = None) -> bytes:
        """Begins an epoch, and returns the snapshot of its start. ``before`` is that of ``Loading``."""
        self.stop()
        self._began = self._not_before = monotonic()
        self._spent = 0.0
        self._compared, self._is_frozen = b"", False
        self.has_state = any(map(is_stateful, self._sources(fetcher, dataset)))
        with self.charged():
            of_iterator, of_dataset = states = self._states(fetcher, dataset)
            # If the dataset is its own iterator, its state is that of the iterator.
            now = of_iterator if of_dataset is None else of_dataset
            payload = self._pickled(states, fetcher, moved=before is not None and before != by_value.dumps(now))
        if self.has_state:
            self._every = self._policy_every
        return payload

    def after(self, ordinal: int, fetcher: Any, dataset: Any) -> bytes | None:
        """Returns the snapshot after the batch with this ordinal, or None if none is due. Also returns None if a state
        cannot be made or pickled; in that case no more snapshots are due in this epoch.
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
        """Returns True if the policy asks for a snapshot after the batch with this ordinal, and the cost of earlier
        snapshots leaves CPU time for it. As in torchdata, each worker makes a snapshot during the last turn before a
        multiple of ``every``."""
        self._ordinal = ordinal
        every = self._every
        return every > 0 and ordinal % every + self._turns >= every and monotonic() >= self._not_before

    def stop(self) -> None:
        """Stops snapshots until the next epoch."""
        self._every = 0

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Counts the CPU time of the body as the cost of a snapshot, and postpones the next snapshot until the
        allowance covers the same cost again."""
        before = thread_time()
        try:
            yield
        finally:
            cost = thread_time() - before
            self._spent += cost
            self._not_before = self._began + (self._spent + cost - SNAPSHOT_ALLOWANCE) / SNAPSHOT_SHARE

    def make(self, fetcher: Any, dataset: Any, **fields: bool) -> bytes:
        """Makes a snapshot now, with the given fields. Raises the errors of ``state_dict`` and of pickling."""
        return self._pickled(self._states(fetcher, dataset), fetcher, **fields)

    def _pickled(self, states: list[Any], fetcher: Any, **fields: bool) -> bytes:
        # The states have a separate pickle, because its bytes are compared.
        pickled = by_value.dumps(states)
        if self._is_iterable and self.has_state:
            self._compare(pickled)
        return by_value.dumps((pickled, self._extra_fields(fetcher) | fields))

    def state(self, fetcher: Any, dataset: Any) -> WorkerStart:
        """Returns the content of a snapshot made now."""
        iterator_state, dataset_state = states = self._states(fetcher, dataset)
        if self._is_iterable and self.has_state and self._is_compared_now():
            self._compare(by_value.dumps(states))
        return WorkerStart(dataset_state, iterator_state, **self._extra_fields(fetcher))

    def _states(self, fetcher: Any, dataset: Any) -> list[Any]:
        return [source.state_dict() if is_stateful(source) else None for source in self._sources(fetcher, dataset)]

    def _is_compared_now(self) -> bool:
        return not self._compared or self._ordinal - self._compared_at >= FROZEN_AFTER * self._turns

    def _compare(self, states: bytes) -> None:
        """Records whether the state stays the same while batches are made. If it does, it lacks the position."""
        if self._is_compared_now():
            self._is_frozen = self._compared == states
            self._compared, self._compared_at = states, self._ordinal

    def _sources(self, fetcher: Any, dataset: Any) -> tuple[Any, Any]:
        """Returns the dataset's iterator and the dataset. The iterator is None for a map-style dataset. The dataset is
        None if it is its own iterator."""
        if not self._is_iterable:
            return None, dataset
        iterator = unguarded(getattr(fetcher, "dataset_iter", None))
        return iterator, None if iterator is dataset else dataset

    def _extra_fields(self, fetcher: Any) -> dict[str, Any]:
        """Returns the fields of a snapshot other than the states."""
        seeds = fetcher.seeds if isinstance(fetcher, StepFetcher) else self._seeds
        counters = {} if seeds is None else {"batches": seeds.batches, "samples": seeds.samples}
        ended = self._is_iterable and getattr(fetcher, "ended", False)
        return {"ended": ended, "frozen": self._is_frozen, **counters}


class Publisher:
    """Sends the snapshots of a worker, and counts the answers that identify them.

    Args:
        port: The worker's port.
        snapshots: Makes the snapshots.
        offset: The ordinal of a batch minus the number of its task, in the first epoch.
        where: The source that errors name, such as "in DataLoader worker process 0".
        answers: Number of answers from the worker's earlier processes in this epoch.
    """

    def __init__(self, port: Port, snapshots: Snapshots, offset: int, where: str, answers: int = 0) -> None:
        self._port, self._snapshots, self._where = port, snapshots, where
        self._offset = offset
        self._answers = answers
        # True if an error was sent in this epoch. At most one is sent.
        self._failed = False

    def begin_epoch(self, first_task: int) -> None:
        """Begins another epoch, whose batches are the tasks from ``first_task`` on. The caller must then call
        ``first``."""
        self._offset, self._answers, self._failed = -first_task, 0, False

    def first(self, error: ExceptionWrapper | None, fetcher: Any, dataset: Any, before: bytes | None = None) -> None:
        """Sends the snapshot of the epoch's start, or the worker's error in its place. A process that continues in the
        middle of an epoch sends neither: the main process has the snapshot from which that process starts."""
        if error is None:
            first = functools.partial(self._snapshots.first, before=before)
            self._send(first, self._answers, fetcher, dataset, is_wanted=not self._answers)
        elif not self._answers:
            self._fail(error, self._answers, of_state=False)

    def after(self, task: int, fetcher: Any, dataset: Any) -> None:
        """Counts an answer, and sends the snapshot after it if one is due. This must precede the answer itself, so that
        the main process has the snapshot when it receives the answer."""
        self._answers += 1
        # torch's fetcher has ended if it has collated the dataset's last samples into an incomplete batch.
        if self._snapshots.is_due(task + self._offset) or (getattr(fetcher, "ended", False) and not self._failed):
            with self._snapshots.charged():
                self._send(self._snapshots.make, self._answers, fetcher, dataset)

    def at_end(self, fetcher: Any, dataset: Any) -> None:
        """Sends the snapshot of an iterable dataset that has ended, regardless of its cost. It is sent under the number
        of the next answer, so that the state at a position before the end does not depend on whether the worker has
        reached the end."""
        # torch's fetcher sets this only when it collates samples into batches.
        fetcher.ended = True
        if not self._failed:
            self._send(functools.partial(self._snapshots.make, exhausted=True), self._answers + 1, fetcher, dataset)

    def _send(self, make: Any, answers: int, fetcher: Any, dataset: Any, is_wanted: bool = True) -> None:
        try:
            payload = make(fetcher, dataset)
        except Exception:
            error = ExceptionWrapper(where=f"in the state of the dataset, {self._where}")
            self._fail(error, answers, of_state=True)
            return
        if is_wanted:
            self._port.send_snapshot(answers, payload, False)

    def _fail(self, error: ExceptionWrapper, answers: int, of_state: bool) -> None:
        self._failed = True
        self._snapshots.stop()
        self._port.send_snapshot(answers, bytes([of_state]) + serialize.dumps_error(error), True)
