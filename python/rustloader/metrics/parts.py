"""The parts of ``rustloader.Stats``, and its fields."""

from dataclasses import dataclass, field

from rustloader.caching.usage import CacheUsage
from rustloader.fetch.failures import Failure
from rustloader.metrics.transfers import TransferStats


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True)
class WorkerStats:
    """Holds the statistics of one worker; for a loader, of all workers that had this number.

    All times but ``cpu_seconds`` are wall time.

    Attributes:
        id: Number of the worker, from 0.
        pid: Process id; for a loader, the latest one.
        alive: Whether that process runs now.
        rss_bytes: Resident memory in bytes, pages shared with other processes included; 0 after its end,
            and on another machine.
        tasks: Number of batches sent, and of errors sent instead of a batch.
        starting_seconds: Before the first task of an epoch: seeding, ``worker_init_fn``, ``iter(dataset)``.
        idle_seconds: Waiting for tasks.
        fetch_seconds: In the dataset.
        collate_seconds: In ``collate_fn``.
        pack_seconds: Writing batches into the arena, or pickling them, and publishing them.
        cpu_seconds: Processor time in seconds since the first task, of all threads and of child processes that have
            ended. Compare it with ``busy_seconds - unmeasured_seconds``: a worker that waits for storage has much less.
            None if unknown: the system does not report it, or the worker was killed.
        queued_seconds: Seconds since the first task in which the worker was ready to run but had no core; None if
            unknown.
        unmeasured_seconds: Part of ``busy_seconds``: of processes with unknown processor time, such as killed ones.
        fetch_cpu_seconds: Processor time in seconds in the dataset, of all threads and of child processes that have
            ended. It is measured in all fetches, or in one of 8 if they take less than 400 us on average.
        fetch_measured_seconds: Part of ``fetch_seconds``: the fetches with measured processor time. Compare it with
            ``fetch_cpu_seconds``.
        private_bytes: Memory in bytes that the latest process alone has, without shared memory: now, or before its end.
            A forked worker starts with nearly none, so it has grown by this much. A spawned one has its modules and its
            copy of the dataset from the start. Read again when page faults have added 16 MiB, so it may be as much
            older. None if unknown.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> worker = rustloader.stats(loader).workers[0]
        >>> worker.tasks, worker.alive, worker.fetch_seconds > 0
        (2, False, True)
    """

    id: int
    pid: int = 0
    alive: bool = False
    rss_bytes: int = 0
    tasks: int = 0
    starting_seconds: float = 0.0
    idle_seconds: float = 0.0
    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0
    cpu_seconds: float | None = None
    queued_seconds: float | None = None
    unmeasured_seconds: float = 0.0
    fetch_cpu_seconds: float = 0.0
    fetch_measured_seconds: float = 0.0
    private_bytes: int | None = None

    @property
    def fetch_cpu_share(self) -> float | None:
        """Processor time in the dataset as a share of the wall time there; None before the first fetch.

        A worker that waits for storage has a small share, one with several threads may have more than 1.
        """
        return self.fetch_cpu_seconds / self.fetch_measured_seconds if self.fetch_measured_seconds else None

    @property
    def busy_seconds(self) -> float:
        """Seconds of work on batches: fetch, collate and pack."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class SlowBatch:
    """Describes one of the slowest batches, or one that later batches waited for.

    Attributes:
        index: Index batch as text; of a large one the beginning.
        worker: Number of the worker.
        fetch_seconds: In the dataset.
        collate_seconds: In ``collate_fn``.
        pack_seconds: Writing it into the arena, or pickling it.
        blocked_seconds: Time in which ``next`` waited for it while later batches were ready.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> sorted(batch.index for batch in rustloader.stats(loader).slowest)
        ['[0, 1, 2, 3]', '[4, 5, 6, 7]']
    """

    index: str
    worker: int
    fetch_seconds: float
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0
    blocked_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of work on the batch: fetch, collate and pack."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class LargeAttribute:
    """Describes a large list, tuple or dict of a dataset, whose objects workers copy as they read them.

    Attributes:
        path: Its place in the dataset, for instance "dataset.dataset.samples".
        kind: Name of its type.
        items: Number of its items.
        bytes: Bytes of the objects in it, estimated from a few of them. NumPy arrays and tensors count without their
            data, which are not copied.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).large_attributes
        ()
    """

    path: str
    kind: str
    items: int
    bytes: int


@dataclass(frozen=True)
class ArenaStats:
    """Holds the shared memory of the iterators that run now.

    Attributes:
        leased_bytes: Bytes of blocks that tensors of the main process use.
        warm_bytes: Bytes of all blocks with resident pages.
        high_water_bytes: Peak bytes of one iterator's arena (the sum over its regions).
        blocks: Number of blocks, idle ones included.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> arena = rustloader.stats(loader).arena
        >>> arena.warm_bytes, arena.high_water_bytes > 0
        (0, True)
    """

    leased_bytes: int = 0
    warm_bytes: int = 0
    high_water_bytes: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class CopyStats:
    """Counts what workers copied and what they sent without a copy.

    What ``default_collate`` builds lies in the arena, and so do large arrays that NumPy makes in a worker. These are
    copied if anything but the batch refers to them.

    Attributes:
        count: Number of tensors, arrays and bytes objects that workers copied into the arena.
        bytes: Bytes of these.
        pickled: Number of pickled batches: those that are not plain trees of dicts, lists and tuples.
        adopted: Number of tensors and arrays of 16 KiB or more that workers sent without a copy. It counts what was
            sent, delivered or not.
        adopted_bytes: Bytes of these.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1, collate_fn=set)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).copies.pickled
        2
    """

    count: int = 0
    bytes: int = 0
    pickled: int = 0
    adopted: int = 0
    adopted_bytes: int = 0


@dataclass(frozen=True)
class PinningStats:
    """Holds the statistics of the pin thread.

    Attributes:
        running: Whether the thread runs now.
        batches: Number of batches pinned.
        seconds: Seconds of work on batches.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> rustloader.stats(loader).pinning
        PinningStats(running=False, batches=0, seconds=0.0)
    """

    running: bool = False
    batches: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Fallback:
    """Counts the iterators that ran on torch's own loop for one reason.

    Attributes:
        reason: The reason why the engine could not serve them.
        count: Number of iterators.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> loader = rustloader.DataLoader(IterableWrapper(range(8)), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).fallbacks
        (Fallback(reason='its dataset is a DataPipe', count=1),)
    """

    reason: str
    count: int


@dataclass(frozen=True)
class FaultStats:
    """Counts the faults that epochs have survived.

    Attributes:
        restarts: Number of workers that were started again, with ``max_restarts``.
        stalls: Part of ``restarts``: the worker was killed because it was stuck, with ``stall_timeout``.
        out_of_memory: Part of ``restarts``: the worker's memory cgroup was out of memory.
        skipped: Number of samples that were left out, with ``on_error``.
        replaced: Number of samples that another one took the place of, with ``on_error``. A replacement that failed
            counts, too.
        failures: The samples of both, at most the first 1,000.
        deaths: Descriptions of the deaths before the restarts, at most the first 100.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1, on_error="skip")
        >>> batches = list(loader)
        >>> faults = rustloader.stats(loader).faults
        >>> faults.restarts, faults.skipped, faults.failures
        (0, 0, ())
    """

    restarts: int = 0
    stalls: int = 0
    out_of_memory: int = 0
    skipped: int = 0
    replaced: int = 0
    failures: tuple[Failure, ...] = ()
    deaths: tuple[str, ...] = ()

    @property
    def unlisted_failures(self) -> int:
        """Number of failed samples that are not in ``failures``."""
        return self.skipped + self.replaced - len(self.failures)


@dataclass(frozen=True)
class SchedulingStats:
    """Holds the settings of the last iterator that the engine has served, with the options of ``install()``.

    Attributes:
        prefetch_factor: Batches under way per worker.
        in_order: Whether batches are delivered in order.
        dispatch: "round_robin" or "shared_queue".
        reorder_window: Batches that may be under way or wait for an older one, or their bytes as text; None means
            ``prefetch_factor`` x ``num_workers``.
        worker_threads: Samples of a batch that a worker fetches at a time.
        map_style: Whether the dataset is a map-style one.
        batch_size: Samples per batch; None with a batch sampler of the program's own, or without batches.
        per_sample: Whether a worker fetches samples one by one, so that ``worker_threads`` has an effect.
        auto_workers: Number of workers that ``num_workers="auto"`` has set; None without it.
        remote: Whether the workers run on other machines.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).scheduling.dispatch
        'round_robin'
    """

    prefetch_factor: int = 2
    in_order: bool = True
    dispatch: str = "round_robin"
    reorder_window: int | str | None = None
    worker_threads: int = 1
    map_style: bool = True
    batch_size: int | None = None
    per_sample: bool = True
    auto_workers: int | None = None
    remote: bool = False


@dataclass(frozen=True)
class CacheEstimate:
    """Holds the estimated size of a cache of all samples, from the batches so far.

    Attributes:
        bytes: Bytes of all samples, about, as they are in the batches.
        free_bytes: Bytes of memory that are left: of the machine, or of a cgroup.

    Examples:
        >>> dataset = torch.utils.data.TensorDataset(torch.zeros(64, 100))
        >>> loader = rustloader.DataLoader(dataset, batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).cache_estimate.bytes > 64 * 100 * 4
        True
    """

    bytes: int
    free_bytes: int


@dataclass(frozen=True)
class CoreUsers:
    """Holds the use of the processor cores while the workers of the last iterator ran: shares of all cores, 0 to 1.

    Attributes:
        main: The main process.
        workers: The workers.
        others: Other processes, and other virtual machines on the same cores.

    Examples:
        >>> users = rustloader.CoreUsers(main=0.3, workers=0.1, others=0.6)
        >>> print(users)
        other processes used 60% of the cores, the main process 30% and the workers 10%
    """

    main: float
    workers: float
    others: float

    def __str__(self) -> str:
        return (
            f"other processes used {self.others:.0%} of the cores, the main process {self.main:.0%} and the workers "
            f"{self.workers:.0%}"
        )


@dataclass(frozen=True, repr=False)
class Figures:
    """The fields of ``Stats``: all that verdicts and tables need."""

    name: str = ""
    num_workers: int = 0
    cores: int = 1
    iterators: int = 0
    epochs: int = 0
    batches: int = 0
    bytes: int = 0
    next_seconds: float = 0.0
    first_seconds: float = 0.0
    waited_seconds: float = 0.0
    blocked_seconds: float = 0.0
    sampler_seconds: float = 0.0
    step_seconds: float = 0.0
    workers: tuple[WorkerStats, ...] = ()
    slowest: tuple[SlowBatch, ...] = ()
    blocking: tuple[SlowBatch, ...] = ()
    recent_seconds: tuple[float, ...] = ()
    scheduling: SchedulingStats | None = None
    large_attributes: tuple[LargeAttribute, ...] = ()
    arena: ArenaStats = ArenaStats()
    copies: CopyStats = CopyStats()
    pinning: PinningStats = PinningStats()
    transfers: TransferStats = field(default_factory=TransferStats)
    faults: FaultStats = FaultStats()
    cache: CacheUsage | None = None
    cache_estimate: CacheEstimate | None = None
    core_users: CoreUsers | None = None
    fallbacks: tuple[Fallback, ...] = ()
    note: str = ""

    @property
    def own_seconds(self) -> float:
        """Seconds in ``next`` without waiting: sampler, sending indices, opening batches."""
        return max(0.0, self.next_seconds - self.first_seconds - self.waited_seconds)


# Pickles and reprs name the module that programs import from.
for _cls in (
    WorkerStats,
    SlowBatch,
    SchedulingStats,
    LargeAttribute,
    CacheEstimate,
    CoreUsers,
    ArenaStats,
    CopyStats,
    PinningStats,
    FaultStats,
    Fallback,
):
    _cls.__module__ = "rustloader"
