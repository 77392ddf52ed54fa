"""Starts worker processes through multiprocessing, and makes multiprocessing record that they have ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing.process
import warnings
from multiprocessing import resource_tracker
from pickle import PicklingError
from typing import Any

from rustloader._core import descends
from rustloader.remote.context import is_remote
from rustloader.settings.limits import STATUS_AFTER
from rustloader.system.torch_side import in_torch
from rustloader.workers import fork_server
from rustloader.workers.definitions import CloudpickleMissing

# The children that multiprocessing ends and joins at the interpreter's exit.
_mp_children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]

# Remedies to suggest if the system refuses to start another process, by error number.
_REFUSED_STARTS = {
    errno.EAGAIN: "raise `ulimit -u` (RLIMIT_NPROC), or the cgroup's pids.max, or use a smaller num_workers",
    errno.ENOMEM: "the machine or the address space (`ulimit -v`, RLIMIT_AS) has no memory left for another process",
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
    """Returns a context's process class, the function that some contexts have in its place, or None."""
    kind = getattr(context, "Process", None)
    while isinstance(kind, functools.partial):
        kind = kind.func
    return kind


def start_method(context: Any) -> str:
    """Returns the method by which a context starts processes: "fork", "forkserver" or "spawn"."""
    if is_remote(context):
        remote_method: str = context.get_start_method()
        return remote_method
    # A context may not know its start method. The class of its processes does, as in multiprocessing itself.
    method: str = process_class(context)._start_method or multiprocessing.get_start_method()
    return method


def start_helpers(context: Any) -> None:
    """Starts multiprocessing's helper processes, which outlive the loader. This must come before signals are deferred:
    a helper would inherit the blocked signals, and so would every process that the fork server starts later."""
    method = start_method(context)
    if method == "forkserver":
        fork_server.ensure_running()
    elif method == "spawn":
        resource_tracker.ensure_running()


def start(process: Any, worker: str) -> None:
    """Starts a process. ``worker`` names it in the error if the system refuses."""
    try:
        process.start()
    except CloudpickleMissing:
        raise
    except (TypeError, AttributeError, PicklingError):
        in_torch(warnings.warn, _PICKLE_WARNING, None, 1)
        raise
    except OSError as error:
        if error.errno in _REFUSED_STARTS:
            error.strerror = f"{error.strerror}: {worker} cannot be started; {_REFUSED_STARTS[error.errno]}"
        raise


def is_refused(error: OSError) -> bool:
    """Returns True if an error means that the system currently refuses to start another process."""
    return error.errno in _REFUSED_STARTS


def kill(process: Any) -> None:
    """Kills a worker and joins it. Does nothing to a thread, or to a process that does not descend from this one."""
    if isinstance(process, multiprocessing.process.BaseProcess) and descends(process.pid or 0):
        process.kill()
        process.join()


def note_end(process: Any, has_ended: bool) -> None:
    """Makes multiprocessing record the end of a worker, and forget the worker. ``has_ended`` is True if the process is
    known to have ended."""
    # Under forkserver, join() waits for a descriptor whose number may belong to another file by now, so it needs a time
    # limit. A process object that the program has closed raises ValueError.
    with contextlib.suppress(ValueError):
        if has_ended and process.exitcode is None:
            process.join(STATUS_AFTER)
    # If other code has reaped the process, multiprocessing would otherwise list it as alive forever.
    _mp_children.discard(process)


def forget(processes: list[Any]) -> None:
    """Keeps multiprocessing from ending these processes when this process exits."""
    _mp_children.difference_update(processes)
