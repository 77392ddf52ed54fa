"""The error of a worker's death: torch's texts."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from rustloader._core import Death
from rustloader.config import STATUS_AFTER
from rustloader.errors import WorkerDiedError
from rustloader.workers import stalls

_Error = TypeVar("_Error", bound=BaseException)


def error_of(death: Death, process: Any) -> Callable[[], WorkerDiedError]:
    """What makes the error of a death, anew for each call that raises it.

    ``process`` is the worker's, or None. The user may have closed it, or may have put something else in its place.
    """
    exitcode, name = death.exitcode, death.signal
    if exitcode is None:
        exitcode = _asked(process)
        if exitcode is not None and exitcode < 0:
            name = signal.strsignal(-exitcode) or f"Unknown signal {-exitcode}"
    if death.index is None:
        note = f"It was worker {death.worker_id}."
    else:
        note = f"Worker {death.worker_id} was to fetch the batch of index {stalls.index_text(death.index)}."
    error = functools.partial(
        WorkerDiedError,
        _text(death.pid, exitcode, name),
        worker_id=death.worker_id,
        pid=death.pid,
        exitcode=exitcode,
        index=death.index,
    )
    return functools.partial(_with_note, error, note)


def pin_thread_error(cause: str) -> Callable[[], RuntimeError]:
    """What makes the error of the pin thread's end, anew for each call that raises it."""
    return functools.partial(_with_note, lambda: RuntimeError("Pin memory thread exited unexpectedly"), cause)


def _with_note(make: Callable[[], _Error], note: str) -> _Error:
    error = make()
    if note:
        error.add_note(note)
    return error


def _asked(process: Any) -> int | None:
    # Under forkserver the main process is not the parent: the fork server alone knows, and says it a little later. Not
    # join(): where somebody has closed all descriptors that would wait without end.
    with contextlib.suppress(Exception):
        multiprocessing.connection.wait([process.sentinel], STATUS_AFTER)
    with contextlib.suppress(Exception):
        exitcode: int | None = process.exitcode
        return exitcode
    return None


def _text(pid: int, exitcode: int | None, signal_name: str | None) -> str:
    if not exitcode:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
    if exitcode > 0:
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exitcode}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
    text = f"DataLoader worker (pid {pid}) is killed by signal: {signal_name}. "
    if exitcode == -signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return text
