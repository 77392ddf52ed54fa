"""The Rust extension. Only ``engine_batches`` is public; the rest is for the modules of this package."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, Self, final, type_check_only

import numpy as np
import torch
from torch.utils.data.sampler import BatchSampler
from typing_extensions import disjoint_base

from rustloader.settings.config import LoaderConfig
from rustloader.settings.limits import StallLimits

__all__ = [
    "ARENA_MIN",
    "BACK_BATCHES",
    "BATCH",
    "CACHE_HEADER",
    "CACHE_VERSION",
    "DEAD",
    "EARLY",
    "END",
    "ERROR",
    "INLINE_LIMIT",
    "LEAVE",
    "NO_PIN_THREAD",
    "RESUME",
    "REWIND",
    "TIMED_OUT",
    "TRACE_KINDS",
    "TRACE_MAIN",
    "TRACE_PINNER",
    "UNREADABLE",
    "VACANT",
    "WAIT_BOUNDS",
    "ArrayTensor",
    "CacheTable",
    "Counts",
    "Death",
    "DeferredSignals",
    "Engine",
    "IndexStream",
    "LeaseBuffer",
    "Link",
    "Meter",
    "Observed",
    "ObservedWorker",
    "Port",
    "Position",
    "Progress",
    "ShareBuilder",
    "SharedData",
    "SharedItems",
    "SharedIterator",
    "SharedPairs",
    "SharedStore",
    "SlowTask",
    "Snapshot",
    "StoppableIndices",
    "TimedCollate",
    "Totals",
    "TraceSink",
    "WarmPages",
    "WorkerStopped",
    "WorkerTotals",
    "__version__",
    "_collate",
    "_roundtrip",
    "_trim_pool",
    "begin_forks",
    "call_into",
    "cpu_quota",
    "descends",
    "end_forks",
    "engine_batches",
    "figures",
    "gather",
    "heap_storage",
    "inspect_arena",
    "is_plain_leaf",
    "memory_limits",
    "move_storage",
    "observed",
    "seed_words",
    "set_reporting",
    "tend_pages",
]

__version__: Final[str]

# Bytes of the smallest arena, which takes half of the remaining address space.
ARENA_MIN: Final[int]
# Seconds.
WAIT_BOUNDS: Final[tuple[float, ...]]

# Bytes of a cache's file before its index, and the version of its format.
CACHE_HEADER: Final[int]
CACHE_VERSION: Final[int]

# Batches that `Engine.position` can go back.
BACK_BATCHES: Final[int]

# Leaves below this many bytes travel inside the message and are copied on delivery.
INLINE_LIMIT: Final[int]

# The names of the kinds of a trace's events, by number, and the numbers of the main process and of the pin thread in
# place of a worker's: see `TraceSink`.
TRACE_KINDS: Final[list[str]]
TRACE_MAIN: Final[int]
TRACE_PINNER: Final[int]

# Codes of `Engine.next` and `Engine.begin`.
BATCH: Final[int]
ERROR: Final[int]
DEAD: Final[int]
END: Final[int]
TIMED_OUT: Final[int]
NO_PIN_THREAD: Final[int]
VACANT: Final[int]

# Codes of `Port.receive`.
RESUME: Final[int]
LEAVE: Final[int]
EARLY: Final[int]
REWIND: Final[int]
UNREADABLE: Final[int]

@type_check_only
class Foresight(Protocol):
    """The index batches of the next epoch, as they will be if nothing changes until it begins."""

    def begin(self) -> bytes | None:
        """Returns the message of ``Engine.begin``; None if the epoch cannot be foreseen."""

    def __next__(self) -> Any: ...

@type_check_only
class StallWarning(Protocol):
    """Names a stuck worker in the log: ``index`` is its index batch or None, ``why_not`` why there is no ``stack``.

    ``exceeds``: ``stall_seconds``, which it has exceeded, and whether it was killed; None for a report alone."""

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
        exceeds: tuple[float, bool] | None,
        /,
    ) -> None: ...

class WorkerStopped(BaseException):
    """Ends a fetch between two samples when the loader shuts down."""

@final
class Engine:
    """The engine of one iterator. Methods wait for other threads in ``next`` unless marked "lock-free"."""

    def __new__(
        cls,
        config: LoaderConfig,
        stalls: StallLimits,
        loads: Callable[[bytes, list[Any]], Any],
        dump_index: Callable[[Any], bytes],
        is_interrupt: Callable[[BaseException], bool],
        warn_stall: StallWarning,
    ) -> Engine:
        """``loads`` unpickles a result with its out-of-band objects, ``dump_index`` pickles an index batch, and
        ``is_interrupt`` returns whether a signal handler raised an error. With the setting ``snapshots`` each worker
        begins an epoch with a snapshot of its state (`Port.send_snapshot`). With ``max_restarts`` a worker's death is
        answered with ``VACANT``, and the worker can be replaced. A call that waits kills a worker that is in one batch
        for more than ``stall_timeout``."""

    def shipment(self) -> tuple[int, int, tuple[int, int, int, bool], tuple[int, int]]:
        """Returns what a worker needs: memfd, doorbell, (bytes, workers, slots of a ring, whether the workers share a
        queue), (pid, start time). Lock-free."""

    def started(self, worker: int, pid: int) -> None:
        """Registers a started worker. If it replaces one that has died, its unanswered tasks are sent again."""

    def attached(self, worker: int, fd: int, pid: int) -> Link:
        """Registers a worker on another machine by the connected socket ``fd``, which the engine then owns. ``pid`` is
        its process there. Otherwise as ``started``."""

    @property
    def ring_slots(self) -> int:
        """Entries of a worker's ring, for ``Port.remote``."""

    @property
    def region_len(self) -> int:
        """Bytes for the batches of a worker, for ``Port.remote``."""

    def vacate(self, worker: int) -> None:
        """Prepares the slot of a dead worker (``VACANT``) for its next process: start that one, then call ``started``.
        May be called again if the start has failed, and once its process has ended. RuntimeError: the worker is not
        vacant."""

    def postpone(self, worker: int, seconds: float) -> None:
        """Delays the next ``VACANT`` of a dead worker by this time. Other workers continue meanwhile.
        RuntimeError: the worker is not vacant."""

    def give_up(self, worker: int) -> None:
        """Makes a death final: what precedes the first lost task is still delivered, then ``DEAD`` comes.
        RuntimeError: the worker is not vacant."""

    def begin(
        self,
        answer: list[Any],
        next_index: Iterator[Any] | Callable[[], Any],
        is_first: bool,
        message: bytes,
        first_worker: int = 0,
        foresight: Foresight | None = None,
    ) -> None:
        """Begins an epoch; all but the first send ``message`` to the workers and wait until they have answered. A
        worker that has not answered for the epoch before gets no second message. ``first_worker`` gets the first task,
        unless the workers share a queue. After ``VACANT``, a call with the same message goes on. ValueError: there is
        no such worker.

        With ``foresight`` the workers may go on with the next epoch once the sampler has ended. Its ``begin`` then
        draws from the sampler as always. If message, first worker and index batches are as foreseen, what the workers
        have done counts, and the value of ``END`` is True. Otherwise it is
        taken back, and the value is False."""

    def next(
        self,
        answer: list[Any],
        next_index: Iterator[Any] | Callable[[], Any],
        foresight: Foresight | None = None,
    ) -> None:
        """Puts a code and its value into ``answer``. Yields for up to 20 us with the GIL, then waits without it.
        ``VACANT`` comes again at each call until the worker is replaced, postponed or given up.

        ``next_index`` is the sampler's iterator, or a function that returns the next index and raises StopIteration at
        the end. RuntimeError: ``next`` is already running in this thread, the iterator has been shut down, or it
        belongs to another process.
        """

    def active(self) -> list[bool] | None:
        """Returns, for each worker, whether it takes tasks in this epoch; None while another thread is in ``next``.
        Lock-free."""

    def progress(self) -> Progress | None:
        """Returns the progress of this epoch. None while another thread is in ``next``. Lock-free."""

    def position(self, answers: int, back: int) -> Position:
        """Returns the position in this epoch after ``answers`` answers (``BATCH`` and ``ERROR``), without the last
        ``back`` batches and the errors after each of these.

        ``answers`` counts all answers, or all but the last one, which has not reached the caller. ValueError: more than
        9 batches back, or more than were delivered, or another number of answers. Lock-free; after the end the last
        position."""

    def trace(self, sink: TraceSink, source: int, level: int) -> bool:
        """Begins to trace, as number ``source``: batches at level 1, samples, too, at 2. False after ``finish``.
        Errors: no memory for the workers' rings. Lock-free."""

    def end_trace(self) -> None:
        """Ends the trace. ``finish`` does so as well. Lock-free; nothing in a forked child."""

    def note_saved(self, answers: int) -> None:
        """Lets a trace know that the state after ``answers`` answers was saved. Lock-free."""

    def snapshot(self, worker: int, answers: int) -> Snapshot | None:
        """Returns the newest snapshot of this epoch that a worker made after at most ``answers`` of its answers.

        None if there is none yet, and after ``finish``. Snapshots that no position needs any more are not kept.
        ValueError: there is no such worker. RuntimeError: the shared memory is damaged. Lock-free."""

    def wait_started(self, timeout: float = 0.0) -> bool | None:
        """Waits without the GIL until each worker has sent its first snapshot of this epoch or has died, or the engine
        is closed. Handles signals. Returns False at once while a thread, this one included, is in ``next``, and None
        after ``timeout`` seconds (0: no limit). An engine without ``snapshots`` waits for none."""

    def start_pinning(
        self,
        begin: Callable[[], None],
        plain: Callable[[], tuple[Callable[[int], torch.Tensor], bool] | None],
        pin: Callable[[Any], Any],
        failure: Callable[[Exception], Any],
    ) -> None:
        """Starts the pin thread, after the workers. ``device.pinning.Pinner`` documents the functions."""

    def pinning(self) -> bool:
        """Returns True if a pin thread runs. Lock-free."""

    def stop_pinning(self) -> None:
        """Asks the pin thread to end. Lock-free."""

    def join_pinning(self, seconds: float | None = None) -> bool:
        """Waits up to ``seconds`` for the pin thread to end; returns whether it has. Lock-free."""

    @property
    def meter(self) -> Meter:
        """The counters of this iterator. Lock-free."""

    @property
    def batches(self) -> int:
        """Batches delivered so far. Lock-free."""

    @property
    def closing(self) -> bool:
        """True once ``close`` was called. Lock-free."""

    @property
    def is_ours(self) -> bool:
        """False in a forked child. Lock-free."""

    def belongs_to(self, pages: WarmPages) -> None:
        """Keeps the engine's memory for the next epoch of a loader. Lock-free."""

    def close(self, exiting: bool = False) -> None:
        """Asks the workers to leave and wakes a waiting ``next``, unless ``exiting``. Lock-free."""

    def stay(self) -> None:
        """Parks a daemon thread once the iterator was closed while ``exiting``. Lock-free."""

    def alive(self) -> int:
        """Returns the number of running workers. Lock-free."""

    def wait_gone(self, seconds: float) -> bool:
        """Waits for the workers to end, up to ``seconds`` or 0.25 s, whichever is less. Lock-free."""

    def signal_all(self, signal: int) -> None:
        """Sends a signal to the running workers. Lock-free."""

    def worker_status(self, worker: int) -> dict[str, Any]:
        """Returns a worker's status: state, pid, task, times, tasks done, whether it was sent SIGTERM. Lock-free;
        after the end its last status."""

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of the arena that have pages, and those in use. Lock-free; both 0 after the end."""

    def finish(self) -> None:
        """Releases everything once the workers have ended; a running ``next`` does it on return. Lock-free."""

@final
class Counts:
    """Counters of the main process."""

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
        """Returns the difference from an earlier moment."""

@final
class WorkerTotals:
    """Counters of a worker. Times are in seconds; ``starting`` to ``left`` are those of its states."""

    pid: Final[int]
    alive: Final[bool]
    start_cpu: Final[float]
    start_queued: Final[float]
    tasks: Final[int]
    adopted: Final[int]
    adopted_bytes: Final[int]
    starting: Final[float]
    idle: Final[float]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]
    publish: Final[float]
    left: Final[float]
    # CPU time and wall time of the fetches whose CPU time is measured.
    fetch_cpu: Final[float]
    fetch_measured: Final[float]
    def since(self, earlier: WorkerTotals) -> WorkerTotals:
        """Returns the difference from an earlier moment, in tasks, leaves, and the times of states and of measured
        fetches.
        """

@final
class SlowTask:
    """One of the slowest tasks, or of those that blocked later ones for longest. Times are in seconds."""

    index: Final[str]
    worker: Final[int]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]
    # Wait of `next` for this task with later ones ready.
    blocked: Final[float]

@final
class Totals:
    """The figures of one or more iterators."""

    counts: Final[Counts]
    # Numbers of waits by the first of the WAIT_BOUNDS that is not below them; the last one counts longer ones.
    waits: Final[list[int]]
    workers: Final[list[WorkerTotals]]
    slowest: Final[list[SlowTask]]
    blocking: Final[list[SlowTask]]
    # Seconds of work on recent batches, the latest last.
    recent: Final[list[float]]
    leased: Final[int]
    warm: Final[int]
    blocks: Final[int]
    high_water: Final[int]
    pin_threads: Final[int]
    # Answers in the completion rings.
    ready: Final[int]

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
    # The loader's name, of which there may be the beginning only.
    name: Final[str]
    state: Final[str]
    seconds_in_state: Final[float]
    started: Final[float]
    stopping: Final[bool]
    prefetch_factor: Final[int]
    in_order: Final[bool]
    persistent: Final[bool]
    pinning: Final[bool]
    remote: Final[bool]
    epoch_batches: Final[int]
    counts: Final[Counts]
    workers: Final[list[ObservedWorker]]
    leased: Final[int]
    warm: Final[int]
    high_water: Final[int]
    blocks: Final[int]

@final
class Death:
    """A worker's death: the value that comes with DEAD and VACANT.

    ``exitcode`` is multiprocessing's: negative for a signal, None if unknown. ``signal`` is the C library's text.
    ``index`` is the index batch that the worker was at, else its first unanswered one, or None. ``task`` is its number
    in this epoch, from 0. ``answers`` counts the results of this epoch, errors included, that the processes of this
    worker have published. ``has_begun``: it had begun that task; its start, and batches that it makes again before the
    task, do not count. ``place`` is the place in its index batch of the sample that the worker was at
    (`Port.at_sample`), or None. ``generation`` counts the processes before it. ``stalled``: it was killed for
    ``stall_seconds``. ``first_task`` is the number of the epoch's first task, as in ``RESUME``.
    """

    worker_id: Final[int]
    pid: Final[int]
    exitcode: Final[int | None]
    signal: Final[str | None]
    index: Final[Any]
    task: Final[int | None]
    answers: Final[int]
    has_begun: Final[bool]
    place: Final[int | None]
    generation: Final[int]
    stalled: Final[bool]
    first_task: Final[int]

@final
class Position:
    """The delivered tasks of an epoch.

    ``low`` is the number of the first task that is not delivered, counted from 0. Tasks that an exhausted worker left
    out do not count as such. ``ahead`` holds the delivered tasks behind it, in order. ``per_worker`` counts the answers
    of each worker. ``last_worker`` made the last answer; None before the first.
    """

    low: Final[int]
    ahead: Final[list[int]]
    per_worker: Final[list[int]]
    last_worker: Final[int | None]

@final
class Snapshot:
    """A worker's state after ``answers`` of its answers, or with ``is_error`` the error of an attempt to make it.

    ``payload`` is the pickle of either.
    """

    answers: Final[int]
    is_error: Final[bool]
    payload: Final[bytes]

@final
class Progress:
    """The progress of an epoch.

    ``sent`` counts the tasks that were sent, and ``outstanding`` those of them without a result. ``loads`` counts the
    undelivered tasks of each worker. ``undelivered`` has the number and the worker of each undelivered task, in order;
    None for a worker that is not known.
    """

    sent: Final[int]
    outstanding: Final[int]
    loads: Final[list[int]]
    undelivered: Final[list[tuple[int, int | None]]]

@final
class Meter:
    """The counters of one iterator, which they outlive, or of ended iterators together."""

    def __new__(cls) -> Meter: ...
    @property
    def ended(self) -> bool:
        """True if the iterator has ended, so that the counters are final."""

    def absorb(self, meters: list[Meter]) -> None:
        """Removes ended iterators' meters from a list and adds their figures."""

@final
class Link:
    """The main process's end of a connection to a worker on another machine."""

    @property
    def has_ended(self) -> bool:
        """True if the connection has ended."""

    @property
    def reason(self) -> str | None:
        """The reason why it has ended; None if the worker has left, and before the end."""

    @property
    def received(self) -> int:
        """Bytes received."""

@final
class Port:
    """A worker's connection to the main process."""

    def __new__(
        cls,
        memfd: int,
        doorbell: int,
        geometry: tuple[int, int, int, bool],
        worker: int,
        load_index: Callable[[bytes], Any],
    ) -> Port:
        """``load_index`` unpickles an index batch."""

    @staticmethod
    def inherit(engine: Engine, worker: int, load_index: Callable[[bytes], Any]) -> Port:
        """Opens the port in a forked child, over the inherited engine."""

    @staticmethod
    def remote(fd: int, ring_slots: int, region_len: int, load_index: Callable[[bytes], Any]) -> Port:
        """Opens the port over a connected socket ``fd``, which it then owns. The end of the connection ends this
        process."""

    @property
    def is_remote(self) -> bool:
        """True if the main process is on another machine."""

    def ready(self) -> None:
        """Notifies a main process on another machine that the worker enters its loop."""

    def finish(self, seconds: float) -> bool:
        """Sends what is published to a main process on another machine, and closes the connection, without the GIL.
        Returns whether all was sent within ``seconds``. Call it after ``leave``."""

    def watch(self, parent: tuple[int, int]) -> None:
        """Ends this process after the main process (pid, start time) has ended."""

    def survive_group_signal(self, main: int, alone: float) -> bool:
        """Keeps this process alive after a SIGTERM to the process group, while the main process reacts. It ends if no
        other worker gets one within ``alone`` seconds. False if the system refuses."""

    def offer_stack(self) -> None:
        """Lets the main process request a dump of this process's stacks by a signal, through faulthandler."""

    def receive(self) -> tuple[int, int, Any]:
        """Waits without the GIL for ``RESUME``, ``LEAVE``, ``UNREADABLE``, or a task to fetch (any other number).
        Returns that code, the task's number, and the index or the exception that unpickling it raised; for ``RESUME``
        the number of the epoch's first task, and the message of ``Engine.begin``. ``EARLY`` and ``REWIND`` are as
        ``RESUME``: the one comes before the current epoch has ended, precedes its tasks and has no answer; the other
        comes in place of an epoch that has begun early."""

    def at_sample(self, place: int) -> None:
        """Shows the place in the index batch of the sample that is fetched next, for the report of a death."""

    def send(self, task: int, batch: list[Any], leaves_are_ours: bool) -> bool:
        """Sends a plain batch, the one item of a list. Returns False, and sends nothing, if it must be pickled: always
        unless ``leaves_are_ours``, that is, with a custom reducer of tensors or arrays. MemoryError: no room.

        Arrays in the region are not copied if nothing but the batch refers to them. They must then go with the batch,
        so this empties the list."""

    def send_pickle(self, task: int, pickle: bytes, objects: list[Any], tied: bool) -> bool:
        """Sends a batch's pickle and its out-of-band tensors and arrays. Returns False, and sends nothing, if they are
        not plain. ``tied``: unpickling needs this process alive. MemoryError: no room."""

    def use_numpy_arena(self) -> bool:
        """Lets NumPy make large arrays in this worker's region, in this thread. Returns False, and changes nothing,
        if NumPy is missing or older than 1.22, the program has set a handler of its own, or forks cannot be watched."""

    def array_tensor(self, array: np.ndarray) -> ArrayTensor | None:
        """Stands for ``torch.as_tensor(array)`` if the array lies in the region and could be sent from there, and torch
        would make a tensor over its memory without a warning."""

    def enter_thread(self) -> None:
        """Lets NumPy make large arrays in this worker's region in a further thread, after `use_numpy_arena` has
        succeeded."""

    def take_refusal(self) -> MemoryError | None:
        """Takes the error of an array of the current task that found no memory in the region, nor elsewhere. None
        without such an array, and the next time."""

    def send_error(self, task: int, pickle: bytes) -> None:
        """Sends an error as a pickle. MemoryError: no room."""

    def send_snapshot(self, count: int, payload: bytes, is_error: bool) -> bool:
        """Sends a snapshot of this worker's state, made after ``count`` of its answers in this epoch, or the error that
        prevents it. Comes before the next result, at most once for each; once more at the start of an epoch (with the
        count 0), at its end, and for an error. Returns False if it is left out because memory is short."""

    def exhausted(self, task: int) -> None:
        """Reports that the iterable dataset is exhausted."""

    def resumed(self) -> None:
        """Acknowledges a new epoch."""

    def progress(self, *, ends: bool = False) -> None:
        """Notes that a batch of a replay begins, or that the replay ends: ``stall_seconds`` counts from now. In a
        replay the worker has not begun its task (``Death.has_begun``)."""

    def leave(self) -> None:
        """Reports that the worker leaves, and ignores Ctrl-C from then on."""

    def stoppable(self, index: Any, *, shows_places: bool = False, traces: bool = False) -> StoppableIndices:
        """Wraps an index batch, whose iteration ends with WorkerStopped when the loader shuts down. With
        ``shows_places`` it also calls `at_sample` for each index. With ``traces`` the time to the next index is that of
        a sample, for a trace with samples.
        """

    def timed(self, collate_fn: Any) -> TimedCollate:
        """Wraps ``collate_fn`` to measure its time."""

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """Returns a storage in the arena; None if ordinary memory is the better choice."""

    def stack(self, batch: Any) -> torch.Tensor | None:
        """Collates plain tensors of one dtype and shape, as default_collate would. None: left to torch's function."""

    def numbers(self, batch: Any) -> torch.Tensor | None:
        """Collates floats (float64) or ints (int64), as default_collate would. None: left to torch's function."""

    def gather(self, tensors: Any, index: Any) -> list[torch.Tensor] | None:
        """Like the function ``gather``, but into the arena."""

    def gather_cached(self, table: CacheTable, index: Any) -> Any:
        """Collates cached samples into the arena, as default_collate would. Returns None to leave the batch to torch: a
        sample is missing, or they are not all of one form that is gathered."""

@final
class IndexStream:
    """The index batches of an epoch, cut from int64 arrays. Survives an error that a signal handler raises."""

    def __new__(
        cls,
        torchs: Iterator[Any],
        batches: BatchSampler | None,
        begin: Callable[[], tuple[Callable[[], np.ndarray | None], int | None] | None],
        size_of: Callable[[Any], int],
        is_interrupt: Callable[[BaseException], bool],
    ) -> IndexStream:
        """``batches`` has the size of each batch; None yields single indices.

        ``begin`` is called at the first ``next``. It returns a function that returns the next array, or None at the
        end, and the size of all batches if an incomplete last one is dropped. None: ``torchs`` takes over.
        ``size_of`` returns the size for an unusual ``batch_size``, or raises.
        """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def skip(self, count: int) -> None:
        """Leaves out the first ``count`` index batches, at the first ``next``: this costs their arrays, and no Python
        object per index. More batches than there are end the stream. ValueError: ``next`` was called before."""

@final
class StoppableIndices:
    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...

@final
class ArrayTensor:
    """An array in a batch that arrives as a tensor, without a copy if nothing but the batch refers to the array."""

    def tensor(self) -> torch.Tensor:
        """Returns ``torch.as_tensor`` of the array."""

@final
class TimedCollate:
    def __call__(self, batch: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...

@final
class DeferredSignals:
    """A context, entered once, that defers signals: this thread blocks them, and the process's handlers only note them.
    On exit deferred signals are raised in this thread. In the process's other threads only SIGINT and SIGTERM are
    deferred, and only if they have a handler."""

    def __new__(cls, signals: Sequence[int]) -> DeferredSignals: ...
    def __enter__(self) -> list[int]:
        """Returns the signals that this thread had not blocked before."""

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None: ...

@final
class LeaseBuffer:
    """Memory of a batch as a writable buffer, released with its last user."""

    def __len__(self) -> int: ...
    def storage(self) -> torch.UntypedStorage:
        """Returns a storage that shares these bytes and keeps them alive."""

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

def call_into(into: list[Any], function: Callable[..., Any], /, *args: Any) -> None:
    """Calls ``function`` with ``args`` and appends what it returns to ``into``. No signal handler can lose the value.

    A handler may raise wherever Python runs it, and an item of an iterator or a draw of a generator comes only once.
    Python runs handlers after a call, at the start of a function, and where a loop goes back; after no other bytecode.
    Hence two rules:

    * To take a value and to keep it is one call, of this function. In ``kept.append(next(items))`` a handler may raise
      between the two calls, and the item is gone. Here the value is in ``into`` before a handler runs. ``into`` belongs
      to an object that outlives the error, so that the next attempt finds the value there.
    * To hand the value on is a stretch without a call, such as ``self._kept, self._count = [], count; return value``. A
      handler finds all of it done, or nothing. The comment "Atomic for signal handlers" marks such a stretch, from
      there to the end of its block, and a test checks that it has no call and no loop.

    An error of ``function``, StopIteration included, passes through. ``into`` then stays as it is.
    """

def observed() -> bool:
    """Returns True if a profiler or another callback of torch would see ``record_function``, or a report is in
    force."""

def set_reporting(reporting: bool) -> None:
    """Makes ``observed`` return True while reports are in force."""

def figures(meters: list[Meter]) -> Totals:
    """Returns the figures of several iterators together, the latest last."""

def inspect_arena(fd: int) -> Observed | None:
    """Reads an iterator of another process from its arena's descriptor; None while no iterator uses the arena.
    RuntimeError: the file is no arena, or one of another version."""

def memory_limits() -> list[tuple[bool, int, int]]:
    """Returns the memory limits, the machine's first: whether it is a cgroup's, its size, and the free bytes."""

def cpu_quota() -> float | None:
    """Returns the CPU quota of this process's cgroups, in cores; None without a quota."""

def seed_words(base_seed: int, place: int, ordinal: int, worker: int, epoch: int) -> list[int]:
    """Returns four words of 64 bits from Philox4x64-10 with the key (base_seed, 0) and the counter of the other
    arguments.
    """

def is_plain_leaf(obj: Any) -> bool:
    """Returns True if the codec can describe an object, a tensor or an array. It may still share memory in a way that
    the codec cannot describe."""

def gather(tensors: Any, index: Any) -> list[torch.Tensor] | None:
    """Collates the samples ``index`` of a TensorDataset with these tensors, as default_collate would.

    None: left to torch. The tensors are no tuple of plain tensors with contiguous rows, the index is no list of ints in
    range, or a mode of torch is active.
    """

def heap_storage(nbytes: int) -> torch.UntypedStorage:
    """Returns a storage of ordinary memory that cannot be resized."""

def move_storage(function: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(storage, *args, **kwargs)``, which may give the storage other memory.

    If its memory was this package's, the storage keeps it as long as it lives, for arrays and DLPack views of its
    tensors.
    """

@final
class ShareBuilder:
    """The image of a shared object that is being written. It has rows, or raw data.

    MemoryError: a memory cgroup, the machine or a limit has too little memory.
    """

    def __new__(cls) -> Self: ...
    def extend(self, items: Any, dumps: Callable[[Any], bytes]) -> None:
        """Appends each item as a row. ``dumps`` pickles those that are no plain trees."""

    def update(self, pairs: Any, dumps: Callable[[Any], bytes]) -> None:
        """Appends the key and the value of each pair as two rows."""

    def expect(self, nbytes: int) -> None:
        """Checks that there is memory for ``nbytes`` more bytes."""

    def raw(self, data: Any) -> None:
        """Appends the bytes of a contiguous buffer of uint8."""

    def finish(self, kind: int, meta: bytes) -> SharedStore:
        """Seals the image. ``kind`` and ``meta`` describe the object for the reader."""

@final
class CacheTable:
    """The samples of a dataset that were made, by index, in memory or in a file. Forked children continue to use it."""

    def __new__(cls, fd: int) -> Self:
        """Takes the descriptor of a table in memory. ValueError: it is none."""

    @staticmethod
    def create(rows: int, limit: int) -> CacheTable:
        """Makes an empty table in memory, of at most ``limit`` bytes."""

    @staticmethod
    def format(fd: int, rows: int, limit: int, meta: bytes) -> None:
        """Makes a file of ``limit`` zeroes an empty table."""

    @staticmethod
    def head(fd: int) -> tuple[int, int, int, bytes] | None:
        """Returns version, rows, limit and meta of a file; None if it is no table."""

    @staticmethod
    def open_file(fd: int, in_memory: bool, whole: int) -> CacheTable:
        """Maps a file that is as long as its limit; ``whole`` is the length that it had before. The caller holds the
        file's lock, and keeps the descriptor."""

    @staticmethod
    def overhead(rows: int) -> int:
        """Returns the number of bytes that a table takes before its first sample."""

    def some_rows(self, most: int) -> list[int]:
        """Returns up to ``most`` rows that have a sample."""

    def grow(self, limit: int) -> None:
        """Raises the limit to the length that the file has now. The table is then to be opened again."""

    def reopen(self) -> None:
        """Takes samples again, if room was short."""

    @property
    def rows(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def closed(self) -> str | None:
        """The reason why it takes no more, "full" or "no room"; None if it does."""

    def fileno(self) -> int:
        """Returns the descriptor. OSError: other code has closed it."""

    def get(self, index: Any, missing: Any) -> Any:
        """Returns a new object equal to the sample of an exact int, or ``missing``. Counts a hit or a miss for each
        row.
        """

    def takes(self, row: int) -> bool:
        """Returns True if ``put`` may keep the sample of a row."""

    def put(self, row: int, sample: Any, dumps: Callable[[Any], bytes]) -> str | None:
        """Keeps a sample. Returns the reason why the table takes no more, if this call has found it.

        Raises:
            OSError: The sample could not be written. The table takes no more.
            Exception: The sample could not be pickled.
        """

    def never(self, row: int) -> None:
        """Marks a row whose sample cannot be kept."""

    def take_probe(self) -> bool:
        """Returns True if a sample is to be made twice: for a few, over all processes."""

    def is_news(self, bit: int) -> bool:
        """Returns True if this call is the first with that bit, over all processes."""

    def usage(self) -> dict[str, int]:
        """Returns the keyword arguments of ``CacheUsage``."""

    @staticmethod
    def usage_of_header(header: bytes) -> dict[str, int] | None:
        """Reads the same from the first ``CACHE_HEADER`` bytes of a file; None if it is no table of this version."""

@final
class SharedStore:
    """A mapped image. Its buffer is the whole image."""

    def __new__(cls, fd: int) -> Self:
        """Takes a descriptor. ValueError: it is no image, or a damaged one."""

    @staticmethod
    def sealed(fd: int) -> SharedStore:
        """Seals a memfd with an image, and takes it. After an error the caller still has it."""

    @property
    def kind(self) -> int: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def fileno(self) -> int:
        """Returns the descriptor. OSError: other code has closed it."""

    def data(self) -> Any:
        """Returns the raw data, in a private mapping of their own: a ``SharedData``."""

@final
class SharedData:
    """The raw data of an image as a read-only buffer, and as a storage of torch."""

    @property
    def store(self) -> SharedStore: ...
    @property
    def address(self) -> int: ...
    def storage(self) -> torch.UntypedStorage:
        """Returns a storage over the data. Only this process sees what is written to it."""

    def __len__(self) -> int: ...

@disjoint_base
class SharedItems:
    """The base of a shared list or tuple: reading. Items are made again at each access."""

    def __new__(cls, store: SharedStore, is_tuple: bool) -> Self: ...
    @property
    def store(self) -> SharedStore: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __reversed__(self) -> Iterator[Any]: ...
    def __contains__(self, key: Any, /) -> bool: ...
    def index(self, value: Any, start: int = 0, stop: int = ..., /) -> int: ...
    def count(self, value: Any, /) -> int: ...
    def equals(self, other: Any) -> bool:
        """Returns True if another sequence of the same length has equal items."""

@disjoint_base
class SharedPairs:
    """The base of a shared dict: reading. Keys are found by a hash that all processes share."""

    def __new__(cls, store: SharedStore) -> Self: ...
    @property
    def store(self) -> SharedStore: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __reversed__(self) -> Iterator[Any]: ...
    def __contains__(self, key: Any, /) -> bool: ...
    def get(self, key: Any, default: Any = None, /) -> Any: ...
    def iterate_values(self, is_reversed: bool) -> Iterator[Any]:
        """Returns the values, in the order of the keys or backwards."""

@final
class SharedIterator:
    """An iterator over items, keys or values."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def __length_hint__(self) -> int: ...

@final
class WarmPages:
    """A loader's claim on shared memory that waits for its next epoch. The pages go when the claim is freed."""

    def __new__(cls) -> WarmPages: ...
    def announce(self, workers: int) -> None:
        """Lets a loader with this number of workers inherit the memory of one that is freed before this one begins."""

@final
class TraceSink:
    """Writes the events of a trace to files.

    A record has 40 bytes, five little-endian words: ``source`` (32 bits), ``who`` (24) and kind (8); begin and length
    in monotonic nanoseconds; two numbers. `TRACE_KINDS` has the names of the kinds. ``who`` is a worker, `TRACE_MAIN`
    or `TRACE_PINNER`."""

    def __new__(cls, files: list[int], seconds: float) -> TraceSink:
        """Takes descriptors of empty files. Two take turns of ``seconds``."""

    def put(self, source: int, kind: int, who: int, begin: int, length: int, number: int, extra: int = 0) -> None:
        """Adds an event. ValueError: there is no such kind."""

    def end(self) -> tuple[int, list[tuple[int, int]]]:
        """Writes what is left. Returns the number of lost events, and each file by its number, with its bytes, the last
        one last.
        Later events are dropped."""

def begin_forks() -> None:
    """Marks this thread's forks until ``end_forks`` as the workers of one iterator. No fork finds the thread that
    returns idle pages."""

def end_forks() -> None:
    """Ends the group that ``begin_forks`` began."""

def tend_pages() -> None:
    """Starts the thread that returns idle pages again, if a fork has ended it."""

def descends(pid: int) -> bool:
    """Returns True if a process is a child or grandchild (under the fork server) of this one; False if ``pid`` is no
    pid."""

def _trim_pool() -> int:
    """Releases the pooled arenas; returns their number."""

def _roundtrip(
    obj: Any,
    *,
    exchange: bool = True,
    damage: Sequence[tuple[int, int]] = ...,
    indices: bool = False,
    raw: bool = False,
    adopt: int | None = None,
) -> tuple[bool, Any]:
    """Encodes and decodes over ordinary memory, for tests: (plain, object or None).

    ``exchange=False`` avoids torch's C functions. ``damage`` overwrites (position, byte) of the payload; a position
    beyond its end removes the last byte. ``indices`` uses the codec of index batches. ``raw``: ``obj`` is a payload,
    with one leaf of 1 MiB. ``adopt``: large leaves lie this many bytes deep in memory that travels as it is.
    """

def _collate(batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Runs the collate fast paths over ordinary memory, for tests."""
