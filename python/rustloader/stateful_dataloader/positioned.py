"""What the iterators of a StatefulDataLoader share: an epoch that begins at a position."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from rustloader.fetch.seeds import Seeding, ordinal_of
from rustloader.settings import loader_state
from rustloader.settings.config import view
from rustloader.settings.limits import FROZEN_AFTER
from rustloader.stateful_dataloader.sampling import Sampling, sampling
from rustloader.stateful_dataloader.schema import DatasetState, Draws, SamplerState, State, copied
from rustloader.stateful_dataloader.state import Plan
from rustloader.system.torch_side import TORCHS_INIT, in_torch
from rustloader.workers.snapshots import WorkerStart

_EMPTY = (
    "an epoch of 0 batches: the loaded state was taken after the last batch of its epoch, before the end of the loop. "
    "Take the state after the loop to begin with the next epoch"
)
_FROZEN = (
    "the state of {} has not changed over {} batches: a loop that resumes from it begins at the same place again. Let "
    "state_dict() of the dataset, or of its iterator, return the position"
)


class Positioned(_BaseDataLoaderIter):
    """What both iterators share: an epoch that begins at a position, and the state of the epoch.

    Attributes:
        origin: What the present epoch started from.
        sampling: Its index batches.
    """

    origin: Plan
    sampling: Sampling
    # What the next epoch starts from, until it has begun.
    _plan: Plan | None = None
    finished: Any
    _every = 1
    # What a state says about the dataset.
    _about_dataset: DatasetState
    _seeding: Seeding | None = None
    _raised = 0
    # From `_note_end` to the program.
    _frames_to_caller = 5
    _has_warned = False

    def _prepare(self, loader: Any, plan: Plan, about_dataset: DatasetState) -> None:
        """Sets what the first epoch starts from. Comes before torch's constructor."""
        self._plan = self.origin = plan
        self._every = loader.snapshot_every_n_steps or 0
        self._about_dataset = about_dataset
        if plan.seeds is not None:
            loader_state.set_epochs(loader, *plan.seeds)

    def _call_torchs_init(self, init: Callable[[Any], None], loader: Any) -> None:
        base_seed = self.origin.base_seed
        if base_seed is None or self.origin.owes_draws:
            in_torch(TORCHS_INIT, "__init__", init, loader)
        else:
            # torch draws a base seed here, too. A private generator leaves those of the program alone.
            in_torch(TORCHS_INIT, "__init__", init, view(loader, generator=torch.Generator()))
        if base_seed is not None:
            self._base_seed = base_seed

    def _seeds_from_here(self, seeding: Seeding | None) -> Seeding | None:
        if seeding is None or (self.origin.low == 0 and not self.origin.ahead):
            return seeding
        return dataclasses.replace(seeding, first_ordinal=self.origin.low, ahead=self.origin.ahead)

    def _sample_from(self, origin: Plan, torchs: Any, position: int) -> Sampling:
        is_map = self._dataset_kind == _DatasetKind.Map
        return sampling(
            self._index_sampler, torchs, origin.sampler, position, origin.ahead, self._every, map_style=is_map
        )

    def plan(self, plan: Plan) -> None:
        """Sets what the next epoch starts from, of a persistent loader."""
        self._plan = dataclasses.replace(plan, base_seed=int(self._base_seed))

    def _warn_if_frozen(self, made: WorkerStart) -> None:
        if made.frozen and not self._has_warned:
            self._has_warned = True
            warnings.warn(_FROZEN.format(type(self._dataset).__qualname__, FROZEN_AFTER), stacklevel=5)

    def delivered_nothing(self) -> bool:
        """Whether neither a batch nor the end has come out of the present epoch."""
        return self._num_yielded == self.origin.yielded and not self._raised and not self.finished

    def failed_to_resume(self) -> bool:
        """Whether nothing was delivered because a worker could not load the state that the epoch comes from."""
        return False

    def _note_end(self) -> None:
        """Warns of an epoch without batches that comes out of a state."""
        if self.origin.resumed and self._num_yielded == self.origin.yielded and not self._raised:
            warnings.warn(_EMPTY, stacklevel=self._frames_to_caller)

    def _worker_after(self, start: WorkerStart, answers: int, count: int, made: WorkerStart | None) -> WorkerStart:
        """What a worker starts from that goes on after a number of its answers.

        Before its first answer, a worker that has loaded a state has that one: the state comes back as it was loaded.
        A dataset that applies it at its first step shows another one until then.

        Args:
            start: What it started from.
            answers: Number of its answers since.
            count: Number of its answers before its snapshot.
            made: The snapshot, or None.
        """
        if made is None or (count == 0 and start.has_state):
            made = dataclasses.replace(
                start, dataset_state=copied(start.dataset_state), iterator_state=copied(start.iterator_state)
            )
        replay = answers - count + (start.replayed if count == 0 else 0)
        return dataclasses.replace(made, delivered=start.delivered + answers, replay=replay)

    def _state(
        self,
        low: int,
        ahead: list[int],
        yielded: int,
        finished: bool,
        draws: Draws | None,
        sampler: SamplerState,
        workers: list[WorkerStart] | None,
        last_worker: int = -1,
    ) -> dict[str, Any]:
        seeding = self._seeding
        return State(
            num_workers=self._num_workers,
            low=low,
            ahead=tuple(ahead),
            yielded=yielded,
            last_worker=last_worker,
            finished=finished,
            sampler=sampler,
            workers=[WorkerStart()] * self._num_workers if workers is None else workers,
            has_records=workers is not None,
            base_seed=int(self._base_seed),
            len_called=self._IterableDataset_len_called,
            shared_seed=self._shared_seed,
            epoch=self.origin.epoch,
            dataset=self._about_dataset,
            seeds=None if seeding is None else (seeding.base_seed, seeding.epoch),
            failures=self._failures_after(yielded),
            next=draws,
        ).to_torchdata()

    def _failures_after(self, yielded: int) -> int:
        """Number of failures in this epoch before a batch."""
        raise NotImplementedError


def own_copy(batch: Any) -> Any:
    """An index batch to keep: a sampler may use its list again for the next one."""
    return [*batch] if type(batch) is list else batch


def ordinals(origin: Plan, low: int, ahead: list[int]) -> tuple[int, list[int]]:
    """The low-water mark and the delivered ordinals beyond it, of numbers that count from the start of the epoch's
    tasks."""
    if not origin.ahead:
        return origin.low + low, [origin.low + task for task in ahead]
    mark = ordinal_of(low, origin.low, origin.ahead)
    delivered = {ordinal for ordinal in origin.ahead if ordinal > mark}
    delivered.update(ordinal_of(task, origin.low, origin.ahead) for task in ahead)
    return mark, sorted(delivered)
