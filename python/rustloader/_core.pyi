"""The Rust extension. Only ``engine_batches`` is public; the rest is for the modules of this package."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, final, type_check_only

import torch

from rustloader.config import StallLimits

__all__ = [
    "ARENA_MIN",
    "BATCH",
    "DEAD",
    "END",
    "ERROR",
    "INLINE_LIMIT",
    "LEAVE",
    "NO_PIN_THREAD",
    "RESUME",
    "TIMED_OUT",
    "UNREADABLE",
    "Counts",
    "Death",
    "DeferredSignals",
    "Engine",
    "LeaseBuffer",
    "Meter",
    "Observed",
    "ObservedWorker",
    "Port",
    "SlowTask",
    "StoppableIndices",
    "TimedCollate",
    "Totals",
    "WorkerStopped",
    "WorkerTotals",
    "__version__",
    "_collate",
    "_roundtrip",
    "_trim_pool",
    "begin_forks",
    "cpu_quota",
    "descends",
    "end_forks",
    "engine_batches",
    "figures",
    "heap_storage",
    "inspect_arena",
    "is_plain_leaf",
    "memory_limits",
    "observed",
    "set_reporting",
]

__version__: Final[str]

# Bytes of the smallest arena; it takes half of the address space that is left.
ARENA_MIN: Final[int]

# Leaves of fewer bytes travel inside the message and are copied out on delivery.
INLINE_LIMIT: Final[int]

# What `Engine.next` and `Engine.begin` answer.
BATCH: Final[int]
ERROR: Final[int]
DEAD: Final[int]
END: Final[int]
TIMED_OUT: Final[int]
NO_PIN_THREAD: Final[int]

# What `Port.receive` answers.
RESUME: Final[int]
LEAVE: Final[int]
UNREADABLE: Final[int]

@type_check_only
class StallWarning(Protocol):
    """Names a stuck worker in the log.

    ``index`` is the index batch that it is at, where that is known; ``why_not`` says why there is no ``stack``.
    """

    def __call__(
        self,
        worker: int,
        pid: int,
        starting: bool,
        seconds: float,
        state: str,
        index: Any,
        stack: str | None,
        why_not: str | None,
        /,
    ) -> None: ...

class WorkerStopped(BaseException):
    """Ends a fetch between two samples when the loader shuts down."""

@final
class Engine:
    """The engine of one iterator. Methods wait for other threads in ``next`` unless marked "any time"."""

    def __new__(
        cls,
        workers: int,
        prefetch_factor: int,
        in_order: bool,
        persistent: bool,
        timeout: float,
        stalls: StallLimits,
        loads: Callable[[bytes, list[Any]], Any],
        dump_index: Callable[[Any], bytes],
        is_interrupt: Callable[[BaseException], bool],
        warn_stall: StallWarning,
    ) -> Engine:
        """``loads`` unpickles a result with what stands beside it, ``dump_index`` pickles an index batch, and
        ``is_interrupt`` answers whether a signal handler raised an error."""

    def shipment(self) -> tuple[int, int, tuple[int, int, int], tuple[int, int]]:
        """memfd, doorbell, (bytes, workers, slots of a ring), (pid, start time). Any time."""

    def started(self, worker: int, pid: int) -> None:
        """Notes a worker that has been started."""

    def begin(self, answer: list[Any], next_index: Iterator[Any] | Callable[[], Any], is_first: bool) -> None:
        """Begins an epoch; for all but the first waits until the workers have answered."""

    def next(self, answer: list[Any], next_index: Iterator[Any] | Callable[[], Any]) -> None:
        """Puts the next thing to do into ``answer``: a code and its value. Waits without the GIL.

        ``next_index`` is the iterator of the sampler, or a function that is called for each index and raises
        StopIteration at the end.

        RuntimeError: this thread is in ``next`` already, or the iterator has been shut down, or is another process's.
        """

    def active(self) -> list[bool] | None:
        """Whether each worker takes tasks in this epoch; None while another thread is in ``next``. Any time."""

    def progress(self) -> tuple[int, int, list[int], list[tuple[int, int]]] | None:
        """Tasks sent in this epoch; tasks without a result; tasks not delivered, by worker; (number, worker) of each
        task that was not delivered. None while another thread is in ``next``. Any time."""

    def start_pinning(
        self,
        begin: Callable[[], None],
        plain: Callable[[], tuple[Callable[[int], torch.Tensor], bool] | None],
        pin: Callable[[Any], Any],
        failure: Callable[[Exception], Any],
    ) -> None:
        """Starts the pin thread, after the workers. It calls the functions, see ``device.pinning.Pinner``."""

    def pinning(self) -> bool:
        """Whether a pin thread runs. Any time."""

    def stop_pinning(self) -> None:
        """Tells the pin thread to end. Any time."""

    def join_pinning(self, seconds: float | None = None) -> bool:
        """Waits for the pin thread's end, at most ``seconds``; says whether it has ended. Any time."""

    @property
    def meter(self) -> Meter:
        """The counters of this iterator. Any time."""

    @property
    def batches(self) -> int:
        """Batches handed out so far. Any time."""

    @property
    def closing(self) -> bool:
        """True once ``close`` was called. Any time."""

    @property
    def is_ours(self) -> bool:
        """False in a forked child. Any time."""

    def close(self, exiting: bool = False) -> None:
        """Tells the workers to leave and wakes a waiting ``next``, but not while ``exiting``. Any time."""

    def stay(self) -> None:
        """Does not return to a daemon thread once the iterator was closed while ``exiting``. Any time."""

    def alive(self) -> int:
        """Number of workers that run. Any time."""

    def wait_gone(self, seconds: float) -> bool:
        """Waits for the workers to end, for at most ``seconds`` and at most 0.25 s. Any time."""

    def signal_all(self, signal: int) -> None:
        """Sends a signal to the workers that run. Any time."""

    def worker_status(self, worker: int) -> dict[str, Any]:
        """What a worker says of itself: state, pid, task, times, tasks done, what it knows of a SIGTERM. Any time;
        after the end what it said last."""

    def memory(self) -> tuple[int, int]:
        """Bytes of the arena that have pages, and those of them that somebody holds. Any time; none after the end."""

    def finish(self) -> None:
        """Gives everything back after the workers have ended, or as soon as a ``next`` has left. Any time."""

@final
class Counts:
    """What the main process has counted."""

    epochs: Final[int]
    batches: Final[int]
    bytes: Final[int]
    copies: Final[int]
    copied_bytes: Final[int]
    pickled: Final[int]
    next_seconds: Final[float]
    waited_seconds: Final[float]
    first_seconds: Final[float]
    blocked_seconds: Final[float]
    sampler_seconds: Final[float]
    step_seconds: Final[float]
    pinned: Final[int]
    pinning_seconds: Final[float]
    def since(self, earlier: Counts) -> Counts:
        """What has been counted since an earlier moment."""

@final
class WorkerTotals:
    """What a worker has done. Times are in seconds; the last seven are those of its states."""

    pid: Final[int]
    alive: Final[bool]
    start_cpu: Final[float]
    start_queued: Final[float]
    tasks: Final[int]
    starting: Final[float]
    idle: Final[float]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]
    publish: Final[float]
    left: Final[float]
    def since(self, earlier: WorkerTotals) -> WorkerTotals:
        """What it has done since an earlier moment: tasks and the times of its states."""

@final
class SlowTask:
    """One of the slowest tasks. Times are in seconds."""

    index: Final[str]
    worker: Final[int]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]

@final
class Totals:
    """The figures of one or more iterators."""

    counts: Final[Counts]
    workers: Final[list[WorkerTotals]]
    slowest: Final[list[SlowTask]]
    leased: Final[int]
    warm: Final[int]
    blocks: Final[int]
    high_water: Final[int]
    pin_threads: Final[int]

@final
class ObservedWorker:
    """A worker of another process's iterator at one moment. Times are in seconds."""

    totals: Final[WorkerTotals]
    state: Final[str]
    seconds_in_state: Final[float]
    batch: Final[int | None]
    seconds_at_batch: Final[float]
    index: Final[str | None]
    queued: Final[int]
    ready: Final[int]
    warm: Final[int]

@final
class Observed:
    """An iterator of another process at one moment. Times are in seconds."""

    now: Final[float]
    pid: Final[int]
    state: Final[str]
    seconds_in_state: Final[float]
    started: Final[float]
    stopping: Final[bool]
    prefetch_factor: Final[int]
    in_order: Final[bool]
    persistent: Final[bool]
    pinning: Final[bool]
    epoch_batches: Final[int]
    counts: Final[Counts]
    workers: Final[list[ObservedWorker]]
    leased: Final[int]
    warm: Final[int]
    high_water: Final[int]
    blocks: Final[int]

@final
class Death:
    """What the engine knows of a worker's death; the value beside DEAD."""

    @property
    def worker_id(self) -> int:
        """The worker's number."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it: negative for a signal. None where the kernel does not tell."""

    @property
    def signal(self) -> str | None:
        """The C library's words for the signal, where one ended it."""

    @property
    def index(self) -> Any:
        """The first index batch that the worker had not answered, or None."""

    @property
    def oldest(self) -> bool:
        """Whether that batch was lost and is the oldest of those that are not delivered."""

@final
class Meter:
    """The counters of one iterator, which they outlive; or those of ended iterators."""

    def __new__(cls) -> Meter: ...
    @property
    def ended(self) -> bool:
        """True once nothing more will be counted."""

    def absorb(self, meters: list[Meter]) -> None:
        """Takes those of ended iterators out of a list, and adds their figures to its own."""

@final
class Port:
    """A worker's connection to the main process."""

    def __new__(
        cls,
        memfd: int,
        doorbell: int,
        geometry: tuple[int, int, int],
        worker: int,
        load_index: Callable[[bytes], Any],
    ) -> Port:
        """``load_index`` unpickles an index batch."""

    @staticmethod
    def inherit(engine: Engine, worker: int, load_index: Callable[[bytes], Any]) -> Port:
        """Opens the port in a forked child."""

    def watch(self, parent: tuple[int, int]) -> None:
        """Ends this process when the main process (pid, start time) has ended."""

    def survive_group_signal(self, main: int, alone: float) -> bool:
        """Has this process work on after a SIGTERM to the whole process group, while the main process reacts: after one
        that no other worker has got within ``alone`` seconds it ends. False where the system refuses it."""

    def offer_stack(self) -> None:
        """Has faulthandler dump this process's stacks where the main process finds them, when that asks by a signal."""

    def receive(self) -> tuple[int, int, Any]:
        """The next thing to do, waiting without the GIL: ``RESUME``, ``LEAVE``, ``UNREADABLE``, or another number for a
        task to be fetched; the task's number; the index, or the exception that its unpickling has raised."""

    def send(self, task: int, batch: Any, leaves_are_ours: bool) -> bool:
        """Sends a plain batch; False, and nothing sent, when it has to be pickled: always where tensors and arrays
        are not ours to carry. MemoryError: no room."""

    def send_pickle(self, task: int, pickle: bytes, objects: list[Any], tied: bool) -> bool:
        """Sends a batch as a pickle and the plain tensors and arrays beside it; False, and nothing sent, when they are
        not plain. ``tied``: unpickling it asks something of this process. MemoryError: no room."""

    def send_error(self, task: int, pickle: bytes) -> None:
        """Sends an error as a pickle. MemoryError: no room."""

    def exhausted(self, task: int) -> None:
        """Says that the iterable dataset is at its end."""

    def resumed(self) -> None:
        """Answers to the begin of a new epoch."""

    def leave(self) -> None:
        """The worker's last word."""

    def stoppable(self, index: Any) -> StoppableIndices:
        """An index batch whose iteration ends with WorkerStopped when the loader shuts down."""

    def timed(self, collate_fn: Any) -> TimedCollate:
        """``collate_fn``, timed."""

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """A storage in the arena; None where ordinary memory is the better choice."""

    def stack(self, batch: Any) -> torch.Tensor | None:
        """default_collate of plain tensors of one dtype and shape; None: torch's function is to do it."""

    def numbers(self, batch: Any) -> torch.Tensor | None:
        """default_collate of floats (float64) or ints (int64); None: torch's function is to do it."""

@final
class StoppableIndices:
    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...

@final
class TimedCollate:
    def __call__(self, batch: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...

@final
class DeferredSignals:
    """A context in which signals are deferred: the process's handlers take a note, and this thread has them blocked.
    Signals that came meanwhile are raised in this thread when it is left. Entered once. Only SIGINT and SIGTERM, and
    only where they have a handler, are deferred in the process's other threads."""

    def __new__(cls, signals: Sequence[int]) -> DeferredSignals: ...
    def __enter__(self) -> list[int]:
        """Those of them that this thread did not have blocked before."""

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None: ...

@final
class LeaseBuffer:
    """Memory of a batch, with a writable buffer; given back when nothing looks at it any more."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def storage(self) -> torch.UntypedStorage:
        """A storage of just these bytes."""

def engine_batches() -> int:
    """Counts the batches that the Rust engine has delivered in this process, all loaders together.

    Batches of torch's own loop (``num_workers=0``, or a loader that fell back to it) do not count.

    Returns:
        The number of batches.

    Examples:
        >>> before = rustloader.engine_batches()
        >>> batches = list(rustloader.DataLoader(range(8), batch_size=4, num_workers=2))
        >>> rustloader.engine_batches() - before
        2
    """

def observed() -> bool:
    """True while a profiler or another callback of torch would see ``record_function``, or a report is in force."""

def set_reporting(reporting: bool) -> None:
    """Has ``observed`` answer True while reports are in force."""

def figures(meters: list[Meter]) -> Totals:
    """The figures of several iterators together, the latest last."""

def inspect_arena(fd: int) -> Observed | None:
    """What the arena behind a descriptor shows of an iterator of another process; None while no iterator has it. Reads
    only. RuntimeError: it is no arena, or one of another version."""

def memory_limits() -> list[tuple[bool, int, int]]:
    """The limits on memory, the machine's first: for each whether it is a cgroup's, its size and what is left of it, in
    bytes."""

def cpu_quota() -> float | None:
    """The cores' worth of CPU time that the cgroups of this process grant; None without a quota."""

def is_plain_leaf(obj: Any) -> bool:
    """Whether an object is a tensor or an array that the codec can describe."""

def heap_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage of ordinary memory that cannot be resized."""

def begin_forks() -> None:
    """The forks of this thread from here to ``end_forks`` are the workers of one iterator."""

def end_forks() -> None:
    """Ends what ``begin_forks`` began."""

def descends(pid: int) -> bool:
    """Whether a process is a child of this one, or a child of a child, as under the fork server; False for this process
    itself, and for what is no pid."""

def _trim_pool() -> int:
    """Lets go of the arenas that wait for the next iterator; says how many there were."""

def _roundtrip(
    obj: Any,
    *,
    exchange: bool = True,
    damage: Sequence[tuple[int, int]] = ...,
    indices: bool = False,
    raw: bool = False,
    adopt: int | None = None,
) -> tuple[bool, Any]:
    """Encodes and decodes over ordinary memory, for tests."""

def _collate(batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The collate fast paths over ordinary memory, for tests."""
