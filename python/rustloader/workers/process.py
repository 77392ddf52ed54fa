"""One worker process: how multiprocessing starts it, and how its end is noted."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing.process
import warnings
from multiprocessing import forkserver, resource_tracker
from pickle import PicklingError
from typing import Any

from rustloader._core import descends
from rustloader.config import STATUS_AFTER
from rustloader.torch_side import in_torch

# multiprocessing's own set of the children that it ends and joins at the interpreter's exit.
_mp_children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]

# The way out where the system has no process, or no descriptor, for a worker.
_REFUSED_STARTS = {
    errno.EAGAIN: "raise `ulimit -u` (RLIMIT_NPROC), or the cgroup's pids.max, or use a smaller num_workers",
    errno.ENOMEM: "the machine or the address space (`ulimit -v`, RLIMIT_AS) has no memory left for one more process",
    errno.EMFILE: "raise `ulimit -n` (RLIMIT_NOFILE), or close files that are no longer needed",
    errno.ENFILE: "raise the sysctl fs.file-max",
}
_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


def process_class(context: Any) -> Any:
    """The class of a context's processes, where it names one."""
    kind = getattr(context, "Process", None)
    while isinstance(kind, functools.partial):
        kind = kind.func
    return kind


def start_helpers(context: Any) -> None:
    """Starts multiprocessing's own helper processes, which outlive the loader: started with SIGINT blocked, they would
    pass that on to every process that the user starts later."""
    # A context need not know its method: torch does not ask. multiprocessing goes by the class as well.
    method = process_class(context)._start_method or multiprocessing.get_start_method()
    if method == "forkserver":
        forkserver.ensure_running()
    elif method == "spawn":
        resource_tracker.ensure_running()


def start(process: Any, worker: str) -> None:
    """Starts a process. ``worker`` names it in the error of a system that refuses it."""
    try:
        process.start()
    except (TypeError, AttributeError, PicklingError):
        in_torch(warnings.warn, _PICKLE_WARNING, None, 1)
        raise
    except OSError as error:
        if error.errno in _REFUSED_STARTS:
            error.strerror = f"{error.strerror}: {worker} cannot be started; {_REFUSED_STARTS[error.errno]}"
        raise


def kill(process: Any) -> None:
    """Ends a process that torch's iterator has started. A thread in its place is left alone, and so is every process
    that does not descend from this one."""
    if isinstance(process, multiprocessing.process.BaseProcess) and descends(process.pid or 0):
        process.kill()
        process.join()


def note_end(process: Any, has_ended: bool) -> None:
    """Lets multiprocessing note the end of a worker."""
    # Under forkserver to join is to wait for a descriptor, whose number may be another file's by now.
    # A process that the user has closed answers with an error.
    with contextlib.suppress(ValueError):
        if has_ended and process.exitcode is None:
            process.join(STATUS_AFTER)
    # If other code has reaped it, multiprocessing would keep it among the living for ever.
    _mp_children.discard(process)


def forget(processes: list[Any]) -> None:
    """Keeps multiprocessing from ending processes at the exit of this process."""
    _mp_children.difference_update(processes)
