"""The format of a loader's state: the keys of torchdata's states, and this package's part, ``_rustloader``.

Only this module contains these keys as literals. ``State`` is the content of a state. ``State.to_torchdata`` writes it
as a dict; ``State.from_torchdata`` reads dicts of this package and of torchdata.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from rustloader.workers.snapshots import WorkerStart

VERSION = 1

# Keys of a state with workers.
SNAPSHOT = "_snapshot"
STEPS = "_steps_since_snapshot"
FINISHED = "_iterator_finished"
# Keys of the snapshot in a state with workers.
SNAPSHOT_STEP = "_snapshot_step"
LAST_WORKER = "_last_yielded_worker_id"
MAIN = "_main_snapshot"
WORKER_SNAPSHOTS = "_worker_snapshots"
# Keys of the main process's part of the snapshot. Most are also keys of a state without workers.
NUM_WORKERS = "_num_workers"
INDEX_SAMPLER_STATE = "_index_sampler_state"
SAMPLER_ITER_STATE = "_sampler_iter_state"
SAMPLER_ITER_YIELDED = "_sampler_iter_yielded"
NUM_YIELDED = "_num_yielded"
LEN_CALLED = "_IterableDataset_len_called"
SHARED_SEED = "_shared_seed"
BASE_SEED = "_base_seed"
# Keys of a worker's part of the snapshot. DATASET_STATE and FETCHER_STATE are also keys of a state without workers.
WORKER_ID = "worker_id"
DATASET_STATE = "dataset_state"
FETCHER_STATE = "fetcher_state"
# Keys of a fetcher's state.
DATASET_ITER_STATE = "dataset_iter_state"
FETCHER_ENDED = "fetcher_ended"
# Keys of the state of an iterator over batches.
SAMPLES_YIELDED = "samples_yielded"
INNER_STATE = "sampler_state"
INNER_ITER_STATE = "sampler_iter_state"
# The key of this package's part, which torchdata's states lack.
OWN = "_rustloader"

# The order of the keys is part of the format.
_POSITION_KEYS = (SAMPLER_ITER_STATE, INDEX_SAMPLER_STATE, SAMPLER_ITER_YIELDED, LEN_CALLED, SHARED_SEED)
_MAIN_KEYS = (NUM_WORKERS, *_POSITION_KEYS, BASE_SEED)
# Keys of states without workers: before the first epoch, and later.
_FRESH_KEYS = (*_POSITION_KEYS, NUM_YIELDED)
_FLAT_KEYS = (INDEX_SAMPLER_STATE, SAMPLER_ITER_STATE, SAMPLER_ITER_YIELDED, NUM_YIELDED, LEN_CALLED, SHARED_SEED)
KEYS_WITH_WORKERS = (SNAPSHOT, STEPS, FINISHED, OWN)
KEYS_WITHOUT_WORKERS = (*_FLAT_KEYS, FETCHER_STATE, DATASET_STATE, FINISHED, OWN)


class Own:
    """The keys of this package's part, and of the dicts in it."""

    VERSION = "version"
    EPOCH = "epoch"
    BASE_SEED = "base_seed"
    DELIVERED = "delivered"
    AHEAD = "ahead"
    SAMPLER = "sampler"
    DATASET = "dataset"
    SEEDS = "seeds"
    WORKERS = "workers"
    FAILURES = "failures"
    NEXT = "next"
    # In the sampler's and the dataset's part.
    KIND = "kind"
    # In a worker's record. A worker with "start" resumes from these states, not from those under torchdata's keys: its
    # dataset has loaded them, has delivered nothing since, and has another state now.
    REPLAY = "replay"
    BATCHES = "batches"
    SAMPLES = "samples"
    START = "start"


# Keys of a worker's record, which are also attributes of `WorkerStart`.
_RECORD_KEYS = (Own.DELIVERED, Own.REPLAY, Own.BATCHES, Own.SAMPLES)


@dataclass(frozen=True)
class DatasetState:
    """The part of a state that describes the dataset.

    Attributes:
        kind: ``"map"`` or ``"iterable"``.
        length: The length of the dataset, or None.
        stateful: Whether the dataset has a state.
    """

    kind: Any
    length: Any
    stateful: Any

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Reads the dataset's part of a state. A missing entry becomes None."""
        return _from_entries(cls, entries)

    @property
    def is_iterable(self) -> bool:
        """True if the dataset is iterable."""
        return bool(self.kind == "iterable")


@dataclass(frozen=True)
class SamplerState:
    """The part of a state that describes a sampler at a position. Entries that the state lacks are None.

    Attributes:
        kind: The name of an ``order.base.Order``; None in torchdata's states.
        length: Length of the sampler.
        batch_size: Batch size of torch's BatchSampler.
        drop_last: ``drop_last`` of torch's BatchSampler.
        data_length: Number of indices that a random sampler draws from.
        replacement: Whether a random sampler draws with replacement.
        start: The start of the order (see ``order.base.Order``).
        state_position: Number of index batches drawn before ``index_sampler_state`` and ``sampler_iter_state`` were
            taken; None if these are the states at the position.
        index_sampler_state: torchdata's ``_index_sampler_state``.
        sampler_iter_state: torchdata's ``_sampler_iter_state``.
        says_batch_size: Whether the state has an entry for the batch size, which may be None.
        owes_draws: Whether torch's draws must still be made, because ``start`` only predicts them. Not saved in states.
    """

    kind: Any = None
    length: Any = None
    batch_size: Any = None
    drop_last: Any = None
    data_length: Any = None
    replacement: Any = None
    start: Any = None
    state_position: Any = None
    index_sampler_state: Any = None
    sampler_iter_state: Any = None
    says_batch_size: bool = True
    owes_draws: bool = False

    @classmethod
    def of(cls, entries: Mapping[str, Any], main: Mapping[str, Any] | None = None) -> Self:
        """Reads the sampler's part of a state.

        Args:
            entries: The sampler's entries in this package's part.
            main: The dict with torchdata's keys; None if there is none.
        """
        main = main or {}
        return _from_entries(
            cls,
            entries,
            index_sampler_state=main.get(INDEX_SAMPLER_STATE),
            sampler_iter_state=main.get(SAMPLER_ITER_STATE),
            says_batch_size="batch_size" in entries,
            owes_draws=False,
        )

    @property
    def own(self) -> dict[str, Any]:
        """The sampler's entries in this package's part of a state."""
        entries = {name: getattr(self, name) for name in ("kind", "length", "batch_size", "drop_last")}
        if self.kind in ("random", "weighted"):
            entries |= {"data_length": self.data_length, "replacement": self.replacement}
        entries["start"] = self.start
        return entries if self.state_position is None else entries | {"state_position": self.state_position}

    @property
    def has_states(self) -> bool:
        """True if there is a state of the sampler or of its iterator. That of a sampler without a state, "other", says
        only how many samples precede it, maybe at an earlier position."""
        has_any = self.index_sampler_state is not None or self.sampler_iter_state is not None
        return has_any and self.kind != "other"


@dataclass(frozen=True)
class Draws:
    """The random draws of an epoch that has not begun.

    Attributes:
        base_seed: The base seed, or None.
        sampler: The start of the sampler's order; None if the sampler draws nothing, or does not have torch's code. The
            draws include a ``"seed"``, and the order that torch draws from a ``"global_generator"``. They do not
            include the order from the sampler's own ``"generator"``, whose state is only read.
    """

    base_seed: int | None
    sampler: dict[str, Any] | None


@dataclass
class State:
    """The content of a state.

    Attributes:
        num_workers: Number of workers of the loader that wrote the state.
        low: Ordinal before which all batches are delivered.
        ahead: Delivered ordinals from ``low`` on, in ascending order.
        yielded: Number of batches delivered; an error instead of a batch does not count.
        steps: Number of batches that torchdata delivered after its snapshot.
        last_worker: The worker that delivered the last batch.
        finished: Whether the epoch has ended.
        sampler: The sampler's part, or None for the start of an epoch.
        workers: The start of each worker; a single one for a loader without workers.
        has_records: Whether the state has records of the workers in addition to their snapshots.
        base_seed: The base seed of the workers, or None to draw it.
        len_called: The length of an iterable dataset, if torch has called ``len``.
        shared_seed: torch's shared seed for DataPipes.
        epoch: Number of epochs that the loader began before this epoch.
        dataset: The dataset's part; None in torchdata's states.
        seeds: Base seed and epoch of ``seed_by``, or None.
        failures: Number of failures under ``on_error`` in this epoch before the position.
        next: The draws of the next epoch if this epoch has ended, or of this epoch if it has not begun.
    """

    num_workers: int = 0
    low: int = 0
    ahead: tuple[int, ...] = ()
    yielded: int = 0
    steps: int = 0
    last_worker: int = -1
    finished: bool = False
    sampler: SamplerState | None = None
    workers: list[WorkerStart] = field(default_factory=list)
    has_records: bool = False
    base_seed: int | None = None
    len_called: Any = None
    shared_seed: Any = None
    epoch: int = 0
    dataset: DatasetState | None = None
    seeds: tuple[int, int] | None = None
    failures: int = 0
    next: Draws | None = None

    # Writing

    def to_torchdata(self) -> dict[str, Any]:
        """Returns the state as a new dict, which shares its values with this object."""
        assert self.sampler is not None and self.dataset is not None
        values = {
            NUM_WORKERS: self.num_workers,
            INDEX_SAMPLER_STATE: self.sampler.index_sampler_state,
            SAMPLER_ITER_STATE: self.sampler.sampler_iter_state,
            SAMPLER_ITER_YIELDED: self.low,
            NUM_YIELDED: self.yielded,
            LEN_CALLED: self.len_called,
            SHARED_SEED: self.shared_seed,
            BASE_SEED: self.base_seed,
        }
        snapshots = [
            {WORKER_ID: worker} | self._states_of(start.shown or start) for worker, start in enumerate(self.workers)
        ]
        if self.num_workers == 0:
            keys = _FLAT_KEYS if self.has_records else _FRESH_KEYS
            entries = {key: values[key] for key in keys}
            entries |= {key: snapshots[0][key] for key in (FETCHER_STATE, DATASET_STATE)}
        else:
            snapshot = {
                SNAPSHOT_STEP: self.yielded,
                LAST_WORKER: self.last_worker,
                MAIN: {key: values[key] for key in _MAIN_KEYS},
                WORKER_SNAPSHOTS: {_name(worker): part for worker, part in enumerate(snapshots)},
            }
            entries = {SNAPSHOT: snapshot, STEPS: self.steps}
        return entries | {FINISHED: self.finished, OWN: self._own(self.sampler, self.dataset)}

    def _states_of(self, start: WorkerStart) -> dict[str, Any]:
        """Returns the states of a worker's dataset and fetcher."""
        assert self.dataset is not None
        fetcher = None
        if self.dataset.is_iterable and (self.has_records or not self.num_workers):
            fetcher = {DATASET_ITER_STATE: start.iterator_state, FETCHER_ENDED: start.ended}
        return {DATASET_STATE: start.dataset_state, FETCHER_STATE: fetcher}

    def _record_of(self, start: WorkerStart) -> dict[str, Any]:
        """Returns the record of a worker."""
        record = {key: getattr(start, key) for key in _RECORD_KEYS}
        return record if start.shown is None else record | {Own.START: self._states_of(start)}

    def _own(self, sampler: SamplerState, dataset: DatasetState) -> dict[str, Any]:
        records = [self._record_of(start) for start in self.workers]
        own: dict[str, Any] = {
            Own.VERSION: VERSION,
            Own.EPOCH: self.epoch,
            Own.BASE_SEED: self.base_seed,
            Own.DELIVERED: self.low,
            Own.AHEAD: [*self.ahead],
            Own.SAMPLER: sampler.own,
            Own.DATASET: asdict(dataset),
            Own.SEEDS: self.seeds and {Own.BASE_SEED: self.seeds[0], Own.EPOCH: self.seeds[1]},
            Own.WORKERS: records if self.has_records else None,
        }
        if self.failures:
            own[Own.FAILURES] = self.failures
        if self.next is not None:
            own[Own.NEXT] = {Own.BASE_SEED: self.next.base_seed, Own.SAMPLER: self.next.sampler}
        return own

    # Reading

    @classmethod
    def from_torchdata(
        cls, state: Any, check: Callable[[DatasetState | SamplerState], None] = lambda part: None
    ) -> Self:
        """Reads a state of this package or of torchdata.

        Args:
            state: The state.
            check: Called for states of this package, with the dataset's part and then with the sampler's, before the
                position and the snapshots are read. Raises ValueError if a part does not fit.

        Raises:
            ValueError: ``state`` is not a state, or one of its entries is missing or wrong.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a state must be a dict from state_dict() of a StatefulDataLoader, got {state!r}")
        result, own, main = cls(), state.get(OWN), state
        if own is not None:
            result._read_header(own, check)
        result.finished = bool(value_of(state, FINISHED, bool))
        if SNAPSHOT in state:
            main = result._read_snapshot(state, own)
        elif NUM_YIELDED in state:
            result.low = count(state, SAMPLER_ITER_YIELDED)
            result.yielded = count(state, NUM_YIELDED)
            result.workers = [_worker(state, result._records(own, 1)[0])]
        else:
            raise ValueError(
                f"the state has neither {SNAPSHOT!r} nor {NUM_YIELDED!r}, so it is not from a StatefulDataLoader: load "
                "what state_dict() returned"
            )
        result.sampler = SamplerState.of((own and own.get(Own.SAMPLER)) or {}, main)
        if own is not None:
            result._read_own(own)
        return result

    def _read_header(self, own: Any, check: Callable[[DatasetState | SamplerState], None]) -> None:
        if not isinstance(own, Mapping):
            raise ValueError(f"the state's {OWN!r} must be a dict, got {own!r}")
        version = count(own, Own.VERSION)
        if version > VERSION:
            raise ValueError(
                f"the state has format {version}, and this version of rustloader reads format {VERSION}: update "
                "rustloader"
            )
        self.dataset = DatasetState.of(value_of(own, Own.DATASET, dict))
        check(self.dataset)
        check(SamplerState.of(value_of(own, Own.SAMPLER, dict)))

    def _records(self, own: Mapping[str, Any] | None, number: int) -> list[Any]:
        records = (value_of(own, Own.WORKERS, list, type(None)) if own else None) or []
        self.has_records = bool(records)
        return records or [{}] * number

    def _read_snapshot(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Reads the position of a state with workers. Returns the main process's part."""
        snapshot = value_of(state, SNAPSHOT, dict)
        main: Mapping[str, Any] = value_of(snapshot, MAIN, dict)
        self.steps = count(state, STEPS)
        self.low = count(main, SAMPLER_ITER_YIELDED)
        self.yielded = count(snapshot, SNAPSHOT_STEP)
        self.num_workers = number = count(main, NUM_WORKERS)
        snapshots = value_of(snapshot, WORKER_SNAPSHOTS, dict)
        names = [_name(worker) for worker in range(min(number, len(snapshots)))]
        if number == 0 or number != len(snapshots) or sorted(snapshots) != sorted(names):
            raise ValueError(
                f"the state has {NUM_WORKERS}={number}, but snapshots of "
                f"{', '.join(map(str, snapshots)) or 'no worker'}"
            )
        records = self._records(own, number)
        if len(records) != number:
            raise ValueError(f"the state has {NUM_WORKERS}={number}, but {len(records)} workers in {OWN!r}")
        for name, record in zip(names, records, strict=True):
            self.workers.append(_worker(value_of(snapshots, name, dict), record))
        self.last_worker = count(snapshot, LAST_WORKER)
        self.base_seed = value_of(main, BASE_SEED, int, type(None)) if BASE_SEED in main else None
        return main

    def _read_own(self, own: Mapping[str, Any]) -> None:
        ahead = value_of(own, Own.AHEAD, list, tuple)
        if not all(isinstance(value, int) and value >= 0 for value in ahead):
            raise ValueError(f"the state's {Own.AHEAD!r} must contain only non-negative integers, got {ahead!r}")
        self.ahead = tuple(sorted(ahead))
        self.epoch = count(own, Own.EPOCH)
        self.failures = count(own, Own.FAILURES, 0)
        self.base_seed = value_of(own, Own.BASE_SEED, int, type(None))
        seeds = own.get(Own.SEEDS)
        self.seeds = None if seeds is None else (value_of(seeds, Own.BASE_SEED, int), count(seeds, Own.EPOCH))
        draws = value_of(own, Own.NEXT, dict, type(None)) if Own.NEXT in own else None
        self.next = None if draws is None else Draws(draws.get(Own.BASE_SEED), draws.get(Own.SAMPLER))


def _name(worker: int) -> str:
    return f"worker_{worker}"


def _from_entries(cls: Any, entries: Mapping[str, Any], **more: Any) -> Any:
    return cls(**{name: entries.get(name) for name in cls.__dataclass_fields__} | more)


def _worker(snapshot: Any, record: Any) -> WorkerStart:
    """Returns the start of a worker, built from its snapshot and its record in a state."""
    snapshot = record.get(Own.START) or snapshot
    value_of(snapshot, DATASET_STATE, object)
    fetcher = value_of(snapshot, FETCHER_STATE, dict, type(None)) or {}
    if fetcher:
        value_of(fetcher, DATASET_ITER_STATE, object)
    counts: dict[str, Any] = {key: count(record, key, 0) for key in _RECORD_KEYS}
    return WorkerStart(
        dataset_state=snapshot.get(DATASET_STATE),
        iterator_state=fetcher.get(DATASET_ITER_STATE),
        ended=bool(fetcher.get(FETCHER_ENDED)),
        **counts,
    ).resumed()


def value_of(values: Any, key: str, *types: type) -> Any:
    """Returns a value in a state. Raises ValueError if the value is missing or of none of these types."""
    if key not in values:
        raise ValueError(f"the state has no {key!r}: load what state_dict() of a StatefulDataLoader returned")
    value = values[key]
    if not isinstance(value, types):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        raise ValueError(f"the state's {key!r} must be of type {names}, got {value!r}")
    return value


def count(values: Any, key: str, default: int | None = None) -> int:
    """Returns a non-negative integer in a state, or ``default`` if it is missing.

    Raises ValueError if it is missing and there is no default, or if it is not a non-negative integer.
    """
    if default is not None and key not in values:
        return default
    value: int = value_of(values, key, int)
    if isinstance(value, bool):
        raise ValueError(f"the state's {key!r} must be of type int, got {value!r}")
    if value < 0:
        raise ValueError(f"the state's {key!r} must not be negative, got {value}")
    return value


_IMMUTABLE = frozenset({int, float, bool, str, bytes, type(None)})


def copied(value: Any) -> Any:
    """Returns a deep copy of a state. Fast for plain types and tensors."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    if kind is torch.Tensor:
        return value.detach().clone()
    return copy.deepcopy(value)
