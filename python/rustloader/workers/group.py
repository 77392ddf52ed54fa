"""Starts the workers of an engine. Ends them within one deadline, at the latest when the interpreter exits."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import _utils

from rustloader._core import Death, DeferredSignals, Engine, begin_forks, end_forks, tend_pages
from rustloader.remote.context import is_remote
from rustloader.settings.limits import (
    EXIT_GRACE,
    EXIT_KILL_AFTER,
    INTERRUPT_AFTER,
    KILL_AFTER,
    KILLED_AFTER,
    NUMPY_ARENA,
    REMOTE_GRACE,
    REMOTE_KILL_AFTER,
    SIGTERM,
)
from rustloader.system.cleanup import clean_up_after, quietly
from rustloader.system.forks import at_fork
from rustloader.workers import arguments, main, process, remote
from rustloader.workers.arguments import Reports
from rustloader.workers.bootstrap import Connection, Job, Payload
from rustloader.workers.definitions import Pickling
from rustloader.workers.gates import Gates
from rustloader.workers.memory_events import OomKills
from rustloader.workers.pickled_once import PickledOnce
from rustloader.workers.preparation import calling_first

# The signals that `src/sys/deferred_signals.rs` defers.
_DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Defers signal handlers in the main thread while workers start. Yields the signals that a new process has to
    unblock.

    A handler must not raise in a worker that cannot catch the error yet. Errors that handlers raise in at-fork
    hooks are lost. A handler that raises just after a fork would leave an unregistered process running.
    """
    deferred = DeferredSignals([number for number in _DEFERRED if callable(signal.getsignal(number))])
    # Not a `with` statement: in Python 3.14 a handler may raise between its `__enter__` and its body.
    try:
        yield deferred.__enter__()
    finally:
        deferred.__exit__(None, None, None)


def _handles_sigterm() -> bool:
    """Returns True if the program handles SIGTERM itself. Ray's handler, which `ray.init` installs, does not count: it
    only ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    return str(getattr(handler, "__module__", "")).partition(".")[0] != "ray"


class WorkerGroup:
    """The worker processes of one engine.

    Args:
        engine: The engine that sends tasks to the workers and signals them.
        processes: List to which the processes are appended. Programs can access and change it.
        context: The multiprocessing context.
        dataset: The dataset.
        on_exit: Weak reference to the method to call at the interpreter's exit, once the workers have ended.
    """

    def __init__(
        self,
        engine: Engine,
        processes: list[Any],
        context: Any,
        dataset: Any,
        on_exit: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.engine = engine
        self.processes = processes
        self.context = context
        self.dataset = dataset
        self._on_exit = on_exit
        # The pickled arguments of workers on other machines.
        self._blob: remote.Blob | None = None
        # Reports about arguments that workers could not load. None for forked workers, which load none, and if the file
        # could not be created.
        self._reports: Reports | None = None
        # Set when the workers start, if OOM kills are counted.
        self._oom_kills: OomKills | None = None
        # For each worker, the generation that died last, and whether its memory cgroup was out of memory.
        self._out_of_memory: dict[int, tuple[int, bool]] = {}
        _live.add(self)

    def start(self, job: Job, counts_oom_kills: bool = False) -> None:
        """Starts all workers. After an error some of them may be running; the caller must end them.

        Args:
            job: The settings that the workers share.
            counts_oom_kills: Whether to count OOM kills for ``was_out_of_memory``. This reads files of the memory
                cgroups.
        """
        if counts_oom_kills:
            self._oom_kills = OomKills()
        if is_remote(self.context):
            self._blob = remote.Blob(self.context, self.dataset, job)
            self._start_remote(range(job.config.num_workers), self._blob, job)
            return
        process.start_helpers(self.context)
        with deferred_signals() as unblock:
            self._start(range(job.config.num_workers), job, unblock)

    def replace(self, worker_id: int, job: Job, unblock: list[int]) -> int:
        """Starts a process in place of a dead one, and returns the new pid. After an error the slot is still vacant, or
        its new process has been killed. The caller defers signals; ``unblock`` is the list that ``deferred_signals``
        yields."""
        self.engine.vacate(worker_id)
        # Programs can reach this list and may have emptied it.
        if worker_id < len(self.processes):
            if self._blob is None:
                quietly(process.note_end, self.processes[worker_id], True)
        if self._blob is not None:
            self._start_remote([worker_id], self._blob, job)
            return int(self.processes[worker_id].pid)
        (pid,) = self._start([worker_id], job, unblock)
        return pid

    def _start_remote(self, worker_ids: Sequence[int], blob: remote.Blob, job: Job) -> None:
        """Starts workers on other machines, all at the same time."""
        # Earlier processes are killed first: a process that hangs keeps the resources that the cluster has reserved for
        # it.
        for worker_id in worker_ids:
            for predecessor in self.processes[worker_id : worker_id + 1]:
                quietly(predecessor.kill)
        for worker in remote.start(self.engine, blob, worker_ids, job):
            self.processes[worker.worker_id : worker.worker_id + 1] = [worker]

    def was_out_of_memory(self, death: Death, exitcode: int | None) -> bool:
        """Returns True if a worker died because its memory cgroup was out of memory. Repeated calls for one death
        return the same result."""
        generation, was_out_of_memory = self._out_of_memory.get(death.worker_id, (-1, False))
        if generation != death.generation:
            was_killed = exitcode == -signal.SIGKILL and not death.stalled
            was_out_of_memory = was_killed and self._oom_kills is not None and self._oom_kills.grew()
            self._out_of_memory[death.worker_id] = death.generation, was_out_of_memory
        return was_out_of_memory

    def _start(self, worker_ids: Sequence[int], job: Job, unblock: list[int]) -> list[int]:
        """Starts processes on this machine, and returns their pids. The caller defers signals."""
        job.numpy_arena = NUMPY_ARENA.get()
        job.sigterm_seconds = SIGTERM.get() if _handles_sigterm() else None
        job.unblock = unblock
        method = process.start_method(self.context)
        with contextlib.ExitStack() as stack:
            common, gates, pickling = None, None, None
            if method != "fork" and self._reports is None:
                # Without this file, the error of a worker that cannot load its dataset appears only on stderr.
                with contextlib.suppress(OSError):
                    self._reports = Reports()
            if method != "fork":
                pickling = Pickling()
            if len(worker_ids) > 1 and pickling is not None:
                if job.starts is None:
                    common = PickledOnce.of(arguments.marked(self.dataset, job, job), pickling)
                if common is not None:
                    stack.callback(common.close)
                if method == "spawn":
                    gates = Gates(len(worker_ids))
                    stack.callback(gates.close)
            begin_forks()
            stack.callback(end_forks)
            return [self._start_one(worker_id, job, common, gates, pickling) for worker_id in worker_ids]

    def _start_one(
        self,
        worker_id: int,
        job: Job,
        common: PickledOnce | None,
        gates: Gates | None,
        pickling: Pickling | None,
    ) -> int:
        with contextlib.nullcontext() if gates is None else gates.next() as gate:
            connection = Connection(self.engine, worker_id)
            payload = Payload(connection, self.dataset, job, worker_id, common, gate, self._reports, pickling)
            worker = self.context.Process(target=main.run, args=(payload,))
            worker.daemon = True
            try:
                try:
                    is_forked = process.start_method(self.context) == "fork"
                    has_calls = not is_forked and payload.has_first_calls
                    adding_calls: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                    if has_calls:
                        adding_calls = calling_first(worker, payload.first_calls)
                    with arguments.naming_argument(), adding_calls:
                        process.start(worker, f"DataLoader worker {worker_id} (num_workers={job.config.num_workers})")
                finally:
                    payload.close()
                self.processes[worker_id : worker_id + 1] = [worker]
                self.engine.started(worker_id, worker.pid)
                pid: int = worker.pid
                return pid
            except BaseException as error:
                # A signal handler may raise as soon as the process runs. `end` does not reach a process that the engine
                # does not know yet.
                clean_up_after(error, lambda: process.kill(worker))
                raise

    def notes_of_start(self, death: Death, exitcode: int | None) -> tuple[str | None, tuple[str, ...]]:
        """Returns a dead worker's report about an argument that it could not load, and notes on its start. Returns None
        and no notes if the worker did not fail to start."""
        report = None if self._reports is None else self._reports.of(death.pid)
        # Python exits with 1 after an uncaught error. Errors of `worker_init_fn` occur later, and are sent as results.
        failed = (
            exitcode == 1
            and self._reports is not None
            and self.engine.worker_status(death.worker_id)["state"] == "starting"
        )
        if report is None and not failed:
            return None, ()
        return report, (arguments.remedy(report),)

    def end(self, grace: float) -> None:
        """Ends the workers. They have ``grace`` seconds to exit, then receive SIGTERM, and SIGKILL ``KILL_AFTER``
        seconds later. After an interrupt they receive SIGKILL at once, and the interrupt is raised again. For workers
        on other machines, ``grace`` is at most ``REMOTE_GRACE``, and ``REMOTE_KILL_AFTER`` takes the place of
        ``KILL_AFTER``."""
        if self._blob is None:
            _end([self], grace, KILL_AFTER)
        else:
            _end([self], min(grace, REMOTE_GRACE), REMOTE_KILL_AFTER)

    @staticmethod
    def exiting() -> bool:
        """Returns True if the interpreter is exiting: torch has set its flag, or the globals of this module are already
        None. This is a method because a function of this module would be such a global."""
        return _utils is None or _utils.python_exit_status is True or _utils.python_exit_status is None

    def exit(self) -> None:
        on_exit = self._on_exit()
        if on_exit is not None:
            on_exit()


# All groups with workers, for the interpreter's exit. Each iterator owns its group.
_live: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def interrupt_again() -> None:
    """Raises again a Ctrl-C that a destructor caught, but only after a moment, when the object is gone. Python drops
    errors that are raised in a destructor or in the weak reference callbacks that follow it."""

    def interrupt() -> None:
        time.sleep(INTERRUPT_AFTER)
        main = threading.main_thread().ident
        # Unlike `interrupt_main`, a signal ends a wait of the main thread. Without a handler it would end the process.
        if main is not None and callable(signal.getsignal(signal.SIGINT)):
            signal.pthread_kill(main, signal.SIGINT)

    # `threading.Thread` takes locks that this thread may already hold.
    _thread.start_new_thread(interrupt, ())


def _end(groups: list[WorkerGroup], grace: float, kill_after: float) -> None:
    """Ends the workers of all groups within one deadline, as ``WorkerGroup.end`` does."""
    engines = [group.engine for group in groups]
    # The lists are copied, because the next group of an iterator, which another thread may start, uses the same list.
    group_processes = [(group, list(group.processes)) for group in groups]
    start = time.monotonic()
    try:
        for engine in engines:
            engine.stop_pinning()
        for engine in engines:
            engine.close()
        # Pin threads end first: they read what the workers write.
        for engine in engines:
            engine.join_pinning(grace - (time.monotonic() - start))
        if not _gone(engines, grace - (time.monotonic() - start)):
            for engine in engines:
                engine.signal_all(signal.SIGTERM)
            _gone(engines, kill_after)
    finally:
        for engine in engines:
            engine.signal_all(signal.SIGKILL)
        quietly(_gone, engines, KILLED_AFTER)
        for group, processes in group_processes:
            all_ended = group.engine.alive() == 0
            for worker in processes:
                if isinstance(worker, remote.RemoteProcess):
                    quietly(worker.kill)
                else:
                    quietly(process.note_end, worker, all_ended)
            group.engine.finish()
            if group._reports is not None:
                group._reports.close()
            _live.discard(group)


def _gone(engines: list[Engine], seconds: float) -> bool:
    """Waits until all workers have ended. Returns False if some of them have not ended after ``seconds`` seconds."""
    deadline = time.monotonic() + seconds
    for engine in engines:
        while not engine.wait_gone(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                return False
    return True


def _end_all() -> None:
    """Ends all workers at exit: before torch's hook, which disables ``__del__``, and before multiprocessing's, which
    joins daemonic processes without a time limit. The shorter deadline of the exit also applies to groups that a
    daemon thread is already ending."""
    own_groups = [group for group in list(_live) if group.engine.is_ours]
    for group in own_groups:
        # A daemon thread in `next` must not wake up to an error that it can only print.
        group.engine.close(exiting=True)
    # A second Ctrl-C only makes the workers end sooner. Python would print it as an error in this hook.
    with contextlib.suppress(KeyboardInterrupt):
        _end(own_groups, EXIT_GRACE, EXIT_KILL_AFTER)
    for group in own_groups:
        group.exit()


def _forget_in_child() -> None:
    """Keeps multiprocessing in a forked child from ending the parent's workers when the child exits."""
    for group in list(_live):
        process.forget(group.processes)


atexit.register(_end_all)
at_fork("workers", after_in_child=_forget_in_child)
# Python 3.13 counts the threads after these hooks have run, to warn about a fork of a multi-threaded process. In 3.13
# the next iterator makes this call instead.
if sys.version_info[:2] != (3, 13):
    at_fork("pages", after_in_parent=tend_pages)
