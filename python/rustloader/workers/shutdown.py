"""The end of workers: within one deadline, at the interpreter's exit, and not in a forked child."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import multiprocessing.process
import os
import signal
import time
import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import _utils

from rustloader import _core
from rustloader.cleanup import quietly
from rustloader.config import EXIT_GRACE, EXIT_KILL_AFTER, INTERRUPT_AFTER, KILL_AFTER, STATUS_AFTER

if TYPE_CHECKING:
    from rustloader._core import Engine
    from rustloader.iterator.core import _MultiProcessingDataLoaderIter as Iter

__all__ = ["EXIT_GRACE", "KILL_AFTER", "end", "exiting", "interrupt_again", "kill", "live"]

# multiprocessing's own set of the children that it ends and joins at the interpreter's exit.
_mp_children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]

# Every iterator with workers, for the interpreter's exit, by its id: a subclass that compares by value has no hash.
live: weakref.WeakValueDictionary[int, Iter] = weakref.WeakValueDictionary()


def kill(process: Any) -> None:
    """Ends a process that torch's iterator has started. A thread in its place is left alone, and so is every process
    that does not descend from this one."""
    if isinstance(process, multiprocessing.process.BaseProcess) and _core.descends(process.pid or 0):
        process.kill()
        process.join()


def interrupt_again() -> None:
    """The Ctrl-C that a destructor has had, once more, after a moment in which the object has gone. What a destructor
    raises is lost, and so is what is raised in the callbacks of weak references that come behind it."""

    def interrupt() -> None:
        time.sleep(INTERRUPT_AFTER)
        _thread.interrupt_main()

    # Not by `threading`, whose locks this thread may hold.
    _thread.start_new_thread(interrupt, ())


def exiting() -> bool:
    """Whether the interpreter exits. torch sets the flag then; what of its module has gone before is None."""
    return _utils is None or _utils.python_exit_status is True or _utils.python_exit_status is None


def end(iterators: list[Iter], grace: float, kill_after: float) -> None:
    """Ends the workers of iterators, all within one deadline: ``grace`` seconds to leave by themselves, ``kill_after``
    more after SIGTERM, then SIGKILL. An interrupt meanwhile goes straight to SIGKILL and is raised again."""
    cores = [iterator._engine() for iterator in iterators]

    def gone(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for core in cores:
            while not core.wait_gone(deadline - time.monotonic()):
                if time.monotonic() >= deadline:
                    return False
        return True

    start = time.monotonic()
    try:
        for core in cores:
            core.stop_pinning()
        for core in cores:
            core.close()
        # The pin threads first: they read what the workers write.
        for core in cores:
            core.join_pinning(grace - (time.monotonic() - start))
        if not gone(grace - (time.monotonic() - start)):
            for core in cores:
                core.signal_all(signal.SIGTERM)
            gone(kill_after)
    finally:
        for core in cores:
            core.signal_all(signal.SIGKILL)
        # Nothing outlives SIGKILL for long, but a process in the kernel's uninterruptible sleep does.
        quietly(gone, 5.0)
        for iterator, core in zip(iterators, cores, strict=True):
            for process in iterator._workers:
                quietly(_join, process, core)
            core.finish()
            live.pop(id(iterator), None)


def _join(process: Any, core: Engine) -> None:
    """Has multiprocessing take note of the end of a worker."""
    # Under forkserver to join is to wait for a descriptor, whose number may be another file's by now.
    # A process that the user has closed says nothing more.
    with contextlib.suppress(ValueError):
        if core.alive() == 0 and process.exitcode is None:
            process.join(STATUS_AFTER)
    # If other code has reaped it, multiprocessing would keep it among the living for ever.
    _mp_children.discard(process)


def _end_all() -> None:
    """The interpreter's exit: runs before torch's hook, which switches ``__del__`` off, and before multiprocessing's,
    which joins daemonic processes without limit."""
    here = [it for it in list(live.values()) if not it._shutdown and it._core is not None and it._core.is_ours]
    for iterator in here:
        # A daemon thread in its `next` must not wake up to an error that it can only print.
        iterator._engine().close(exiting=True)
    # A second Ctrl-C has sped it up, and has no more to say: Python would print it as an error of this hook.
    with contextlib.suppress(KeyboardInterrupt):
        end(here, EXIT_GRACE, EXIT_KILL_AFTER)
    for iterator in here:
        iterator._shutdown = True


def _forget_in_child() -> None:
    """In a forked child the workers are somebody else's: multiprocessing must not end them at the child's exit."""
    for iterator in list(live.values()):
        _mp_children.difference_update(iterator._workers)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_in_child)
