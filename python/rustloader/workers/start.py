"""Starts worker processes."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import warnings
from multiprocessing import forkserver, resource_tracker
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from rustloader import _core
from rustloader._core import Engine
from rustloader.config import SIGTERM
from rustloader.iterator import fallback
from rustloader.iterator.torch_side import in_torch
from rustloader.workers import main

if TYPE_CHECKING:
    from rustloader.iterator.core import _MultiProcessingDataLoaderIter as Iter

__all__ = ["start_processes"]

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


def start_processes(iterator: Iter, core: Engine) -> None:
    """Starts the workers of an iterator, and notes each with it and with its engine."""
    _start_helpers(iterator._context)
    survives_sigterm = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    # From the workers, so that none is interrupted before it can catch them, and from the hooks of the forks, which
    # lose what a handler raises.
    kept_out = [signal.SIGINT, signal.SIGTERM] if survives_sigterm else [signal.SIGINT]
    with _core.HeldSignals(kept_out) as blocked:
        job = main.Job(
            dataset_kind=iterator._dataset_kind,
            auto_collation=iterator._auto_collation,
            collate_fn=iterator._collate_fn,
            drop_last=iterator._drop_last,
            base_seed=int(iterator._base_seed),
            init_fn=iterator._worker_init_fn,
            num_workers=iterator._num_workers,
            sigterm_seconds=SIGTERM.get() if survives_sigterm else None,
            unblock=blocked,
        )
        _core.begin_forks()
        try:
            for worker_id in range(iterator._num_workers):
                connection = main.Connection(core, worker_id)
                parcel = main.Parcel(connection, iterator._dataset, job, worker_id)
                process = iterator._context.Process(target=main.run, args=(parcel,))
                process.daemon = True
                try:
                    process.start()
                except (TypeError, AttributeError, PicklingError):
                    in_torch(warnings.warn, _PICKLE_WARNING, None, 1)
                    raise
                except OSError as error:
                    if error.errno in _REFUSED_STARTS:
                        what = f"worker {worker_id} of a DataLoader with {iterator._num_workers} cannot be started"
                        error.strerror = f"{error.strerror}: {what}; {_REFUSED_STARTS[error.errno]}"
                    raise
                finally:
                    parcel.close()
                iterator._workers.append(process)
                core.started(worker_id, process.pid)
        finally:
            _core.end_forks()


def _start_helpers(context: Any) -> None:
    """Starts multiprocessing's own helper processes, which live on: with SIGINT blocked they would answer that on to
    every process that the user starts later."""
    # A context need not know its method: torch does not ask. multiprocessing goes by the class as well.
    method = fallback.process_class(context)._start_method or multiprocessing.get_start_method()
    if method == "forkserver":
        forkserver.ensure_running()
    elif method == "spawn":
        resource_tracker.ensure_running()
