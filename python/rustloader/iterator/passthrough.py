"""The iterator mode for loaders that the engine cannot serve as torch would. It delegates to torch's own methods."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader.iterator.epochs import Epochs
from rustloader.system import hooks
from rustloader.system.cleanup import clean_up_after, quietly
from rustloader.system.protocols import LoaderLike, WorkersIterator
from rustloader.workers import process


class TorchMode:
    """The mode that calls the methods of torch's own iterator.

    Args:
        engine_class: The engine's iterator class. In the MRO, torch's class comes after it.
        epochs: Decides how each epoch begins.
    """

    engine = None
    batches = 0
    has_failed = False
    has_ended = False

    def __init__(self, engine_class: type[_BaseDataLoaderIter], epochs: Epochs) -> None:
        self._engine_class, self.epochs = engine_class, epochs
        epochs.on_engine = False

    def _torch_iterator(self, it: WorkersIterator) -> Any:
        return super(self._engine_class, it)

    def start(self, it: WorkersIterator, loader: LoaderLike) -> None:
        """Calls torch's constructor, which starts the workers and the first epoch."""
        try:
            self.epochs.init_torch_iterator(it, self._torch_iterator(it).__init__, loader)
        except BaseException as error:
            clean_up_after(error, lambda: self._abandon(it))
            raise

    def _abandon(self, it: WorkersIterator) -> None:
        """Ends the workers that torch's constructor started before it failed, even if torch's own shutdown fails
        because the constructor had not set all attributes."""
        try:
            self.shut_down(it)
        except Exception as error:
            for worker in it._workers:
                quietly(process.kill, worker)
            if not isinstance(error, AttributeError):
                raise

    def begin(self, it: WorkersIterator, loader: LoaderLike, is_first: bool) -> None:
        self.epochs.beginning(it)
        self.has_ended = False
        self._torch_iterator(it)._reset(loader, is_first)
        # torch's `_reset` sets the count to 0, but the epoch may start at a later position.
        it._num_yielded = self.epochs.yielded
        self.epochs.begun(it)

    def next(self, it: WorkersIterator) -> Any:
        hooks.run()
        try:
            return self._torch_iterator(it).__next__()
        except StopIteration:
            self.epochs.ended(it)
            self.has_ended = True
            raise
        except Exception:
            self.epochs.raised += 1
            raise

    next_observed = next

    def next_data(self, it: WorkersIterator) -> Any:
        return self._torch_iterator(it)._next_data()

    def shut_down(self, it: WorkersIterator) -> None:
        self._torch_iterator(it)._shutdown_workers()

    def dismiss(self, it: WorkersIterator, worker_id: int, shutdown: bool) -> None:
        self._torch_iterator(it)._mark_worker_as_unavailable(worker_id, shutdown)
