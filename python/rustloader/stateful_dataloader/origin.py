"""The origin of an epoch: its beginning, or the position of a loaded state."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data.dataloader import _DatasetKind

from rustloader.order.stream import KNOWN_SAMPLERS
from rustloader.settings import loader_state
from rustloader.stateful_dataloader.compatibility import check, dataset_of
from rustloader.stateful_dataloader.next_epoch import EarlyDraws, SeedWatch, generators_after_draws, restore, run_out
from rustloader.stateful_dataloader.recording import resumable, unstarted
from rustloader.stateful_dataloader.schema import FETCHER_STATE, Draws, SamplerState, State, copied, value_of
from rustloader.system.protocols import LoaderLike, StatefulLoaderLike
from rustloader.workers.snapshots import WorkerStart, is_stateful

# Keys of the starts of samplers without their own generator.
_WITHOUT_GENERATOR = frozenset({"seed", "global_generator"})


@dataclass
class Origin(State):
    """The origin of an epoch: its beginning, or the position of a loaded state.

    An iterator has the origin of its epoch, and a loader has that of its next epoch.

    Attributes:
        kind: "fresh" for an epoch that follows from nothing, such as the first one, "continued" for the epoch after the
            last one, "interim" for a continued one while ``iter()`` replaces the iterator of an abandoned epoch, whose
            state is ``saved``, and "resumed" for one that follows from the loaded state ``saved``.
        saved: The state that the loader's ``state_dict()`` returns until the epoch has an iterator; None if it makes
            one.
        early: The draws of the epoch, if they were made or predicted for a state.
        watches: The watches of the loader's generator and of torch's global generator since the state of a finished
            epoch, or of an epoch that had not begun, was loaded.
        loaded: The loader's origin from which that of the iterator was made; None if no state was loaded.
        is_bound: Whether only a loader with the same number of workers can resume from the origin.
        first_worker: The worker that gets the next task.
        drop: Number of batches to take and drop before the first batch is delivered.
        owes_draws: Whether torch still makes its draws, although ``base_seed`` and ``sampler`` replace their results.
            See ``EarlyDraws``.
    """

    kind: Literal["fresh", "continued", "interim", "resumed"] = "fresh"
    saved: dict[str, Any] | None = None
    early: EarlyDraws | None = None
    watches: tuple[SeedWatch, SeedWatch] | None = None
    loaded: Origin | None = None

    is_bound: bool = False
    first_worker: int = 0
    drop: int = 0
    owes_draws: bool = False

    def begins(self, loader: StatefulLoaderLike) -> list[Origin]:
        """Returns the origins of the epochs that ``iter()`` of a loader begins, of which it returns the last one.

        A dataset in this process, or in workers that are kept, has its state from the epoch before. If a loaded state
        has such a state, and its epoch has ended, that epoch comes first.
        """
        if self.kind != "resumed":
            return [self._continued(loader._epochs)]
        # A copy, because the dataset may modify the states that it loads.
        at = dataclasses.replace(self, saved=None, early=None, watches=None)
        at = dataclasses.replace(copy.deepcopy(at), loaded=self)
        if self.watches is None:
            return [at]
        # If the program has seeded a generator since the load, the epoch draws from that generator, as in a run without
        # a state.
        of_loader, of_torch = self.watches
        draws = at.next or Draws(None, None)
        has_seed = at.next is not None and not of_loader.was_seeded()
        base_seed = draws.base_seed if has_seed else None
        start = None if of_torch.was_seeded() else _random_start(draws)
        if not at.finished:
            if start is None and at.sampler is not None and at.sampler.kind == "stateful":
                start = at.sampler
            return [dataclasses.replace(at, base_seed=base_seed, sampler=start)]
        if base_seed is None and (has_seed or loader._keeps_workers()):
            # Persistent workers keep their base seed.
            base_seed = at.base_seed
        following = Origin(
            epoch=at.epoch + 1,
            base_seed=base_seed,
            sampler=start,
            seeds=None if at.seeds is None else (at.seeds[0], at.seeds[1] + 1),
            kind="resumed",
            loaded=self,
        )
        if any(worker.has_state for worker in at.workers):
            if loader.num_workers == 0:
                # Any base seed prevents a draw from a generator whose state the dataset's state may include.
                ended = [dataclasses.replace(worker, ended=not worker.replayed) for worker in at.workers]
                return [dataclasses.replace(at, base_seed=at.base_seed or 0, workers=ended), following]
            if loader._keeps_workers():
                return [at, following]
        return [following]

    def _continued(self, epoch: int) -> Origin:
        """Returns the beginning of an epoch, with the draws that were made or predicted for a state, if any."""
        begun, early = Origin(kind="continued", epoch=epoch), self.early
        if early is None or early.was_seeded_since():
            return begun
        owes = not early.are_made
        start = _random_start(early.draws, owes)
        return dataclasses.replace(begun, base_seed=early.draws.base_seed, sampler=start, owes_draws=owes)

    def draws(self, loader: StatefulLoaderLike, are_made: bool) -> Draws:
        """Returns the draws of the next ``iter()``, which then uses them.

        The draws are made now, or predicted if ``are_made`` is False, unless an earlier call did so and the program
        has not seeded a generator since.
        """
        if self.early is None or self.early.was_seeded_since():
            with_base_seed = not (are_made and loader._keeps_workers())
            self.early = EarlyDraws(loader, loader._index_sampler, are_made, with_base_seed)
        return copy.deepcopy(self.early.draws)

    def watch(self, loader: LoaderLike) -> None:
        """If an epoch begins from a loaded state, brings a sampler with its own generator or state to the start of that
        epoch. The program can still seed its generator before ``iter()``, which ``watches`` notice."""
        if not self.finished and self.next is None:
            return
        start = None if self.next is None else self.next.sampler
        if start is not None:
            restore(loader._index_sampler, start)
        elif self.finished:
            # In torchdata's states of loaders without workers, the sampler's state was taken after the epoch.
            has_ended = self.dataset is None and self.num_workers == 0
            run_out(loader._index_sampler, self.sampler, self.low, has_ended)
        self.watches = SeedWatch(loader.generator), SeedWatch(None)


def _random_start(draws: Draws, owes_draws: bool = False) -> SamplerState | None:
    """Returns the start of a sampler's order as the sampler's part of a state.

    Returns None if the sampler draws nothing, or draws from its own generator.
    """
    start = draws.sampler
    if not start or _WITHOUT_GENERATOR.isdisjoint(start):
        return None
    return SamplerState(start=start, owes_draws=owes_draws)


def read(state: Any, loader: LoaderLike) -> Origin:
    """Reads a state for a loader.

    Raises:
        ValueError: ``state`` is not a state of a loader, or is that of another dataset, sampler or batch size.
    """
    try:
        return _read(state, loader)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the state cannot be read: {error}; load what state_dict() returned") from error


def _read(state: Any, loader: LoaderLike) -> Origin:
    origin = Origin.from_torchdata(state, lambda part: check(part, loader))
    origin.kind = "resumed"
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    _check_workers_states(origin, loader, is_iterable)
    if origin.num_workers:
        _place_with_workers(origin, is_iterable)
    elif is_iterable:
        value_of(state, FETCHER_STATE, dict)
        if origin.dataset is None and not origin.workers[0].has_state:
            origin.workers[0].replay = origin.yielded
    if is_iterable:
        # Each worker of an iterable dataset has its own position.
        origin.ahead = ()
    else:
        _check_position(origin, loader)
    return origin


def _place_with_workers(origin: Origin, is_iterable: bool) -> None:
    """Sets the position of an origin from a state with workers. In torchdata's states, ``steps`` batches follow the
    last snapshot."""
    steps, count = origin.steps, origin.num_workers
    origin.first_worker = (origin.last_worker + 1) % count
    if is_iterable and origin.dataset is None and not any(start.has_state for start in origin.workers):
        # As in torchdata, workers make all batches of the epoch again, and those before the position are dropped.
        origin.low, origin.yielded, origin.first_worker, origin.drop = 0, 0, 0, origin.yielded + steps
        origin.workers = []
    elif origin.is_bound:
        origin.drop = steps
    else:
        origin.low, origin.yielded = origin.low + steps, origin.yielded + steps
        origin.first_worker = (origin.first_worker + steps) % count


def _check_position(origin: Origin, loader: LoaderLike) -> None:
    saved = origin.sampler or SamplerState()
    order = resumable(loader._index_sampler)
    order.check_position(saved.start, origin.low, loader)
    if origin.ahead:
        order.check_place(saved.start)
    if origin.low and saved.kind != "sequential" and saved.kind in KNOWN_SAMPLERS and not saved.start:
        raise ValueError(
            "the state's sampler has no 'start', without which the order of the epoch is not known: load what "
            "state_dict() returned"
        )


def check_workers(origin: Origin, num_workers: int) -> None:
    """Raises AssertionError if a loader with ``num_workers`` workers cannot resume from an origin."""
    if origin.is_bound and origin.num_workers != num_workers:
        raise AssertionError(
            f"the state was saved with num_workers={origin.num_workers}, but this loader has "
            f"num_workers={num_workers}: a dataset that is iterable or has a state resumes only with the same number "
            "of workers"
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


def _check_workers_states(origin: Origin, loader: LoaderLike, is_iterable: bool) -> None:
    """Checks that the states of the workers fit the dataset, and sets ``is_bound``."""
    has_state = is_stateful(loader.dataset)
    for start in origin.workers:
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
    was_stateful = origin.dataset is not None and bool(origin.dataset.stateful)
    origin.is_bound = is_iterable or has_state or was_stateful or any(start.has_state for start in origin.workers)
