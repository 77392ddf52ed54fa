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
from rustloader.stateful_dataloader import origin as origins
from rustloader.stateful_dataloader import shuffle_buffers
from rustloader.stateful_dataloader.compatibility import dataset_of
from rustloader.stateful_dataloader.multi import _StatefulMultiProcessingIter as _WithWorkers
from rustloader.stateful_dataloader.origin import Origin
from rustloader.stateful_dataloader.set_epoch import EpochRecorder, recorder_of
from rustloader.stateful_dataloader.single import _StatefulSingleProcessIter as _WithoutWorkers
from rustloader.system.torch_side import in_torch
from rustloader.workers.snapshots import is_stateful

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
    # Where the next epoch begins.
    _origin: Origin
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
            self._origin = Origin()
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
        iterator, origin = self._iterator, self._origin
        if origin.saved is not None or iterator is None:
            if back:
                raise ValueError(f"back must be 0 before the first batch, got {back}")
            return copy.deepcopy(origin.saved) or origins.fresh(self, origin.draws(self, are_made=False))
        # The draws come before the dataset's state, which may include the state of a generator.
        finished = bool(iterator.finished) and not back
        draws = origin.draws(self, are_made=True) if finished else None
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
        origin = Origin()
        if state_dict != {}:
            # Read from a copy, because the dataset may modify the state that it loads.
            origin = origins.read(copy.deepcopy(state_dict), self)
            origin.saved = copy.deepcopy(dict(state_dict))
            origin.watch(self)
        if self._iterator is not None and self._iterator.delivered_nothing():
            warnings.warn(
                "load_state_dict() replaces an iterator that has delivered nothing: call iter() after "
                "load_state_dict(), or the loop continues from the old position",
                stacklevel=2,
            )
        # In this order: a signal handler that saves a state in between gets the loaded one.
        self._origin = origin
        self._iterator = None
        if origin.seeds is None:
            loader_state.forget_epochs(self)

    def __iter__(self) -> _BaseDataLoaderIter:
        arguments.refuse_string(self)
        # No local variable may refer to the last iterator, because that would keep the iterator's workers alive.
        if isinstance(self._iterator, _WithWorkers) and self._iterator.failed_to_resume():
            self._origin = self._iterator.origin.loaded or self._origin
        if self._origin.kind == "resumed":
            bound = self._origin.num_workers if self._origin.is_bound else 0
            if not (bound and tuner.pin(self, bound)):
                origins.check_workers(self._origin, self.num_workers)
            self._iterator = None
        *ended, origin = self._origin.begins(self)
        for earlier in ended:
            self._begin(earlier)
        iterator = self._begin(origin)
        self._epochs = iterator.origin.epoch + 1
        self._origin = Origin(kind="continued")
        return iterator

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return self._make_iterator(Origin(epoch=self._epochs))

    def _make_iterator(self, origin: Origin) -> _Iter:
        about = dataset_of(self)
        if self.num_workers == 0:
            return _WithoutWorkers(self, origin, about)
        epoch_recorder = self._recorder()
        if not loader_state.has_auto(self):
            in_torch(self.check_worker_number_rationality)
        return _WithWorkers(self, origin, about, epoch_recorder)

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

    def _begin(self, origin: Origin) -> _Iter:
        """Begins an epoch, with the workers of the last one if they are kept."""
        if self.persistent_workers and self.num_workers > 0 and isinstance(self._iterator, _WithWorkers):
            self._iterator.begin_next_at(origin)
            self._iterator._reset(self)
            return self._iterator
        if self._iterator is not None and not self._iterator.finished:
            # The epoch was abandoned. Its workers end before new workers start. Meanwhile, `saved` is the loader's
            # state. If nothing was delivered, no state is taken: the order may not be drawn yet, and taking a state
            # would draw it.
            if not self._iterator.delivered_nothing():
                with contextlib.suppress(Exception):
                    self._origin = dataclasses.replace(self._origin, kind="interim", saved=self.state_dict())
            self._iterator = None
        iterator = self._make_iterator(origin)
        for _ in range(iterator.origin.drop):
            if not _drop_next(iterator):
                break
        self._iterator = iterator
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be copied. Predicted draws apply only to the first epoch of this loader, not of a copy.
        early = self._origin.early
        origin = dataclasses.replace(self._origin, early=early if early is not None and early.are_made else None)
        return self.__dict__ | {"_iterator": None, "_origin": origin}


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
