"""The iterators of a StatefulDataLoader: torch's and the engine's, with a position."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from rustloader._core import BACK_BATCHES, observed
from rustloader.config import FROZEN_AFTER
from rustloader.fetch.inline import SeededFetcher
from rustloader.fetch.seeds import Seeding, ordinal_of
from rustloader.iterator import fallback, fetching, settings, single
from rustloader.iterator.core import _MultiProcessingDataLoaderIter, warn_of_length
from rustloader.stateful_dataloader.recording import copied
from rustloader.stateful_dataloader.sampling import Sampling, sampling
from rustloader.stateful_dataloader.set_epoch import Recorder
from rustloader.stateful_dataloader.state import OWN, VERSION, Plan
from rustloader.torch_side import in_torch
from rustloader.workers import resuming
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import SnapshotPolicy, Snapshots, WorkerStart

_EMPTY = (
    "an epoch of 0 batches: the loaded state was taken after the last batch of its epoch, before the end of the loop. "
    "Take the state after the loop to begin with the next epoch"
)
_FROZEN = (
    "the state of {} has not changed over {} batches: a loop that resumes from it begins at the same place again. Let "
    "state_dict() of the dataset, or of its iterator, return the position"
)


class _Positioned(_BaseDataLoaderIter):
    """What both iterators share: an epoch that begins at a position, and the state of the epoch.

    Attributes:
        origin: What the present epoch started from.
        sampling: Its index batches.
    """

    origin: Plan
    sampling: Sampling
    # The start of the next epoch, once the loader has set it.
    _plan: Plan | None = None
    finished: Any
    _every = 1
    # What a state says about the dataset.
    _about_dataset: dict[str, Any]
    _seeding: Seeding | None = None
    _raised = 0
    # From `_note_end` to the program.
    _frames_to_caller = 4
    _has_warned = False

    def _prepare(self, loader: Any, plan: Plan, about_dataset: dict[str, Any]) -> None:
        """Sets what the first epoch starts from. Comes before torch's constructor."""
        self._plan = self.origin = plan
        self._every = loader.snapshot_every_n_steps or 0
        self._about_dataset = about_dataset
        if plan.seeds is not None:
            fetching.set_next(loader, *plan.seeds)

    def _call_torchs_init(self, init: Callable[[Any], None], loader: Any) -> None:
        base_seed = self.origin.base_seed
        if base_seed is None:
            in_torch(init, loader)
            return
        # torch draws a base seed; nobody sees this generator.
        in_torch(init, settings.with_values(loader, generator=torch.Generator()))
        self._base_seed = base_seed

    def _seeds_from_here(self, seeding: Seeding | None) -> Seeding | None:
        if seeding is None or (self.origin.low == 0 and not self.origin.ahead):
            return seeding
        return dataclasses.replace(seeding, first_ordinal=self.origin.low, ahead=self.origin.ahead)

    def _sample_from(self, torchs: Any, position: int) -> None:
        origin, is_map = self.origin, self._dataset_kind == _DatasetKind.Map
        self.sampling = sampling(
            self._index_sampler, torchs, origin.sampler, position, origin.ahead, self._every, map_style=is_map
        )

    def _begin_epoch(self) -> None:
        """Takes the plan of the epoch that begins: the one that was set, or its beginning."""
        if self._plan is None:
            self._plan = Plan(base_seed=int(self._base_seed), epoch=self.origin.epoch + 1)
        self.origin = self._plan

    def plan(self, plan: Plan) -> None:
        """Sets what the next epoch starts from, of a persistent loader."""
        self._plan = dataclasses.replace(plan, base_seed=int(self._base_seed), epoch=self.origin.epoch + 1)

    def _warn_if_frozen(self, made: dict[str, Any]) -> None:
        if made.get("frozen") and not self._has_warned:
            self._has_warned = True
            warnings.warn(_FROZEN.format(type(self._dataset).__qualname__, FROZEN_AFTER), stacklevel=5)

    def delivered_nothing(self) -> bool:
        """Whether neither a batch nor the end has come out of the present epoch."""
        return self._num_yielded == self.origin.yielded and not self._raised and not self.finished

    def _note_end(self) -> None:
        """Warns of an epoch without batches that comes out of a state."""
        if self.origin.resumed and self._num_yielded == self.origin.yielded and not self._raised:
            warnings.warn(_EMPTY, stacklevel=self._frames_to_caller)

    def _own_part(
        self, low: int, ahead: list[int], sampler: dict[str, Any], workers: list[dict[str, int]] | None
    ) -> Any:
        """This package's part of a state."""
        seeding = self._seeding
        return {
            "version": VERSION,
            "epoch": self.origin.epoch,
            "base_seed": self._base_seed,
            "delivered": low,
            "ahead": ahead,
            "sampler": sampler,
            "dataset": self._about_dataset.copy(),
            "seeds": None if seeding is None else {"base_seed": seeding.base_seed, "epoch": seeding.epoch},
            "workers": workers,
        }


class _StatefulSingleProcessIter(_Positioned, _SingleProcessDataLoaderIter):
    """Iterates without workers, as torch's iterator does."""

    finished = False
    # Answers when the index batch of `_drawn` was drawn.
    _drawn_at = -1

    def __init__(self, loader: Any, plan: Plan, about_dataset: dict[str, Any]) -> None:
        self._prepare(loader, plan, about_dataset)
        self._start = start = plan.workers[0] if plan.workers else WorkerStart()
        # The index batch that is being made. An interrupt leaves it here for the next call.
        self._drawn: list[Any] = []
        # Numbers of the answers that were errors.
        self._errors: list[int] = []
        # Snapshots after a number of answers, the latest last.
        self._snapshots: list[tuple[int, bytes]] = []
        resuming.load_dataset(loader.dataset, start)
        self._call_torchs_init(super(_Positioned, self).__init__, loader)
        resuming.load_iterator(self._dataset_fetcher, start)
        self._maker = Snapshots(SnapshotPolicy(self._every, plan.low), 1, self._dataset_kind)
        seen = settings.applied(loader)
        self._seeding = self._seeds_from_here(fetching.seeding(seen, int(self._base_seed)))
        single.prepare_fetcher(self, loader, self._seeding)
        if isinstance(self._dataset_fetcher, SeededFetcher):
            resuming.load_counters(self._dataset_fetcher.seeds, start)
        self._sampler_iter = self._resume_sampler(self._sampler_iter)
        self._num_yielded = plan.yielded

    def _resume_sampler(self, torchs: Any) -> Any:
        """Takes the first snapshot, and makes the batches again that the saved one lacks."""
        start, low = self._start, self.origin.low
        fetcher, count = self._dataset_fetcher, start.replayed
        with contextlib.suppress(Exception):  # `state_dict` raises it again
            first = self._maker.first(fetcher, self._dataset)
            if self._maker.has_state:
                self._snapshots.append((0, first))
        is_map = self._dataset_kind == _DatasetKind.Map
        self._sample_from(torchs, low - count if is_map else low)
        if count:
            if is_map:
                batches: Any = list(itertools.islice(self.sampling.iterator, count))
            else:
                # The index batches of an iterable dataset are all alike.
                batches = itertools.repeat(next(iter(self._index_sampler)), count)
            resuming.replay(fetcher, batches, self._dataset_kind)
        return self.sampling.iterator

    @property
    def _answers(self) -> int:
        return self._num_yielded - self.origin.yielded + self._raised

    def __next__(self) -> Any:
        if observed():
            with torch.autograd.profiler.record_function(self._profile_name):
                data = self._next_data()
        else:
            data = self._next_data()
        # No call from here on: a signal handler that raises in it would lose a batch that counts.
        self._num_yielded += 1
        length: Any = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            warn_of_length(self)
        return data

    def _next_data(self) -> Any:
        answers = self._answers
        if self._drawn_at != answers:
            self._drawn.clear()
            self._drawn_at = answers
        elif self._drawn and isinstance(self._dataset_fetcher, SeededFetcher):
            self._dataset_fetcher.number = answers
        if not self._drawn:
            # A single call of C code draws and stores: no signal handler runs in between.
            self._drawn.extend(itertools.islice(self._sampler_iter, 1))
        if not self._drawn:
            self._note_end()
            self.finished = True
            raise StopIteration
        try:
            data = self._dataset_fetcher.fetch(self._drawn[0])
            if self._pin_memory:
                data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)
        except StopIteration:
            self._note_end()
            self.finished = True
            raise
        except Exception:
            self._errors.append(answers)
            self._raised += 1
            raise
        if self._maker.has_state:
            self._keep_snapshot(answers)
        return data

    def _keep_snapshot(self, answers: int) -> None:
        made = self._maker.after(self.origin.low + answers, self._dataset_fetcher, self._dataset)
        if made is None:
            return
        kept = self._snapshots
        # The one before the oldest position that can be asked for, and all later ones.
        while len(kept) > 1 and kept[1][0] <= answers - BACK_BATCHES:
            kept.pop(0)
        kept.append((answers + 1, made))

    def _answers_before(self, answers: int, back: int) -> int:
        if back > BACK_BATCHES:
            raise ValueError(f"back must be {BACK_BATCHES} or less, got {back}")
        while back:
            answers -= 1
            if answers < 0:
                raise ValueError("back must not be larger than the number of batches delivered since the last resume")
            back -= answers not in self._errors
        return answers

    def state(self, back: int, finished: bool) -> dict[str, Any]:
        """The state after the last batch that was delivered, or ``back`` batches before."""
        # Once: another thread may be in `next`.
        yielded = self._num_yielded
        answers = yielded - self.origin.yielded + self._raised
        if back:
            answers = self._answers_before(answers, back)
        low, ahead = _ordinals(self.origin, answers, [])
        # First: the state of a dataset may hold that of a generator.
        self.sampling.draw()
        made, record = self._made(answers, back == 0, finished)
        sampled = self.sampling.state(low - record["replay"] if self._dataset_kind == _DatasetKind.Map else low)
        return {
            "_index_sampler_state": sampled.index_sampler_state,
            "_sampler_iter_state": sampled.sampler_iter_state,
            "_sampler_iter_yielded": low,
            "_num_yielded": yielded - back,
            "_IterableDataset_len_called": self._IterableDataset_len_called,
            "_shared_seed": self._shared_seed,
            "fetcher_state": made["fetcher_state"],
            "dataset_state": made["dataset_state"],
            "_iterator_finished": finished,
            OWN: self._own_part(low, ahead, sampled.own, [record]),
        }

    def _made(self, answers: int, is_last: bool, finished: bool) -> tuple[dict[str, Any], dict[str, int]]:
        """The state of dataset and fetcher, and how many batches were made after it."""
        maker, count, made = self._maker, answers, None
        if is_last and maker.has_state and (finished or self._drawn_at != answers):
            made = copied(maker.state(self._dataset_fetcher, self._dataset))
            if not finished and self._drawn_at == answers:
                # Another thread has begun the next batch.
                made = None
        if made is None:
            count, made = self._newest_snapshot(answers)
        self._warn_if_frozen(made)
        has_place = maker.has_state or self._dataset_kind == _DatasetKind.Iterable
        replay = answers - count + (self._start.replayed if count == 0 else 0)
        record = {
            "delivered": answers,
            "replay": replay if has_place else 0,
            "batches": made["batches"],
            "samples": made["samples"],
        }
        return made, record

    def _newest_snapshot(self, answers: int) -> tuple[int, dict[str, Any]]:
        for after, payload in reversed(self._snapshots):
            if after <= answers:
                return after, pickle.loads(payload)
        return 0, self._start.as_snapshot(0, self._dataset_kind == _DatasetKind.Iterable)


class _StatefulMultiProcessingIter(_Positioned, _MultiProcessingDataLoaderIter):
    """Iterates with workers."""

    # The snapshots of each worker, once its engine has ended.
    _frozen: list[list[tuple[int, bool, bytes]]] | None = None
    _started = False
    # Whether torch's iterator, which does the work, has ended.
    _ended = False
    # Whether the index batches of the epoch are there already.
    _begun = False
    _frames_to_caller = 5
    # Has the epoch that the program has told its dataset.
    _told_epoch: Recorder | None = None

    def __init__(self, loader: Any, plan: Plan, about_dataset: dict[str, Any], told: Recorder | None) -> None:
        self._prepare(loader, plan, about_dataset)
        self._told_epoch = told
        # A map-style dataset without a state needs its position alone.
        self._has_states = about_dataset["kind"] == "iterable" or bool(about_dataset["stateful"])
        self._wants_snapshots = self._has_states or loader.worker_init_fn is not None
        super().__init__(loader)

    @property
    def finished(self) -> bool:
        return self._ended or self._last is StopIteration

    # The parts of the construction that differ.

    def _settings_for(self, loader: Any) -> settings.EngineSettings:
        found = super()._settings_for(loader)
        if self._about_dataset["stateful"]:
            found = fallback.round_robin(self, found, "a dataset with a state of its own")
        return dataclasses.replace(found, snapshots=self._wants_snapshots)

    def _init_torchs(self, init: Callable[[Any], None], loader: Any) -> None:
        self._call_torchs_init(init, loader)

    def _first_seeding(self, loader: Any) -> Seeding | None:
        return self._seeds_from_here(super()._first_seeding(loader))

    def _make_job(self) -> Job:
        job = super()._make_job()
        plan = self._plan
        if self._wants_snapshots:
            job.snapshots = SnapshotPolicy(self._every, 0 if plan is None else plan.low)
        # None: the process of a persistent loader begins again, with an epoch from its beginning.
        if plan is not None and plan.workers and self._has_states:
            job.starts = self._starts(plan)
        return job

    def _starts(self, plan: Plan) -> list[WorkerStart | None]:
        """What each worker starts from. For a map-style dataset this takes the index batches that they fetch again."""
        if self._dataset_kind == _DatasetKind.Iterable:
            return [*plan.workers]
        ordinals = [_last_ordinals(plan, worker) for worker in range(self._num_workers)]
        oldest = min((found[0] for found in ordinals if found), default=plan.low)
        self._sample_from(iter(self._index_sampler), oldest)
        self._begun = True
        again = dict(zip(range(oldest, plan.low), self.sampling.iterator, strict=False))
        return [
            dataclasses.replace(start, replay=[again[ordinal] for ordinal in found if ordinal in again])
            for start, found in zip(plan.workers, ordinals, strict=True)
        ]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._begin_epoch()
        if self._passthrough and self._dataset_kind == _DatasetKind.Iterable:
            # torch's workers begin at the beginning.
            delivered = self.origin.yielded + self.origin.drop
            self.origin = Plan(base_seed=self.origin.base_seed, epoch=self.origin.epoch, drop=delivered)
        origin = self.origin
        self._frozen = None
        self._started = self._ended = False
        self._first_worker = origin.first_worker if origin.num_workers == self._num_workers else 0
        super()._reset(loader, first_iter)
        # Only now: an epoch that failed to begin is begun again.
        self._plan = None
        self._num_yielded = origin.yielded
        if self._worker_init_fn is not None and first_iter and not self._passthrough:
            self._raise_failed_start()

    def _index_batches(self, torchs: Any) -> Any:
        begun, self._begun = self._begun, False
        if not begun:
            self._sample_from(torchs, self.origin.low)
        return self.sampling.iterator

    def _epoch_message(self) -> dict[str, Any]:
        message = super()._epoch_message()
        told = None if self._told_epoch is None else self._told_epoch.last
        return message if told is None else message | {"set_epoch": told}

    def _raise_failed_start(self) -> None:
        """Raises an error of worker_init_fn or iter(dataset)."""
        core = self._engine()
        core.wait_started()
        for worker in range(self._num_workers):
            found = core.snapshot(worker, 0)
            if found is not None and found[1]:
                self._shutdown_workers()
                pickle.loads(found[2]).reraise()

    def _torchs_next(self) -> Any:
        try:
            return super()._torchs_next()
        except StopIteration:
            self._note_end()
            self._ended = True
            raise
        except Exception:
            self._raised += 1
            raise

    # The state.

    def state(self, back: int, finished: bool) -> dict[str, Any]:
        """The state after the last batch that was delivered, or ``back`` batches before."""
        origin = self.origin
        # Once: another thread may be in `next`.
        yielded = self._num_yielded
        answers = yielded - origin.yielded + self._raised
        if self._passthrough:
            if back:
                raise ValueError("back must be 0: this loader runs on torch's own iterator")
            position: Any = answers, [], [], -1
        else:
            position = self._engine().position(answers, back)
        tasks, beyond, counts, last = position
        low, ahead = _ordinals(origin, tasks, beyond)
        if last < 0:
            last = (self._first_worker - 1) % self._num_workers
        sampled_at, records = low, None
        if self._has_states and not self._passthrough:
            snapshots, records = self._worker_states(counts)
            if self._dataset_kind == _DatasetKind.Map and not ahead:
                sampled_at -= self._num_workers * max(record["replay"] for record in records)
        else:
            snapshots = {
                f"worker_{worker}": {"worker_id": worker, "dataset_state": None, "fetcher_state": None}
                for worker in range(self._num_workers)
            }
        sampled = self.sampling.state(max(sampled_at, 0))
        return {
            "_snapshot": {
                "_snapshot_step": yielded - back,
                "_last_yielded_worker_id": last,
                "_main_snapshot": {
                    "_num_workers": self._num_workers,
                    "_sampler_iter_state": sampled.sampler_iter_state,
                    "_index_sampler_state": sampled.index_sampler_state,
                    "_sampler_iter_yielded": low,
                    "_IterableDataset_len_called": self._IterableDataset_len_called,
                    "_shared_seed": self._shared_seed,
                    "_base_seed": self._base_seed,
                },
                "_worker_snapshots": snapshots,
            },
            "_steps_since_snapshot": 0,
            "_iterator_finished": finished,
            OWN: self._own_part(low, ahead, sampled.own, records),
        }

    def _worker_states(self, counts: list[int]) -> tuple[dict[str, Any], list[dict[str, int]]]:
        """The newest snapshots that are no younger than the position, and what was delivered after them."""
        if not self._started and self._frozen is None:
            self._started = self._engine().wait_started()
        starts = self.origin.workers
        states, records = {}, []
        for worker, answers in enumerate(counts):
            start = starts[worker] if starts else WorkerStart()
            count, made = self._snapshot(worker, answers)
            if made is not None:
                self._warn_if_frozen(made)
            else:
                made = start.as_snapshot(worker, self._dataset_kind == _DatasetKind.Iterable)
            state = {name: made[name] for name in ("worker_id", "dataset_state", "fetcher_state")}
            states[f"worker_{worker}"] = state
            replay = answers - count + (start.replayed if count == 0 else 0)
            records.append(
                {"delivered": answers, "replay": replay, "batches": made["batches"], "samples": made["samples"]}
            )
        return states, records

    def _snapshot(self, worker: int, answers: int) -> tuple[int, dict[str, Any] | None]:
        """A worker's newest snapshot after at most that many of its answers."""
        if self._frozen is None:
            found = self._engine().snapshot(worker, answers)
        else:
            found = next((it for it in reversed(self._frozen[worker]) if it[0] <= answers), None)
        if found is None:
            return 0, None
        count, is_error, payload = found
        if is_error and count == 0:
            # `next` raises it in place of every batch of this worker.
            return 0, None
        made = pickle.loads(payload)
        if is_error:
            made.reraise()
        return count, made

    def _shutdown_workers(self) -> None:
        if self._frozen is None and not self._passthrough and self._group is not None and self._has_states:
            self._frozen = self._all_snapshots()
        super()._shutdown_workers()

    def _all_snapshots(self) -> list[list[tuple[int, bool, bytes]]]:
        """All snapshots that a state can need. They are gone with the engine."""
        core, answers = self._engine(), self._num_yielded - self.origin.yielded + self._raised
        found: list[list[tuple[int, bool, bytes]]] = [[] for _ in range(self._num_workers)]
        for back in range(BACK_BATCHES, -1, -1):
            try:
                counts = core.position(answers, back)[2]
            except ValueError:
                continue
            for worker, count in enumerate(counts):
                snapshot = core.snapshot(worker, count)
                if snapshot is not None and snapshot not in found[worker]:
                    found[worker].append(snapshot)
        return found

    def __del__(self) -> None:
        # Nothing can ask for a state any more.
        self._frozen = []
        super().__del__()


def _ordinals(origin: Plan, low: int, ahead: list[int]) -> tuple[int, list[int]]:
    """The low-water mark and the delivered ordinals beyond it, of numbers that count from the start of the epoch's
    tasks."""
    if not origin.ahead:
        return origin.low + low, [origin.low + task for task in ahead]
    mark = ordinal_of(low, origin.low, origin.ahead)
    delivered = {ordinal for ordinal in origin.ahead if ordinal > mark}
    delivered.update(ordinal_of(task, origin.low, origin.ahead) for task in ahead)
    return mark, sorted(delivered)


def _last_ordinals(plan: Plan, worker: int) -> list[int]:
    """The ordinals of the index batches that a worker fetches again, in order; worker i mod N made them."""
    count = plan.workers[worker].replay
    if plan.ahead or not isinstance(count, int):
        return []
    step = plan.num_workers
    last = plan.low - 1 - (plan.first_worker - 1 - worker) % step
    return [ordinal for ordinal in range(last - (count - 1) * step, last + 1, step) if ordinal >= 0]
