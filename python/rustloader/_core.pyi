"""The Rust extension. Only ``engine_batches`` and ``__version__`` are public; the other names are for this package."""

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
    "CacheBatch",
    "CacheTable",
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
    "SequencePlan",
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
    "address_space_left",
    "begin_forks",
    "call_into",
    "copy_of",
    "cpu_quota",
    "descends",
    "end_forks",
    "engine_batches",
    "figures",
    "gather",
    "heap_storage",
    "inspect_arena",
    "int_tensor",
    "is_plain_leaf",
    "memory_limits",
    "move_storage",
    "observed",
    "rename_to_new",
    "seed_words",
    "set_reporting",
    "tend_pages",
]

__version__: Final[str]

# Size of the smallest arena in bytes. If the address space is limited, an arena takes at most half of it.
ARENA_MIN: Final[int]
# Upper bounds, in seconds, of the buckets of the histogram `Totals.waits`.
WAIT_BOUNDS: Final[tuple[float, ...]]

# Size in bytes of the header and the counters of a cache's file, and the version of the file format.
CACHE_HEADER: Final[int]
CACHE_VERSION: Final[int]

# Maximum number of batches by which `Engine.position` can go back.
BACK_BATCHES: Final[int]

# Leaves smaller than this number of bytes are part of the message, and are copied on delivery.
INLINE_LIMIT: Final[int]

# The names of the kinds of events in a trace, by the number of the kind.
TRACE_KINDS: Final[list[str]]
# Values of `who` in `TraceSink` that stand for the main process and the pin thread.
TRACE_MAIN: Final[int]
TRACE_PINNER: Final[int]

# Codes that `Engine.next` and `Engine.begin` put into the answer.
BATCH: Final[int]
ERROR: Final[int]
DEAD: Final[int]
END: Final[int]
TIMED_OUT: Final[int]
NO_PIN_THREAD: Final[int]
VACANT: Final[int]

# Codes that `Port.receive` returns.
RESUME: Final[int]
LEAVE: Final[int]
EARLY: Final[int]
REWIND: Final[int]
UNREADABLE: Final[int]

@type_check_only
class Predictor(Protocol):
    """An iterator over the predicted index batches of the next epoch. Implemented by
    ``iterator.early_epochs.EpochPredictor``."""

    def begin(self) -> bytes | None:
        """Returns the message that the next call of ``Engine.begin`` is expected to send; None if it cannot be
        predicted."""

    def __next__(self) -> Any: ...

@type_check_only
class StallWarning(Protocol):
    """A function that logs a warning about a stuck worker.

    ``index`` is the worker's index batch, or None. ``why_not`` is the reason why ``stack`` is None. If the worker has
    exceeded ``stall_timeout``, ``exceeds`` is a pair: the value of this option, and whether the worker was killed.
    ``supervision.stalls.warn`` documents all arguments."""

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
    """Raised in a worker to end a fetch between two samples when the loader shuts down."""

@final
class Engine:
    """The engine of one iterator. Methods that are not marked "lock-free" wait while another thread is in ``next``."""

    def __new__(
        cls,
        config: LoaderConfig,
        stalls: StallLimits,
        loads: Callable[[bytes, list[Any]], Any],
        dump_index: Callable[[Any], bytes],
        is_interrupt: Callable[[BaseException], bool],
        warn_stall: StallWarning,
    ) -> Engine:
        """Creates an engine without workers.

        ``loads`` unpickles a result and its out-of-band objects, ``dump_index`` pickles an index batch, and
        ``is_interrupt`` returns True if a signal handler raised the error. With the setting ``snapshots``, each worker
        sends a snapshot of its state at the start of an epoch (`Port.send_snapshot`). With ``max_restarts``, the answer
        to a worker's death is ``VACANT``, and the worker can be replaced. With ``stall_timeout``, a method that waits
        kills any worker that takes longer than this for one batch."""

    def shipment(self) -> tuple[int, int, tuple[int, int, int, bool], tuple[int, int]]:
        """Returns the parameters of a worker's port: memfd, doorbell, (size in bytes, number of workers, entries
        per ring, whether the workers share a queue), and (pid, start time) of this process. Lock-free."""

    def started(self, worker: int, pid: int) -> None:
        """Registers the process of a worker, which the caller has started. If the process replaces a dead worker, the
        engine sends the outstanding tasks again."""

    def attached(self, worker: int, fd: int, pid: int) -> Link:
        """Does the same as ``started`` for a worker on another machine. ``fd`` is the socket that is connected to the
        worker; the engine takes ownership of it. ``pid`` is the worker's process ID on its machine."""

    @property
    def ring_slots(self) -> int:
        """Capacity of a worker's ring in entries, for ``Port.remote``."""

    @property
    def region_len(self) -> int:
        """Size in bytes of the memory for a worker's batches, for ``Port.remote``."""

    def vacate(self, worker: int) -> None:
        """Prepares the slot of a dead worker (``VACANT``) for its next process. The caller must then start that process
        and call ``started``. If the start fails, this method may be called again once the failed process has ended.
        RuntimeError: the worker is not vacant."""

    def postpone(self, worker: int, seconds: float) -> None:
        """Delays the next ``VACANT`` of a dead worker by ``seconds``. The other workers continue in the meantime.
        RuntimeError: the worker is not vacant."""

    def give_up(self, worker: int) -> None:
        """Makes the death of a worker final: the batches before its first lost task are still delivered, and ``DEAD``
        follows. RuntimeError: the worker is not vacant."""

    def begin(
        self,
        answer: list[Any],
        next_index: Iterator[Any] | Callable[[], Any],
        is_first: bool,
        message: bytes,
        first_worker: int = 0,
        predictor: Predictor | None = None,
    ) -> None:
        """Starts an epoch, and puts a code and its value into ``answer``: ``END`` if the epoch has started. For every
        epoch except the first, sends ``message`` to the workers and waits for their replies. A worker that has not yet
        replied to the message of an earlier call gets this one only after its reply. ``first_worker`` gets the first
        task, unless the workers share a queue. After ``VACANT``, a call with the same message continues the start.
        ValueError: there is no such worker.

        With ``predictor``, the workers may start the next epoch as soon as the sampler of the current one is exhausted.
        The call of ``begin`` for that next epoch still draws from the sampler. If the message, the first worker and the
        index batches are as predicted, the workers' results are used, and the value that accompanies ``END`` is True.
        Otherwise, the results are discarded, and the value is False."""

    def next(
        self,
        answer: list[Any],
        next_index: Iterator[Any] | Callable[[], Any],
        predictor: Predictor | None = None,
    ) -> None:
        """Puts the next answer, a code and its value, into ``answer``. If it must wait, holds the GIL for up to 20 us,
        then releases it. After ``VACANT``, every call is answered with ``VACANT`` until the dead worker is replaced,
        postponed or given up.

        ``next_index`` is the sampler's iterator, or a function that returns the next index batch and raises
        StopIteration at the end. RuntimeError: ``next`` is already running in this thread, the iterator has been shut
        down, or it belongs to another process.
        """

    def active(self) -> list[bool] | None:
        """Returns for each worker whether it still takes tasks in this epoch. Returns None while another thread is in
        ``next``. Lock-free."""

    def progress(self) -> Progress | None:
        """Returns the progress of this epoch. Returns None while another thread is in ``next``. Lock-free."""

    def position(self, answers: int, back: int) -> Position:
        """Returns the position in this epoch after ``answers`` answers (``BATCH`` and ``ERROR``), minus the last
        ``back`` batches and the errors after them. After the end, returns the last position. Lock-free.

        ``answers`` must be the number of all answers, or one less if the last answer has not reached the caller.
        ValueError: ``answers`` is another number, or ``back`` is greater than ``BACK_BATCHES`` or than the number of
        delivered batches."""

    def trace(self, sink: TraceSink, source: int, level: int) -> bool:
        """Starts a trace. In its records, ``source`` identifies this engine. Level 1 records batches; level 2 records
        samples, too. Returns False if ``finish`` was called. Raises if there is no memory for the workers' trace
        rings. Lock-free."""

    def end_trace(self) -> None:
        """Ends the trace; ``finish`` does this, too. Does nothing in a forked child. Lock-free."""

    def note_saved(self, answers: int) -> None:
        """Records in the trace, if there is one, that the state after ``answers`` answers was saved. Lock-free."""

    def snapshot(self, worker: int, answers: int) -> Snapshot | None:
        """Returns the newest snapshot that a worker made in this epoch after at most ``answers`` of its answers.

        Returns None if there is none yet, or if ``finish`` was called. Snapshots that no position can still need are
        not kept. ValueError: there is no such worker. RuntimeError: the shared memory is damaged. Lock-free."""

    def wait_started(self, timeout: float = 0.0) -> bool | None:
        """Waits, without the GIL, until each worker has sent its first snapshot of this epoch or has died, or until the
        engine is closed; then returns True. Runs signal handlers while it waits. Returns None after ``timeout`` seconds
        (0 for no limit). Returns False at once if a thread, which may be this one, is in ``next``. Does not wait if the
        engine has no ``snapshots``."""

    def start_pinning(
        self,
        begin: Callable[[], None],
        plain: Callable[[], tuple[Callable[[int], torch.Tensor], bool] | None],
        pin: Callable[[Any], Any],
        failure: Callable[[Exception], Any],
    ) -> None:
        """Starts the pin thread. Must be called after the workers have started. ``device.pinning.Pinner`` documents the
        functions."""

    def pinning(self) -> bool:
        """Returns True if the pin thread is running. Lock-free."""

    def stop_pinning(self) -> None:
        """Asks the pin thread to end. Lock-free."""

    def join_pinning(self, seconds: float | None = None) -> bool:
        """Waits up to ``seconds`` (None for no limit) until the pin thread has ended. Returns True if it has ended.
        Lock-free."""

    @property
    def meter(self) -> Meter:
        """The counters of this engine's iterator. Lock-free."""

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
        """Makes the engine keep its memory, when it ends, for the next epoch of the loader that owns ``pages``.
        Lock-free."""

    def close(self, exiting: bool = False) -> None:
        """Asks the workers to exit. Also wakes a ``next`` that waits, unless ``exiting`` is set, which means that the
        interpreter is exiting. Lock-free."""

    def stay(self) -> None:
        """Blocks the calling thread forever if it is a daemon thread and the iterator was closed with ``exiting``.
        Lock-free."""

    def alive(self) -> int:
        """Returns the number of running workers. Lock-free."""

    def wait_gone(self, seconds: float) -> bool:
        """Waits until the workers have ended, for at most ``seconds`` and never longer than 0.25 s. Returns True if all
        have ended. Lock-free."""

    def signal_all(self, signal: int) -> None:
        """Sends a signal to all running workers. Lock-free."""

    def worker_status(self, worker: int) -> dict[str, Any]:
        """Returns a worker's status: its state, pid, task, times and number of finished tasks, and whether it was sent
        SIGTERM. After the end, returns its last status. Lock-free."""

    def memory(self) -> tuple[int, int]:
        """Returns how many bytes of the arena have pages, and how many are in use; both are 0 after the end.
        Lock-free."""

    def finish(self) -> None:
        """Releases all resources. Must be called after the workers have ended. If a ``next`` is running, they are
        released when it returns. Lock-free."""

@final
class WorkerTotals:
    """Counters of a worker. Those with the names of fields of ``WorkerStats`` are these fields."""

    pid: Final[int]
    alive: Final[bool]
    # CPU time, and time spent waiting for a core, before the first task.
    start_cpu: Final[float]
    start_queued: Final[float]
    tasks: Final[int]
    adopted: Final[int]
    adopted_bytes: Final[int]
    starting_seconds: Final[float]
    idle_seconds: Final[float]
    fetch_seconds: Final[float]
    collate_seconds: Final[float]
    pack_seconds: Final[float]
    busy_seconds: Final[float]
    left_seconds: Final[float]
    fetch_cpu_seconds: Final[float]
    fetch_measured_seconds: Final[float]

@final
class SlowTask:
    """One of the slowest tasks, or one of those that blocked later tasks for the longest time. Times are in seconds."""

    index: Final[str]
    worker: Final[int]
    fetch: Final[float]
    collate: Final[float]
    pack: Final[float]
    # Time that `next` waited for this task while later tasks were ready.
    blocked: Final[float]

@final
class Totals:
    """The counters of one or more iterators, of this process or of another one."""

    # The counters of the main process by name, numbers as ints and times in seconds. Those with the names of fields of
    # `Stats` are these fields.
    counts: Final[dict[str, Any]]
    # For each of the WAIT_BOUNDS, the number of waits up to this bound and above the previous one. The last item is the
    # number of waits above all bounds.
    waits: Final[list[int]]
    workers: Final[list[WorkerTotals]]
    slowest: Final[list[SlowTask]]
    blocking: Final[list[SlowTask]]
    # These totals, with the counters after about half of the batches.
    half: Final[Totals | None]
    # Seconds of work on each recent batch; the latest batch is last.
    recent: Final[list[float]]
    leased: Final[int]
    warm: Final[int]
    blocks: Final[int]
    high_water: Final[int]
    pin_threads: Final[int]
    # Number of results in the completion rings.
    ready: Final[int]
    def since(self, earlier: Totals) -> Totals:
        """Returns these totals, with the counters minus earlier ones."""

@final
class ObservedWorker:
    """A worker of another process's iterator at one moment. Times are in seconds."""

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
    # The loader's name, which may be truncated.
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
    totals: Final[Totals]
    workers: Final[list[ObservedWorker]]

@final
class Death:
    """A worker's death: the value that accompanies the codes DEAD and VACANT.

    ``exitcode`` is as in multiprocessing: negative for a signal, None if unknown. ``signal`` is the C library's
    description of the signal. ``index`` is the index batch that the worker was working on; if it was not working on
    any, its first outstanding index batch, or None. ``task`` is the ordinal of that index batch in this epoch.
    ``answers`` is the number of results, including errors, that the processes of this worker have published in this
    epoch. ``has_begun`` is True if the worker had started the task; it is False while the worker starts or replays
    batches. ``place`` is the sample that the worker was working on, as a position in the index batch
    (`Port.at_sample`), or None. ``generation`` is the number of earlier processes of the worker. ``stalled`` is
    True if the worker was killed because it exceeded ``stall_timeout``. ``first_task`` is the number of the epoch's
    first task, as in ``RESUME``.
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
    """The delivered tasks of an epoch, which are identified by their ordinals.

    ``low`` is the first task that is not delivered, not counting tasks that an exhausted worker skipped. ``ahead``
    lists the delivered tasks after ``low``, in ascending order. ``per_worker`` has the number of answers of each
    worker. ``last_worker`` is the worker that gave the last answer; None before the first answer.
    """

    low: Final[int]
    ahead: Final[list[int]]
    per_worker: Final[list[int]]
    last_worker: Final[int | None]

@final
class Snapshot:
    """A worker's state after ``answers`` of its answers or, if ``is_error`` is True, the error that prevented the
    snapshot.

    ``payload`` is the pickle of the state or of the error.
    """

    answers: Final[int]
    is_error: Final[bool]
    payload: Final[bytes]

@final
class Progress:
    """The progress of an epoch.

    ``sent`` is the number of tasks that were sent; ``outstanding`` is the number of these tasks that have no result
    yet. ``loads`` has the number of undelivered tasks of each worker, or of unanswered ones with a window and no shared
    queue. ``undelivered`` lists the ordinal and the worker of each undelivered task, in order; the worker is None if it
    is unknown.
    """

    sent: Final[int]
    outstanding: Final[int]
    loads: Final[list[int]]
    undelivered: Final[list[tuple[int, int | None]]]

@final
class Meter:
    """The counters of one iterator, which remain available after its end, or the summed counters of several ended
    iterators."""

    def __new__(cls) -> Meter: ...
    @property
    def ended(self) -> bool:
        """True if the iterator has ended, so that the counters are final."""

    def note_fetch(self, step: int | None, fetch: int, has_batch: bool) -> None:
        """Counts a fetch of an iterator without workers, for which the loop waits.

        Args:
            step: Nanoseconds since the epoch's last fetch; None for its first.
            fetch: Duration in nanoseconds.
            has_batch: Whether the fetch returned a batch.
        """

    def absorb(self, meters: list[Meter]) -> None:
        """Removes the meters of ended iterators from a list, and adds their counters to this meter."""

@final
class Link:
    """The main process's end of a connection to a worker on another machine."""

    @property
    def has_ended(self) -> bool:
        """True if the connection has ended."""

    @property
    def reason(self) -> str | None:
        """The reason why the connection ended; None if it has not ended, or if the worker exited normally."""

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
        """Opens the port. The first arguments come from ``Engine.shipment``. ``load_index`` unpickles an index
        batch."""

    @staticmethod
    def inherit(engine: Engine, worker: int, load_index: Callable[[bytes], Any]) -> Port:
        """Opens the port in a forked child, from the engine that the child has inherited."""

    @staticmethod
    def remote(fd: int, ring_slots: int, region_len: int, load_index: Callable[[bytes], Any]) -> Port:
        """Opens the port over a connected socket ``fd``, of which the port takes ownership. When the connection ends,
        this process ends."""

    @property
    def is_remote(self) -> bool:
        """True if the main process is on another machine."""

    def ready(self) -> None:
        """Tells a main process on another machine that the worker is entering its loop."""

    def finish(self, seconds: float) -> bool:
        """Sends the remaining published results to a main process on another machine, and closes the connection. Runs
        without the GIL. Returns False if that takes longer than ``seconds``. Must be called after ``leave``."""

    def watch(self, parent: tuple[int, int]) -> None:
        """Makes this process end once the main process, given by its pid and start time, has ended."""

    def survive_group_signal(self, main: int, alone: float) -> bool:
        """Makes this process survive a SIGTERM to the whole process group, so that the main process can react. ``main``
        is the pid of the main process. If no other worker receives a SIGTERM within ``alone`` seconds, only this
        process was signaled, and it ends. Returns False if the system refuses the signal handler."""

    def offer_stack(self) -> None:
        """Lets the main process request, with a signal, that faulthandler dump this process's stacks."""

    def receive(self) -> tuple[int, int, Any]:
        """Waits, without the GIL, for the next message. Returns its code, a task's number, and a value.

        Any code other than those below means a task to fetch; the value is its index batch. With ``UNREADABLE``, the
        value is the exception that unpickling the index batch raised. With ``RESUME``, the next epoch starts: the
        number is that of the epoch's first task, and the value is the message of ``Engine.begin``. ``EARLY`` and
        ``REWIND`` have the same number and value as ``RESUME``. ``EARLY`` precedes the tasks of an epoch that starts
        before the current one has ended, and must not be answered. ``REWIND`` starts an epoch instead of one that was
        started early. With ``LEAVE``, the worker must exit."""

    def at_sample(self, place: int) -> None:
        """Publishes which sample is fetched next, as a position in the index batch, in case the worker dies at it."""

    def send(self, task: int, batch: list[Any], leaves_are_ours: bool) -> bool:
        """Sends a plain batch, given as the only item of a list. If the batch must be pickled instead, sends nothing
        and returns False. Every batch must be pickled if tensors or arrays have a custom reducer; ``leaves_are_ours``
        is then False. MemoryError: there is no room.

        An array in the region is not copied if nothing except the batch refers to it. It must then be freed together
        with the batch, so this method empties the list."""

    def send_pickle(self, task: int, pickle: bytes, objects: list[Any], tied: bool) -> bool:
        """Sends a batch's pickle and its out-of-band tensors and arrays. If these are not plain, sends nothing and
        returns False. ``tied`` means that the pickle can be read only while this process is alive. MemoryError: there
        is no room."""

    def use_numpy_arena(self) -> bool:
        """Makes NumPy allocate this thread's large arrays in this worker's region. Changes nothing and returns False if
        NumPy is missing or older than 1.22, if the program has set its own memory handler, or if forks cannot be
        watched."""

    def array_tensor(self, array: np.ndarray) -> ArrayTensor | None:
        """Returns a stand-in for ``torch.as_tensor(array)`` if the array is in the region and could be sent from there,
        and if torch would make a tensor that shares its memory, without a warning. Otherwise returns None."""

    def enter_thread(self) -> None:
        """Makes NumPy allocate the calling thread's large arrays in this worker's region, too. `use_numpy_arena` must
        already have succeeded in another thread."""

    def take_refusal(self) -> MemoryError | None:
        """If an array of the current task could be allocated neither in the region nor elsewhere, returns the error,
        but only once. Otherwise returns None."""

    def send_error(self, task: int, pickle: bytes) -> None:
        """Sends an error, given as a pickle. MemoryError: there is no room."""

    def send_snapshot(self, count: int, payload: bytes, is_error: bool) -> bool:
        """Sends a snapshot of this worker's state after ``count`` of its answers in this epoch, or the error that
        prevented the snapshot. May be called at most once before each result, and once more at the start of an epoch
        (with a count of 0), at its end, and for an error. Returns False if the snapshot was dropped because of a lack
        of memory."""

    def exhausted(self, task: int) -> None:
        """Reports, as the result of a task, that the iterable dataset is exhausted."""

    def resumed(self) -> None:
        """Acknowledges the message that starts a new epoch (``RESUME``)."""

    def progress(self, *, ends: bool = False) -> None:
        """Records that a batch of a replay starts or, with ``ends``, that the replay ends. The time that counts toward
        ``stall_timeout`` restarts now. During a replay, the worker has not started its task (``Death.has_begun``)."""

    def leave(self) -> None:
        """Reports that the worker is exiting. From then on, the worker ignores Ctrl-C."""

    def stoppable(self, index: Any, *, shows_places: bool = False, traces: bool = False) -> StoppableIndices:
        """Wraps an index batch so that iterating over it raises WorkerStopped when the loader shuts down. With
        ``shows_places``, the iteration also calls `at_sample` for each index. With ``traces``, the time until the next
        index is requested is recorded as the time of a sample.
        """

    def check_stop(self) -> None:
        """Raises WorkerStopped if the loader is shutting down."""

    def timed(self, collate_fn: Any) -> TimedCollate:
        """Wraps ``collate_fn`` so that its time is measured."""

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """Returns a new storage in the arena; None if ordinary memory is the better choice."""

    def stack(self, batch: Any) -> torch.Tensor | None:
        """Collates plain tensors of one dtype and shape as default_collate would. Returns None to leave the batch to
        torch."""

    def numbers(self, batch: Any) -> torch.Tensor | None:
        """Collates floats (to float64) or ints (to int64) as default_collate would. Returns None to leave the batch to
        torch."""

    def gather(self, tensors: Any, index: Any) -> list[torch.Tensor] | None:
        """Does the same as the module's function ``gather``, but puts the result into the arena."""

    def gather_cached(self, table: CacheTable, index: Any) -> Any:
        """Collates cached samples into the arena, as default_collate would. Returns None, which leaves the batch to
        torch, if a sample is missing, if the forms of the samples differ, or if their form cannot be gathered."""

@final
class IndexStream:
    """An iterator over an epoch's index batches, which it cuts from int64 arrays. If a signal handler raises an error
    during a call, the iteration can be continued."""

    def __new__(
        cls,
        torch_iterator: Iterator[Any],
        batches: BatchSampler | None,
        begin: Callable[[], tuple[Callable[[], np.ndarray | None], int | None] | None],
        size_of: Callable[[Any], int],
        is_interrupt: Callable[[BaseException], bool],
    ) -> IndexStream:
        """Creates a stream that replaces ``torch_iterator``, torch's iterator over the sampler.

        ``batches`` is the sampler whose ``batch_size`` is the size of each batch; if it is None, the stream yields
        single indices. ``begin`` is called in the first ``next``. It returns a pair: a function that returns the next
        array, or None at the end; and the batch size if an incomplete last batch is dropped, otherwise None. If
        ``begin`` returns None instead of a pair, the stream yields what ``torch_iterator`` yields. ``size_of`` converts
        a ``batch_size`` that is not a small int, or raises an error.
        """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def skip(self, count: int) -> None:
        """Makes the first ``next`` skip ``count`` index batches. This creates their arrays, but no Python object per
        index. If there are fewer index batches, the stream ends. ValueError: ``next`` has already been called."""

@final
class SequencePlan:
    """The batches of all ranks in an epoch. ``lengths`` are contiguous uint32. ``order`` consists of ``shuffle``, the
    seed, the epoch and the window."""

    @staticmethod
    def budget(
        lengths: np.ndarray, order: tuple[bool, int, int, int], max_tokens: int, max_samples: int, multiple: int
    ) -> SequencePlan: ...
    @staticmethod
    def packs(
        lengths: np.ndarray, order: tuple[bool, int, int, int], capacity: int, per_batch: int, skip_too_long: bool
    ) -> SequencePlan: ...
    def __len__(self) -> int: ...
    def batch(self, number: int) -> list[int]:
        """Returns the indices of a batch."""

@final
class StoppableIndices:
    """An index batch whose iteration stops when the loader shuts down; see `Port.stoppable`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...

@final
class ArrayTensor:
    """An array in a batch that the main process receives as a tensor. The array is not copied if nothing except the
    batch refers to it."""

    def tensor(self) -> torch.Tensor:
        """Returns ``torch.as_tensor`` of the array."""

@final
class TimedCollate:
    """A ``collate_fn`` whose time is measured; see `Port.timed`."""

    def __call__(self, batch: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...

@final
class DeferredSignals:
    """A context manager that defers signals and can be entered only once. This thread blocks the signals. In the main
    thread, the process's handlers only record them, and the recorded signals are sent again on exit."""

    def __new__(cls, signals: Sequence[int]) -> DeferredSignals: ...
    def __enter__(self) -> list[int]:
        """Returns the signals that this thread had not blocked before."""

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None: ...

@final
class LeaseBuffer:
    """Memory of a batch as a writable buffer. It is released once nothing uses it."""

    def __len__(self) -> int: ...
    def storage(self) -> torch.UntypedStorage:
        """Returns a storage that shares these bytes and keeps them alive."""

def engine_batches() -> int:
    """Returns the number of batches that the Rust engine has delivered in this process, across all loaders.

    Batches of torch's own loop (``num_workers=0``, or a loader that fell back to it) are not counted.

    Returns:
        The number of batches.

    Examples:
        >>> before = rustloader.engine_batches()
        >>> batches = list(rustloader.DataLoader(range(8), batch_size=4, num_workers=2))
        >>> rustloader.engine_batches() - before
        2
    """

def call_into(into: list[Any], function: Callable[..., Any], /, *args: Any) -> None:
    """Calls ``function`` with ``args``, and appends the result to ``into``. No signal handler can lose the result.

    A signal handler may raise wherever Python runs it, but an iterator yields each item, and a generator each random
    number, only once. Python runs handlers after a call, at the start of a function, and where a loop jumps back, but
    after no other bytecode. Hence two rules:

    * A single call, of this function, must obtain a value and store it. In ``kept.append(next(items))``, a handler may
      raise between the two calls, and the item is lost. With this function, the value is in ``into`` before a handler
      can run. ``into`` must belong to an object that outlives the error, so that the next attempt finds the value.
    * The code that passes the value on must not contain a call: ``self._kept, self._count = [], count; return value``.
      A handler then finds either all of it done or nothing. The comment "Atomic for signal handlers" marks such code,
      from the comment to the end of its block, and a test checks that the code has no call and no loop.

    An error that ``function`` raises, including StopIteration, propagates, and ``into`` does not change.
    """

def observed() -> bool:
    """Returns True if ``next`` is observed: a profiler or another callback of torch would see ``record_function``, or
    reports are active."""

def set_reporting(reporting: bool) -> None:
    """Sets whether reports are active. ``observed`` returns True while they are."""

def figures(meters: list[Meter]) -> Totals:
    """Returns the combined counters of several iterators. The meter of the latest iterator must be the last item."""

def inspect_arena(fd: int) -> Observed | None:
    """Reads the state of another process's iterator from the descriptor of its arena. Returns None while no iterator
    uses the arena. RuntimeError: the file is not an arena, or is an arena of another version."""

def memory_limits() -> list[tuple[bool, int, int]]:
    """Returns the memory limits of the machine (first) and of the cgroups. Each item tells whether the limit is a
    cgroup's, the limit in bytes, and the free memory in bytes."""

def address_space_left() -> int | None:
    """Returns the bytes of address space that are left to this process; None without a limit."""

def rename_to_new(folder: int, name: bytes, new: bytes) -> bool:
    """Gives a file another name in its folder, which a descriptor names. Returns False if a file has that name."""

def cpu_quota() -> float | None:
    """Returns the CPU quota of this process's cgroups, in cores; None if there is no quota."""

def seed_words(base_seed: int, place: int, ordinal: int, worker: int, epoch: int) -> list[int]:
    """Returns four 64-bit words from the generator Philox4x64-10, whose key is (base_seed, 0), and whose counter
    consists of the other arguments.
    """

def int_tensor(ints: Any) -> torch.Tensor | None:
    """Returns an int64 tensor of a list or tuple of ints, or a float64 tensor of floats. Returns None if there are
    other items, or if torch would make another kind of tensor."""

def is_plain_leaf(obj: Any) -> bool:
    """Returns True if the codec can describe a tensor or an array by itself. Even then, the object may share memory
    with another one in a way that the codec cannot describe."""

def copy_of(sample: Any, dumps: Callable[[Any], bytes]) -> Any:
    """Returns the copy of a sample that a `CacheTable` would return."""

def gather(tensors: Any, index: Any) -> list[torch.Tensor] | None:
    """Collates the samples with the indices ``index`` of a TensorDataset that has these tensors, as default_collate
    would.

    Returns None, which leaves the samples to torch, if the tensors are not a tuple of plain tensors with contiguous
    rows, if the index is not a list of ints in range, or if a mode of torch is active.
    """

def heap_storage(nbytes: int) -> torch.UntypedStorage:
    """Returns a new storage in ordinary memory, which cannot be resized."""

def move_storage(function: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(storage, *args, **kwargs)``, which may move the storage to other memory.

    If the old memory belongs to this package, the storage keeps that memory alive for arrays and DLPack views that were
    made from its tensors.
    """

@final
class ShareBuilder:
    """The image of a shared object while it is being written. It has either rows or raw data.

    The methods raise MemoryError if a memory cgroup, the machine or a limit leaves too little memory.
    """

    def __new__(cls) -> Self: ...
    def extend(self, items: Any, dumps: Callable[[Any], bytes]) -> None:
        """Appends each item as a row. ``dumps`` pickles the items that are not plain trees."""

    def update(self, pairs: Any, dumps: Callable[[Any], bytes]) -> None:
        """Appends the key and the value of each pair as two rows. ``dumps`` is used as in ``extend``."""

    def expect(self, nbytes: int) -> None:
        """Raises MemoryError if there is not enough memory for ``nbytes`` more bytes."""

    def raw(self, data: Any) -> None:
        """Appends the bytes of a contiguous buffer of uint8."""

    def finish(self, kind: int, meta: bytes) -> SharedStore:
        """Seals the image and returns it. ``kind`` and ``meta`` describe the object to its readers."""

@final
class CacheTable:
    """The cached samples of a dataset, by index, in memory or in a file. Forked children use the same table."""

    def __new__(cls, fd: int, opening: int = 0) -> Self:
        """Opens a table that another process has created or opened, and takes ownership of the descriptor.
        ``opening`` is the other process's ``opening``. ValueError: the file is not a table."""

    @staticmethod
    def create(rows: int, limit: int) -> CacheTable:
        """Creates an empty table in memory, of at most ``limit`` bytes."""

    @staticmethod
    def format(fd: int, rows: int, limit: int, meta: bytes) -> None:
        """Turns a file of ``limit`` zero bytes into an empty table that outlives the programs that use it."""

    @staticmethod
    def head(fd: int) -> tuple[int, int, int, bytes] | None:
        """Returns the version, rows, limit and meta of a table in a file; None if the file is not a table."""

    @staticmethod
    def open_file(fd: int, whole: int, token: int) -> CacheTable:
        """Opens the table in a file whose length must be the table's limit. ``whole`` is the length that the file had
        before the caller extended it; samples beyond this length are forgotten. The caller must hold the file's lock,
        and keeps ownership of the descriptor. All processes that pass the same ``token`` belong to one opening: they
        share the results of their comparisons."""

    @staticmethod
    def overhead(rows: int) -> int:
        """Returns the size in bytes of a table with this number of rows and no samples."""

    def grow(self, limit: int) -> None:
        """Raises the limit to ``limit``, which must be the file's length. The table must then be opened again."""

    def reopen(self) -> None:
        """Makes the table accept samples again. If there is still no room, the next sample closes it."""

    @property
    def rows(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def opening(self) -> int:
        """The number of the opening to which this process belongs; 0 for a table in memory."""

    @property
    def closed(self) -> str | None:
        """The reason why the table accepts no further samples, "full" or "no room"; None if it accepts them."""

    def fileno(self) -> int:
        """Returns the table's descriptor. OSError: other code has closed it."""

    def get(self, index: Any, missing: Any) -> Any:
        """Returns a new object that is equal to the sample of an index, or ``missing`` if the table does not have the
        sample. An index that is not an exact int is missing, and so is a sample that is due. Counts a hit, but no miss.
        """

    def get_all(self, indices: list[Any], missing: Any) -> tuple[list[Any], list[int]] | None:
        """Returns what ``get`` returns for each index, and the positions of the missing samples. Counts nothing.
        Returns None if an index is not an exact int, or if the table has no row for it."""

    def count(self, hits: int, misses: int) -> None:
        """Counts hits and misses."""

    def is_due(self, row: int) -> bool:
        """Returns True if the sample of a row must be compared with the dataset before it is used, or if the table is
        known to belong to another dataset."""

    def peek(self, row: int, missing: Any) -> Any:
        """Returns the sample of a row, even if it is due, or ``missing``. Counts neither a hit nor a miss."""

    def compared(self, row: int, is_equal: bool, seconds: float) -> None:
        """Records the result of a comparison, and the time that it took. After a difference every row is due."""

    @property
    def differing_row(self) -> int | None:
        """The row whose sample was found to differ from the dataset; None if none is known."""

    def takes(self, row: int) -> bool:
        """Returns True if ``put`` may succeed for a row: the row has no sample, no mark of ``never``, and there may be
        room."""

    def put(self, row: int, sample: Any, dumps: Callable[[Any], bytes]) -> str | None:
        """Keeps a sample. If this call is the first to find that the table accepts no more samples, returns the reason.

        Raises:
            OSError: The sample could not be written. The table accepts no more samples.
            Exception: The sample could not be pickled.
        """

    def never(self, row: int) -> None:
        """Marks a row as one whose sample cannot be kept."""

    def take_probe(self) -> bool:
        """Returns True if the caller must make its sample a second time and compare the two. True for the first few
        calls, counted across all processes."""

    def first_time(self, event: int) -> bool:
        """Notes an event, a power of two. Returns True for the first time across all processes."""

    def has_happened(self, event: int) -> bool:
        """Returns True if ``first_time`` was called for an event."""

    def usage(self) -> dict[str, int]:
        """Returns the counters of the table, as keyword arguments of ``CacheUsage``."""

    @staticmethod
    def usage_of_header(header: bytes) -> dict[str, int] | None:
        """Returns the same as ``usage``, but from the first ``CACHE_HEADER`` bytes of a file. Returns None if the file
        is not a table of this version."""

@final
class CacheBatch:
    """Small samples that are written to a table with one system call."""

    def __new__(cls, table: CacheTable) -> Self: ...
    def add(self, row: int, sample: Any) -> int:
        """Adds a copy of a sample, if it is small, needs no pickle, and the table takes it. Returns the number of bytes
        in the batch, or 0 if the sample was not added: ``CacheTable.put`` must then be called."""

    def write(self) -> str | None:
        """Keeps the samples. Returns and raises the same as ``CacheTable.put``."""

@final
class SharedStore:
    """The mapped image of a shared object. The buffer protocol gives access to the complete image."""

    def __new__(cls, fd: int) -> Self:
        """Maps the image in a file, and takes ownership of its descriptor. ValueError: the file is not an image, or the
        image is damaged."""

    @staticmethod
    def sealed(fd: int) -> SharedStore:
        """Seals a memfd that contains an image, and takes ownership of it. If this raises, the caller still owns it."""

    @property
    def kind(self) -> int: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def fileno(self) -> int:
        """Returns the image's descriptor. OSError: other code has closed it."""

    def data(self) -> Any:
        """Returns the raw data as a ``SharedData`` object, which has a private mapping of the data."""

@final
class SharedData:
    """The raw data of an image, as a read-only buffer and as one of torch's storages."""

    @property
    def store(self) -> SharedStore: ...
    @property
    def address(self) -> int: ...
    def storage(self) -> torch.UntypedStorage:
        """Returns a storage over the data. Writes to the storage are visible only in this process."""

    def __len__(self) -> int: ...

@disjoint_base
class SharedItems:
    """The base class of shared lists and tuples, with the methods that read items. Each access creates a new object."""

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
        """Returns True if ``other`` has the same length and equal items."""

@disjoint_base
class SharedPairs:
    """The base class of shared dicts, with the methods that read items. Keys are looked up by a hash that is the same
    in all processes."""

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
        """Returns an iterator over the values, in the order of the keys or, if ``is_reversed``, in reverse order."""

@final
class SharedIterator:
    """An iterator over the items, keys or values of a shared object."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def __length_hint__(self) -> int: ...

@final
class WarmPages:
    """A loader's claim to shared memory that is kept for its next epoch. The memory is freed with the claim."""

    def __new__(cls) -> WarmPages: ...
    def announce(self, workers: int) -> None:
        """Announces a loader with this number of workers. If another loader is freed before this one starts its first
        epoch, this one may inherit the memory of the other."""

@final
class TraceSink:
    """A sink that writes the events of a trace to files.

    A record has 40 bytes, in five little-endian words. The first contains ``source`` (32 bits), ``who`` (24 bits) and
    the kind (8 bits); the next two are the start and the length in nanoseconds of the monotonic clock; the last two are
    ``number`` and ``extra``. `TRACE_KINDS` has the names of the kinds. ``who`` is a worker's ID, `TRACE_MAIN` or
    `TRACE_PINNER`."""

    def __new__(cls, files: list[int], unfinished: int, seconds: float) -> TraceSink:
        """Takes ownership of the descriptors of empty files. If there are two ``files``, the sink switches between them
        every ``seconds`` seconds. A thread writes the events to the current file four times per second. It also
        replaces the content of the file ``unfinished``: the time in nanoseconds and the number of records, in two
        little-endian words, and a record for each activity that is in progress."""

    def begin(self, source: int, kind: int, who: int, begin: int, number: int) -> None:
        """Notes that an activity is in progress, until the next ``put`` for the source. Does nothing in a forked child.
        ValueError: there is no such kind."""

    def put(self, source: int, kind: int, who: int, begin: int, length: int, number: int, extra: int = 0) -> None:
        """Adds an event. Does nothing in a forked child. ValueError: there is no such kind."""

    def end(self) -> tuple[int, list[tuple[int, int]]]:
        """Writes the remaining events. Returns the number of lost events, and a pair for each file: its index and its
        size in bytes; the file with the latest events is last. Events that are added later are dropped."""

def begin_forks() -> None:
    """Marks all forks of this thread, until ``end_forks``, as the workers of one iterator. In the meantime, the thread
    that returns idle pages does not run."""

def end_forks() -> None:
    """Ends the group of forks that ``begin_forks`` started."""

def tend_pages() -> None:
    """Restarts the thread that returns idle pages if a fork has ended it."""

def descends(pid: int) -> bool:
    """Returns True if a process is a child of this process or, with the fork server, a grandchild. Returns False for an
    invalid pid."""

def _trim_pool() -> int:
    """Releases all arenas in the pool. Returns their number."""

def _roundtrip(
    obj: Any,
    *,
    exchange: bool = True,
    damage: Sequence[tuple[int, int]] = ...,
    indices: bool = False,
    raw: bool = False,
    adopt: int | None = None,
) -> tuple[bool, Any]:
    """Encodes and decodes an object in ordinary memory, for tests. Returns whether the object is plain, and the decoded
    object or None.

    With ``exchange=False``, torch's C functions are not used. For each (position, byte) in ``damage``, this byte of the
    payload is overwritten; a position beyond the end removes the last byte instead. With ``indices``, the codec for
    index batches is used. With ``raw``, ``obj`` is a payload that has one leaf of 1 MiB. With ``adopt``, large leaves
    are at this offset in memory that is sent without a copy.
    """

def _collate(batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Runs the fast paths for collating (`Port.stack` and `Port.numbers`) in ordinary memory, for tests."""
