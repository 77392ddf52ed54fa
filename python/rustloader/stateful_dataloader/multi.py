"""The iterator of a StatefulDataLoader with workers: the engine's iterator, with epochs that start at a position."""

from __future__ import annotations

from typing import Any

from rustloader.iterator.core import _MultiProcessingDataLoaderIter
from rustloader.stateful_dataloader.epochs import StatefulEpochs
from rustloader.stateful_dataloader.origin import Origin
from rustloader.stateful_dataloader.schema import DatasetState, Draws
from rustloader.stateful_dataloader.set_epoch import EpochRecorder
from rustloader.system.protocols import StatefulLoaderLike


class _StatefulMultiProcessingIter(_MultiProcessingDataLoaderIter):
    """The iterator of a StatefulDataLoader with workers."""

    _epochs: StatefulEpochs

    def __init__(
        self, loader: StatefulLoaderLike, origin: Origin, dataset: DatasetState, epoch_recorder: EpochRecorder | None
    ) -> None:
        self._epochs = StatefulEpochs(loader, origin, dataset, epoch_recorder)
        super().__init__(loader)

    @property
    def origin(self) -> Origin:
        """The origin of the current epoch."""
        return self._epochs.origin

    @property
    def raised(self) -> int:
        """Number of answers in the current epoch that were errors. A prefetcher reads it."""
        return self._epochs.raised

    @property
    def finished(self) -> bool:
        """True if the epoch has ended."""
        return self._mode is not None and self._mode.has_ended

    def begin_next_at(self, origin: Origin) -> None:
        """Sets the origin of a persistent loader's next epoch."""
        self._epochs.begin_next_at(self, origin)

    def delivered_nothing(self) -> bool:
        """Returns True if the current epoch has delivered nothing, and has not ended."""
        return self._epochs.delivered_nothing(self) and not self.finished

    def failed_to_resume(self) -> bool:
        """Returns True if no batch was delivered because a worker failed to load the state."""
        return self._epochs.failed_to_resume(self)

    def has_died(self) -> bool:
        """Returns True if every later ``next`` raises the same error instead of StopIteration."""
        return self._mode is not None and self._mode.has_failed

    def state(
        self, back: int, finished: bool, draws: Draws | None = None, *, before_error: bool = False
    ) -> dict[str, Any]:
        """Returns the state after the last delivered batch.

        Args:
            back: Number of batches to go back from that batch.
            finished: Whether the state is that of a finished epoch.
            draws: The draws of the next epoch.
            before_error: True if the last answer was an error, and the state before it is requested.
        """
        return self._epochs.state_at(self, back, finished, draws, before_error)
