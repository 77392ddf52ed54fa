"""``StatefulDataLoader``: a loader whose position can be saved and loaded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader.auto import arguments, tuner
from rustloader.dataloader import DataLoader
from rustloader.settings import loader_state
from rustloader.settings.config import resolve
from rustloader.stateful_dataloader import plan as plans
from rustloader.stateful_dataloader import shuffle_buffers
from rustloader.stateful_dataloader.compatibility import dataset_of
from rustloader.stateful_dataloader.multi import _StatefulMultiProcessingIter as _WithWorkers
from rustloader.stateful_dataloader.next_epoch import EarlyDraws, SeedWatch, restore, run_out
from rustloader.stateful_dataloader.plan import Plan
from rustloader.stateful_dataloader.schema import Draws, SamplerState
from rustloader.stateful_dataloader.set_epoch import EpochRecorder, recorder_of
from rustloader.stateful_dataloader.single import _StatefulSingleProcessIter as _WithoutWorkers
from rustloader.system.torch_side import in_torch
from rustloader.workers.snapshots import is_stateful

# Keys of the starts of samplers without their own generator.
_WITHOUT_GENERATOR = frozenset({"seed", "global_generator"})
_T_co = TypeVar("_T_co", covariant=True)
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch.utils.data import Dataset, Sampler

    from rustloader.settings.options import Dispatch, OnError, SeedBy

_Iter = _WithoutWorkers | _WithWorkers


class StatefulDataLoader(DataLoader[_T_co]):
    """Loads batches as ``rustloader.DataLoader`` does, and saves and loads its position.

    ``state_dict()`` returns a state with the position in the epoch. If a loader over the same dataset, even in another
    process, loads this state, it delivers the remaining batches of the epoch: each batch once, in the same order. The
    class replaces ``torchdata.stateful_dataloader.StatefulDataLoader``: it has the same methods and keys, and torch's
    order of samples. It loads torchdata's states. docs/resuming.md describes when resuming is exact.

    It has the arguments of ``rustloader.DataLoader``, and these:

    Args:
        snapshot_every_n_steps: Number of batches between two snapshots of the dataset's state; 0 takes them only at the
            start of an epoch, and when an iterable dataset ends (default: 1). Datasets without ``state_dict`` have no
            snapshots. Workers skip snapshots that would take more than 0.5 % of their time; after a resume, they make
            the batches since the last snapshot again.
        forward_set_epoch: Whether persistent and restarted workers receive the epoch that the program passes to the
            dataset's ``set_epoch`` (default: True).

    Raises:
        ValueError: As for ``rustloader.DataLoader``, or ``snapshot_every_n_steps`` is not a non-negative integer.
        TypeError: As for ``rustloader.DataLoader``.
        AssertionError: As for ``rustloader.DataLoader``; also raised by ``iter()`` if the loaded state requires a
            different ``num_workers``.

    Examples:
        >>> loader = rustloader.StatefulDataLoader(range(8), batch_size=2, num_workers=2)
        >>> batches = iter(loader)
        >>> next(batches)
        tensor([0, 1])
        >>> state = loader.state_dict()
        >>> loader = rustloader.StatefulDataLoader(range(8), batch_size=2, num_workers=2)
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5], [6, 7]]
    """

    # The result of the last `iter()`.
    _iterator: _Iter | None = None
    # The loaded state, until the next `iter()`: the dict, and the plan that was made from it.
    _loaded: tuple[dict[str, Any], Plan] | None = None
    # The same for the state from which the current iterator resumed.
    _resumed_from: tuple[dict[str, Any], Plan] | None = None
    # The state of an abandoned epoch, while `iter()` replaces that epoch's iterator.
    _interim: dict[str, Any] | None = None
    # The draws of the next epoch, if they were made or predicted for a state.
    _draws: EarlyDraws | None = None
    # The watches of the loader's generator and of torch's global generator. Set when a state of a finished epoch, or of
    # an epoch that had not begun, is loaded.
    _since_load: tuple[SeedWatch, SeedWatch]
    # Number of epochs that have begun, including those before a resume.
    _epochs = 0
    # True once a state has been taken mid-epoch, and the dataset has been searched for a shuffle buffer.
    _has_checked_buffer = False

    if TYPE_CHECKING:

        def __init__(
            self,
            dataset: Dataset[_T_co],
            batch_size: int | None = 1,
            shuffle: bool | None = None,
            sampler: Sampler[Any] | Iterable[Any] | None = None,
            batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
            num_workers: int | Literal["auto"] = 0,
            collate_fn: Callable[[list[Any]], Any] | None = None,
            pin_memory: bool = False,
            drop_last: bool = False,
            timeout: float = 0,
            worker_init_fn: Callable[[int], None] | None = None,
            multiprocessing_context: Any = None,
            generator: Any = None,
            *,
            prefetch_factor: int | None = None,
            persistent_workers: bool = False,
            pin_memory_device: str = "",
            in_order: bool = True,
            dispatch: Dispatch | None = None,
            reorder_window: int | str | None = None,
            seed_by: SeedBy | None = None,
            worker_threads: int | None = None,
            max_restarts: int | None = None,
            stall_timeout: float | None = None,
            on_error: OnError | Callable[[Any, Exception], Any] | None = None,
            max_errors: int | float | None = None,
            worker_affinity: Literal["spread"] | Sequence[int | Collection[int]] | None = None,
            name: str | None = None,
            overlap_epochs: bool | None = None,
            snapshot_every_n_steps: int | None = 1,
            forward_set_epoch: bool = True,
        ) -> None:
            self.snapshot_every_n_steps = snapshot_every_n_steps
            self.forward_set_epoch = forward_set_epoch

    else:

        def __init__(self, *args, snapshot_every_n_steps=1, forward_set_epoch=True, **kwargs):
            every = snapshot_every_n_steps
            if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
                raise ValueError(f"snapshot_every_n_steps must be a non-negative integer, got {every!r}")
            super().__init__(*args, **kwargs)
            self.snapshot_every_n_steps = every
            self.forward_set_epoch = forward_set_epoch
            # Makes the dataset's class record calls of `set_epoch` from now on.
            self._recorder()

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        """Returns the state after the last batch that ``next`` returned, for ``load_state_dict`` of a loader over the
        same dataset.

        May be called at any time, even before ``iter()``, from any thread and from a signal handler. It starts no
        worker. At the end of an epoch it makes the random draws of the next ``iter()``, which then uses them. Before
        the first ``iter()`` it predicts the draws of that call.

        Args:
            back: Number of batches to go back from the last delivered batch, at most 9 (default: 0). Intended for
                wrappers that take batches before the program uses them.

        Returns:
            A new dict of plain types and tensors, for ``pickle`` and ``torch.save``, and for JSON if it contains no
            tensors. It has torchdata's keys, and ``"_rustloader"``.

        Raises:
            ValueError: ``back`` is not an integer from 0 to 9, or is larger than the number of batches delivered since
                the epoch began or was resumed.
            Exception: ``state_dict`` of the dataset or sampler failed; its error is raised.

        Examples:
            >>> loader = rustloader.StatefulDataLoader(range(8), batch_size=2)
            >>> for batch in loader:
            ...     break
            >>> loader.state_dict()["_num_yielded"]
            1
        """
        if isinstance(back, bool) or not isinstance(back, int) or back < 0:
            raise ValueError(f"back must be a non-negative integer, got {back!r}")
        iterator = self._iterator
        if self._loaded is not None or iterator is None:
            if back:
                raise ValueError(f"back must be 0 before the first batch, got {back}")
            if self._loaded is not None:
                return copy.deepcopy(self._loaded[0])
            return copy.deepcopy(self._interim) or plans.fresh(self, self._early_draws(are_made=False))
        # The draws come before the dataset's state, which may include the state of a generator.
        finished = bool(iterator.finished) and not back
        draws = self._early_draws(are_made=True) if finished else None
        state = iterator.state(back, finished, draws)
        if not (finished or self._has_checked_buffer or iterator.delivered_nothing()):
            self._has_checked_buffer = True
            if is_stateful(self.dataset):
                shuffle_buffers.warn(self.dataset)
        return state

    def _state_before_end(self) -> dict[str, Any]:
        """Returns the state after the last batch of an epoch whose end only a prefetcher has seen."""
        assert self._iterator is not None
        return self._iterator.state(0, False)

    def _state_before_error(self) -> dict[str, Any]:
        """Returns the state before the last error, which only a prefetcher has seen."""
        assert self._iterator is not None
        return self._iterator.state(0, False, before_error=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state. The next ``iter()`` resumes from its position.

        Args:
            state_dict: A state of this class or of torchdata's. An empty dict means a fresh start.

        Raises:
            ValueError: ``state_dict`` is not a state, or is that of another dataset, sampler or batch size. The loader
                is unchanged.

        Examples:
            >>> loader = rustloader.StatefulDataLoader(range(4), batch_size=2)
            >>> list(loader)
            [tensor([0, 1]), tensor([2, 3])]
            >>> other = rustloader.StatefulDataLoader(range(4), batch_size=2)
            >>> other.load_state_dict(loader.state_dict())
            >>> list(other)
            [tensor([0, 1]), tensor([2, 3])]
        """
        loaded = None
        if state_dict != {}:
            # The plan is made from a copy, because the dataset may modify the state that it loads.
            plan = plans.read(copy.deepcopy(state_dict), self)
            loaded = copy.deepcopy(dict(state_dict)), plan
            if plan.finished or plan.next is not None:
                # Done now rather than in `iter()`, so that a program can still seed its generator for the next epoch.
                self._restore_sampler(plan)
                self._since_load = SeedWatch(self.generator), SeedWatch(None)
        if self._iterator is not None and self._iterator.delivered_nothing():
            warnings.warn(
                "load_state_dict() replaces an iterator that has delivered nothing: call iter() after "
                "load_state_dict(), or the loop continues from the old position",
                stacklevel=2,
            )
        self._iterator = self._interim = self._draws = None
        self._loaded = loaded
        if loaded is None or loaded[1].seeds is None:
            loader_state.forget_epochs(self)

    def __iter__(self) -> _BaseDataLoaderIter:
        arguments.refuse_string(self)
        # No local variable may refer to the last iterator, because that would keep the iterator's workers alive.
        if isinstance(self._iterator, _WithWorkers) and self._iterator.failed_to_resume():
            self._loaded = self._resumed_from
        loaded = self._loaded
        if loaded is not None:
            plan = loaded[1]
            bound = plan.num_workers if plan.is_bound else 0
            if not (bound and tuner.pin(self, bound)):
                plans.check_workers(plan, self.num_workers)
            iterator = self._begin_from(copy.deepcopy(plan))
            self._loaded, self._resumed_from = None, loaded
        elif self.persistent_workers and self.num_workers > 0 and isinstance(self._iterator, _WithWorkers):
            iterator = self._begin_again(self._iterator, self._plan_of_next())
        else:
            iterator = self._begin(self._plan_of_next())
        self._draws = None
        self._epochs = iterator.origin.epoch + 1
        return iterator

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return self._make_iterator(Plan(epoch=self._epochs))

    def _make_iterator(self, plan: Plan) -> _Iter:
        about = dataset_of(self)
        if self.num_workers == 0:
            return _WithoutWorkers(self, plan, about)
        epoch_recorder = self._recorder()
        if not loader_state.has_auto(self):
            in_torch(self.check_worker_number_rationality)
        return _WithWorkers(self, plan, about, epoch_recorder)

    def _recorder(self) -> EpochRecorder | None:
        """Returns the recorder of the dataset's ``set_epoch``; None if no workers need it.

        Persistent workers need it in later epochs, and so do restarted workers.
        """
        config = resolve(self)
        if not self.forward_set_epoch or not (config.persistent_workers or config.max_restarts):
            return None
        return recorder_of(self.dataset, self)

    def _keeps_workers(self) -> bool:
        """Returns True if the workers of an epoch are kept for the next epoch."""
        return self.num_workers > 0 and bool(resolve(self).persistent_workers)

    def _begin(self, plan: Plan) -> _Iter:
        if self._iterator is not None and not self._iterator.finished:
            # The epoch was abandoned. Its workers end before new workers start. Meanwhile, `_interim` is the loader's
            # state. If nothing was delivered, no state is taken: the order may not be drawn yet, and taking a state
            # would draw it.
            if not self._iterator.delivered_nothing():
                with contextlib.suppress(Exception):
                    self._interim = self.state_dict()
            self._iterator = None
        iterator = self._make_iterator(plan)
        for _ in range(iterator.origin.drop):
            if not _drop_next(iterator):
                break
        self._iterator, self._interim = iterator, None
        return iterator

    def _begin_again(self, iterator: _WithWorkers, plan: Plan) -> _Iter:
        """Begins an epoch with the persistent workers of an iterator."""
        iterator.begin_next_at(plan)
        iterator._reset(self)
        return iterator

    def _begin_from(self, plan: Plan) -> _Iter:
        """Begins an epoch from a loaded state."""
        if not plan.finished and plan.next is None:
            return self._begin(plan)
        # The state is that of a finished epoch, or of an epoch that has not begun.
        # If the program has seeded a generator since the load, the epoch draws from that generator, as in a run without
        # a state.
        of_loader, of_torch = self._since_load
        draws = plan.next or Draws(None, None)
        has_seed = plan.next is not None and not of_loader.was_seeded()
        base_seed = draws.base_seed if has_seed else None
        start = None if of_torch.was_seeded() else _random_start(draws)
        if not plan.finished:
            if start is None and plan.sampler is not None and plan.sampler.kind == "stateful":
                start = plan.sampler
            return self._begin(dataclasses.replace(plan, base_seed=base_seed, sampler=start))
        if base_seed is None and (has_seed or self._keeps_workers()):
            # Persistent workers keep their base seed.
            base_seed = plan.base_seed
        begun = Plan(
            epoch=plan.epoch + 1,
            base_seed=base_seed,
            sampler=start,
            seeds=None if plan.seeds is None else (plan.seeds[0], plan.seeds[1] + 1),
            resumed=True,
        )
        if any(worker.has_state for worker in plan.workers):
            # A dataset in this process, or in persistent workers, keeps its state from epoch to epoch.
            if self.num_workers == 0:
                # Any base seed prevents a draw from a generator whose state the dataset's state may include.
                ended = [dataclasses.replace(worker, ended=not worker.replayed) for worker in plan.workers]
                self._begin(dataclasses.replace(plan, base_seed=plan.base_seed or 0, workers=ended))
            elif self._keeps_workers():
                iterator = self._begin(plan)
                assert isinstance(iterator, _WithWorkers)
                return self._begin_again(iterator, begun)
        return self._begin(begun)

    def _restore_sampler(self, plan: Plan) -> None:
        """Brings a sampler with its own generator or state to the start of the next epoch."""
        start = None if plan.next is None else plan.next.sampler
        if start is not None:
            restore(self._index_sampler, start)
        elif plan.finished:
            # In torchdata's states of loaders without workers, the sampler's state was taken after the epoch.
            has_ended = plan.dataset is None and plan.num_workers == 0
            run_out(self._index_sampler, plan.sampler, plan.low, has_ended)

    def _plan_of_next(self) -> Plan:
        """Returns the plan of the next epoch, with the draws that were made or predicted for a state, if any."""
        early = self._draws
        if early is None or early.was_seeded_since():
            return Plan(epoch=self._epochs)
        start = _random_start(early.draws, owes_draws=not early.are_made)
        return Plan(epoch=self._epochs, base_seed=early.draws.base_seed, sampler=start, owes_draws=not early.are_made)

    def _early_draws(self, are_made: bool) -> Draws:
        """Returns the draws of the next ``iter()``, which then uses them.

        The draws are made now, or predicted if ``are_made`` is False, unless an earlier call did so and the program
        has not seeded a generator since.
        """
        if self._draws is None or self._draws.was_seeded_since():
            with_base_seed = not are_made or not self._keeps_workers()
            self._draws = EarlyDraws(self, self._index_sampler, are_made, with_base_seed)
        return copy.deepcopy(self._draws.draws)

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be copied. Predicted draws apply only to the first epoch of this loader, not of a copy.
        draws = self._draws if self._draws is not None and self._draws.are_made else None
        return self.__dict__ | {"_iterator": None, "_draws": draws}


def _drop_next(iterator: _Iter) -> bool:
    """Takes and drops a batch that was delivered before the resume, or an error instead of a batch.

    Raises an error only if the iterator cannot continue after it, because a worker has died.

    Returns:
        False at the end of the epoch.
    """
    try:
        next(iterator)
    except StopIteration:
        return False
    except Exception:
        if isinstance(iterator, _WithWorkers) and iterator.has_died():
            raise
    return True


def _add_parameters() -> None:
    """Adds the parameters of ``DataLoader`` to the class's signature, from which frameworks rebuild a loader."""
    signature = inspect.signature(DataLoader.__init__)
    own = inspect.signature(StatefulDataLoader.__init__).parameters
    parameters = [*signature.parameters.values(), own["snapshot_every_n_steps"], own["forward_set_epoch"]]
    StatefulDataLoader.__init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


_add_parameters()


def _random_start(draws: Draws, owes_draws: bool = False) -> SamplerState | None:
    """Returns the start of a sampler's order as the sampler's part of a state.

    Returns None if the sampler draws nothing, or draws from its own generator.
    """
    start = draws.sampler
    return (
        None if not start or _WITHOUT_GENERATOR.isdisjoint(start) else SamplerState(start=start, owes_draws=owes_draws)
    )
