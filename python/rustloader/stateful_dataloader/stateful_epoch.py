"""The common part of a StatefulDataLoader's iterators: an epoch that starts at a position."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from rustloader.fetch.seeds import Seeding, ordinal_of
from rustloader.settings import loader_state
from rustloader.settings.config import view
from rustloader.settings.limits import FROZEN_AFTER
from rustloader.stateful_dataloader.origin import Origin
from rustloader.stateful_dataloader.sampling import Sampling, sampling
from rustloader.stateful_dataloader.schema import DatasetState, State, copied
from rustloader.system.protocols import IteratorLike, LoaderLike, StatefulLoaderLike
from rustloader.system.torch_side import frames_to_program, in_torch
from rustloader.workers.snapshots import WorkerStart

_EMPTY = (
    "an epoch of 0 batches: the loaded state was taken after the last batch of its epoch, before the end of the loop. "
    "Take the state after the loop to start with the next epoch"
)
_FROZEN = (
    "the state of {} has not changed over {} batches: a loop that resumes from it starts at the same place again. Make "
    "state_dict() of the dataset, or of its iterator, return the position"
)


class StatefulEpoch:
    """An epoch that starts at a position, and the entries of a state that describe it.

    Methods take the iterator as an argument.

    Args:
        loader: The loader.
        origin: The origin of the first epoch.
        dataset: The description of the dataset for states.

    Attributes:
        origin: The origin of the current epoch.
        sampling: The index batches of the current epoch.
        seeding: The seeds of the current epoch; None for torch's seeds.
        raised: Number of answers in this epoch that were errors.
        dataset: The description of the dataset for states.
        every: Number of batches between two snapshots; 0 for snapshots only at the start of an epoch, and when an
            iterable dataset ends.
    """

    sampling: Sampling
    seeding: Seeding | None = None
    raised = 0
    _has_warned = False

    def __init__(self, loader: StatefulLoaderLike, origin: Origin, dataset: DatasetState) -> None:
        self.origin, self.dataset = origin, dataset
        self.every = loader.snapshot_every_n_steps or 0
        if origin.seeds is not None:
            loader_state.set_epochs(loader, *origin.seeds)

    @property
    def yielded(self) -> int:
        """Number of batches delivered before the position at which the epoch starts."""
        return self.origin.yielded

    def answers(self, yielded: int) -> int:
        """Returns the number of answers, batches and errors, since the position at which the epoch started.

        ``yielded`` is the number of batches delivered, including those before that position.
        """
        return yielded - self.origin.yielded + self.raised

    def init_torch_iterator(self, it: IteratorLike, init: Callable[[Any], None], loader: LoaderLike) -> None:
        """Calls torch's constructor, and sets the iterator's base seed to that of the origin, if the origin has one."""
        base_seed = self.origin.base_seed
        if base_seed is None or self.origin.owes_draws:
            in_torch(init, loader)
        else:
            # torch draws a base seed that is not used. The draw comes from a private generator, so that the program's
            # generators are unchanged.
            in_torch(init, view(loader, generator=torch.Generator()))
        if base_seed is not None:
            it._base_seed = base_seed

    def seed_from(self, seeding: Seeding | None) -> None:
        """Sets the seeds of the epoch, which apply from the origin's position on."""
        if seeding is not None and (self.origin.low or self.origin.ahead):
            seeding = dataclasses.replace(seeding, first_ordinal=self.origin.low, ahead=self.origin.ahead)
        self.seeding = seeding

    def sample_from(self, it: IteratorLike, origin: Origin, torch_iterator: Iterator[Any], position: int) -> Sampling:
        """Returns the index batches of an origin from a position on.

        ``torch_iterator`` is torch's iterator over the sampler.
        """
        is_map = it._dataset_kind == _DatasetKind.Map
        saved, ahead = origin.sampler, origin.ahead
        return sampling(it._index_sampler, torch_iterator, saved, position, ahead, self.every, map_style=is_map)

    def warn_if_frozen(self, it: IteratorLike, snapshot: WorkerStart) -> None:
        """Warns once about a dataset whose state does not change."""
        if snapshot.frozen and not self._has_warned:
            self._has_warned = True
            text = _FROZEN.format(type(it._dataset).__qualname__, FROZEN_AFTER)
            warnings.warn(text, stacklevel=frames_to_program())

    def delivered_nothing(self, it: IteratorLike) -> bool:
        """Returns True if the current epoch has delivered neither a batch nor an error."""
        return it._num_yielded == self.origin.yielded and not self.raised

    def warn_if_empty(self, it: IteratorLike) -> None:
        """Warns if an epoch that resumed from a state has no batches."""
        if self.origin.kind == "resumed" and self.delivered_nothing(it):
            warnings.warn(_EMPTY, stacklevel=frames_to_program())

    def state(self, it: IteratorLike, **position: Any) -> dict[str, Any]:
        """Returns the state at a position in the current epoch.

        ``position`` contains the fields of ``State`` that depend on the position.
        """
        seeding = self.seeding
        return State(
            num_workers=it._num_workers,
            base_seed=int(it._base_seed),
            len_called=it._IterableDataset_len_called,
            shared_seed=it._shared_seed,
            epoch=self.origin.epoch,
            dataset=self.dataset,
            seeds=None if seeding is None else (seeding.base_seed, seeding.epoch),
            **position,
        ).to_torchdata()


def worker_after(start: WorkerStart, answers: int, count: int, snapshot: WorkerStart | None) -> WorkerStart:
    """Returns the start of a worker that continues after a number of its answers.

    Before the worker's first answer, a state that the worker has loaded is returned unchanged: a dataset may apply it
    only at its first step, and would return a different state until then. If ``__iter__`` has changed the dataset's
    state, as a count of epochs does, ``shown`` is the state that the dataset has.

    Args:
        start: The start of the worker in this epoch.
        answers: Number of its answers since that start.
        count: Number of its answers before the snapshot, plus one if the snapshot was taken at the end of its data.
        snapshot: The snapshot, or None.
    """
    if snapshot is None or (count == 0 and start.has_state):
        snapshot = dataclasses.replace(
            start,
            dataset_state=copied(start.dataset_state),
            iterator_state=copied(start.iterator_state),
            shown=snapshot if snapshot is not None and snapshot.moved else None,
        )
    replay = max(answers - count, 0) + (start.replayed if count == 0 else 0)
    return dataclasses.replace(snapshot, delivered=start.delivered + answers, replay=replay)


def own_copy(batch: Any) -> Any:
    """Returns a copy of an index batch, because a sampler may reuse the list for its next index batch."""
    return [*batch] if type(batch) is list else batch


def ordinals(origin: Origin, low: int, ahead: list[int]) -> tuple[int, tuple[int, ...]]:
    """Converts a position in tasks, which are counted from the origin, into a position in ordinals.

    Returns:
        The low-water mark, and the delivered ordinals beyond it.
    """
    mark = ordinal_of(low, origin.low, origin.ahead)
    delivered = {ordinal for ordinal in origin.ahead if ordinal > mark}
    delivered.update(ordinal_of(task, origin.low, origin.ahead) for task in ahead)
    return mark, tuple(sorted(delivered))
