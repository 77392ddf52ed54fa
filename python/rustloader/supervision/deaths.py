"""Errors for dead workers and a dead pin thread, with torch's wording."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
from collections.abc import Callable, Sequence
from typing import Any

from rustloader._core import Death
from rustloader.errors import WorkerDiedError, WorkerStalledError
from rustloader.fetch.failures import index_text
from rustloader.settings.limits import STATUS_AFTER
from rustloader.supervision import stalls
from rustloader.workers import remote
from rustloader.workers.memory_events import OUT_OF_MEMORY

# torch's text for an unknown cause. The worker's report, if there is one, replaces it.
_LOST = "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."


def error_of(
    death: Death,
    process: Any,
    restarts: int = 0,
    history: Sequence[str] = (),
    out_of_memory: bool = False,
    report: str | None = None,
) -> Callable[[], WorkerDiedError]:
    """Returns a function that makes a new error for a death at each call.

    Args:
        death: The death.
        process: The worker's process, which the program may have closed or replaced; None if it is unknown.
        restarts: Number of earlier restarts of the worker.
        history: Additional notes for the error.
        out_of_memory: Whether the worker's memory cgroup ran out of memory.
        report: The worker's report on an argument that it could not load; None if there is no report.
    """
    exitcode, name = end_of(death, process)
    if death.index is None:
        note = f"Worker {death.worker_id} had no outstanding batch."
    else:
        note = f"Worker {death.worker_id} was assigned the batch with index {index_text(death.index)}."
    kind: type[WorkerDiedError] = WorkerDiedError
    text, index = _text(death.pid, exitcode, name), death.index
    if report is not None:
        text = f"{text.removesuffix(_LOST)}{report.rstrip()}"
    if out_of_memory:
        text = text.rstrip() + OUT_OF_MEMORY
    if death.stalled:
        kind, text = WorkerStalledError, stalls.text(death.worker_id, text)

    end = process.why_died() if isinstance(process, remote.RemoteProcess) else None
    notes = (note, *history) if end is None else (note, f"It ran on another machine: {end}", *history)

    def make() -> WorkerDiedError:
        error = kind(text, worker_id=death.worker_id, pid=death.pid, exitcode=exitcode, index=index, restarts=restarts)
        for line in notes:
            error.add_note(line)
        return error

    return make


def cause(death: Death, process: Any, out_of_memory: bool = False) -> str:
    """Describes how a worker's process ended, as in "was killed by signal: Killed". The arguments are those of
    ``error_of``."""
    if death.stalled:
        return "took longer than stall_timeout for one batch and was killed"
    exitcode, name = end_of(death, process)
    if not exitcode:
        return "exited unexpectedly"
    if exitcode > 0:
        return f"exited unexpectedly with exit code {exitcode}"
    return f"was killed by signal: {name}" + (" (its memory cgroup was out of memory)" if out_of_memory else "")


def pin_thread_error(cause: str) -> Callable[[], RuntimeError]:
    """Returns a function that makes the error for a pin thread that ended unexpectedly. ``cause`` becomes a note of the
    error, unless it is empty."""

    def make() -> RuntimeError:
        error = RuntimeError("Pin memory thread exited unexpectedly")
        if cause:
            error.add_note(cause)
        return error

    return make


def end_of(death: Death, process: Any) -> tuple[int | None, str | None]:
    """Returns a worker's exit code, and the name of the signal that killed it. The exit code is None if it is unknown;
    the name is None if no signal is known to have killed the worker."""
    exitcode, name = death.exitcode, death.signal
    if exitcode is None:
        exitcode = _exitcode_of(process)
        if exitcode is not None and exitcode < 0:
            name = signal.strsignal(-exitcode) or f"Unknown signal {-exitcode}"
    return exitcode, name


def _exitcode_of(process: Any) -> int | None:
    # With forkserver, only the fork server learns how a worker ended, and it reports this a little later. `join` could
    # block forever if the program has closed all descriptors.
    # If the process object was closed, it raises ValueError; an object with which the program has replaced it may raise
    # AttributeError. Any other error comes from a signal handler and must propagate.
    with contextlib.suppress(AttributeError, ValueError):
        multiprocessing.connection.wait([process.sentinel], STATUS_AFTER)
        exitcode: int | None = process.exitcode
        return exitcode
    return None


def _text(pid: int, exitcode: int | None, signal_name: str | None) -> str:
    if not exitcode:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
    if exitcode > 0:
        return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exitcode}. {_LOST}"
    text = f"DataLoader worker (pid {pid}) is killed by signal: {signal_name}. "
    if exitcode == -signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return text
