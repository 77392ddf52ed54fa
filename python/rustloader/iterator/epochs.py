"""The start of an iterator's epochs: settings, seeds, index batches, the jobs of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import Death, Engine
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import fallback, fetching, indices
from rustloader.iterator.failures import FailureCount
from rustloader.settings.config import LoaderConfig
from rustloader.system.protocols import LoaderLike, WorkersIterator
from rustloader.system.torch_side import TORCHS_INIT, in_torch
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import WorkerStart


class Epochs:
    """The epochs of an iterator, each from its beginning. Those of a StatefulDataLoader may begin at a position.

    Methods take the iterator, which may not be referred to: its end is that of the workers.

    Attributes:
        seeding: The seeds of the epoch, unless they are torch's.
        failures: Counts failed samples. None counts nothing.
        raised: Number of answers in this epoch that were no batch: errors, and batches that had no samples left.
        on_engine: Whether the engine does the work; else torch's own iterator does.
        is_deleted: Whether the iterator is deleted, so that nothing can ask for a state.
        may_change_workers: Whether the workers of a persistent loader may be replaced by others between epochs.
    """

    seeding: Seeding | None = None
    failures: FailureCount | None = None
    raised = 0
    on_engine = True
    is_deleted = False
    may_change_workers = True

    @property
    def yielded(self) -> int:
        """Number of batches of the current epoch before its start."""
        return 0

    def adapted(self, loader: LoaderLike, config: LoaderConfig) -> LoaderConfig:
        """Returns the settings that the engine and the workers get. Logs once which options have no effect."""
        if loader._dataset_kind == _DatasetKind.Iterable:
            config = fallback.round_robin(loader, config, "an iterable dataset")
        return fetching.adapted(loader, config)

    def init_torchs(self, it: WorkersIterator, init: Callable[[Any], None], loader: LoaderLike) -> None:
        """Calls torch's constructor, which draws the base seed."""
        in_torch(TORCHS_INIT, "__init__", init, loader)

    def seed(self, it: WorkersIterator, loader: LoaderLike, config: LoaderConfig) -> None:
        """Sets the seeds of the first epoch."""
        self.seeding = fetching.seeding(loader, config, int(it._base_seed))

    # An epoch begins: `beginning`, `index_batches`, the engine, `begun`. `owes_an_epoch` follows an error.

    def beginning(self, it: WorkersIterator) -> None:
        """Decides where the epoch that begins starts."""

    def first_worker(self, it: WorkersIterator) -> int:
        """Returns the worker that gets the first task of the epoch that begins."""
        return 0

    def index_batches(self, it: WorkersIterator, torch_iterator: Iterator[Any]) -> Any:
        """Returns the index batches of the epoch that begins, from torch's iterator over the sampler."""
        self.raised = 0
        return indices.stream(it._index_sampler, torch_iterator)

    def message(self, loader: LoaderLike) -> dict[str, Any]:
        """Returns the message that the workers of a persistent loader get when an epoch begins. It has the next
        seeds."""
        if self.seeding is not None:
            self.seeding = fetching.next_epoch(loader, self.seeding)
            return {"epoch": self.seeding.epoch}
        return {} if self.failures is None else {"epoch": self.failures.epoch}

    def next_message(self) -> dict[str, Any] | None:
        """Returns the ``message`` of the next epoch if nothing changes; None if it cannot be foreseen."""
        if self.seeding is not None:
            return {"epoch": self.seeding.epoch + 1}
        return {} if self.failures is None else {"epoch": self.failures.epoch + 1}

    def engine_begun(self, it: WorkersIterator, engine: Engine, is_first: bool) -> None:
        """Called when the engine has begun an epoch, which counts unless this raises."""

    def begun(self, it: WorkersIterator) -> None:
        """Notes that the epoch has begun."""

    def owes_an_epoch(self) -> bool:
        """Returns True if the iterator, after an error in a beginning, delivers nothing until an epoch has begun."""
        return False

    # Workers.

    def complete(self, job: Job) -> None:
        """Completes a job."""

    def complete_first(self, it: WorkersIterator, job: Job) -> None:
        """Completes the job of workers that begin with an engine's first epoch."""

    def complete_next(self, job: Job) -> None:
        """Completes the job of a process that follows a death, in the current epoch."""

    def start_after(self, it: WorkersIterator, engine: Engine, death: Death) -> WorkerStart | None:
        """Returns the point from which a worker continues after a death. An iterable dataset makes its batches again up
        to there."""
        if it._dataset_kind != _DatasetKind.Iterable or not death.answers:
            return None
        return WorkerStart(replay=death.answers)

    # The end.

    def ended(self, it: WorkersIterator) -> None:
        """Called at the end of an epoch."""

    def before_shutdown(self, it: WorkersIterator, engine: Engine) -> None:
        """Called before the workers are asked to leave."""
