"""The fields of ``rustloader.Stats``, and the classes of their values."""

from dataclasses import dataclass, field

from rustloader.caching.usage import CacheUsage
from rustloader.fetch.failures import Failure
from rustloader.metrics.transfers import TransferStats
from rustloader.system.figures import figure


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True)
class WorkerStats:
    """The statistics of one worker; for a loader, the sums over all workers that have had this number.

    Times are wall time unless stated otherwise.

    Attributes:
        id: Number of the worker, from 0.
        pid: Process ID; for a loader, that of the latest process.
        alive: Whether this process is running.
        rss_bytes: Resident memory in bytes, including pages shared with other processes; 0 if the process has ended
            or runs on another machine.
        tasks: Number of results sent: batches, and errors sent in place of batches.
        starting_seconds: Time before the first task of each epoch: seeding, ``worker_init_fn``, ``iter(dataset)``.
        idle_seconds: Time spent waiting for tasks.
        fetch_seconds: Time spent in the dataset.
        collate_seconds: Time spent in ``collate_fn``.
        pack_seconds: Time spent writing batches into the arena or pickling them, and publishing them.
        cpu_seconds: CPU time in seconds since the first task, including all threads, and child processes that
            have ended. It is much less than ``busy_seconds - unmeasured_seconds`` if the worker waits for storage. None
            if unknown: the system does not report it, or the worker was killed.
        queued_seconds: Seconds since the first task for which the worker was ready to run but had no core; None if
            unknown.
        unmeasured_seconds: Part of ``busy_seconds``: the work of processes whose CPU time is unknown, such as
            killed ones.
        fetch_cpu_seconds: CPU time in seconds spent in the dataset, including all threads, and child processes
            that have ended. It is measured in every fetch, or in every eighth if fetches take less than 400 us on
            average.
        fetch_measured_seconds: Part of ``fetch_seconds``: the fetches whose CPU time was measured. Compare this
            with ``fetch_cpu_seconds``.
        private_bytes: Private memory of the latest process in bytes, without shared memory: the current size, or the
            last one before the process ended. A forked worker starts with almost no private memory, so this is what
            it has added. A spawned worker has its modules and its copy of the dataset from the start. The value is
            updated after page faults have added 16 MiB, so it may lag by that much. None if unknown.

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
    rss_bytes: int = figure(0, "worker_resident_bytes", "Resident memory of the worker.", gauge=True)
    tasks: int = figure(0, "worker_batches", "Batches sent by the worker.", scalar=False)
    starting_seconds: float = figure(
        0.0, "worker_starting_seconds", "Time before the first task of each epoch.", scalar=False
    )
    idle_seconds: float = figure(0.0, "worker_idle_seconds", "Time spent waiting for tasks.")
    fetch_seconds: float = figure(0.0, "worker_fetch_seconds", "Time in the dataset.")
    collate_seconds: float = figure(0.0, "worker_collate_seconds", "Time in collate_fn.")
    pack_seconds: float = figure(0.0, "worker_pack_seconds", "Time spent writing batches into shared memory.")
    cpu_seconds: float | None = None
    queued_seconds: float | None = None
    unmeasured_seconds: float = 0.0
    fetch_cpu_seconds: float = figure(
        0.0, "worker_fetch_cpu_seconds", "CPU time of the fetches that were measured.", scalar=False
    )
    fetch_measured_seconds: float = figure(
        0.0, "worker_fetch_measured_seconds", "Time in the fetches whose CPU time was measured.", scalar=False
    )
    private_bytes: int | None = None

    @property
    def fetch_cpu_share(self) -> float | None:
        """CPU time spent in the dataset as a share of the wall time; None before the first fetch.

        The share is small for a worker that waits for storage, and may exceed 1 for one with several threads.
        """
        return self.fetch_cpu_seconds / self.fetch_measured_seconds if self.fetch_measured_seconds else None

    @property
    def busy_seconds(self) -> float:
        """Seconds of work on batches: fetching, collating and packing."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class SlowBatch:
    """One of the slowest batches, or a batch that held up later ones.

    Attributes:
        index: Index batch as a string, shortened if it is long.
        worker: Number of the worker that made the batch.
        fetch_seconds: Time spent in the dataset.
        collate_seconds: Time spent in ``collate_fn``.
        pack_seconds: Time spent writing the batch into the arena, or pickling it.
        blocked_seconds: Time for which ``next`` waited for the batch while later batches were ready.

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
        """Seconds of work on the batch: fetching, collating and packing."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class LargeAttribute:
    """A large list, tuple or dict in a dataset. Merely reading its objects makes forked workers copy them.

    Attributes:
        path: Its path in the dataset, for instance "dataset.dataset.samples".
        kind: Name of its type.
        items: Number of its items.
        bytes: Size of its objects in bytes, estimated from a few of them. The data of NumPy arrays and tensors is not
            included, because reading does not copy it.

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
    """The use of shared memory by the running iterators.

    Attributes:
        leased_bytes: Size of the blocks that tensors in the main process use.
        warm_bytes: Size of all blocks with resident pages.
        high_water_bytes: Peak size of one iterator's arena in bytes (the sum over its regions), even if the
            iterator has ended.
        blocks: Number of blocks, including idle ones.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(loader)
        >>> arena = rustloader.stats(loader).arena
        >>> arena.warm_bytes, arena.high_water_bytes > 0
        (0, True)
    """

    leased_bytes: int = 0
    warm_bytes: int = figure(0, "arena_bytes", "Shared memory with resident pages, in bytes.", gauge=True)
    high_water_bytes: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class CopyStats:
    """The amounts of data that workers copied into the arena, and that they sent without copying.

    Tensors built by ``default_collate`` are in the arena, and so are large arrays that NumPy allocates in a worker. A
    worker copies such data only if something other than the batch refers to it.

    Attributes:
        count: Number of tensors, arrays and bytes objects that workers copied into the arena.
        bytes: Their size in bytes.
        pickled: Number of batches that were pickled because they are not plain trees of dicts, lists and tuples.
        adopted: Number of tensors and arrays of 16 KiB or more that workers sent without copying, including those in
            batches that were not delivered.
        adopted_bytes: Their size in bytes.

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
    """The statistics of the thread that pins batches.

    Attributes:
        running: Whether the thread is running.
        batches: Number of batches pinned.
        seconds: Seconds spent pinning batches.

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
    """The number of iterators that fell back to torch's own loop for one reason.

    Attributes:
        reason: Why the engine could not serve the iterators.
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
    """The faults from which epochs recovered: worker restarts and failed samples.

    Attributes:
        restarts: Number of worker restarts, with ``max_restarts``.
        stalls: Part of ``restarts``: the worker was killed because it was stuck, with ``stall_timeout``.
        out_of_memory: Part of ``restarts``: the worker's memory cgroup was out of memory.
        skipped: Number of failed samples that were skipped, with ``on_error``.
        replaced: Number of failed samples that were replaced by other samples, with ``on_error``. A replacement that
            itself failed also counts.
        failures: The skipped and replaced samples, at most the first 1,000.
        deaths: Descriptions of the worker deaths that led to restarts, at most the first 100.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1, on_error="skip")
        >>> batches = list(loader)
        >>> faults = rustloader.stats(loader).faults
        >>> faults.restarts, faults.skipped, faults.failures
        (0, 0, ())
    """

    restarts: int = figure(0, "restarts", "Workers restarted after a death.")
    stalls: int = figure(0, "stalls", "Part of the restarts: the worker was stuck.")
    out_of_memory: int = 0
    skipped: int = figure(0, "skipped_samples", "Samples that failed and were skipped.")
    replaced: int = figure(0, "replaced_samples", "Samples that failed and were replaced.")
    failures: tuple[Failure, ...] = ()
    deaths: tuple[str, ...] = ()

    @property
    def unlisted_failures(self) -> int:
        """Number of failed samples that are not in ``failures``."""
        return self.skipped + self.replaced - len(self.failures)


@dataclass(frozen=True)
class SchedulingStats:
    """The settings of the latest iterator on the engine, including the options of ``install()``.

    Attributes:
        prefetch_factor: Maximum number of outstanding batches per worker.
        in_order: Whether batches are delivered in order.
        dispatch: "round_robin" or "shared_queue".
        reorder_window: Limit on the batches that are outstanding or wait for an earlier batch: an int limits their
            number, a string their size in bytes; None means ``prefetch_factor`` x ``num_workers`` batches.
        worker_threads: Number of samples of a batch that a worker fetches concurrently.
        map_style: Whether the dataset is map-style.
        batch_size: Samples per batch; None with a custom batch sampler, or without batching.
        per_sample: Whether a worker fetches samples one by one, so that ``worker_threads`` has an effect.
        auto_workers: Number of workers that ``num_workers="auto"`` chose; None without it.
        remote: Whether the workers run on other machines.
        overlap_epochs: Whether workers may start the next epoch early. False without the option, if the option has no
            effect, and after a wrong prediction.

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
    overlap_epochs: bool = False


@dataclass(frozen=True)
class CacheEstimate:
    """The estimated size of a cache of all samples, based on the batches delivered so far.

    Attributes:
        bytes: Approximate size of all samples in bytes, in the form in which batches contain them.
        free_bytes: Free memory in bytes, on the machine or in the process's cgroups, whichever is less.
        samples: Number of samples of the dataset.

    Examples:
        >>> dataset = torch.utils.data.TensorDataset(torch.zeros(64, 100))
        >>> loader = rustloader.DataLoader(dataset, batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).cache_estimate.bytes > 64 * 100 * 4
        True
    """

    bytes: int
    free_bytes: int
    samples: int


@dataclass(frozen=True)
class CoreUsers:
    """The use of the processor cores while the workers of the latest iterator ran.

    Each attribute is a share of all cores, from 0 to 1.

    Attributes:
        main: Share used by the main process.
        workers: Share used by the workers.
        others: Share used by other processes, and by other virtual machines on the same cores.

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


# The fields of `Stats`. Verdicts and tables are computed from them alone.
@dataclass(frozen=True, repr=False)
class StatsFields:
    """The statistics of a loader or an iterator so far, as returned by ``rustloader.stats()``.

    ``print(stats)`` shows text; a notebook shows tables. Times are in seconds of the monotonic clock. The training loop
    takes ``turnaround_seconds + next_seconds + step_seconds`` (``loop_seconds``). The program's own work between two
    epochs is not included.

    Attributes:
        name: The loader's name: the option ``name``, or the file and line that created it.
        num_workers: Number of workers of the loader or the iterator.
        cores: Number of processor cores that this process may use by affinity and CPU quota, rounded up.
        iterators: Number of iterators on the Rust engine, including those that have ended. If it is 0, all times below
            are 0, even if torch's own iterators did work.
        epochs: Number of epochs started.
        batches: Number of batches that the engine has delivered; for an iterator of torch's own loop, the number in its
            current epoch.
        bytes: Size of the engine's batches in bytes.
        next_seconds: Total time in ``next``.
        first_seconds: Part of ``next_seconds``: waiting for the first batch of each epoch.
        waited_seconds: Part of ``next_seconds``: waiting for the other batches.
        blocked_seconds: Part of ``waited_seconds``: waiting while later batches were ready (head-of-line blocking).
        sampler_seconds: Part of ``next_seconds``: drawing indices from the sampler and sending them. Measured only
            after a call of ``next`` that took 50 us or more, not counting waits.
        step_seconds: Time between two calls of ``next`` in one epoch: the training step.
        turnaround_seconds: Time in ``iter()``, which starts the workers or their next epoch, and time to end them.
        workers: One entry per worker, in order of worker number.
        slowest: The slowest batches so far, slowest first.
        blocking: The batches for which ``next`` waited while later ones were ready, longest wait first. The sum of all
            such waits is ``blocked_seconds``.
        recent_seconds: Seconds of work on each of the latest batches (at most 256), in order. ``verdict`` uses them to
            predict how much other settings would gain.
        scheduling: Settings of the latest iterator on the engine; None if there is no such iterator, or
            if its settings are unknown.
        large_attributes: The dataset's large lists, tuples and dicts of Python objects, largest first. The dataset
            is searched for them only if a worker has 64 MiB or more of private memory.
        arena: Use of shared memory.
        copies: Data that workers copied, pickled, or sent without copying.
        pinning: Work of the pin thread.
        transfers: Copies to the device, with ``prefetch_to_device``.
        faults: The faults from which epochs recovered: worker restarts, and failed samples.
        cache: Size of the dataset's cache, and its hits and misses in all processes; None without
            ``rustloader.cache``.
        cache_estimate: The estimated size of a cache of all samples; None if there is a cache, or if the size
            is unknown.
        core_users: Use of the processor cores while the workers of the latest iterator ran; None if unknown.
        fallbacks: Iterators that ran on torch's own loop. No other field includes their work.
        note: The reason why the engine has no statistics, with the remedy; empty if it has some.
        halves: The statistics of the first and of the second half of the batches, roughly, from which ``verdict`` sees
            whether they agree; empty if they are unknown. ``as_dict`` omits them.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> stats = rustloader.stats(loader)
        >>> stats.batches, stats.epochs, len(stats.workers)
        (8, 1, 2)
        >>> print(stats.verdict().sentence)
        Too few batches to tell; ask again after 20.
    """

    name: str = ""
    num_workers: int = figure(0, "workers")
    cores: int = 1
    iterators: int = 0
    epochs: int = figure(0, "epochs", "Epochs begun.")
    batches: int = figure(0, "batches", "Batches delivered to the loop.")
    bytes: int = figure(0, "bytes", "Size of the delivered batches in bytes.")
    next_seconds: float = figure(0.0, "next_seconds", "Time in next(), including waits.")
    first_seconds: float = figure(0.0, "first_wait_seconds", "Time spent waiting for the first batch of each epoch.")
    waited_seconds: float = figure(0.0, "wait_seconds")  # a histogram in Prometheus
    blocked_seconds: float = figure(
        0.0, "blocked_seconds", "Part of wait_seconds during which later batches were ready."
    )
    sampler_seconds: float = 0.0
    step_seconds: float = figure(0.0, "step_seconds", "Time between calls of next() in one epoch.")
    turnaround_seconds: float = figure(0.0, "turnaround_seconds")
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
    halves: tuple["StatsFields", ...] = ()

    @property
    def own_seconds(self) -> float:
        """Seconds in ``next`` spent on work rather than waiting: drawing indices, sending them, and opening batches."""
        return max(0.0, self.next_seconds - self.first_seconds - self.waited_seconds)

    @property
    def loop_seconds(self) -> float:
        """Seconds of the whole training loop, from each ``iter()`` to the end of the epoch."""
        return self.turnaround_seconds + self.next_seconds + self.step_seconds


# Pickles and reprs name the package that users import.
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
