"""The start of each epoch of an iterator: its settings, seeds, index batches and worker jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import Death, Engine
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import adaptation
from rustloader.iterator.failures import FailureCount
from rustloader.order.stream import stream
from rustloader.settings.config import LoaderConfig
from rustloader.system.protocols import LoaderLike, WorkersIterator
from rustloader.system.torch_side import in_torch
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import WorkerStart


class Epochs:
    """The decisions at the start of an iterator's epochs. In this class, every epoch starts at its first batch.

    StatefulDataLoader uses a subclass whose epochs may start at a later position. Methods take the iterator as an
    argument and keep no reference to it, because dropping the last reference to the iterator ends its workers.

    Attributes:
        seeding: The seeds of the epoch; None if they are torch's.
        failures: The count of failed samples; None if failures are not counted.
        raised: Number of answers in this epoch that were errors. A batch that lost all its samples counts as an error.
        on_engine: Whether the engine does the work, rather than torch's own iterator.
        is_deleted: Whether the iterator has been deleted. After that, nothing can ask for its state.
        may_change_workers: Whether a persistent loader may replace its workers between epochs.
    """

    seeding: Seeding | None = None
    failures: FailureCount | None = None
    raised = 0
    on_engine = True
    is_deleted = False
    may_change_workers = True

    @property
    def yielded(self) -> int:
        """Number of batches in the current epoch that come before the epoch's starting position."""
        return 0

    def adapted(self, loader: LoaderLike, config: LoaderConfig) -> LoaderConfig:
        """Returns the settings for the engine and the workers: ``config`` without the options that have no effect for
        this loader. Logs once which options these are."""
        if loader._dataset_kind == _DatasetKind.Iterable:
            config = adaptation.round_robin(loader, config, "an iterable dataset")
        return adaptation.adapted(loader, config)

    def init_torch_iterator(self, it: WorkersIterator, init: Callable[[Any], None], loader: LoaderLike) -> None:
        """Calls torch's constructor, ``init``, which draws the base seed."""
        in_torch(init, loader)

    def seed(self, it: WorkersIterator, loader: LoaderLike, config: LoaderConfig) -> None:
        """Sets the seeds of the first epoch."""
        self.seeding = Seeding.of(loader, config, int(it._base_seed))

    # The calls at the start of an epoch are `beginning`, `index_batches`, `message` (except for an iterator's first
    # epoch), `Engine.begin`, `engine_begun` and `begun`, in this order. After an error in any of them except
    # `beginning`, `owes_an_epoch` is called.

    def beginning(self, it: WorkersIterator) -> None:
        """Decides at which position the new epoch starts."""

    def first_worker(self, it: WorkersIterator) -> int:
        """Returns the worker that gets the first task of the new epoch."""
        return 0

    def index_batches(self, it: WorkersIterator, torch_iterator: Iterator[Any]) -> Any:
        """Returns an iterator over the new epoch's index batches. It replaces torch's iterator over the sampler."""
        self.raised = 0
        return stream(it._index_sampler, torch_iterator)

    def message(self, loader: LoaderLike) -> dict[str, Any]:
        """Sets the seeds of the new epoch, and returns the message that starts it in a persistent loader's workers."""
        if self.seeding is not None:
            self.seeding = self.seeding.of_next_epoch(loader)
            return {"epoch": self.seeding.epoch}
        return {} if self.failures is None else {"epoch": self.failures.epoch}

    def next_message(self) -> dict[str, Any] | None:
        """Returns what ``message`` will return for the next epoch if nothing changes until then; None if this cannot be
        predicted. Has no side effects."""
        if self.seeding is not None:
            return {"epoch": self.seeding.epoch + 1}
        return {} if self.failures is None else {"epoch": self.failures.epoch + 1}

    def engine_begun(self, it: WorkersIterator, engine: Engine, is_first: bool) -> None:
        """Runs after the engine has started an epoch. If this method raises, the epoch does not count as started."""

    def begun(self, it: WorkersIterator) -> None:
        """Records that the epoch has started."""

    def owes_an_epoch(self) -> bool:
        """Returns True if an epoch failed to start, and the iterator must deliver nothing until one does start."""
        return False

    # Workers.

    def complete(self, job: Job) -> None:
        """Adds the settings of the current epoch to a worker's job. Called for every job."""

    def complete_first(self, it: WorkersIterator, job: Job) -> None:
        """Adds more settings to the job of the workers that start with an engine's first epoch."""

    def complete_next(self, job: Job) -> None:
        """Adds more settings to the job of a process that replaces a dead worker in the current epoch."""

    def start_after(self, it: WorkersIterator, engine: Engine, death: Death) -> WorkerStart | None:
        """Returns the point at which the replacement of a dead worker continues; None if the replacement has no earlier
        answers to replay. The replacement makes the batches of an iterable dataset again, up to that point."""
        if it._dataset_kind != _DatasetKind.Iterable or not death.answers:
            return None
        return WorkerStart(replay=death.answers)

    # The end.

    def ended(self, it: WorkersIterator) -> None:
        """Runs at the end of an epoch."""

    def before_shutdown(self, it: WorkersIterator, engine: Engine) -> None:
        """Runs before the workers are asked to exit."""
