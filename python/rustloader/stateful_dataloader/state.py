"""Reads and checks the states of loaders: torchdata's keys, and one key of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader import loader_state
from rustloader.stateful_dataloader import sampling
from rustloader.stateful_dataloader.kinds import length_of
from rustloader.stateful_dataloader.recording import copied
from rustloader.workers.snapshots import WorkerStart, is_stateful

VERSION = 1
# The key of a state that torchdata's states do not have.
OWN = "_rustloader"


@dataclass
class Plan:
    """What an epoch starts from: its beginning, or a saved position.

    Attributes:
        low: All index batches before this ordinal are delivered.
        ahead: Delivered ordinals from ``low`` on, in ascending order.
        yielded: Number of batches delivered; an error in place of a batch does not count.
        sampler: What ``sampling`` saved, or None for the beginning of an epoch.
        base_seed: The base seed of the workers, or None to draw it.
        seeds: Base seed and epoch of ``seed_by``, or None.
        epoch: Number of epochs that the loader began before.
        failures: Number of failures under ``on_error`` in this epoch before the position.
        num_workers: Number of workers of the loader that wrote the state.
        is_bound: Whether only a loader with as many workers can go on.
        workers: What each worker starts from; one for a loader without workers.
        first_worker: The worker that gets the next task.
        drop: Number of batches to take and drop before the first one is delivered.
        finished: Whether the epoch has ended.
        next: The draws of the next epoch, if it has, or of the first one, if it has not begun.
        owes_draws: Whether the draws of ``base_seed`` and ``sampler`` are made all the same, see ``ForeseenDraws``.
        resumed: Whether it comes out of a state.
        sampler_has_ended: Whether the state of a sampler is that after the end of its epoch, as in torchdata's states
            of loaders without workers.
    """

    low: int = 0
    ahead: tuple[int, ...] = ()
    yielded: int = 0
    sampler: dict[str, Any] | None = None
    base_seed: int | None = None
    seeds: tuple[int, int] | None = None
    epoch: int = 0
    failures: int = 0
    num_workers: int = 0
    is_bound: bool = False
    workers: list[WorkerStart] = field(default_factory=list)
    first_worker: int = 0
    drop: int = 0
    finished: bool = False
    next: dict[str, Any] | None = None
    owes_draws: bool = False
    resumed: bool = False
    sampler_has_ended: bool = False


def read(state: Any, loader: Any) -> Plan:
    """Reads a state for a loader.

    Raises:
        ValueError: It is not a state of a loader, or one of another dataset, sampler or batch size.
    """
    try:
        return _read(state, loader)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the state cannot be read: {error}; load what state_dict() returned") from error


def _read(state: Any, loader: Any) -> Plan:
    if not isinstance(state, Mapping):
        raise ValueError(f"a state must be a dict from state_dict() of a StatefulDataLoader, got {state!r}")
    own = state.get(OWN)
    if own is None:
        own = {}
    else:
        _check_own(own, loader)
    finished = bool(_of(state, "_iterator_finished", bool))
    if "_snapshot" in state:
        plan = _with_workers(state, own, loader)
    elif "_num_yielded" in state:
        plan = _without_workers(state, own, loader)
    else:
        raise ValueError(
            "the state has neither '_snapshot' nor '_num_yielded', which states of a StatefulDataLoader have: load "
            "what state_dict() returned"
        )
    plan.finished, plan.resumed = finished, True
    if own:
        ahead = sorted(_counts(own, "ahead"))
        # The workers of an iterable dataset have positions of their own.
        plan.ahead = tuple(ahead) if loader._dataset_kind == _DatasetKind.Map else ()
        plan.epoch = _count(own, "epoch")
        plan.failures = _count(own, "failures", 0)
        plan.base_seed = _of(own, "base_seed", int, type(None))
        seeds = own.get("seeds")
        plan.seeds = None if seeds is None else (_of(seeds, "base_seed", int), _count(seeds, "epoch"))
        plan.next = _of(own, "next", dict, type(None)) if "next" in own else None
    _check_position(plan, loader)
    return plan


def _check_position(plan: Plan, loader: Any) -> None:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return
    saved = plan.sampler or {}
    start = saved.get("start")
    # What is left after a `reshard` is dealt anew from this batch on.
    first = start.get("first") if isinstance(start, Mapping) else None
    delivered = plan.low - (first if type(first) is int else 0)
    total = length_of(loader)
    if total is not None and delivered > total:
        raise ValueError(
            f"the state has {delivered} batches delivered, and an epoch of this loader has {total}: load it into a "
            "loader over the same dataset, with the same batch size"
        )
    if plan.low and saved.get("kind") in ("random", "subset", "weighted", "distributed") and not saved.get("start"):
        raise ValueError(
            "the state's sampler has no 'start', without which the order of the epoch is not known: load what "
            "state_dict() returned"
        )


def check_workers(plan: Plan, num_workers: int) -> None:
    """Raises AssertionError if a state cannot go on with another number of workers."""
    if plan.is_bound and plan.num_workers != num_workers:
        raise AssertionError(
            f"the state is of a loader with num_workers={plan.num_workers}, and this one has {num_workers}: a dataset "
            "with a state of its own, or an iterable one, goes on with the same number of workers only"
        )


def fresh(loader: Any, draws: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader before its first epoch, and the draws of that."""
    dataset, count = loader.dataset, loader.num_workers
    sampled, epochs = sampling.unstarted(loader._index_sampler), loader_state.epochs(loader)
    own = {
        "version": VERSION,
        "epoch": loader._epochs,
        "base_seed": None,
        "delivered": 0,
        "ahead": [],
        "sampler": sampled.own,
        "dataset": dataset_of(loader),
        # Of a copy of a loader that has run.
        "seeds": None if epochs is None else {"base_seed": epochs[0], "epoch": epochs[1]},
        "workers": None,
        "next": draws,
    }
    parts = {
        "_sampler_iter_state": sampled.sampler_iter_state,
        "_index_sampler_state": sampled.index_sampler_state,
        "_sampler_iter_yielded": 0,
        "_IterableDataset_len_called": loader._IterableDataset_len_called,
        "_shared_seed": None,
    }
    if count == 0:
        fetcher_state = None
        if loader._dataset_kind == _DatasetKind.Iterable:
            fetcher_state = {"dataset_iter_state": None, "fetcher_ended": False}
        return {
            **parts,
            "_num_yielded": 0,
            "fetcher_state": fetcher_state,
            "dataset_state": copied(dataset.state_dict()) if is_stateful(dataset) else None,
            "_iterator_finished": False,
            OWN: own,
        }
    return {
        "_snapshot": {
            "_snapshot_step": 0,
            "_last_yielded_worker_id": count - 1,
            "_main_snapshot": {"_num_workers": count, **parts, "_base_seed": None},
            "_worker_snapshots": no_snapshots(count),
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
        OWN: own,
    }


def no_snapshots(num_workers: int) -> dict[str, Any]:
    """torchdata's snapshots of workers that have no state."""
    return {
        f"worker_{worker}": {"worker_id": worker, "dataset_state": None, "fetcher_state": None}
        for worker in range(num_workers)
    }


def dataset_of(loader: Any) -> dict[str, Any]:
    """What a state says about the dataset."""
    dataset = loader.dataset
    if loader._dataset_kind == _DatasetKind.Iterable:
        # The length of an iterable dataset is an estimate, and may take long.
        return {"kind": "iterable", "length": None, "stateful": is_stateful(dataset)}
    return {"kind": "map", "length": length_of(dataset), "stateful": is_stateful(dataset)}


def _check_own(own: Any, loader: Any) -> None:
    if not isinstance(own, Mapping):
        raise ValueError(f"the state's {OWN!r} must be a dict, got {own!r}")
    version = _count(own, "version")
    if version > VERSION:
        raise ValueError(
            f"the state has format {version}, and this version of rustloader reads format {VERSION}: update rustloader"
        )
    saved, present = _of(own, "dataset", dict), dataset_of(loader)
    kinds = {"map": "a map-style", "iterable": "an iterable"}
    if saved.get("kind") != present["kind"]:
        raise ValueError(
            f"the state is of {kinds.get(saved.get('kind'), 'another')} dataset, and this loader has "
            f"{kinds[present['kind']]} one: load it into a loader over the same dataset"
        )
    lengths = saved.get("length"), present["length"]
    if None not in lengths and lengths[0] != lengths[1]:
        raise ValueError(
            f"the state is of a dataset of length {lengths[0]}, and this loader's has {lengths[1]}: load it into a "
            "loader over the same dataset, or begin without a state"
        )
    sampling.check(_of(own, "sampler", dict), loader)


def _without_workers(state: Any, own: Any, loader: Any) -> Plan:
    kind = loader._dataset_kind
    low = _count(state, "_sampler_iter_yielded")
    yielded = _count(state, "_num_yielded")
    records = (_of(own, "workers", list, type(None)) if own else None) or [{}]
    start = worker_start(state, records[0])
    if kind == _DatasetKind.Iterable:
        _of(state, "fetcher_state", dict)
    if not own and kind == _DatasetKind.Iterable and not start.has_state:
        start.replay = yielded
    _check_kind(start, kind, loader)
    return Plan(
        low=low,
        yielded=yielded,
        sampler=_sampler(own, state),
        is_bound=_is_bound(loader, own, [start]),
        workers=[start],
        sampler_has_ended=not own,
    )


def _with_workers(state: Any, own: Any, loader: Any) -> Plan:
    snapshot = _of(state, "_snapshot", dict)
    main = _of(snapshot, "_main_snapshot", dict)
    steps = _count(state, "_steps_since_snapshot")
    low = _count(main, "_sampler_iter_yielded")
    yielded = _count(snapshot, "_snapshot_step")
    count = _count(main, "_num_workers")
    snapshots = _of(snapshot, "_worker_snapshots", dict)
    names = [f"worker_{worker}" for worker in range(min(count, len(snapshots)))]
    if count == 0 or count != len(snapshots) or sorted(snapshots) != sorted(names):
        raise ValueError(
            f"the state has _num_workers={count}, but snapshots of {', '.join(map(str, snapshots)) or 'no worker'}"
        )
    records = (_of(own, "workers", list, type(None)) if own else None) or [{}] * count
    if len(records) != count:
        raise ValueError(f"the state has _num_workers={count}, but {len(records)} workers in {OWN!r}")
    starts = []
    for name, record in zip(names, records, strict=True):
        start = worker_start(_of(snapshots, name, dict), record)
        _check_kind(start, loader._dataset_kind, loader)
        starts.append(start)
    last = _count(snapshot, "_last_yielded_worker_id")
    plan = Plan(
        low=low,
        yielded=yielded,
        sampler=_sampler(own, main),
        base_seed=_of(main, "_base_seed", int, type(None)) if "_base_seed" in main else None,
        num_workers=count,
        is_bound=_is_bound(loader, own, starts),
        workers=starts,
        first_worker=(last + 1) % count,
    )
    if loader._dataset_kind == _DatasetKind.Iterable:
        if not own and not any(start.has_state for start in starts):
            # torchdata delivers them again.
            plan.low, plan.yielded, plan.first_worker, plan.drop = 0, 0, 0, yielded + steps
            plan.workers = []
        else:
            plan.drop = steps
    elif plan.is_bound:
        plan.drop = steps
    else:
        plan.low, plan.yielded = low + steps, yielded + steps
        plan.first_worker = (plan.first_worker + steps) % count
    return plan


def _sampler(own: Any, parts: Any) -> dict[str, Any]:
    """What ``sampling`` saved; for a state of torchdata, what it knows of the sampler."""
    saved = dict(own.get("sampler") or {})
    for key in ("_index_sampler_state", "_sampler_iter_state"):
        if parts.get(key) is not None:
            saved[key] = parts[key]
    return saved


def worker_start(snapshot: Any, record: Any) -> WorkerStart:
    """What a worker starts from, of its snapshot and what a state says about it besides."""
    # Early states have it beside the snapshot of a worker that has delivered nothing since its start.
    snapshot = record.get("start") or snapshot
    _of(snapshot, "dataset_state", object)
    fetcher = _of(snapshot, "fetcher_state", dict, type(None)) or {}
    if fetcher:
        _of(fetcher, "dataset_iter_state", object)
    replay = _count(record, "replay", 0)
    return WorkerStart(
        dataset_state=snapshot.get("dataset_state"),
        iterator_state=fetcher.get("dataset_iter_state"),
        ended=bool(fetcher.get("fetcher_ended")) and replay == 0,
        replay=replay,
        batches=_count(record, "batches", 0),
        samples=_count(record, "samples", 0),
        delivered=_count(record, "delivered", 0),
    )


def _check_kind(start: WorkerStart, kind: int, loader: Any) -> None:
    if start.dataset_state is not None and not is_stateful(loader.dataset):
        raise ValueError(
            f"the state has a state of the dataset, and {type(loader.dataset).__qualname__} has no load_state_dict: "
            "load it into a loader over the same dataset"
        )
    if start.iterator_state is not None and kind == _DatasetKind.Map:
        raise ValueError(
            "the state is of an iterable dataset, and this loader has a map-style one: load it into a loader over the "
            "same dataset"
        )


def _is_bound(loader: Any, own: Any, starts: list[WorkerStart]) -> bool:
    return (
        loader._dataset_kind == _DatasetKind.Iterable
        or is_stateful(loader.dataset)
        or bool((own.get("dataset") or {}).get("stateful"))
        or any(start.has_state for start in starts)
    )


def _of(values: Any, key: str, *kinds: type) -> Any:
    """A value of a state, of one of these types."""
    if key not in values:
        raise ValueError(f"the state has no {key!r}: load what state_dict() of a StatefulDataLoader returned")
    value = values[key]
    if not isinstance(value, kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"the state's {key!r} must be of type {names}, got {value!r}")
    return value


_REQUIRED = object()


def _count(values: Any, key: str, default: Any = _REQUIRED) -> int:
    if default is not _REQUIRED and key not in values:
        return int(default)
    value: int = _of(values, key, int)
    if isinstance(value, bool):
        raise ValueError(f"the state's {key!r} must be of type int, got {value!r}")
    if value < 0:
        raise ValueError(f"the state's {key!r} must not be negative, got {value}")
    return value


def _counts(values: Any, key: str) -> list[int]:
    found = _of(values, key, list, tuple)
    if not all(isinstance(value, int) and value >= 0 for value in found):
        raise ValueError(f"the state's {key!r} must have non-negative integers, got {found!r}")
    return list(found)
