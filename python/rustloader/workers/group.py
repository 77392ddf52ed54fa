"""The workers of one engine: their start, their end within one deadline, and their end at the interpreter's exit."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import _utils

from rustloader._core import DeferredSignals, Engine, begin_forks, end_forks
from rustloader.cleanup import quietly
from rustloader.config import EXIT_GRACE, EXIT_KILL_AFTER, INTERRUPT_AFTER, KILL_AFTER, KILLED_AFTER, SIGTERM
from rustloader.workers import main, process
from rustloader.workers.bootstrap import Connection, Job, Parcel


class WorkerGroup:
    """The worker processes of one engine.

    Args:
        engine: Sends tasks to the workers, and signals them.
        processes: The list that the processes are appended to. Users can reach it, and change it.
        on_exit: Is called when the interpreter's exit has ended the workers.
    """

    def __init__(self, engine: Engine, processes: list[Any], on_exit: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.engine = engine
        self.processes = processes
        # True once the end has begun.
        self.ended = False
        self._on_exit = on_exit
        _live.add(self)

    def start(self, context: Any, dataset: Any, job: Job) -> None:
        """Starts all workers. After an error some of them may run: the caller has to end them."""
        process.start_helpers(context)
        survives_sigterm = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        job.sigterm_seconds = SIGTERM.get() if survives_sigterm else None
        # From the workers, so that none is interrupted before it can catch them, and from the hooks of the forks, which
        # lose what a handler raises.
        deferred = [signal.SIGINT, signal.SIGTERM] if survives_sigterm else [signal.SIGINT]
        with DeferredSignals(deferred) as blocked:
            job.unblock = blocked
            begin_forks()
            try:
                for worker_id in range(job.num_workers):
                    self._start_one(worker_id, context, dataset, job)
            finally:
                end_forks()

    def _start_one(self, worker_id: int, context: Any, dataset: Any, job: Job) -> None:
        parcel = Parcel(Connection(self.engine, worker_id), dataset, job, worker_id)
        worker = context.Process(target=main.run, args=(parcel,))
        worker.daemon = True
        try:
            process.start(worker, f"worker {worker_id} of a DataLoader with {job.num_workers}")
        finally:
            parcel.close()
        self.processes.append(worker)
        self.engine.started(worker_id, worker.pid)

    def end(self, grace: float) -> None:
        """Ends the workers: within ``grace`` seconds they leave by themselves, ``KILL_AFTER`` seconds after SIGTERM,
        then SIGKILL. An interrupt meanwhile goes straight to SIGKILL and is raised again."""
        self.ended = True
        _end([self], grace, KILL_AFTER)

    def exit(self) -> None:
        """Notes that the interpreter's exit has ended the workers."""
        self.ended = True
        on_exit = self._on_exit()
        if on_exit is not None:
            on_exit()


# Every group that has workers, for the interpreter's exit. Its iterator owns it.
_live: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def interrupt_again() -> None:
    """Raises a Ctrl-C that a destructor has caught once more, after a moment in which the object has gone. What a
    destructor raises is lost, and so is what is raised in the callbacks of weak references that come after it."""

    def interrupt() -> None:
        time.sleep(INTERRUPT_AFTER)
        _thread.interrupt_main()

    # Not by `threading`, whose locks this thread may hold.
    _thread.start_new_thread(interrupt, ())


def exiting() -> bool:
    """Whether the interpreter exits. torch sets the flag then; what of its module has gone before is None."""
    return _utils is None or _utils.python_exit_status is True or _utils.python_exit_status is None


def _end(groups: list[WorkerGroup], grace: float, kill_after: float) -> None:
    """Ends the workers of all groups within one deadline, see ``WorkerGroup.end``."""
    engines = [group.engine for group in groups]
    start = time.monotonic()
    try:
        for engine in engines:
            engine.stop_pinning()
        for engine in engines:
            engine.close()
        # The pin threads first: they read what the workers write.
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
        for group in groups:
            all_ended = group.engine.alive() == 0
            for worker in group.processes:
                quietly(process.note_end, worker, all_ended)
            group.engine.finish()
            _live.discard(group)


def _gone(engines: list[Engine], seconds: float) -> bool:
    """Waits for the workers' end; says whether all have ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    for engine in engines:
        while not engine.wait_gone(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                return False
    return True


def _end_all() -> None:
    """The interpreter's exit: runs before torch's hook, which switches ``__del__`` off, and before multiprocessing's,
    which joins daemonic processes without limit."""
    here = [group for group in list(_live) if not group.ended and group.engine.is_ours]
    for group in here:
        # A daemon thread in its `next` must not wake up to an error that it can only print.
        group.engine.close(exiting=True)
    # A second Ctrl-C has sped it up, and has no more to say: Python would print it as an error of this hook.
    with contextlib.suppress(KeyboardInterrupt):
        _end(here, EXIT_GRACE, EXIT_KILL_AFTER)
    for group in here:
        group.exit()


def _forget_in_child() -> None:
    """In a forked child the workers are the parent's: multiprocessing must not end them at the child's exit."""
    for group in list(_live):
        process.forget(group.processes)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_in_child)
