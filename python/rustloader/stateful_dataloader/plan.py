"""The plan that a loader makes from a state, and the state of a loader before its first epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader.order.stream import KNOWN_SAMPLERS
from rustloader.settings import loader_state
from rustloader.stateful_dataloader.compatibility import check, dataset_of
from rustloader.stateful_dataloader.next_epoch import generators_after_draws
from rustloader.stateful_dataloader.recording import resumable, unstarted
from rustloader.stateful_dataloader.schema import FETCHER_STATE, Draws, SamplerState, State, copied, value_of
from rustloader.system.protocols import LoaderLike, StatefulLoaderLike
from rustloader.workers.snapshots import WorkerStart, is_stateful


@dataclass
class Plan(State):
    """The point at which an epoch starts: its beginning, or a saved position.

    Attributes:
        is_bound: Whether only a loader with the same number of workers can resume from the plan.
        first_worker: The worker that gets the next task.
        drop: Number of batches to take and drop before the first batch is delivered.
        owes_draws: Whether torch still makes its draws, although ``base_seed`` and ``sampler`` replace their results.
            See ``EarlyDraws``.
        resumed: Whether the plan was made from a state.
    """

    is_bound: bool = False
    first_worker: int = 0
    drop: int = 0
    owes_draws: bool = False
    resumed: bool = False


def read(state: Any, loader: LoaderLike) -> Plan:
    """Reads a state for a loader.

    Raises:
        ValueError: ``state`` is not a state of a loader, or is that of another dataset, sampler or batch size.
    """
    try:
        return _read(state, loader)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the state cannot be read: {error}; load what state_dict() returned") from error


def _read(state: Any, loader: LoaderLike) -> Plan:
    plan = Plan.from_torchdata(state, lambda part: check(part, loader))
    plan.resumed = True
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    _check_workers_states(plan, loader, is_iterable)
    if plan.num_workers:
        _place_with_workers(plan, is_iterable)
    elif is_iterable:
        value_of(state, FETCHER_STATE, dict)
        if plan.dataset is None and not plan.workers[0].has_state:
            plan.workers[0].replay = plan.yielded
    if is_iterable:
        # Each worker of an iterable dataset has its own position.
        plan.ahead = ()
    else:
        _check_position(plan, loader)
    return plan


def _place_with_workers(plan: Plan, is_iterable: bool) -> None:
    """Sets the position of a plan from a state with workers. In torchdata's states, ``steps`` batches follow the last
    snapshot."""
    steps, count = plan.steps, plan.num_workers
    plan.first_worker = (plan.last_worker + 1) % count
    if is_iterable and plan.dataset is None and not any(start.has_state for start in plan.workers):
        # As in torchdata, workers make all batches of the epoch again, and those before the position are dropped.
        plan.low, plan.yielded, plan.first_worker, plan.drop = 0, 0, 0, plan.yielded + steps
        plan.workers = []
    elif plan.is_bound:
        plan.drop = steps
    else:
        plan.low, plan.yielded = plan.low + steps, plan.yielded + steps
        plan.first_worker = (plan.first_worker + steps) % count


def _check_position(plan: Plan, loader: LoaderLike) -> None:
    saved = plan.sampler or SamplerState()
    resumable(loader._index_sampler).check_position(saved.start, plan.low, loader)
    if plan.low and saved.kind != "sequential" and saved.kind in KNOWN_SAMPLERS and not saved.start:
        raise ValueError(
            "the state's sampler has no 'start', without which the order of the epoch is not known: load what "
            "state_dict() returned"
        )


def check_workers(plan: Plan, num_workers: int) -> None:
    """Raises AssertionError if a loader with ``num_workers`` workers cannot resume from a plan."""
    if plan.is_bound and plan.num_workers != num_workers:
        raise AssertionError(
            f"the state was saved with num_workers={plan.num_workers}, but this loader has num_workers={num_workers}: "
            "a dataset that is iterable or has a state resumes only with the same number of workers"
        )


def fresh(loader: StatefulLoaderLike, draws: Draws) -> dict[str, Any]:
    """Returns the state of a loader before its first epoch, with the draws of that epoch."""
    workers, dataset = loader.num_workers, loader.dataset
    starts = [WorkerStart() for _ in range(workers or 1)]
    if workers == 0 and is_stateful(dataset):
        # A dataset that saves a generator makes its first sample after these draws.
        with generators_after_draws(loader, loader._index_sampler):
            starts[0].dataset_state = copied(dataset.state_dict())
    return State(
        num_workers=workers,
        last_worker=workers - 1,
        sampler=unstarted(resumable(loader._index_sampler)),
        workers=starts,
        len_called=loader._IterableDataset_len_called,
        epoch=loader._epochs,
        dataset=dataset_of(loader),
        # If the loader is a copy of one that has run, it has seeds before its first epoch.
        seeds=loader_state.epochs(loader),
        next=draws,
    ).to_torchdata()


def _check_workers_states(plan: Plan, loader: LoaderLike, is_iterable: bool) -> None:
    """Checks that the states of the workers fit the dataset, and sets ``is_bound``."""
    has_state = is_stateful(loader.dataset)
    for start in plan.workers:
        if start.dataset_state is not None and not has_state:
            raise ValueError(
                f"the state contains a state of the dataset, but {type(loader.dataset).__qualname__} has no "
                "load_state_dict: load it into a loader over the same dataset"
            )
        if start.iterator_state is not None and not is_iterable:
            raise ValueError(
                "the state was saved with an iterable dataset, but this loader has a map-style dataset: load it into "
                "a loader over the same dataset"
            )
    was_stateful = plan.dataset is not None and bool(plan.dataset.stateful)
    plan.is_bound = is_iterable or has_state or was_stateful or any(start.has_state for start in plan.workers)
