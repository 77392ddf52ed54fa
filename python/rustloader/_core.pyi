"""The Rust extension. Only ``engine_batches`` is public; the other names are for the modules of this package."""

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

# Size of the smallest arena in bytes. An arena takes at most half of a limited address space.
ARENA_MIN: Final[int]
# Upper bounds of the classes of waits in `Totals.waits`, in seconds.
WAIT_BOUNDS: Final[tuple[float, ...]]

# Number of bytes of a cache's file before its index, and the version of the file's format.
CACHE_HEADER: Final[int]
CACHE_VERSION: Final[int]

# Maximum number of batches by which `Engine.position` can go back.
BACK_BATCHES: Final[int]

# Leaves below this number of bytes are part of the message and are copied on delivery.
INLINE_LIMIT: Final[int]

# The names of a trace's kinds of events, by their numbers; and the numbers that stand for the main process and the pin
# thread in place of a worker: see `TraceSink`.
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
    """An iterator over the predicted index batches of the next epoch: ``iterator.early_epochs.EpochPredictor``."""

    def begin(self) -> bytes | None:
        """Returns the predicted message of ``Engine.begin``; None if the epoch cannot be predicted."""

    def __next__(self) -> Any: ...

@type_check_only
class StallWarning(Protocol):
    """A function that logs a warning about a stuck worker.

    ``index`` is the worker's index batch or None, ``why_not`` the reason why there is no ``stack``. ``exceeds`` is
    ``stall_seconds`` if the worker has exceeded it, and whether the worker was killed; otherwise None."""

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
    """An exception that ends a fetch between two samples when the loader shuts down."""

@final
class Engine:
    """The engine of one iterator. A method waits while another thread is in ``next``, unless it is marked
    "lock-free"."""

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
        ``is_interrupt`` returns True if a signal handler raised an error. With the setting ``snapshots`` each worker
        begins an epoch with a snapshot of its state (`Port.send_snapshot`). With ``max_restarts`` the answer to a
        worker's death is ``VACANT``, and the worker can be replaced. A call that waits kills a worker that takes longer
        than ``stall_timeout`` for one batch."""

    def shipment(self) -> tuple[int, int, tuple[int, int, int, bool], tuple[int, int]]:
        """Returns the parameters of a worker's port: memfd, doorbell, (bytes, workers, slots of a ring, whether the
        workers share a queue), and this process's (pid, start time). Lock-free."""

    def started(self, worker: int, pid: int) -> None:
        """Registers a started worker. If it replaces a dead worker, the outstanding tasks are sent again."""

    def attached(self, worker: int, fd: int, pid: int) -> Link:
        """Registers a worker on another machine by the connected socket ``fd``, which the engine then owns. ``pid`` is
        the worker's process there. Otherwise the same as ``started``."""

    @property
    def ring_slots(self) -> int:
        """Number of entries of a worker's ring, for ``Port.remote``."""

    @property
    def region_len(self) -> int:
        """Number of bytes for the batches of a worker, for ``Port.remote``."""

    def vacate(self, worker: int) -> None:
        """Prepares the slot of a dead worker (``VACANT``) for its next process. The caller then starts that process and
        calls ``started``. May be called again after a failed start, when the process that failed has ended.
        RuntimeError: the worker is not vacant."""

    def postpone(self, worker: int, seconds: float) -> None:
        """Delays the next ``VACANT`` of a dead worker by this time. Other workers continue meanwhile.
        RuntimeError: the worker is not vacant."""

    def give_up(self, worker: int) -> None:
        """Makes a death final: the batches before the first lost task are still delivered, then ``DEAD`` follows.
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
        """Begins an epoch. For every epoch but the first, sends ``message`` to the workers and waits for their answers.
        A worker that has not yet answered for the previous epoch gets no second message. ``first_worker`` gets the
        first task, unless the workers share a queue. After ``VACANT``, a call with the same message continues.
        ValueError: there is no such worker.

        With ``foresight``, the workers may begin the next epoch as soon as the sampler has ended. The call of ``begin``
        for that epoch draws from the sampler as always. If message, first worker and index batches are as predicted,
        the workers' results are used, and the value of ``END`` is True. Otherwise they are discarded, and the value is
        False."""

    def next(
        self,
        answer: list[Any],
        next_index: Iterator[Any] | Callable[[], Any],
        foresight: Foresight | None = None,
    ) -> None:
        """Puts a code and its value into ``answer``. Waits for up to 20 us with the GIL, then without it. ``VACANT`` is
        the answer to each call until the worker is replaced, postponed or given up.

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

        ``answers`` is the number of all answers, or of all but the last one if that has not reached the caller.
        ValueError: ``answers`` is another number, or ``back`` is more than 9 or than the number of delivered batches.
        Lock-free. After the end, returns the last position."""

    def trace(self, sink: TraceSink, source: int, level: int) -> bool:
        """Begins to trace under the number ``source``: batches at level 1, also samples at level 2. Returns False after
        ``finish``. Raises if there is no memory for the workers' rings. Lock-free."""

    def end_trace(self) -> None:
        """Ends the trace, as ``finish`` also does. Does nothing in a forked child. Lock-free."""

    def note_saved(self, answers: int) -> None:
        """Records in a trace that the state after ``answers`` answers was saved. Lock-free."""

    def snapshot(self, worker: int, answers: int) -> Snapshot | None:
        """Returns the newest snapshot of this epoch that a worker made after at most ``answers`` of its answers.

        Returns None if there is none yet, and after ``finish``. Snapshots that no position needs any longer are not
        kept. ValueError: there is no such worker. RuntimeError: the shared memory is damaged. Lock-free."""

    def wait_started(self, timeout: float = 0.0) -> bool | None:
        """Waits without the GIL until each worker has sent its first snapshot of this epoch or has died, or the engine
        is closed. Handles signals. Returns False at once while any thread, including this one, is in ``next``, and None
        after ``timeout`` seconds (0: no limit). An engine without ``snapshots`` does not wait."""

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
        """Waits up to ``seconds`` for the pin thread to end. Returns True if it has ended. Lock-free."""

    @property
    def meter(self) -> Meter:
        """The counters of this iterator. Lock-free."""

    @property
    def batches(self) -> int:
        """Number of batches delivered so far. Lock-free."""

    @property
    def closing(self) -> bool:
        """True once ``close`` was called. Lock-free."""

    @property
    def is_ours(self) -> bool:
        """False in a forked child. Lock-free."""

    def belongs_to(self, pages: WarmPages) -> None:
        """Makes the engine keep its memory for the next epoch of the loader that has ``pages``. Lock-free."""

    def close(self, exiting: bool = False) -> None:
        """Asks the workers to exit and, unless ``exiting``, wakes a waiting ``next``. Lock-free."""

    def stay(self) -> None:
        """Parks the calling daemon thread if the iterator was closed while ``exiting``. Lock-free."""

    def alive(self) -> int:
        """Returns the number of running workers. Lock-free."""

    def wait_gone(self, seconds: float) -> bool:
        """Waits for the workers to end, for up to ``seconds`` and at most 0.25 s. Lock-free."""

    def signal_all(self, signal: int) -> None:
        """Sends a signal to the running workers. Lock-free."""

    def worker_status(self, worker: int) -> dict[str, Any]:
        """Returns a worker's status: state, pid, task, times, tasks done, whether it was sent SIGTERM. After the end,
        returns its last status. Lock-free."""

    def memory(self) -> tuple[int, int]:
        """Returns the number of bytes of the arena that have pages, and of those in use; both 0 after the end.
        Lock-free."""

    def finish(self) -> None:
        """Releases all resources, after the workers have ended. A running ``next`` does this when it returns.
        Lock-free."""

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
        """Returns the difference from earlier counters."""

@final
class WorkerTotals:
    """Counters of a worker. Times are in seconds; ``starting`` to ``left`` are the times in its states."""

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
        """Returns the difference from earlier counters in tasks, in leaves, and in the times of states and of measured
        fetches.
        """

@final
class SlowTask:
    """One of the slowest tasks, or of the tasks that blocked later ones for the longest time. Times are in seconds."""

    index: Final[str]
    worker: Final[int]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]
    # Time for which `next` waited for this task while later ones were ready.
    blocked: Final[float]

@final
class Totals:
    """The figures of one or more iterators."""

    counts: Final[Counts]
    # Numbers of waits: for each of the WAIT_BOUNDS, the waits up to it and above the one before; then the longer waits.
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
    # The loader's name, possibly cut off.
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
    """A worker's death: the value of the answers DEAD and VACANT.

    ``exitcode`` is as in multiprocessing: negative for a signal, None if unknown. ``signal`` is the C library's text.
    ``index`` is the index batch that the worker was working on, otherwise its first outstanding one, or None. ``task``
    is the number of that index batch in this epoch, from 0. ``answers`` is the number of results of this epoch, errors
    included, that the processes of this worker have published. ``has_begun`` is True if the worker had begun the task;
    while it starts, or replays batches, it has not. ``place`` is the position in the index batch of the sample that the
    worker was working on (`Port.at_sample`), or None. ``generation`` is the number of earlier processes. ``stalled`` is
    True if the worker was killed for ``stall_seconds``. ``first_task`` is the number of the epoch's first task, as in
    ``RESUME``.
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

    ``low`` is the number of the first task that is not delivered, from 0. Tasks that an exhausted worker left out are
    passed over. ``ahead`` lists the delivered tasks after ``low``, in order. ``per_worker`` has the number of answers
    of each worker. ``last_worker`` is the worker of the last answer; None before the first answer.
    """

    low: Final[int]
    ahead: Final[list[int]]
    per_worker: Final[list[int]]
    last_worker: Final[int | None]

@final
class Snapshot:
    """A worker's state after ``answers`` of its answers, or with ``is_error`` the error that prevented the snapshot.

    ``payload`` is the pickle of the state or the error.
    """

    answers: Final[int]
    is_error: Final[bool]
    payload: Final[bytes]

@final
class Progress:
    """The progress of an epoch.

    ``sent`` is the number of tasks that were sent, ``outstanding`` the number of those without a result. ``loads`` has
    the number of undelivered tasks of each worker. ``undelivered`` has the number and the worker of each undelivered
    task, in order; the worker is None if it is not known.
    """

    sent: Final[int]
    outstanding: Final[int]
    loads: Final[list[int]]
    undelivered: Final[list[tuple[int, int | None]]]

@final
class Meter:
    """The counters of one iterator, which exist even after it has ended, or the sums of several ended iterators."""

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
        """The reason why the connection has ended; None before its end, or if the worker has left in order."""

    @property
    def received(self) -> int:
        """Number of received bytes."""

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
        """Opens the port over a connected socket ``fd``, which the port then owns. This process ends when the
        connection ends."""

    @property
    def is_remote(self) -> bool:
        """True if the main process is on another machine."""

    def ready(self) -> None:
        """Tells a main process on another machine that the worker enters its loop."""

    def finish(self, seconds: float) -> bool:
        """Sends the published results to a main process on another machine, and closes the connection, without the GIL.
        Returns True if all were sent within ``seconds``. To be called after ``leave``."""

    def watch(self, parent: tuple[int, int]) -> None:
        """Makes this process end after the main process (pid, start time) has ended."""

    def survive_group_signal(self, main: int, alone: float) -> bool:
        """Keeps this process alive after a SIGTERM to the process group, while the main process reacts. The process
        ends if no other worker gets a SIGTERM within ``alone`` seconds. Returns False if the system refuses."""

    def offer_stack(self) -> None:
        """Lets the main process request a dump of this process's stacks by a signal, through faulthandler."""

    def receive(self) -> tuple[int, int, Any]:
        """Waits without the GIL for ``RESUME``, ``LEAVE``, ``UNREADABLE``, or a task to fetch (any other number).
        Returns this code, the task's number, and the index batch or the exception that unpickling it raised. For
        ``RESUME`` these are the number of the epoch's first task, and the message of ``Engine.begin``. ``EARLY`` and
        ``REWIND`` have the same values as ``RESUME``. ``EARLY`` precedes the tasks of an epoch that begins before the
        current one has ended, and is not answered. ``REWIND`` begins an epoch in place of one that has begun early."""

    def at_sample(self, place: int) -> None:
        """Shows the position in the index batch of the sample that is fetched next, for the report of a death."""

    def send(self, task: int, batch: list[Any], leaves_are_ours: bool) -> bool:
        """Sends a plain batch, the only item of a list. Returns False, and sends nothing, if the batch must be pickled.
        This is always so unless ``leaves_are_ours``, that is, if tensors or arrays have a custom reducer. MemoryError:
        no room.

        Arrays in the region are not copied if only the batch refers to them. They must then be freed with the batch, so
        this method empties the list."""

    def send_pickle(self, task: int, pickle: bytes, objects: list[Any], tied: bool) -> bool:
        """Sends a batch's pickle and its out-of-band tensors and arrays. Returns False, and sends nothing, if these are
        not plain. ``tied``: the pickle can be read only while this process is alive. MemoryError: no room."""

    def use_numpy_arena(self) -> bool:
        """Makes NumPy allocate large arrays in this worker's region, in this thread. Returns False, and changes
        nothing, if NumPy is missing or older than 1.22, the program has set its own handler, or forks cannot be
        watched."""

    def array_tensor(self, array: np.ndarray) -> ArrayTensor | None:
        """Returns a stand-in for ``torch.as_tensor(array)`` if the array is in the region and could be sent from there,
        and torch would make a tensor over its memory without a warning; otherwise None."""

    def enter_thread(self) -> None:
        """Makes NumPy allocate large arrays in this worker's region also in the calling thread, after `use_numpy_arena`
        has succeeded in another one."""

    def take_refusal(self) -> MemoryError | None:
        """Returns, once, the error of an array of the current task that found no memory in the region or elsewhere.
        Returns None if there is no such array."""

    def send_error(self, task: int, pickle: bytes) -> None:
        """Sends an error as a pickle. MemoryError: no room."""

    def send_snapshot(self, count: int, payload: bytes, is_error: bool) -> bool:
        """Sends a snapshot of this worker's state after ``count`` of its answers in this epoch, or the error that
        prevents it. Called before a result, at most once for each result, and once more at the start of an epoch (with
        the count 0), at its end, and for an error. Returns False if the snapshot is left out because memory is
        short."""

    def exhausted(self, task: int) -> None:
        """Reports that the iterable dataset is exhausted."""

    def resumed(self) -> None:
        """Acknowledges a new epoch."""

    def progress(self, *, ends: bool = False) -> None:
        """Records that a batch of a replay begins, or that the replay ends, so that ``stall_seconds`` counts from now.
        In a replay the worker has not begun its task (``Death.has_begun``)."""

    def leave(self) -> None:
        """Reports that the worker exits, and ignores Ctrl-C from then on."""

    def stoppable(self, index: Any, *, shows_places: bool = False, traces: bool = False) -> StoppableIndices:
        """Wraps an index batch so that its iteration ends with WorkerStopped when the loader shuts down. With
        ``shows_places`` the iteration also calls `at_sample` for each index. With ``traces`` the time until the next
        index is recorded as the time of a sample.
        """

    def timed(self, collate_fn: Any) -> TimedCollate:
        """Wraps ``collate_fn`` to measure its time."""

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """Returns a storage in the arena; None if ordinary memory is the better choice."""

    def stack(self, batch: Any) -> torch.Tensor | None:
        """Collates plain tensors of one dtype and shape, as default_collate would; None leaves the batch to torch."""

    def numbers(self, batch: Any) -> torch.Tensor | None:
        """Collates floats (float64) or ints (int64), as default_collate would; None leaves the batch to torch."""

    def gather(self, tensors: Any, index: Any) -> list[torch.Tensor] | None:
        """Does the same as the function ``gather``, but puts the result into the arena."""

    def gather_cached(self, table: CacheTable, index: Any) -> Any:
        """Collates cached samples into the arena, as default_collate would. Returns None to leave the batch to torch,
        if a sample is missing, or if the samples do not all have the same form that can be gathered."""

@final
class IndexStream:
    """An iterator over an epoch's index batches, which are cut from int64 arrays. It can be continued after an error
    that a signal handler raises."""

    def __new__(
        cls,
        torchs: Iterator[Any],
        batches: BatchSampler | None,
        begin: Callable[[], tuple[Callable[[], np.ndarray | None], int | None] | None],
        size_of: Callable[[Any], int],
        is_interrupt: Callable[[BaseException], bool],
    ) -> IndexStream:
        """``batches`` has the size of each batch; with None the stream yields single indices.

        ``begin`` is called at the first ``next``. It returns a function that returns the next array, or None at the
        end, and the size of all batches if an incomplete last one is dropped. If it returns None, the stream continues
        with ``torchs``. ``size_of`` returns the size for an unusual ``batch_size``, or raises.
        """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def skip(self, count: int) -> None:
        """Makes the first ``next`` skip ``count`` index batches. This makes their arrays, but no Python object per
        index. If there are fewer batches, the stream ends. ValueError: ``next`` was called before."""

@final
class StoppableIndices:
    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...

@final
class ArrayTensor:
    """An array in a batch that arrives as a tensor, without a copy if only the batch refers to the array."""

    def tensor(self) -> torch.Tensor:
        """Returns ``torch.as_tensor`` of the array."""

@final
class TimedCollate:
    def __call__(self, batch: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...

@final
class DeferredSignals:
    """A context manager, to be entered once, that defers signals: this thread blocks them, and the process's handlers
    only record them. On exit, the deferred signals are raised in this thread. In other threads of the process, only
    SIGINT and SIGTERM are deferred, and only if they have a handler."""

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

    * A single call, of this function, takes a value and keeps it. In ``kept.append(next(items))`` a handler may raise
      between the two calls, and the item is lost. With this function the value is in ``into`` before a handler runs.
      ``into`` belongs to an object that outlives the error, so that the next attempt finds the value there.
    * The code that passes the value on contains no call, as in ``self._kept, self._count = [], count; return value``. A
      handler finds all of it done, or nothing. The comment "Atomic for signal handlers" marks such code, from the
      comment to the end of its block, and a test checks that it has no call and no loop.

    An error of ``function``, including StopIteration, passes through. ``into`` then does not change.
    """

def observed() -> bool:
    """Returns True if a profiler or another callback of torch would see ``record_function``, or if reports are
    active."""

def set_reporting(reporting: bool) -> None:
    """Makes ``observed`` return True while reports are active."""

def figures(meters: list[Meter]) -> Totals:
    """Returns the combined figures of several iterators. The latest iterator is last in the list."""

def inspect_arena(fd: int) -> Observed | None:
    """Reads an iterator of another process from its arena's descriptor; None while no iterator uses the arena.
    RuntimeError: the file is not an arena, or an arena of another version."""

def memory_limits() -> list[tuple[bool, int, int]]:
    """Returns the memory limits, the machine's first. For each: whether it is a cgroup's, its size, and the free
    bytes."""

def cpu_quota() -> float | None:
    """Returns the CPU quota of this process's cgroups, in cores; None without a quota."""

def seed_words(base_seed: int, place: int, ordinal: int, worker: int, epoch: int) -> list[int]:
    """Returns four words of 64 bits from Philox4x64-10 with the key (base_seed, 0) and the counter of the other
    arguments.
    """

def is_plain_leaf(obj: Any) -> bool:
    """Returns True if the codec can describe a tensor or an array. The object may still share memory in a way that the
    codec cannot describe."""

def gather(tensors: Any, index: Any) -> list[torch.Tensor] | None:
    """Collates the samples ``index`` of a TensorDataset with these tensors, as default_collate would.

    Returns None to leave the samples to torch, if the tensors are not a tuple of plain tensors with contiguous rows,
    the index is not a list of ints in range, or a mode of torch is active.
    """

def heap_storage(nbytes: int) -> torch.UntypedStorage:
    """Returns a storage of ordinary memory that cannot be resized."""

def move_storage(function: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(storage, *args, **kwargs)``, which may move the storage to other memory.

    If the old memory belongs to this package, the storage keeps it alive for arrays and DLPack views of its tensors.
    """

@final
class ShareBuilder:
    """The image of a shared object that is being written. It has rows or raw data.

    MemoryError: a memory cgroup, the machine or a limit leaves too little memory.
    """

    def __new__(cls) -> Self: ...
    def extend(self, items: Any, dumps: Callable[[Any], bytes]) -> None:
        """Appends each item as a row. ``dumps`` pickles the items that are not plain trees."""

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
    """The cached samples of a dataset by index, in memory or in a file. Forked children continue to use the table."""

    def __new__(cls, fd: int) -> Self:
        """Takes the descriptor of a table in memory. ValueError: the descriptor is not a table's."""

    @staticmethod
    def create(rows: int, limit: int) -> CacheTable:
        """Makes an empty table in memory, of at most ``limit`` bytes."""

    @staticmethod
    def format(fd: int, rows: int, limit: int, meta: bytes) -> None:
        """Turns a file of ``limit`` zero bytes into an empty table."""

    @staticmethod
    def head(fd: int) -> tuple[int, int, int, bytes] | None:
        """Returns the version, rows, limit and meta of a file; None if the file is not a table."""

    @staticmethod
    def open_file(fd: int, in_memory: bool, whole: int) -> CacheTable:
        """Maps a file that is as long as its limit; ``whole`` is the length that it had before. The caller holds the
        file's lock and keeps the descriptor."""

    @staticmethod
    def overhead(rows: int) -> int:
        """Returns the number of bytes that a table occupies without samples."""

    def some_rows(self, most: int) -> list[int]:
        """Returns up to ``most`` rows that have a sample."""

    def grow(self, limit: int) -> None:
        """Raises the limit to the present length of the file. Afterwards the table must be opened again."""

    def reopen(self) -> None:
        """Makes the table accept samples again after it has run out of room."""

    @property
    def rows(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def closed(self) -> str | None:
        """The reason why the table accepts no further samples, "full" or "no room"; None if it accepts them."""

    def fileno(self) -> int:
        """Returns the descriptor. OSError: other code has closed it."""

    def get(self, index: Any, missing: Any) -> Any:
        """Returns a new object equal to the sample of an index that is an exact int, or ``missing``. Counts a hit or a
        miss for each row.
        """

    def takes(self, row: int) -> bool:
        """Returns True if ``put`` may keep the sample of a row."""

    def put(self, row: int, sample: Any, dumps: Callable[[Any], bytes]) -> str | None:
        """Keeps a sample. If this call is the first to find that the table accepts no further samples, returns the
        reason.

        Raises:
            OSError: The sample could not be written. The table accepts no further samples.
            Exception: The sample could not be pickled.
        """

    def never(self, row: int) -> None:
        """Marks a row whose sample cannot be kept."""

    def take_probe(self) -> bool:
        """Returns True if a sample is to be made twice, which is so for a few samples among all processes."""

    def is_news(self, bit: int) -> bool:
        """Returns True if this is the first call with that bit among all processes."""

    def usage(self) -> dict[str, int]:
        """Returns the keyword arguments of ``CacheUsage``."""

    @staticmethod
    def usage_of_header(header: bytes) -> dict[str, int] | None:
        """Returns the same from the first ``CACHE_HEADER`` bytes of a file; None if it is not a table of this
        version."""

@final
class SharedStore:
    """A mapped image. Its buffer is the whole image."""

    def __new__(cls, fd: int) -> Self:
        """Takes ownership of a descriptor. ValueError: it is not an image, or the image is damaged."""

    @staticmethod
    def sealed(fd: int) -> SharedStore:
        """Seals a memfd with an image, and takes ownership of it. After an error the caller still owns it."""

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
        """Returns the raw data in its own private mapping: a ``SharedData``."""

@final
class SharedData:
    """The raw data of an image as a read-only buffer, and as a storage of torch."""

    @property
    def store(self) -> SharedStore: ...
    @property
    def address(self) -> int: ...
    def storage(self) -> torch.UntypedStorage:
        """Returns a storage over the data. Only this process sees changes to it."""

    def __len__(self) -> int: ...

@disjoint_base
class SharedItems:
    """The base class of shared lists and tuples, with the methods that read. Each access builds a new item."""

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
    """The base class of shared dicts, with the methods that read. Keys are found by a hash that is the same in all
    processes."""

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
        """Returns an iterator over the values, in the order of the keys or in reverse."""

@final
class SharedIterator:
    """An iterator over items, keys or values."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def __length_hint__(self) -> int: ...

@final
class WarmPages:
    """A loader's claim on shared memory that is kept for its next epoch. The memory is freed with the claim."""

    def __new__(cls) -> WarmPages: ...
    def announce(self, workers: int) -> None:
        """Lets this loader, which has this number of workers, inherit the memory of a loader that is freed before this
        one begins."""

@final
class TraceSink:
    """The writer of a trace's events to files.

    A record has 40 bytes, five little-endian words: ``source`` (32 bits), ``who`` (24) and kind (8); start and length
    in monotonic nanoseconds; two numbers. `TRACE_KINDS` has the names of the kinds. ``who`` is a worker, `TRACE_MAIN`
    or `TRACE_PINNER`."""

    def __new__(cls, files: list[int], seconds: float) -> TraceSink:
        """Takes descriptors of empty files. Two files alternate every ``seconds`` seconds."""

    def put(self, source: int, kind: int, who: int, begin: int, length: int, number: int, extra: int = 0) -> None:
        """Adds an event. ValueError: there is no such kind."""

    def end(self) -> tuple[int, list[tuple[int, int]]]:
        """Writes the remaining events. Returns the number of lost events, and the number and size in bytes of each
        file, the latest last. Later events are dropped."""

def begin_forks() -> None:
    """Marks the forks of this thread, until ``end_forks``, as the workers of one iterator. Meanwhile the thread that
    returns idle pages does not run."""

def end_forks() -> None:
    """Ends the group of forks that ``begin_forks`` has begun."""

def tend_pages() -> None:
    """Restarts the thread that returns idle pages, if a fork has ended it."""

def descends(pid: int) -> bool:
    """Returns True if a process is a child or (under the fork server) a grandchild of this one; False for an invalid
    pid."""

def _trim_pool() -> int:
    """Releases the pooled arenas. Returns their number."""

def _roundtrip(
    obj: Any,
    *,
    exchange: bool = True,
    damage: Sequence[tuple[int, int]] = ...,
    indices: bool = False,
    raw: bool = False,
    adopt: int | None = None,
) -> tuple[bool, Any]:
    """Encodes and decodes an object over ordinary memory, for tests. Returns whether it is plain, and the new object or
    None.

    ``exchange=False`` avoids torch's C functions. ``damage`` overwrites the payload at each (position, byte); a
    position beyond the end removes the last byte. ``indices`` uses the codec of index batches. ``raw``: ``obj`` is a
    payload with one leaf of 1 MiB. ``adopt``: large leaves are at this offset in memory that is sent without a copy.
    """

def _collate(batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Runs the collate fast paths over ordinary memory, for tests."""
